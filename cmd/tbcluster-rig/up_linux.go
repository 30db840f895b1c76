package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"tbcluster/api/fault"
	"tbcluster/lab"
	"tbcluster/rig"
	"tbcluster/rig/cluster"
	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// topologyFlags are those that say what a rig is made of.
type topologyFlags struct {
	flags         *pflag.FlagSet
	hosts, cables int
	shape, kernel string
	lan           bool
	host          rig.HostSpec
	speed         int
	wire          wireFlags
	seed          uint64
}

func (t *topologyFlags) add(f *pflag.FlagSet) {
	t.flags = f
	f.IntVar(&t.hosts, "hosts", 2, fmt.Sprintf("number of hosts, 1 to %d; they are called a, b, c, …", rig.MaxHosts))
	f.StringVar(&t.shape, "shape", "chain", "which hosts cables join: pair, chain, ring, mesh, hub (all others behind a hub of the first) or none")
	f.IntVar(&t.cables, "cables", 1, "cables between each two hosts that are joined")
	f.StringVar(&t.kernel, "kernel", "newest", "kernel of the hosts: newest, stable or debug (KASAN and lockdep, slow)")
	f.BoolVar(&t.lan, "lan", false, "an Ethernet between the hosts besides, which leads nowhere else")
	f.IntVar(&t.host.Version, "usb4", 1, "version of USB4 of the host routers, 1 or 2")
	f.IntVar(&t.host.Lanes, "lanes", 2, "lanes of a port, 1 or 2")
	f.IntVar(&t.speed, "generation", int(usb4.Gen3), "speed of a lane: 2, 3 or 4 for 10, 20 or 40 Gb/s")
	f.IntVar(&t.host.Ports, "ports", 0, "ports of a host (default as many as the cables need)")
	f.IntVar(&t.host.Memory, "memory", 0, "memory of a host in MiB (default 512; 1024 for the debug kernel or with --system)")
	f.IntVar(&t.host.CPUs, "cpus", 1, "processors of a host")
	f.IntVar(&t.host.Disk, "disk", 0, "size in MiB of an empty disk, /dev/vda (default none)")
	f.BoolVar(&t.host.System, "system", false, "Debian with systemd, NetworkManager and dpkg instead of an initramfs")
	f.BoolVar(&t.host.IOMMU, "iommu", false, "an IOMMU that translates what the host router asks for")
	f.StringArrayVar(&t.host.Driver, "driver", nil, "a kernel module (.ko) that is loaded instead of the kernel's own driver; repeat it in the order of loading")
	f.Uint64Var(&t.seed, "seed", 0, "decides what is lost and corrupted by probability")
	t.wire.add(f)
}

// check refuses values that no rig can have, by the names of the flags.
func (t *topologyFlags) check() error {
	for _, v := range []struct {
		name            string
		value, min, max int
		unit            string
	}{
		{"usb4", t.host.Version, 1, 2, ""}, {"lanes", t.host.Lanes, 1, 2, ""}, {"generation", t.speed, int(usb4.Gen2), int(usb4.Gen4), ""},
		{"ports", t.host.Ports, 1, rig.MaxPorts, ""}, {"cpus", t.host.CPUs, 1, rig.MaxCPUs, ""},
		{"memory", t.host.Memory, rig.MinMemory, rig.MaxMemory, " MiB"}, {"disk", t.host.Disk, 1, rig.MaxDisk, " MiB"},
	} {
		if t.flags.Changed(v.name) && (v.value < v.min || v.value > v.max) {
			return fault.Newf(fault.Usage, fmt.Sprintf("choose %d to %d%s", v.min, v.max, v.unit), "--%s cannot be %d", v.name, v.value)
		}
	}
	if t.speed == int(usb4.Gen4) && (t.host.Version != 2 || t.host.Lanes != 2) {
		return fault.Newf(fault.Usage, "give --usb4 2 too", "--generation 4 needs version 2 of USB4 and two lanes")
	}
	return nil
}

