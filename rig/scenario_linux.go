package rig

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"tbcluster/api/fault"
	"tbcluster/lab"
	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// Scenario is a topology and what is done to it. Its file is TOML; every field
// is described in docs/rig.md.
type Scenario struct {
	// Seed decides what is lost by probability and what traffic consists of.
	Seed   uint64          `toml:"seed"`
	Rig    ScenarioRig     `toml:"rig"`
	Hosts  []ScenarioHost  `toml:"host,omitempty"`
	Cables []ScenarioCable `toml:"cable,omitempty"`
	Steps  []Step          `toml:"step,omitempty"`
}

// ScenarioRig is the shape, and what holds for all hosts and cables.
type ScenarioRig struct {
	Hosts  int    `toml:"hosts,omitempty"`  // default 2
	Shape  string `toml:"shape,omitempty"`  // pair, chain, ring, mesh, hub; none where [[cable]] says it all
	Cables int    `toml:"cables,omitempty"` // between two hosts that are joined, default 1
	Kernel string `toml:"kernel,omitempty"` // backport, stable, debug
	LAN    bool   `toml:"lan,omitempty"`
	HostOptions
	CableOptions
}

// HostOptions are those of a host in a file.
type HostOptions struct {
	Ports   int  `toml:"ports,omitempty"`
	Lanes   int  `toml:"lanes,omitempty"`
	Version int  `toml:"version,omitempty"` // of USB4
	Gen     int  `toml:"generation,omitempty"`
	Memory  int  `toml:"memory,omitempty"` // MiB
	CPUs    int  `toml:"cpus,omitempty"`
	Disk    int  `toml:"disk,omitempty"` // MiB
	System  bool `toml:"system,omitempty"`
	IOMMU   bool `toml:"iommu,omitempty"`
}

// ScenarioHost is one host that differs from the others.
type ScenarioHost struct {
	Name   string `toml:"name"`
	Kernel string `toml:"kernel,omitempty"`
	HostOptions
}

// ScenarioCable is a cable besides those of the shape, or one of them with
// options of its own.
type ScenarioCable struct {
	A string `toml:"a"`
	B string `toml:"b"`
	CableOptions
	Unplugged bool `toml:"unplugged,omitempty"`
}

// CableOptions are those of a cable in a file.
type CableOptions struct {
	Rate           Rate      `toml:"rate,omitempty"`
	Latency        Duration  `toml:"latency,omitempty"`
	Loss           Injection `toml:"loss,omitempty"`
	Corrupt        Injection `toml:"corrupt,omitempty"`
	CorruptFlagged Injection `toml:"corrupt_flagged,omitempty"`
	Overrun        Injection `toml:"overrun,omitempty"`
	TrainedLanes   int       `toml:"trained_lanes,omitempty"`
	TrainedGen     int       `toml:"trained_generation,omitempty"`
	Training       Duration  `toml:"training,omitempty"`
}

// Injection is usb4.Injection in a file.
type Injection struct {
	Every       uint64  `toml:"every,omitempty"`
	Probability float64 `toml:"probability,omitempty"`
}

// Duration is a time in a file: "1.5s".
type Duration time.Duration

// MarshalText returns the time as Go writes it.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads what MarshalText writes; there is no time below zero.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil || v < 0 {
		return fmt.Errorf(`%q is no time; write 1.5s, 200ms or 2m`, b)
	}
	*d = Duration(v)
	return nil
}

// Rate is bit/s in a file: "100mbit".
type Rate int64

// MarshalText returns the rate in bit/s.
func (r Rate) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%dbit", int64(r)), nil }

// UnmarshalText reads a rate as tc writes it.
func (r *Rate) UnmarshalText(b []byte) error {
	v, err := lab.ParseRate(string(b))
	if err != nil {
		return fmt.Errorf(`%q is no rate; write 100mbit or 2.5gbit`, b)
	}
	*r = Rate(v)
	return nil
}

// Size is a number of bytes in a file: "16m".
type Size int64

// MarshalText returns the size in bytes.
func (s Size) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%d", int64(s)), nil }

