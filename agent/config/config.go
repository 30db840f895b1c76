// Package config reads the one optional configuration file. Nothing has to be
// configured: every key has a default, and a file that is not there is the same
// as an empty one. A key that is not known, a value of the wrong kind or out of
// range is an error that names file, line and key.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"tbcluster/api/fault"
)

// Config is the configuration of one node. Zero values are defaults.
type Config struct {
	Name          string   `toml:"name"`
	ControlPort   int      `toml:"control_port"`
	Peers         []string `toml:"peers"`
	AddressBlock  string   `toml:"address_block"`
	AddressSpares []string `toml:"address_spares"`
	Forward       bool     `toml:"forward"`
	MTU           int      `toml:"mtu"`
	ModelDirs     []string `toml:"model_dirs"`
	EngineDirs    []string `toml:"engine_dirs"`
	GatewayPort   int      `toml:"gateway_port"`
	GatewayListen []string `toml:"gateway_listen"`
	GatewayKeys   []string `toml:"gateway_keys"`
	MetricsPort   int      `toml:"metrics_port"`
	MetricsListen []string `toml:"metrics_listen"`
	MetricsKeys   []string `toml:"metrics_keys"`
	MetricsOpen   bool     `toml:"metrics_open"`
	Owners        []string `toml:"owners"`
	AgentUser     string   `toml:"agent_user"`
	RootWork      string   `toml:"root_work"`
	SysfsRoot     string   `toml:"sysfs_root"`
	MemoryBytes   int64    `toml:"memory_bytes"`
}

// Key documents one key of the file.
type Key struct {
	Name    string
	Kind    string // "text", "number", "yes or no", "list of text"
	Default string // as it would be written
	Meaning string
}

// Keys documents every key, in the order in which they are shown.
var Keys = []Key{
	{"name", "text", `""`, "Name that this node begins with, 1 to 63 of a-z, 0-9 and \"-\". Empty: the host name. Later `tbcluster node rename` changes it, and this does not."},
	{"control_port", "number", "7871", "TCP port on which the agents talk to each other. If it is taken the next free one is used and announced."},
	{"peers", "list of text", "[]", "Nodes to try where mDNS does not reach, as \"host\" or \"host:port\". They still have to be paired."},
	{"address_block", "text", `"10.77.0.0/16"`, "IPv4 block out of which links and nodes get their addresses; /8 to /24. What is in use by anything else is left out."},
	{"address_spares", "list of text", `["172.29.0.0/16", "10.213.0.0/16"]`, "Blocks to go on with where address_block is taken as a whole on a node (a LAN on 10.77.0.0/16). Empty: a cable there stays without addresses."},
	{"forward", "yes or no", "false", "Pass packets on from one cable of this node to another, so that nodes that no cable joins reach each other's node address through it. Nothing is passed on to or from the LAN. Linux."},
	{"mtu", "number", "0", "MTU of the cables' interfaces. 0: the largest that both ends can do."},
	{"model_dirs", "list of text", "[]", "Further directories to look for models in. \"~\" is the home of the user who paired."},
	{"engine_dirs", "list of text", "[]", "Further directories to look for engines in, before all others."},
	{"gateway_port", "number", "8555", "Port of the OpenAI-compatible gateway on 127.0.0.1 and ::1. If it is taken the next free one is used."},
	{"gateway_listen", "list of text", "[]", "Further addresses for the gateway, as \"address:port\". They need gateway_keys."},
	{"gateway_keys", "list of text", "[]", "API keys, at least 20 characters each; one of them has to come with each request that is not from this machine."},
	{"metrics_port", "number", "7880", "Port of the metrics for Prometheus on 127.0.0.1 and ::1. If it is taken the next free one is used; 0: no metrics."},
	{"metrics_listen", "list of text", "[]", "Further addresses for the metrics, as \"address:port\". They need metrics_keys, or metrics_open = true."},
	{"metrics_keys", "list of text", "[]", "Keys, at least 20 characters each; Prometheus has to send one of them as a bearer token, unless it asks on this machine."},
	{"metrics_open", "yes or no", "false", "true: everybody who can reach metrics_listen may read the metrics without a key."},
	{"owners", "list of text", "[]", "Local users who may copy, place, pair and stop, besides root and whoever installed or paired."},
	{"agent_user", "text", `"tbcluster"`, "User as whom the unprivileged half runs. If there is none of that name, a number that belongs to nobody."},
	{"root_work", "text", `"auto"`, "Whether files are copied and engines run as root when root asks: \"yes\", \"no\", or \"auto\": only on a machine that has no other person's account."},
	{"sysfs_root", "text", `"/sys"`, "Where the Thunderbolt layer is read. For virtual clusters."},
	{"memory_bytes", "number", "0", "Memory that this node reports and plans with. 0: what is installed."},
}

