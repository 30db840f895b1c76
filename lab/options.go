package lab

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"tbcluster/api/fault"
)

// DefaultName is the name of the lab that is meant where none is named.
const DefaultName = "default"

// Command returns the command line of `tbcluster lab` for the lab of that name,
// in backquotes, as advice has it.
func Command(name, line string) string {
	if name == "" || name == DefaultName {
		return "`tbcluster lab " + line + "`"
	}
	// What follows the node of exec is the command that it runs.
	if node, is := strings.CutPrefix(line, "exec "); is {
		return "`tbcluster lab exec --name " + name + " " + node + "`"
	}
	return "`tbcluster lab " + line + " --name " + name + "`"
}

// LANHost is the reserved node name of a host that is on the LAN of the lab and
// is no node of the cluster: Exec works there, nothing is booted there.
const LANHost = "lan"

// MaxNodes is the most nodes that a lab may have.
const MaxNodes = 64

// MaxCables is the most cables that join one pair of nodes.
const MaxCables = 8

// Defaults of Options.
const (
	DefaultMemory = 8 << 30 // bytes
	DefaultDisk   = 8 << 30 // bytes
)

// Topology says which pairs of nodes are joined by cables.
type Topology string

// The topologies.
const (
	Mesh  Topology = "mesh"  // every pair
	Ring  Topology = "ring"  // each with the next, the last with the first
	Chain Topology = "chain" // each with the next
	Pair  Topology = "pair"  // two nodes
)

// Topologies lists them for help texts.
var Topologies = []Topology{Mesh, Ring, Chain, Pair}

// Options say what lab to make. The zero value of a field means its default.
type Options struct {
	// Name is that of the lab: letters, digits and "-", at most 24.
	Name string `json:"name"`
	// Nodes is their number, 1 to MaxNodes; default 3, or 2 for Pair.
	Nodes int `json:"nodes"`
	// Topology is Mesh by default.
	Topology Topology `json:"topology"`
	// Cables is their number between each pair of joined nodes; default 1.
	Cables int `json:"cables"`
	// Rate limits each cable each way, as tc writes it ("4gbit"); "" does not.
	Rate string `json:"rate,omitempty"`
	// Memory in bytes that each node reports; it is enforced, together with
	// Disk (which lives in memory too), where there are cgroups.
	Memory uint64 `json:"memory"`
	// Disk is the size in bytes of each node's data disk, which holds
	// /var/lib/tbcluster, /var/tmp and the homes, and survives Kill.
	Disk uint64 `json:"disk"`
	// Program is the tbcluster binary that runs in the nodes and keeps the lab:
	// its `lab-keeper` calls KeeperMain and its `lab-init` InitMain. Default:
	// the running program.
	Program string `json:"program"`
	// Boot is what a node starts when it boots and Start(…, agentOnly) again;
	// default `tbcluster agent --root`. "tbcluster" is Program there.
	Boot []string `json:"boot"`
	// NoBoot lets the nodes start nothing.
	NoBoot bool `json:"no_boot,omitempty"`
	// Config are more settings for the nodes' config.toml.
	Config map[string]any `json:"config,omitempty"`
	// Binds are directories and files of the host that the nodes see, read-only.
	Binds []Bind `json:"binds,omitempty"`
	// Quirks are what makes a desk harder to see through.
	Quirks []Quirk `json:"quirks,omitempty"`
	// Engines is the directory of the host that nodes see, read-only, as
	// /opt/tbcluster/engines, if it exists. Default: the user's cache.
	Engines string `json:"engines,omitempty"`
}

// Quirk is one way in which a desk is harder to see through than four cables
// between four machines.
type Quirk string

// The quirks.
const (
	// Hub puts hubs on the first node's ports: the others are behind them, three
	// to a hub.
	Hub Quirk = "hub"
	// Devices puts a dock and a disk, which nobody has authorised, on further
	// ports of each node, and retimers.
	Devices Quirk = "devices"
	// Crossed lets the second node of each pair have the pair's cables in the
	// opposite order: ports with one UUID are not joined as they are numbered.
	Crossed Quirk = "crossed"
	// Swapped lets every second node write UUIDs of others as some systems may: in
	// capitals, with the bytes of each word reversed.
	Swapped Quirk = "swapped"
)

// Quirks lists them for help texts.
var Quirks = []Quirk{Hub, Devices, Crossed, Swapped}

func (o Options) has(q Quirk) bool { return slices.Contains(o.Quirks, q) }

// Bind shows a directory or file of the host in every node, read-only.
type Bind struct {
	Source string `json:"source"` // absolute path on the host
	Target string `json:"target"` // absolute path in the node
}