// UnmarshalText reads a size in powers of 1024.
func (s *Size) UnmarshalText(b []byte) error {
	v, err := lab.ParseSize(string(b))
	if err != nil || v > maxTraffic {
		return fmt.Errorf(`%q is no size; write 512k or 16m, at most 64g`, b)
	}
	*s = Size(v)
	return nil
}

const maxTraffic = 64 << 30

// Action is what a step does.
type Action string

// The actions.
const (
	DoNothing Action = "nothing" // only waits: at, after, when
	DoPlug    Action = "plug"
	DoUnplug  Action = "unplug"
	DoFlap    Action = "flap"
	DoWire    Action = "wire" // sets the options of a cable
	DoReload  Action = "reload"
	DoCrash   Action = "crash" // cuts the power of a host
	DoBoot    Action = "boot"
	DoReboot  Action = "reboot"
	DoRun     Action = "run"
	DoTraffic Action = "traffic"
)

// needs says what an action has to have named, and how it is waited for.
var needs = map[Action]struct{ host, cable, settles bool }{
	DoNothing: {},
	DoPlug:    {cable: true, settles: true},
	DoUnplug:  {cable: true, settles: true},
	DoFlap:    {cable: true, settles: true},
	DoWire:    {cable: true},
	DoReload:  {host: true, settles: true},
	DoCrash:   {host: true, settles: true},
	DoBoot:    {host: true, settles: true},
	DoReboot:  {host: true, settles: true},
	DoRun:     {host: true},
	DoTraffic: {cable: true},
}