// Default returns the configuration of an empty file.
func Default() Config {
	return Config{
		ControlPort:   7871,
		AddressBlock:  "10.77.0.0/16",
		AddressSpares: []string{"172.29.0.0/16", "10.213.0.0/16"},
		GatewayPort:   8555,
		MetricsPort:   7880,
		AgentUser:     "tbcluster",
		RootWork:      "auto",
		SysfsRoot:     "/sys",
	}
}

// Path returns where the file is looked for: /etc/tbcluster/config.toml for
// root, else in the user's configuration directory.
func Path(uid int, getenv func(string) string) string {
	if uid == 0 {
		return "/etc/tbcluster/config.toml"
	}
	if d := getenv("XDG_CONFIG_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "tbcluster", "config.toml")
	}
	home := getenv("HOME")
	if !filepath.IsAbs(home) {
		home = "/" // as of a user without one
	}
	return filepath.Join(home, ".config", "tbcluster", "config.toml")
}

// Load reads the file at path; one that does not exist gives the defaults.
// Errors are faults of reason ConfigInvalid.
func Load(path string) (Config, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Default(), nil
	}
	if err != nil {
		return Config{}, fault.New(fault.ConfigInvalid, "read the configuration", err, "make it readable or remove it").At(path)
	}
	return Parse(path, data)
}

// Parse reads the file's contents; path is for messages only.
func Parse(path string, data []byte) (Config, error) {
	c := Default()
	d := toml.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return Config{}, decodeFault(path, err)
	}
	if key, why := c.check(); key != "" {
		where := path
		if n := lineOf(string(data), key); n > 0 {
			where = fmt.Sprintf("%s line %d", path, n)
		}
		return Config{}, (&fault.Fault{Reason: fault.ConfigInvalid, What: "cannot read the configuration", Why: key + ": " + why,
			Fix: "correct it; `tbcluster config show` explains every key"}).At(where).With("key", key)
	}
	return c, nil
}

func decodeFault(path string, err error) error {
	f := &fault.Fault{Reason: fault.ConfigInvalid, What: "cannot read the configuration", Where: path, Err: err,
		Fix: "correct it; `tbcluster config show` explains every key"}
	var strict *toml.StrictMissingError
	var de *toml.DecodeError
	switch {
	case errors.As(err, &strict) && len(strict.Errors) > 0:
		e := strict.Errors[0]
		row, _ := e.Position()
		key := strings.Join(e.Key(), ".")
		f.Where = fmt.Sprintf("%s line %d", path, row)
		f.Why = fmt.Sprintf("there is no key %q%s", key, suggestion(key))
		return f.With("key", key)
	case errors.As(err, &de):
		row, _ := de.Position()
		f.Where = fmt.Sprintf("%s line %d", path, row)
		f.Why = strings.TrimPrefix(de.Error(), "toml: ")
		if k := strings.Join(de.Key(), "."); k != "" {
			if want := kindWords[kindOf(k)]; want != "" && strings.HasPrefix(f.Why, "cannot decode TOML") {
				f.Why = "expected " + want
			}
			f.Why = k + ": " + f.Why
			return f.With("key", k)
		}
		return f
	}
	f.Why = err.Error()
	return f
}

// kindWords say how a value of each kind is written.
var kindWords = map[string]string{
	"text": `text in quotes, as in "…"`, "number": "a number", "yes or no": "true or false", "list of text": `a list of text, as in ["…", "…"]`,
}

func kindOf(key string) string {
	for _, k := range Keys {
		if k.Name == key {
			return k.Kind
		}
	}
	return ""
}