var (
	nameRE     = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,23}$`)
	nodeNameRE = regexp.MustCompile(`^[a-z][a-z0-9]{0,15}$`)
)

var greek = strings.Fields("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu " +
	"nu xi omicron pi rho sigma tau upsilon phi chi psi omega")

// NodeNames returns the names of the first n nodes of a lab: the Greek letters,
// then n25, n26, …
func NodeNames(n int) []string {
	names := slices.Clone(greek[:min(n, len(greek))])
	for i := len(greek); i < n; i++ {
		names = append(names, "n"+strconv.Itoa(i+1))
	}
	return names
}

// complete fills in the defaults that need nothing of the machine and checks
// the rest.
func (o Options) complete() (Options, error) {
	usage := func(fix, format string, args ...any) (Options, error) {
		return o, fault.Newf(fault.Usage, fix, format, args...)
	}
	if o.Name == "" {
		o.Name = DefaultName
	}
	if err := checkName(o.Name); err != nil {
		return o, err
	}
	if o.Topology == "" {
		o.Topology = Mesh
	}
	if !slices.Contains(Topologies, o.Topology) {
		return usage("choose mesh, ring, chain or pair", "no topology is called %q", o.Topology)
	}
	if o.Nodes == 0 {
		o.Nodes = 3
		if o.Topology == Pair {
			o.Nodes = 2
		}
	}
	if o.Nodes < 1 || o.Nodes > MaxNodes {
		return usage(fmt.Sprintf("choose 1 to %d", MaxNodes), "a lab cannot have %d nodes", o.Nodes)
	}
	if o.Topology == Pair && o.Nodes != 2 {
		return usage("leave the number of nodes out, or choose another topology", "a pair has 2 nodes, not %d", o.Nodes)
	}
	if o.Cables == 0 {
		o.Cables = 1
	}
	if o.Cables < 1 || o.Cables > MaxCables {
		return usage(fmt.Sprintf("choose 1 to %d", MaxCables), "two nodes cannot be joined by %d cables", o.Cables)
	}
	for _, q := range o.Quirks {
		if !slices.Contains(Quirks, q) {
			return usage("choose hub, devices, crossed or swapped", "no quirk is called %q", q)
		}
	}
	if o.Rate != "" {
		if _, err := ParseRate(o.Rate); err != nil {
			return o, err
		}
	}
	if o.Memory == 0 {
		o.Memory = DefaultMemory
	}
	if o.Disk == 0 {
		o.Disk = DefaultDisk
	}
	if o.Memory < 16<<20 || o.Disk < 1<<20 {
		return usage("give a node at least 16 MB of memory and 1 MB of disk", "a node cannot have %d bytes of memory and %d bytes of disk", o.Memory, o.Disk)
	}
	if len(o.Boot) == 0 && !o.NoBoot {
		o.Boot = []string{"tbcluster", "agent", "--root"}
	}
	for _, b := range o.Binds {
		for _, p := range []string{b.Source, b.Target} {
			if !path.IsAbs(p) || path.Clean(p) != p || p == "/" {
				return usage("write absolute paths without . and ..", "cannot bind %q to %q", b.Source, b.Target)
			}
		}
	}
	return o, nil
}

func checkName(name string) error {
	if !nameRE.MatchString(name) {
		return fault.Newf(fault.Usage, "use letters, digits and \"-\", at most 24", "a lab cannot be called %q", name)
	}
	return nil
}

// rateUnits are tc's units of rate in bits per second.
var rateUnits = map[string]float64{
	"": 1, "bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12,
	"kibit": 1 << 10, "mibit": 1 << 20, "gibit": 1 << 30, "tibit": 1 << 40,
	"bps": 8, "kbps": 8e3, "mbps": 8e6, "gbps": 8e9, "tbps": 8e12,
	"kibps": 8 << 10, "mibps": 8 << 20, "gibps": 8 << 30, "tibps": 8 << 40,
}

var rateRE = regexp.MustCompile(`^([0-9]{1,12}(?:\.[0-9]{1,6})?)([a-z]*)$`)

// ParseRate reads a rate as tc writes it (there "bps" are bytes per second) and
// returns bits per second.
func ParseRate(s string) (uint64, error) {
	bad := fault.Newf(fault.Usage, "write it as tc does: 4gbit, 500mbit", "%q is no rate", s)
	m := rateRE.FindStringSubmatch(strings.ToLower(s))
	if m == nil {
		return 0, bad
	}
	unit, ok := rateUnits[m[2]]
	if !ok {
		return 0, bad
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		return 0, bad
	}
	bits := n * unit
	// Below 64 kbit/s a full frame takes seconds; above 1 Tbit/s nothing here
	// is limited by it.
	if bits < 64e3 || bits > 1e12 {
		return 0, fault.Newf(fault.Usage, "choose between 64kbit and 1tbit", "a cable cannot have the rate %q", s)
	}
	return uint64(bits), nil
}

var sizeUnits = map[string]uint64{
	"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
}

var sizeRE = regexp.MustCompile(`^([0-9]{1,9})([kmgt]?)(?:i?b)?$`)

// ParseSize reads a size such as "8g" or "512m" (powers of 1024) and returns bytes.
func ParseSize(s string) (uint64, error) {
	m := sizeRE.FindStringSubmatch(strings.ToLower(s))
	if m == nil {
		return 0, fault.Newf(fault.Usage, "write it as 8g or 512m", "%q is no size", s)
	}
	n, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil {
		return 0, fault.New(fault.Usage, fmt.Sprintf("%q is no size", s), err, "write it as 8g or 512m")
	}
	if n > 1<<50/sizeUnits[m[2]] {
		return 0, fault.Newf(fault.Usage, "choose something smaller", "%q is too much", s)
	}
	return n * sizeUnits[m[2]], nil
}