// actions are the names of all actions.
func actions() string {
	var names []string
	for a := range needs {
		names = append(names, string(a))
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// Step is one thing that is done. It begins when the one before it has ended,
// at the time At, After and When have come.
type Step struct {
	At    Duration `toml:"at,omitempty"`    // not before this time since the first step
	After Duration `toml:"after,omitempty"` // this long after the step before
	When  string   `toml:"when,omitempty"`  // "settled", "carrier a.0", "peer a.0", "no-peer a.0"

	Do    Action `toml:"do"`
	Host  string `toml:"host,omitempty"`
	Cable string `toml:"cable,omitempty"` // by one of its ports

	Out    Duration      `toml:"out,omitempty"`    // flap: how long it is out, default 200ms
	From   string        `toml:"from,omitempty"`   // wire: only what this port sends
	Wire   *CableOptions `toml:"wire,omitempty"`   // wire
	Run    []string      `toml:"run,omitempty"`    // run
	Expect string        `toml:"expect,omitempty"` // run: a regular expression that its output matches
	Bytes  Size          `toml:"bytes,omitempty"`  // traffic, default 1m

	// Unsettled goes on at once, instead of waiting until all hosts show the
	// truth again.
	Unsettled bool `toml:"unsettled,omitempty"`

	// Took and Result are written when a scenario is played, and not read.
	Took   Duration `toml:"took,omitempty"`
	Result string   `toml:"result,omitempty"`
}

// String is the step in a line.
func (s Step) String() string {
	words := []string{string(s.Do)}
	for _, w := range []string{s.Host, s.Cable} {
		if w != "" {
			words = append(words, w)
		}
	}
	switch s.Do {
	case DoFlap:
		words = append(words, time.Duration(s.out()).String())
	case DoTraffic:
		words = append(words, fmt.Sprint(s.bytes(), " bytes"))
	case DoRun:
		words = append(words, strings.Join(s.Run, " "))
	case DoWire:
		words = append(words, s.Wire.String())
	}
	return strings.Join(words, " ")
}

// String names what is not perfect.
func (o CableOptions) String() string {
	var words []string
	add := func(name string, is bool, format string, value ...any) {
		if is {
			words = append(words, name+" "+fmt.Sprintf(format, value...))
		}
	}
	add("rate", o.Rate != 0, "%g Mb/s", float64(o.Rate)/1e6)
	add("latency", o.Latency != 0, "%v", time.Duration(o.Latency))
	for _, i := range []struct {
		name string
		Injection
	}{{"loss", o.Loss}, {"corrupt", o.Corrupt}, {"corrupt_flagged", o.CorruptFlagged}, {"overrun", o.Overrun}} {
		add(i.name, i.Every != 0, "every %d", i.Every)
		add(i.name, i.Probability != 0, "%g", i.Probability)
	}
	add("lanes", o.TrainedLanes != 0, "%d", o.TrainedLanes)
	add("generation", o.TrainedGen != 0, "%d", o.TrainedGen)
	add("training", o.Training != 0, "%v", time.Duration(o.Training))
	if len(words) == 0 {
		return "perfect"
	}
	return strings.Join(words, ", ")
}

func (s Step) out() time.Duration {
	if s.Out == 0 {
		return 200 * time.Millisecond
	}
	return time.Duration(s.Out)
}

func (s Step) bytes() int64 {
	if s.Bytes == 0 {
		return 1 << 20
	}
	return int64(s.Bytes)
}

// maxSteps bounds a scenario.
const maxSteps = 100_000

// ParseScenario reads a scenario file. Errors name its line.
func ParseScenario(name string, b []byte) (Scenario, error) {
	var s Scenario
	wrong := func(line int, err error) (Scenario, error) {
		where := name
		if line > 0 {
			where = fmt.Sprintf("%s:%d", name, line)
		}
		return Scenario{}, fault.New(fault.ConfigInvalid, "read a scenario", err, "docs/rig.md describes what may stand there").At(where)
	}
	d := toml.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return wrong(decodeError(err))
	}
	lines, err := tables(b)
	if err != nil {
		return wrong(0, err)
	}
	topology, err := s.Topology()
	var table *tableError
	switch {
	case errors.As(err, &table):
		return wrong(lines.of(table.name, table.n), table.err)
	case err != nil:
		return wrong(lines.of("rig", 0), plain(err))
	}
	topology, err = topology.complete()
	if err != nil {
		return wrong(lines.of("rig", 0), plain(err))
	}
	if len(s.Steps) > maxSteps {
		return wrong(lines.of("step", maxSteps), fmt.Errorf("there are %d steps; at most %d are played", len(s.Steps), maxSteps))
	}
	for i, step := range s.Steps {
		if err := step.check(topology); err != nil {
			return wrong(lines.of("step", i), err)
		}
	}
	return s, nil
}

// plain is an error without the words around a Fault.
func plain(err error) error {
	if f := fault.As(err); f != nil && f.Why == "" {
		if f.Fix != "" {
			return errors.New(f.What + "; " + f.Fix)
		}
		return errors.New(f.What)
	}
	return err
}

// decodeError finds the line of what go-toml says.
func decodeError(err error) (line int, what error) {
	var strict *toml.StrictMissingError
	if errors.As(err, &strict) && len(strict.Errors) > 0 {
		row, _ := strict.Errors[0].Position()
		return row, fmt.Errorf("%s does not exist", strings.Join(strict.Errors[0].Key(), "."))
	}
	var decode *toml.DecodeError
	if errors.As(err, &decode) {
		row, _ := decode.Position()
		return row, errors.New(strings.TrimPrefix(decode.Error(), "toml: "))
	}
	return 0, err
}

// tableError is what is wrong with the n-th table of a name.
type tableError struct {
	name string
	n    int
	err  error
}

func (e *tableError) Error() string { return e.err.Error() }

func (e *tableError) Unwrap() error { return e.err }

// tableLines are the lines of the tables of a file, by name.
type tableLines map[string][]int

// of returns the line of the n-th table of a name, 0 if it is not known.
func (t tableLines) of(name string, n int) int {
	if n < len(t[name]) {
		return t[name][n]
	}
	return 0
}

// tables finds the lines of tables. The file has been read before, so it is
// well-formed.
func tables(b []byte) (tableLines, error) {
	lines := tableLines{}
	var p unstable.Parser
	p.Reset(b)
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind != unstable.Table && e.Kind != unstable.ArrayTable {
			continue
		}
		keys := e.Key()
		if !keys.Next() {
			continue
		}
		key := keys.Node()
		name := string(key.Data)
		lines[name] = append(lines[name], p.Shape(key.Raw).Start.Line)
	}
	return lines, p.Error()
}

// kernels are the names of kernels in files and on command lines.
var kernels = map[string]image.Kernel{
	"": "", "newest": image.Backport, "backport": image.Backport, "stable": image.Stable, "debug": image.Debug,
}