// suggestion names a known key that starts alike or holds the same words.
func suggestion(key string) string {
	norm := func(s string) string { return strings.NewReplacer("-", "", "_", "").Replace(strings.ToLower(s)) }
	k := norm(key)
	for _, have := range Keys {
		h := norm(have.Name)
		if h == k || (len(k) >= 4 && (strings.HasPrefix(h, k[:4]) || strings.Contains(h, k) || strings.Contains(k, h))) {
			return fmt.Sprintf("; did you mean %q?", have.Name)
		}
	}
	return ""
}

func lineOf(data, key string) int {
	re := regexp.MustCompile(`^\s*"?` + regexp.QuoteMeta(key) + `"?\s*=`)
	for i, l := range strings.Split(data, "\n") {
		if re.MatchString(l) {
			return i + 1
		}
	}
	return 0
}

var nodeName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// check returns the first key whose value cannot be used, and why.
func (c Config) check() (key, why string) {
	if c.Name != "" && !nodeName.MatchString(c.Name) {
		return "name", fmt.Sprintf("%q is not 1 to 63 of a-z, 0-9 and \"-\"", c.Name)
	}
	for _, p := range []struct {
		key string
		n   int
	}{{"control_port", c.ControlPort}, {"gateway_port", c.GatewayPort}} {
		if p.n < 1 || p.n > 65535 {
			return p.key, fmt.Sprintf("%d is no port number", p.n)
		}
	}
	for _, p := range c.Peers {
		host := p
		if h, port, err := net.SplitHostPort(p); err == nil {
			if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
				return "peers", fmt.Sprintf("%q has no port number behind its colon", p)
			}
			host = h
		}
		_, noAddr := netip.ParseAddr(strings.Trim(host, "[]"))
		if host == "" || strings.ContainsAny(host, " /@") || strings.Contains(host, ":") && noAddr != nil {
			return "peers", fmt.Sprintf("%q is no host", p)
		}
	}
	if why := checkBlock(c.AddressBlock); why != "" {
		return "address_block", why
	}
	if len(c.AddressSpares) > maxSpares {
		return "address_spares", fmt.Sprintf("more than %d", maxSpares)
	}
	for _, s := range c.AddressSpares {
		if why := checkBlock(s); why != "" {
			return "address_spares", why
		}
	}
	if c.MTU != 0 && (c.MTU < 1280 || c.MTU > 65535) {
		return "mtu", fmt.Sprintf("%d is not 0 or 1280 to 65535", c.MTU)
	}
	for _, d := range []struct {
		key  string
		list []string
	}{{"model_dirs", c.ModelDirs}, {"engine_dirs", c.EngineDirs}} {
		for _, dir := range d.list {
			if !filepath.IsAbs(dir) && dir != "~" && !strings.HasPrefix(dir, "~/") {
				return d.key, fmt.Sprintf("%q is neither an absolute path nor begins with \"~/\"", dir)
			}
		}
	}
	for _, a := range c.GatewayListen {
		ap, err := netip.ParseAddrPort(a)
		if err != nil || ap.Port() == 0 {
			return "gateway_listen", fmt.Sprintf("%q is no address with a port", a)
		}
		if !ap.Addr().IsLoopback() && len(c.GatewayKeys) == 0 {
			return "gateway_listen", fmt.Sprintf("%s can be reached by others, so gateway_keys must be set", a)
		}
	}
	if c.MetricsPort < 0 || c.MetricsPort > 65535 {
		return "metrics_port", fmt.Sprintf("%d is no port number", c.MetricsPort)
	}
	for _, a := range c.MetricsListen {
		ap, err := netip.ParseAddrPort(a)
		if err != nil || ap.Port() == 0 {
			return "metrics_listen", fmt.Sprintf("%q is no address with a port", a)
		}
		if len(c.MetricsKeys) == 0 && !c.MetricsOpen {
			return "metrics_listen", fmt.Sprintf("%s can be reached by others, so metrics_keys must be set, or metrics_open = true", a)
		}
	}
	if len(c.MetricsKeys) > 0 && c.MetricsOpen {
		return "metrics_open", "it is true, and metrics_keys are set: say one of them"
	}
	for _, l := range []struct {
		key  string
		keys []string
	}{{"gateway_keys", c.GatewayKeys}, {"metrics_keys", c.MetricsKeys}} {
		for _, k := range l.keys {
			if len(k) < 20 || strings.ContainsAny(k, " \t\r\n") {
				return l.key, "a key has less than 20 characters or white space in it"
			}
		}
	}
	if c.RootWork != "auto" && c.RootWork != "yes" && c.RootWork != "no" {
		return "root_work", fmt.Sprintf("%q is neither \"auto\", \"yes\" nor \"no\"", c.RootWork)
	}
	if !filepath.IsAbs(c.SysfsRoot) {
		return "sysfs_root", fmt.Sprintf("%q is not an absolute path", c.SysfsRoot)
	}
	if c.MemoryBytes < 0 {
		return "memory_bytes", "it is negative"
	}
	return "", ""
}

