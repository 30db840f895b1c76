package state

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Attributes are all files, links and directories that a sysfs has of
// Thunderbolt domains and of what is below them, by their path from the
// domain's parent on: "domain0/0-0/0-1/rx_speed". A value is one of
//
//	= TEXT      a file and what is in it
//	-> TARGET   a symbolic link
//	/           a directory
//	!           a file that cannot be read
type Attributes map[string]string

// shallow are directories of every device that tell nothing of Thunderbolt: what
// is in them is left out.
var shallow = map[string]bool{"power": true, "queues": true, "statistics": true, "wakeup": true}

// maxAttribute is a page: no attribute is longer.
const maxAttribute = 4096

// ReadAttributes reads the attributes from a sysfs, "/sys". The attributes of
// network interfaces may be links, as in a tree that is made up.
func ReadAttributes(sysfs string) (Attributes, error) {
	bus := filepath.Join(sysfs, "bus/thunderbolt/devices")
	entries, err := os.ReadDir(bus)
	if err != nil {
		return nil, fmt.Errorf("list the devices of the Thunderbolt bus: %w", err)
	}
	all := Attributes{}
	for _, e := range entries {
		if !domainName.MatchString(e.Name()) {
			continue
		}
		dir, err := filepath.EvalSymlinks(filepath.Join(bus, e.Name()))
		if err != nil {
			return nil, err
		}
		err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(filepath.Dir(dir), path)
			if err != nil {
				return err
			}
			if all[rel], err = value(path, d); err != nil {
				return err
			}
			if d.IsDir() && shallow[d.Name()] {
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("read the attributes below %s: %w", e.Name(), err)
		}
	}
	return all, nil
}

func value(path string, d fs.DirEntry) (string, error) {
	switch {
	case d.IsDir():
		return "/", nil
	case d.Type() == fs.ModeSymlink:
		target, err := os.Readlink(path)
		return "-> " + target, err
	}
	f, err := os.Open(path)
	if err != nil {
		return "!", nil // root may not read it: it can only be written
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxAttribute))
	if err != nil {
		return "!", nil // there is nothing to say now: EINVAL, ENODEV, EOPNOTSUPP
	}
	return "= " + strings.TrimSuffix(strings.ToValidUTF8(string(b), "\uFFFD"), "\n"), nil
}

// Write writes attributes as text, a line each, in order.
func (a Attributes) Write(w io.Writer) error {
	for _, path := range slices.Sorted(maps.Keys(a)) {
		if _, err := fmt.Fprintf(w, "%s %s\n", path, strconv.Quote(a[path])); err != nil {
			return err
		}
	}
	return nil
}

// ParseAttributes reads what Write has written; lines that begin with # say
// something to people.
func ParseAttributes(r io.Reader) (Attributes, error) {
	all := Attributes{}
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line := lines.Text()
		if line == "" || line[0] == '#' {
			continue
		}
		path, quoted, _ := strings.Cut(line, " ")
		v, err := strconv.Unquote(quoted)
		if err != nil || path == "" || all[path] != "" || !filepath.IsLocal(path) {
			return nil, fmt.Errorf("line %d is no attribute: %q", n, line)
		}
		all[path] = v
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("there is no attribute")
	}
	return all, nil
}

// Make makes a sysfs that shows the attributes, below dir: with the links by
// which the bus lists its devices, and those of network interfaces.
func (a Attributes) Make(dir string) error {
	const parent = "devices/pci0000:00/0000:00:05.0"
	for _, path := range slices.Sorted(maps.Keys(a)) { // directories come before what is in them
		full := filepath.Join(dir, parent, path)
		var err error
		switch kind, rest, _ := strings.Cut(a[path], " "); kind {
		case "/":
			err = os.MkdirAll(full, 0o755)
		case "->":
			err = os.Symlink(rest, full)
		case "=":
			err = os.WriteFile(full, []byte(rest+"\n"), 0o644)
		case "!":
			err = os.WriteFile(full, nil, 0o200)
		default:
			err = fmt.Errorf("%s: %q is no value", path, a[path])
		}
		if err != nil {
			return err
		}
		list := ""
		switch base := filepath.Base(path); {
		case a[path] != "/":
		case domainName.MatchString(base), deviceName.MatchString(base), serviceName.MatchString(base):
			list = "bus/thunderbolt/devices"
		case filepath.Base(filepath.Dir(path)) == "net":
			list = "class/net"
		}
		if list == "" {
			continue
		}
		up := strings.Repeat("../", strings.Count(list, "/")+1)
		if err := os.MkdirAll(filepath.Join(dir, list), 0o755); err != nil {
			return err
		}
		if err := os.Symlink(filepath.Join(up, parent, path), filepath.Join(dir, list, filepath.Base(path))); err != nil {
			return err
		}
	}
	return nil
}

// places are what differs between two machines in the path of one and the same
// attribute.
var places = []struct {
	found *regexp.Regexp
	as    string
}{
	{regexp.MustCompile(`^domain[0-9]+$`), "domain"},
	{regexp.MustCompile(`^[0-9]+-0$`), "host"},
	{regexp.MustCompile(`^[0-9]+-[0-9a-f]+$`), "peer"},
	{regexp.MustCompile(`^[0-9]+-[0-9a-f]+\.[0-9]+$`), "service"},
	{regexp.MustCompile(`^usb4_port[0-9]+$`), "usb4_port"},
	{regexp.MustCompile(`^thunderbolt[0-9]+$`), "interface"},
}

// Place returns a path without what differs between machines: of port, domain
// and interface only that it is one.
func Place(path string) string {
	elems := strings.Split(path, "/")
	for i, e := range elems {
		for _, p := range places {
			if p.found.MatchString(e) {
				elems[i] = p.as
				break
			}
		}
	}
	return strings.Join(elems, "/")
}

var (
	uuid   = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	number = regexp.MustCompile(`0x[0-9a-f]+|[0-9]+`)
)

// Shape returns how a value is written: words stay, of numbers stays their base
// and, where there are zeros in front, their width. Of names, which people
// choose, only that there is one.
func Shape(path, v string) string {
	kind, text, _ := strings.Cut(v, " ")
	switch {
	case kind != "=":
		return kind
	case text == "":
		return "empty"
	case strings.HasSuffix(path, "_name"):
		if strings.IndexFunc(text, unicode.IsControl) < 0 {
			return "a name"
		}
		return "several lines"
	}
	text = uuid.ReplaceAllString(text, "UUID")
	return number.ReplaceAllStringFunc(text, func(n string) string {
		digits, prefix := n, ""
		if strings.HasPrefix(n, "0x") {
			digits, prefix = n[2:], "0x"
		}
		if len(digits) > 1 && digits[0] == '0' {
			return fmt.Sprintf("%s#%d", prefix, len(digits))
		}
		return prefix + "#"
	})
}

// Shapes returns the shapes that each place has.
func (a Attributes) Shapes() map[string][]string {
	all := map[string][]string{}
	for _, path := range slices.Sorted(maps.Keys(a)) {
		place, shape := Place(path), Shape(path, a[path])
		if !slices.Contains(all[place], shape) {
			all[place] = append(all[place], shape)
		}
	}
	return all
}