// ParseKernel returns the kernel of a name: newest (or backport), stable, debug.
func ParseKernel(name string) (image.Kernel, error) {
	k, ok := kernels[name]
	if !ok {
		return "", fault.Newf(fault.Usage, "the kernels are newest, stable and debug", "there is no kernel %q", name)
	}
	return k, nil
}

// shapes are the names of shapes.
var shapes = map[string]func(hosts int, cables ...int) Topology{
	"chain": Chain, "pair": Chain, "ring": Ring, "mesh": Mesh, "hub": Hubbed,
	"none": func(hosts int, _ ...int) Topology { return Topology{Hosts: make([]HostSpec, max(hosts, 0))} },
}

// Shape returns the topology of a name: pair, chain, ring, mesh, hub, or none.
func Shape(name string, hosts, cables int) (Topology, error) {
	f, ok := shapes[name]
	switch {
	case !ok:
		return Topology{}, fault.Newf(fault.Usage, "the shapes are pair, chain, ring, mesh, hub and none", "there is no shape %q", name)
	case name == "pair" && hosts != 2:
		return Topology{}, fault.Newf(fault.Usage, "choose another shape", "a pair has 2 hosts, not %d", hosts)
	case hosts < 1 || hosts > MaxHosts:
		return Topology{}, fault.Newf(fault.Usage, fmt.Sprintf("choose 1 to %d", MaxHosts), "a rig cannot have %d hosts", hosts)
	case cables < 1 || cables > MaxPorts:
		return Topology{}, fault.Newf(fault.Usage, fmt.Sprintf("choose 1 to %d", MaxPorts), "two hosts cannot be joined by %d cables", cables)
	}
	return f(hosts, cables), nil
}

// Topology returns the topology of the scenario.
func (s Scenario) Topology() (Topology, error) {
	shape, hosts, cables := s.Rig.Shape, s.Rig.Hosts, s.Rig.Cables
	if hosts == 0 {
		hosts = max(2, len(s.Hosts))
	}
	if cables == 0 {
		cables = 1
	}
	if shape == "" {
		shape = "chain"
		if len(s.Cables) > 0 {
			shape = "none"
		}
	}
	t, err := Shape(shape, hosts, cables)
	if err != nil {
		return t, err
	}
	if t.Kernel, err = ParseKernel(s.Rig.Kernel); err != nil {
		return t, err
	}
	t.LAN, t.Seed = s.Rig.LAN, s.Seed
	for i := range t.Hosts {
		t.Hosts[i].Name = hostName(i)
		s.Rig.HostOptions.apply(&t.Hosts[i])
	}
	for n, h := range s.Hosts {
		i := slices.IndexFunc(t.Hosts, func(x HostSpec) bool { return x.Name == h.Name })
		if i < 0 {
			return t, &tableError{"host", n, fmt.Errorf("there is no host %q; the hosts are %s", h.Name, strings.Join(t.Names(), ", "))}
		}
		h.HostOptions.apply(&t.Hosts[i])
		if t.Hosts[i].Kernel, err = ParseKernel(h.Kernel); err != nil {
			return t, &tableError{"host", n, plain(err)}
		}
	}
	for i := range t.Cables {
		t.Cables[i].Options = s.Rig.CableOptions.options(false)
	}
	for _, c := range s.Cables {
		spec := CableSpec{A: c.A, B: c.B, Options: c.CableOptions.options(c.Unplugged)}
		i := slices.IndexFunc(t.Cables, func(x CableSpec) bool { return x.A == c.A && x.B == c.B })
		if i >= 0 {
			t.Cables[i] = spec
		} else {
			t.Cables = append(t.Cables, spec)
		}
	}
	return t, nil
}

// apply sets what is given.
func (o HostOptions) apply(h *HostSpec) {
	for _, v := range []struct {
		to   *int
		from int
	}{{&h.Ports, o.Ports}, {&h.Lanes, o.Lanes}, {&h.Version, o.Version}, {&h.Memory, o.Memory}, {&h.CPUs, o.CPUs}, {&h.Disk, o.Disk}} {
		if v.from != 0 {
			*v.to = v.from
		}
	}
	if o.Gen != 0 {
		h.Speed = usb4.Generation(o.Gen)
	}
	h.System, h.IOMMU = h.System || o.System, h.IOMMU || o.IOMMU
}