// maxSpares bounds how many blocks two nodes try one after the other.
const maxSpares = 3

// unusable are ranges from which no machine's interface can have an address.
var unusable = map[string]string{
	"0.0.0.0/8": "this network", "127.0.0.0/8": "the loopback", "169.254.0.0/16": "addresses that machines give themselves",
	"224.0.0.0/4": "multicast", "240.0.0.0/4": "no use yet",
}

func checkBlock(text string) (why string) {
	b, err := netip.ParsePrefix(text)
	if err != nil || !b.Addr().Is4() || b.Bits() < 8 || b.Bits() > 24 {
		return fmt.Sprintf("%q is no IPv4 block of /8 to /24", text)
	}
	if b != b.Masked() {
		return fmt.Sprintf("%q has bits set behind its prefix: %s is meant?", text, b.Masked())
	}
	for r, what := range unusable {
		if netip.MustParsePrefix(r).Overlaps(b) {
			return fmt.Sprintf("%q holds some of %s, which is for %s: a private range such as %q is meant?", text, r, what, Default().AddressBlock)
		}
	}
	return ""
}

// Blocks returns what addresses are taken from: the block, then its spares.
func (c Config) Blocks() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range append([]string{c.AddressBlock}, c.AddressSpares...) {
		if b, err := netip.ParsePrefix(s); err == nil {
			out = append(out, b)
		}
	}
	return out
}

// Value returns the value of a key as it would be written in the file; secret
// ones as their number.
func (c Config) Value(key string) string {
	list := func(l []string) string {
		q := make([]string, len(l))
		for i, s := range l {
			q[i] = strconv.Quote(s)
		}
		return "[" + strings.Join(q, ", ") + "]"
	}
	switch key {
	case "name":
		return strconv.Quote(c.Name)
	case "control_port":
		return strconv.Itoa(c.ControlPort)
	case "peers":
		return list(c.Peers)
	case "address_block":
		return strconv.Quote(c.AddressBlock)
	case "address_spares":
		return list(c.AddressSpares)
	case "forward":
		return strconv.FormatBool(c.Forward)
	case "mtu":
		return strconv.Itoa(c.MTU)
	case "model_dirs":
		return list(c.ModelDirs)
	case "engine_dirs":
		return list(c.EngineDirs)
	case "gateway_port":
		return strconv.Itoa(c.GatewayPort)
	case "gateway_listen":
		return list(c.GatewayListen)
	case "gateway_keys":
		return list(hidden(c.GatewayKeys))
	case "metrics_port":
		return strconv.Itoa(c.MetricsPort)
	case "metrics_listen":
		return list(c.MetricsListen)
	case "metrics_keys":
		return list(hidden(c.MetricsKeys))
	case "metrics_open":
		return strconv.FormatBool(c.MetricsOpen)
	case "owners":
		return list(c.Owners)
	case "agent_user":
		return strconv.Quote(c.AgentUser)
	case "root_work":
		return strconv.Quote(c.RootWork)
	case "sysfs_root":
		return strconv.Quote(c.SysfsRoot)
	case "memory_bytes":
		return strconv.FormatInt(c.MemoryBytes, 10)
	}
	return ""
}

// hidden stands for keys where they are shown.
func hidden(keys []string) []string {
	out := make([]string, len(keys))
	for i := range out {
		out[i] = "(hidden)"
	}
	return out
}

// Changed returns the keys whose values are not the defaults, sorted.
func (c Config) Changed() []string {
	d := Default()
	var keys []string
	for _, k := range Keys {
		if c.Value(k.Name) != d.Value(k.Name) {
			keys = append(keys, k.Name)
		}
	}
	sort.Strings(keys)
	return keys
}