func (t *topologyFlags) topology() (rig.Topology, error) {
	if err := t.check(); err != nil {
		return rig.Topology{}, err
	}
	topology, err := rig.Shape(t.shape, t.hosts, t.cables)
	if err != nil {
		return topology, err
	}
	if topology.Kernel, err = rig.ParseKernel(t.kernel); err != nil {
		return topology, err
	}
	topology.LAN, topology.Seed = t.lan, t.seed
	t.host.Speed = usb4.Generation(t.speed)
	for i := range topology.Hosts {
		topology.Hosts[i] = t.host
	}
	options := usb4.CableOptions{}
	if err := t.wire.apply(&options); err != nil {
		return topology, err
	}
	for i := range topology.Cables {
		topology.Cables[i].Options = options
	}
	return topology, nil
}

// wireFlags are those of a cable.
type wireFlags struct {
	flags   *pflag.FlagSet
	rate    string
	latency time.Duration
	inject  [4]usb4.Injection // in the order of injections
}

// injections are what flags can do to frames: NAME with a probability, and
// NAME-every.
var injections = []struct {
	name, frames string // what frames do
	of           func(*usb4.CableOptions) *usb4.Injection
}{
	{"loss", "are lost", func(o *usb4.CableOptions) *usb4.Injection { return &o.Loss }},
	{"corrupt", "arrive with one bit wrong and say so", func(o *usb4.CableOptions) *usb4.Injection { return &o.CorruptFlagged }},
	{"corrupt-silent", "arrive with one bit wrong and do not say so", func(o *usb4.CableOptions) *usb4.Injection { return &o.Corrupt }},
	{"overrun", "arrive flagged with a buffer overrun", func(o *usb4.CableOptions) *usb4.Injection { return &o.Overrun }},
}

func (w *wireFlags) add(f *pflag.FlagSet) {
	w.flags = f
	f.StringVar(&w.rate, "rate", "", `rate of a cable each way, as tc writes it ("100mbit"; "none" as fast as it goes)`)
	f.DurationVar(&w.latency, "latency", 0, "time that a frame takes over a cable")
	for i, x := range injections {
		f.Float64Var(&w.inject[i].Probability, x.name, 0, "part of the frames, 0 to 1, that "+x.frames)
		f.Uint64Var(&w.inject[i].Every, x.name+"-every", 0, "every n-th frame is one of those that "+x.frames)
	}
}

// maxLatency is how long a frame may take: at a minute nothing works any more.
const maxLatency = time.Minute

// given reports whether there is something to change: the flags of a command are
// also those that all commands have.
func (w *wireFlags) given() bool {
	given := w.flags.Changed("rate") || w.flags.Changed("latency")
	for _, x := range injections {
		given = given || w.flags.Changed(x.name) || w.flags.Changed(x.name+"-every")
	}
	return given
}

// apply changes what was given on the command line.
func (w *wireFlags) apply(o *usb4.CableOptions) error {
	if w.flags.Changed("rate") {
		o.Rate = 0
		if w.rate != "none" {
			rate, err := lab.ParseRate(w.rate)
			switch f := fault.As(err); {
			case f != nil && strings.Trim(w.rate, "0123456789.") == "" && w.rate != "":
				return fault.Newf(fault.Usage, fmt.Sprintf("write %[1]smbit or %[1]sgbit, or none for no limit", w.rate), "--rate %s has no unit", w.rate)
			case f != nil:
				return fault.Newf(fault.Usage, f.Fix+"; none is no limit", "--rate is not right: %s", f.What)
			case err != nil:
				return err
			}
			o.Rate = int64(rate)
		}
	}
	if w.flags.Changed("latency") {
		if w.latency < 0 || w.latency > maxLatency {
			return fault.Newf(fault.Usage, fmt.Sprintf("choose 0s to %v", maxLatency), "--latency cannot be %v", w.latency)
		}
		o.Latency = w.latency
	}
	for i, x := range injections {
		if w.flags.Changed(x.name) {
			if p := w.inject[i].Probability; !(p >= 0 && p <= 1) { // nor NaN
				return fault.Newf(fault.Usage, "choose 0 to 1: 0.01 is one in a hundred", "--%s cannot be %v", x.name, p)
			}
			x.of(o).Probability = w.inject[i].Probability
		}
		if w.flags.Changed(x.name + "-every") {
			x.of(o).Every = w.inject[i].Every
		}
	}
	return nil
}