// options are those of package usb4.
func (o CableOptions) options(unplugged bool) usb4.CableOptions {
	inject := func(i Injection) usb4.Injection { return usb4.Injection{Every: i.Every, Probability: i.Probability} }
	return usb4.CableOptions{
		WireOptions: usb4.WireOptions{
			Rate: int64(o.Rate), Latency: time.Duration(o.Latency),
			Loss: inject(o.Loss), Corrupt: inject(o.Corrupt), CorruptFlagged: inject(o.CorruptFlagged), Overrun: inject(o.Overrun),
		},
		Lanes: o.TrainedLanes, Speed: usb4.Generation(o.TrainedGen), Training: time.Duration(o.Training), Unplugged: unplugged,
	}
}

// check says what is wrong with a step.
func (s Step) check(t Topology) error {
	need, ok := needs[s.Do]
	if !ok {
		return fmt.Errorf("there is no action %q; the actions are %s", s.Do, actions())
	}
	hasPort := func(port string) bool {
		return slices.ContainsFunc(t.Cables, func(c CableSpec) bool { return c.A == port || c.B == port })
	}
	switch {
	case need.host && s.Host == "":
		return fmt.Errorf(`%s: needs a host = "a"`, s.Do)
	case need.cable && s.Cable == "":
		return fmt.Errorf(`%s: needs a cable = "a.0"`, s.Do)
	case !need.host && s.Host != "":
		return fmt.Errorf("%s: takes no host", s.Do)
	case !need.cable && s.Cable != "":
		return fmt.Errorf("%s: takes no cable", s.Do)
	case s.Host != "" && !slices.ContainsFunc(t.Hosts, func(h HostSpec) bool { return h.Name == s.Host }):
		return fmt.Errorf("there is no host %q", s.Host)
	case s.Cable != "" && !hasPort(s.Cable):
		return fmt.Errorf("no cable ends in port %q", s.Cable)
	case (s.Do == DoRun) != (len(s.Run) > 0) || s.Expect != "" && s.Do != DoRun:
		return fmt.Errorf("%s: run and expect belong to the action run, which needs run", s.Do)
	case (s.Do == DoWire) != (s.Wire != nil) || s.From != "" && s.Do != DoWire:
		return fmt.Errorf("%s: wire and from belong to the action wire, which needs wire", s.Do)
	case s.From != "" && !hasPort(s.From):
		return fmt.Errorf("no cable ends in port %q", s.From)
	case s.Out != 0 && s.Do != DoFlap:
		return fmt.Errorf("%s: out belongs to the action flap", s.Do)
	case s.Bytes != 0 && s.Do != DoTraffic:
		return fmt.Errorf("%s: bytes belongs to the action traffic", s.Do)
	}
	if _, err := regexp.Compile(s.Expect); err != nil {
		return fmt.Errorf("expect: %w", err)
	}
	if s.When != "" {
		kind, port, err := s.when()
		if err != nil {
			return err
		}
		if kind != whenSettled && !hasPort(port) {
			return fmt.Errorf("when: no cable ends in port %q", port)
		}
	}
	return nil
}

// The conditions of When.
const (
	whenSettled = "settled"
	whenPeer    = "peer"
	whenNoPeer  = "no-peer"
	whenCarrier = "carrier"
)

func (s Step) when() (kind, port string, err error) {
	f := strings.Fields(s.When)
	switch {
	case len(f) == 1 && f[0] == whenSettled:
		return f[0], "", nil
	case len(f) == 2 && slices.Contains([]string{whenPeer, whenNoPeer, whenCarrier}, f[0]):
		return f[0], f[1], nil
	}
	return "", "", fmt.Errorf("when: %q is none of settled, peer PORT, no-peer PORT, carrier PORT", s.When)
}

// Encode returns the scenario as a file.
func (s Scenario) Encode() ([]byte, error) {
	var b bytes.Buffer
	if err := toml.NewEncoder(&b).Encode(s); err != nil {
		return nil, fault.New(fault.Internal, "write a scenario", err, "")
	}
	return b.Bytes(), nil
}
