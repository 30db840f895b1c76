package image

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"tbcluster/api/fault"
)

// suites are the names under which a Debian mirror has a release of its own,
// as against updates, security and other people's archives.
var suites = []string{"bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing", "unstable"}

// findMirror returns the URI of the Debian mirror that the apt of this machine
// uses; etc is /etc/apt.
func findMirror(etc string) (string, error) {
	files := []string{filepath.Join(etc, "sources.list")}
	for _, pattern := range []string{"*.list", "*.sources"} {
		more, err := filepath.Glob(filepath.Join(etc, "sources.list.d", pattern))
		if err != nil {
			return "", err
		}
		files = append(files, more...)
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return "", fault.New(fault.FileIO, "read the sources of apt", err, "").At(name)
		}
		parse := parseList
		if strings.HasSuffix(name, ".sources") {
			parse = parseSources
		}
		if uri := parse(string(b)); uri != "" {
			return uri, nil
		}
	}
	return "", fault.Newf(fault.Unsupported, "set TBCLUSTER_RIG_MIRROR to the URI of a Debian mirror", "no Debian mirror is named in %s", etc)
}

// parseList reads the one-line format of sources.list(5) and returns the first
// URI of a Debian release, or "".
func parseList(text string) string {
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "deb" {
			continue
		}
		f = f[1:]
		if len(f) > 0 && strings.HasPrefix(f[0], "[") {
			end := slices.IndexFunc(f, func(s string) bool { return strings.HasSuffix(s, "]") })
			if end < 0 {
				continue
			}
			f = f[end+1:]
		}
		if len(f) >= 3 && fits(f[0], f[1:2], f[2:]) {
			return f[0]
		}
	}
	return ""
}

// parseSources reads the deb822 format of sources.list(5) and returns the first
// URI of a Debian release, or "".
func parseSources(text string) string {
	stanza := map[string][]string{}
	check := func() string {
		defer clear(stanza)
		if slices.Contains(stanza["types"], "deb") && !slices.Contains(stanza["enabled"], "no") {
			for _, uri := range stanza["uris"] {
				if fits(uri, stanza["suites"], stanza["components"]) {
					return uri
				}
			}
		}
		return ""
	}
	field := ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, " \t\r\n")
		switch {
		case line == "":
			if uri := check(); uri != "" {
				return uri
			}
			field = ""
		case line[0] == '#':
		case line[0] == ' ' || line[0] == '\t':
			stanza[field] = append(stanza[field], strings.Fields(line)...)
		default:
			name, value, _ := strings.Cut(line, ":")
			field = strings.ToLower(name)
			stanza[field] = strings.Fields(value)
		}
	}
	return check()
}

func fits(uri string, in, components []string) bool {
	scheme, _, ok := strings.Cut(uri, "://")
	return ok && slices.Contains([]string{"http", "https"}, scheme) && slices.Contains(components, "main") &&
		slices.ContainsFunc(in, func(s string) bool { return slices.Contains(suites, s) })
}

// carried are the settings of this machine's apt that decide whether it gets
// through to the mirror: proxies, certificates, clocks.
var carried = regexp.MustCompile(`^Acquire::((https?|Retries|ForceIPv[46]|Check-Valid-Until|Check-Date|Max-FutureTime)\b.*) "(.*)";$`)

// aptOptions returns those settings in the form of apt.conf(5), a line each.
func aptOptions(ctx context.Context) ([]string, error) {
	out, err := run(ctx, exec.CommandContext(ctx, "apt-config", "dump", "Acquire"))
	if err != nil {
		return nil, err
	}
	var options []string
	for line := range strings.Lines(out) {
		if m := carried.FindStringSubmatch(strings.TrimSpace(line)); m != nil && m[3] != "" {
			options = append(options, "Acquire::"+m[1]+` "`+m[3]+`";`)
		}
	}
	return options, nil
}