type upOptions struct {
	g       *globals
	t       topologyFlags
	trace   string
	dir     string
	program string
	guest   string
	once    bool
}

func newUpCommand(g *globals) *cobra.Command {
	o := &upOptions{g: g}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Boot hosts and plug cables",
		Long: `Boots the hosts, loads their drivers and waits until they see each other. On a
terminal it then opens a shell in one of them; when that ends, so does the rig.
Elsewhere it stays until "tbcluster-rig down", ^C, or SIGTERM.

Meanwhile, from elsewhere: "guest", "plug", "unplug", "flap", "wire", "counters",
"trace", "status", "cut", "boot", "reload", "down".

With --cluster the program of that path runs on all hosts; they have paired when
"tbcluster status" is shown.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runUp(cmd.Context(), o) },
	}
	f := cmd.Flags()
	o.t.add(f)
	f.StringVar(&o.trace, "trace", "", `file for what happens on the cables, in lines for people ("-" is standard error)`)
	f.StringVar(&o.dir, "dir", "", "directory for consoles and logs (default a temporary one)")
	f.StringVar(&o.program, "cluster", "", "path of a static tbcluster to run on the hosts; it brings --lan")
	f.StringVar(&o.guest, "guest", "a", "host in which a terminal gets its shell")
	f.BoolVar(&o.once, "once", false, "without a terminal, end when everything is up and shown")
	return cmd
}

func runUp(ctx context.Context, o *upOptions) (err error) {
	g := o.g
	topology, err := o.t.topology()
	if err != nil {
		return err
	}
	if err := o.knows(topology); err != nil {
		return err
	}
	options := rig.Options{Dir: o.dir, Log: func(line string) { g.notef("%s", line) }}
	if o.program != "" {
		topology.LAN = true
		options.Files = cluster.Files(o.program)
		if _, err := os.Stat(o.program); err != nil {
			return fault.New(fault.FileMissing, "take tbcluster into the hosts", err, "`make build` makes bin/tbcluster").At(o.program)
		}
	}
	tracer, done, err := openTrace(g, o.trace)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	options.Trace = tracer
	server, killed, err := g.listen()
	if err != nil {
		return err
	}
	for _, name := range killed {
		g.notef("the rig %s was killed; what it left is removed", name)
	}
	defer func() { err = errors.Join(err, server.close()) }()
	begun := time.Now()
	r, err := rig.Up(ctx, topology, options)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	g.notef("all hosts run after %.1f s; their kernels look for each other", time.Since(begun).Seconds())
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	serving := server.serve(ctx, r, stop)
	defer func() { stop(); <-serving }()
	if o.program != "" {
		// The agents come up while the kernels are at it.
		c := cluster.New(r)
		c.Report = func(line string) { g.notef("%s", line) }
		defer c.Close()
		if err := c.Up(ctx); err != nil {
			return err
		}
		if err := r.Settle(ctx); err != nil {
			return err
		}
		out, err := r.Hosts()[0].Run(ctx, cluster.Path, "status")
		if err != nil {
			return err
		}
		g.notef("the cluster is up after %.1f s; tbcluster status on host %s says:", time.Since(begun).Seconds(), r.Hosts()[0].Name())
		fmt.Fprint(g.out, out)
	} else {
		if err := r.Settle(ctx); err != nil {
			return err
		}
		g.notef("all cables are found after %.1f s", time.Since(begun).Seconds())
		fmt.Fprint(g.out, status(r))
	}
	if err := r.Verify(ctx); err != nil {
		return err
	}
	return o.stay(ctx, r)
}

// knows refuses a shell in a host that there will not be.
func (o *upOptions) knows(t rig.Topology) error {
	names := t.Names()
	if !slices.Contains(names, o.guest) {
		return fault.Newf(fault.NodeUnknown, "the hosts are "+strings.Join(names, ", "), "--guest %s: the rig has no such host", o.guest)
	}
	return nil
}

// stay keeps the rig up for as long as it is wanted.
func (o *upOptions) stay(ctx context.Context, r *rig.Rig) error {
	if o.g.terminal() {
		h, err := r.FindHost(o.guest)
		if err != nil {
			return err
		}
		o.g.notef("a shell in host %s; `exit` ends the rig", h.Name())
		out, ok := o.g.out.(*os.File)
		if !ok {
			return fault.Newf(fault.Internal, "", "a terminal that is no file")
		}
		return h.Guest().Console(ctx, o.g.in, out)
	}
	if o.once {
		o.g.notef("the rig is taken down again: without --once it would stay up")
		return nil
	}
	o.g.notef("it stays up until %s", o.g.command("down"))
	<-ctx.Done()
	return nil
}

// openTrace opens the file of a trace.
func openTrace(g *globals, name string) (w io.Writer, done func() error, err error) {
	nothing := func() error { return nil }
	switch name {
	case "":
		return nil, nothing, nil
	case "-":
		return g.errOut, nothing, nil
	}
	f, err := os.Create(name)
	if err != nil {
		return nil, nothing, fault.New(fault.FileIO, "write the trace", err, "").At(name)
	}
	return f, f.Close, nil
}

type buildOptions struct {
	g       *globals
	kernels []string
}

func newBuildCommand(g *globals) *cobra.Command {
	o := &buildOptions{g: g}
	cmd := &cobra.Command{
		Use:   "build",
		Short: "Build Debian, kernels and tools into the cache, and nothing else",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return runBuild(cmd.Context(), o) },
	}
	cmd.Flags().StringSliceVar(&o.kernels, "kernel", []string{"newest", "stable"}, "kernels to build: newest, stable, debug")
	return cmd
}

func runBuild(ctx context.Context, o *buildOptions) error {
	store, err := image.Open(image.Options{Log: func(line string) { o.g.notef("%s", line) }})
	if err != nil {
		return err
	}
	for _, name := range o.kernels {
		k, err := rig.ParseKernel(name)
		if err != nil {
			return err
		}
		boot, err := store.Boot(ctx, k)
		if err != nil {
			return err
		}
		fmt.Fprintf(o.g.out, "%-8s %s\n", name, boot.Release)
	}
	return nil
}

type moduleOptions struct {
	g      *globals
	kernel string
}

func newModuleCommand(g *globals) *cobra.Command {
	o := &moduleOptions{g: g}
	cmd := &cobra.Command{
		Use:   "module DIR",
		Short: "Build the kernel modules of a directory for the kernel of the guests",
		Long: `Builds a directory with a Kbuild (the line "obj-m += mine.o" is one) or a Makefile
that the kernel's build understands, with the headers and the compiler that lie in
the cache, and leaves the .ko files in it. That takes root.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runModule(cmd.Context(), o, args[0]) },
	}
	cmd.Flags().StringVar(&o.kernel, "kernel", "newest", "kernel of the guests: newest, stable, debug")
	return cmd
}

func runModule(ctx context.Context, o *moduleOptions, dir string) error {
	k, err := rig.ParseKernel(o.kernel)
	if err != nil {
		return err
	}
	store, err := image.Open(image.Options{Log: func(line string) { o.g.notef("%s", line) }})
	if err != nil {
		return err
	}
	built, release, err := store.BuildModules(ctx, k, dir)
	for _, name := range built {
		fmt.Fprintf(o.g.out, "%s for %s\n", name, release)
	}
	return err
}
