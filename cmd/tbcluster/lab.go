package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	"tbcluster/lab"
)

// lanPlug is what takes the place of a second node in `lab cut NODE:lan`.
const lanPlug = lab.LANHost

type labOptions struct {
	g    *globals
	name string
}

// labErrors are the reasons with which every command on a lab may end.
var labErrors = []fault.Reason{fault.LabFailed, fault.NodeUnknown, fault.NodeDown, fault.NodeInUse, fault.Interrupted}

func newLabCommand(g *globals) *cobra.Command {
	o := &labOptions{g: g}
	cmd := &cobra.Command{
		Use:     "lab",
		Short:   "Make a virtual cluster on this machine, and break it",
		GroupID: groupOther,
		Long: `A lab is a cluster of virtual nodes on one Linux machine: each has a network,
processes, a file system and a power switch of its own, and cables join them
that behave as Thunderbolt cables do. The agents in it are real, and pair and
copy and run engines as on hardware.

It works as root and, where user namespaces are allowed, as an ordinary user.
Nothing leads out of a lab, and "lab down" leaves nothing behind.` + exitHelp(labErrors...),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().StringVar(&o.name, "name", lab.DefaultName, "name of the lab; any number stand side by side")
	complete := func(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		names, err := lab.List()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	if err := cmd.RegisterFlagCompletionFunc("name", complete); err != nil {
		panic(err) // the flag is declared above
	}
	cmd.AddCommand(
		newLabUpCommand(o), newLabDownCommand(o), newLabListCommand(o), newLabStatusCommand(o),
		newLabCutCommand(o), newLabMendCommand(o), newLabLANCommand(o), newLabMulticastCommand(o), newLabPartCommand(o),
		newLabPowerCommand(o, "kill NODE", "Take the power from a node, or kill its agent",
			`Every process of the node dies, /run, /tmp and /dev/shm are gone, its cables go
dead at their other ends. Its disk stays: "lab start" boots it, with a new boot
ID. With --agent both halves of the agent get SIGKILL, and nothing else does.`,
			"has no power now", (*lab.Lab).Kill),
		newLabPowerCommand(o, "start NODE", "Boot a node that is off, or resume one that is paused",
			`Gives the node power: it boots with a new boot ID and the disk that it had. A
node that is paused goes on where it stopped. With --agent it starts the agent of
a node that runs, or resumes it.`,
			"runs", (*lab.Lab).Start),
		newLabPowerCommand(o, "pause NODE", "Stop every process of a node, or its agent",
			`All processes get SIGSTOP; the kernel goes on to answer for the node's network.
"lab resume" lets them go on.`,
			"is paused", (*lab.Lab).Pause),
		newLabPowerCommand(o, "resume NODE", "Let a paused node or agent go on",
			`All processes that "lab pause" stopped get SIGCONT.`,
			"runs again", (*lab.Lab).Resume),
		newLabExecCommand(o),
	)
	return cmd
}

// open finds the lab that is meant.
func (o *labOptions) open() (*lab.Lab, error) { return lab.Open(o.name) }

// done says what was done; programs get the status of the lab.
func (o *labOptions) done(ctx context.Context, l *lab.Lab, format string, args ...any) error {
	if !o.g.json() {
		o.g.printf(format+"\n", args...)
		return nil
	}
	s, err := l.Status(ctx)
	if err == nil {
		writeJSON(o.g.out, s)
	}
	return err
}

type labUpOptions struct {
	*labOptions
	nodes, cables          int
	topology, memory, disk string
	rate                   string
	binds, quirks          []string
	noBoot                 bool
}

func newLabUpCommand(lo *labOptions) *cobra.Command {
	o := &labUpOptions{labOptions: lo}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Make a lab and boot its nodes",
		Long: `Makes a lab and returns when the agent of each node answers. They have not
paired then; "tbcluster up --lab N" does that too.

Nodes are called alpha, beta, gamma and so on. They see the machine's programs
(/usr, /opt) read-only, and have files of their own everywhere else.` + exitHelp(fault.LabFailed, fault.Interrupted),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runLabUp(cmd.Context(), o) },
	}
	f := cmd.Flags()
	f.IntVar(&o.nodes, "nodes", 0, fmt.Sprintf("number of nodes, 1 to %d (default 3; 2 for a pair)", lab.MaxNodes))
	f.StringVar(&o.topology, "topology", string(lab.Mesh), "which nodes cables join: mesh, ring, chain or pair")
	f.IntVar(&o.cables, "cables", 1, "cables between each pair of joined nodes")
	f.StringVar(&o.rate, "rate", "", `rate of each cable each way, as tc writes it ("4gbit"; default as fast as it goes)`)
	f.StringVar(&o.memory, "memory", "8g", "memory that each node reports; enforced, together with the disk, where cgroups allow")
	f.StringVar(&o.disk, "disk", "8g", "size of each node's data disk, which survives a power cut (it is in memory)")
	f.StringArrayVar(&o.binds, "bind", nil, "HOST:NODE, show a directory or file of this machine in every node, read-only (repeatable)")
	f.StringSliceVar(&o.quirks, "quirk", nil, "what makes a desk harder to see through: hub (the first node's cables go through hubs), devices (docks and disks), crossed (ports with one UUID), swapped (UUIDs written otherwise)")
	f.BoolVar(&o.noBoot, "no-agent", false, "start no agents")
	var topologies []cobra.Completion
	for _, t := range lab.Topologies {
		topologies = append(topologies, string(t))
	}
	if err := cmd.RegisterFlagCompletionFunc("topology", cobra.FixedCompletions(topologies, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag is declared above
	}
	return cmd
}

// options are those of package lab.
func (o *labUpOptions) options() (lab.Options, error) {
	opts := lab.Options{
		Name: o.name, Nodes: o.nodes, Topology: lab.Topology(o.topology), Cables: o.cables, Rate: o.rate, NoBoot: o.noBoot,
	}
	for _, q := range o.quirks {
		opts.Quirks = append(opts.Quirks, lab.Quirk(q))
	}
	var err error
	if opts.Memory, err = lab.ParseSize(o.memory); err != nil {
		return opts, err
	}
	if opts.Disk, err = lab.ParseSize(o.disk); err != nil {
		return opts, err
	}
	for _, b := range o.binds {
		source, target, ok := strings.Cut(b, ":")
		if !ok {
			return opts, fault.Newf(fault.Usage, "write HOST:NODE, two absolute paths", "%q is no bind", b)
		}
		opts.Binds = append(opts.Binds, lab.Bind{Source: source, Target: target})
	}
	return opts, nil
}

func runLabUp(ctx context.Context, o *labUpOptions) error {
	opts, err := o.options()
	if err != nil {
		return err
	}
	l, err := lab.Up(ctx, opts)
	if err != nil {
		return err
	}
	s, err := l.Status(ctx)
	if err != nil {
		return err
	}
	if !opts.NoBoot {
		clients, err := bootLab(ctx, l, s)
		if err != nil {
			return err
		}
		for _, c := range clients {
			c.close()
		}
	}
	printLab(o.g, s)
	return nil
}

func newLabDownCommand(o *labOptions) *cobra.Command {
	all := false
	cmd := &cobra.Command{
		Use:   "down",
		Short: "End a lab and remove all that is left of it",
		Long: `Ends every process of the lab and removes its files, disks included. It also
removes what is left of a lab whose processes were killed.` + exitHelpAlone(fault.LabFailed, fault.Interrupted),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runLabDown(cmd.Context(), o, all) },
	}
	cmd.Flags().BoolVar(&all, "all", false, "all labs of yours")
	return cmd
}

func runLabDown(ctx context.Context, o *labOptions, all bool) error {
	names := []string{o.name}
	if all {
		var err error
		if names, err = lab.List(); err != nil {
			return err
		}
	}
	for _, name := range names {
		l, err := lab.Open(name)
		if err != nil {
			return err
		}
		if err := l.Down(ctx); err != nil {
			return err
		}
		if !o.g.json() {
			o.g.printf("lab %s is gone\n", name)
		}
	}
	if o.g.json() {
		writeJSON(o.g.out, labsJSON{Labs: append([]string{}, names...)})
	}
	return nil
}

// labsJSON is the labs that `tbcluster lab down` ended.
type labsJSON struct {
	Labs []string `json:"labs"`
}

// labListJSON is `tbcluster lab list -o json`.
type labListJSON struct {
	labsJSON
	List []labEntryJSON `json:"list"`
}

type labEntryJSON struct {
	Name  string    `json:"name"`
	State lab.State `json:"state"`
	// Nodes and Cables are nil where what is left of the lab does not tell.
	Nodes  *int `json:"nodes"`
	Cables *int `json:"cables"`
}

func newLabListCommand(o *labOptions) *cobra.Command {
	return &cobra.Command{
		Use:               "list",
		Aliases:           []string{"ls"},
		Short:             "List your labs",
		Long:              `Lists the labs of the user who asks, dead ones too.` + exitHelpAlone(fault.LabFailed),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runLabList(cmd.Context(), o) },
	}
}

func runLabList(ctx context.Context, o *labOptions) error {
	names, err := lab.List()
	if err != nil {
		return err
	}
	doc := labListJSON{labsJSON{Labs: []string{}}, []labEntryJSON{}}
	for _, name := range names {
		l, err := lab.Open(name)
		if err != nil {
			continue // taken down meanwhile
		}
		e := labEntryJSON{Name: name, State: lab.Dead}
		if s, err := l.Status(ctx); err == nil {
			nodes, cables := len(s.Nodes), len(s.Cables)
			e.State, e.Nodes, e.Cables = s.State, &nodes, &cables
		} else if ctx.Err() != nil {
			return err
		}
		doc.Labs, doc.List = append(doc.Labs, name), append(doc.List, e)
	}
	if o.g.json() {
		writeJSON(o.g.out, doc)
		return nil
	}
	number := func(n *int) string {
		if n == nil {
			return "-"
		}
		return fmt.Sprint(*n)
	}
	t := newTable("LAB", "STATE", "NODES>", "CABLES>")
	for _, e := range doc.List {
		t.add(e.Name, string(e.State), number(e.Nodes), number(e.Cables))
	}
	t.write(o.g.out)
	return nil
}

func newLabStatusCommand(o *labOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show nodes and cables of a lab, as the lab sees them",
		Long: `Shows which nodes have power, which cables are plugged, and where things are.
What the cluster itself sees of that is "tbcluster status".` + exitHelpAlone(fault.LabFailed),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runLabStatus(cmd.Context(), o) },
	}
}

func runLabStatus(ctx context.Context, o *labOptions) error {
	l, err := o.open()
	if err != nil {
		return err
	}
	s, err := l.Status(ctx)
	if err != nil {
		return err
	}
	printLab(o.g, s)
	return nil
}

// printLab prints the status of a lab; a person gets the notes on stderr.
func printLab(g *globals, s lab.Status) {
	if g.json() {
		writeJSON(g.out, s)
		return
	}
	for _, n := range s.Notes {
		g.notef("%s", plain(n))
	}
	who := "of root"
	if s.Rootless {
		who = "without root: it has one user"
	}
	g.printf("lab %s is %s, in %s (%s; memory: %s)\n\n", s.Name, s.State, plain(s.Dir), who, s.Memory)
	nodes := newTable("NODE", "STATE", "AGENT", "LAN", "MEMORY>", "DISK>", "USED>")
	for _, n := range s.Nodes {
		agent, address := string(n.Agent), n.Address
		if n.AgentExit != "" {
			agent += " (" + n.AgentExit + ")"
		}
		if n.LANCut {
			address += " (cut)"
		}
		if n.Multicast != "" {
			address += " (multicast " + string(n.Multicast) + ")"
		}
		nodes.add(n.Name, string(n.State), agent, address, memoryText(n.Memory), memoryText(n.Disk), bytesText(n.DiskUsed))
	}
	nodes.write(g.out)
	if len(s.Cables) == 0 {
		return
	}
	g.printf("\n")
	cables := newTable("CABLE", "NO.>", "STATE", "PORTS", "INTERFACES", "RATE")
	for _, c := range s.Cables {
		interfaces := "-"
		if c.A.Interface != "" {
			interfaces = c.A.Interface + " : " + c.B.Interface
		}
		rate := c.Rate
		if rate == "" {
			rate = "-"
		}
		cables.add(c.A.Node+":"+c.B.Node, fmt.Sprint(c.Index), string(c.State), c.A.Port+" : "+c.B.Port, interfaces, rate)
	}
	cables.write(g.out)
}

// pairOf reads "A:B".
func pairOf(arg string) (a, b string, err error) {
	a, b, ok := strings.Cut(arg, ":")
	if !ok || a == "" || b == "" {
		return "", "", fault.Newf(fault.Usage, "write two nodes, alpha:beta, or a node and the LAN, alpha:"+lanPlug, "%q names no cable", arg)
	}
	if a == lanPlug {
		a, b = b, a
	}
	return a, b, nil
}

func newLabCutCommand(o *labOptions) *cobra.Command {
	var cut lab.CutOptions
	cmd := &cobra.Command{
		Use:   "cut A:B",
		Short: "Pull the cables between two nodes, or make them silent",
		Long: `Does what the driver does when a cable is pulled: the interfaces are destroyed,
services and XDomain vanish, at both ends. With --silent the cable keeps its
carrier and drops every frame.

"A:` + lanPlug + `" takes the LAN's carrier from a node.` + exitHelpAlone(labErrors...),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeCables(o),
		RunE:              func(cmd *cobra.Command, args []string) error { return runLabCut(cmd.Context(), o, args[0], cut) },
	}
	cmd.Flags().BoolVar(&cut.Silent, "silent", false, "keep the carrier and drop every frame")
	cmd.Flags().BoolVar(&cut.Half, "half", false, "let A go on to see the cable, with an interface that has no carrier")
	cmd.MarkFlagsMutuallyExclusive("silent", "half")
	cmd.Flags().IntVar(&cut.Cable, "cable", 0, "one cable of the pair, counted from 1 (default all)")
	return cmd
}

func runLabCut(ctx context.Context, o *labOptions, arg string, cut lab.CutOptions) error {
	a, b, err := pairOf(arg)
	if err != nil {
		return err
	}
	l, err := o.open()
	if err != nil {
		return err
	}
	word := "cut"
	switch {
	case b == lanPlug && cut != lab.CutOptions{}:
		return fault.Newf(fault.Usage, "leave the flags out", "the LAN has one plug, which can only be pulled")
	case b == lanPlug:
		err = l.CutLAN(ctx, a)
	default:
		err = l.Cut(ctx, a, b, cut)
		switch {
		case cut.Silent:
			word = "silent"
		case cut.Half:
			word = "seen by " + a + " alone"
		}
	}
	if err != nil {
		return err
	}
	return o.done(ctx, l, "%s:%s is %s", a, b, word)
}

func newLabMendCommand(o *labOptions) *cobra.Command {
	var mend lab.MendOptions
	cmd := &cobra.Command{
		Use:   "mend A:B",
		Short: "Plug cables in again, or end their silence",
		Long: `Makes new interfaces for a cable that was cut, with the names that the kernel
would give them: the lowest that are free. With --rename they get names that
they did not have before, as after a rename by udev.` + exitHelpAlone(labErrors...),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeCables(o),
		RunE:              func(cmd *cobra.Command, args []string) error { return runLabMend(cmd.Context(), o, args[0], mend) },
	}
	cmd.Flags().BoolVar(&mend.Rename, "rename", false, "give the interfaces new names")
	cmd.Flags().BoolVar(&mend.Move, "move", false, "plug both ends into other ports")
	cmd.Flags().IntVar(&mend.Cable, "cable", 0, "one cable of the pair, counted from 1 (default all)")
	return cmd
}

func runLabMend(ctx context.Context, o *labOptions, arg string, mend lab.MendOptions) error {
	a, b, err := pairOf(arg)
	if err != nil {
		return err
	}
	l, err := o.open()
	if err != nil {
		return err
	}
	switch {
	case b == lanPlug && mend != lab.MendOptions{}:
		return fault.Newf(fault.Usage, "leave the flags out", "the LAN has one plug")
	case b == lanPlug:
		err = l.MendLAN(ctx, a)
	default:
		err = l.Mend(ctx, a, b, mend)
	}
	if err != nil {
		return err
	}
	return o.done(ctx, l, "%s:%s is plugged", a, b)
}

func newLabLANCommand(o *labOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "lan down|up [NODE...]",
		Short: "Switch the LAN off or on, for all nodes or some",
		Long: `Takes the carrier from the LAN interfaces of the named nodes, or of all, as a
switch without power does; "up" gives it back. The cables are not touched.` + exitHelpAlone(labErrors...),
		Args:      cobra.MinimumNArgs(1),
		ValidArgs: []cobra.Completion{"down", "up"},
		RunE: func(cmd *cobra.Command, args []string) error {
			do := map[string]func(*lab.Lab, context.Context, string) error{"down": (*lab.Lab).CutLAN, "up": (*lab.Lab).MendLAN}[args[0]]
			if do == nil {
				return fault.Newf(fault.Usage, "write `tbcluster lab lan down` or `up`", "the LAN cannot be %q", args[0])
			}
			return o.eachNode(cmd.Context(), args[1:], do, "the LAN is "+args[0])
		},
	}
}

func newLabPartCommand(o *labOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "part [NODE,NODE... ...]",
		Short: "Let the LAN fall into parts, or be one again",
		Long: `Each argument is one part, nodes separated by commas: nodes of different parts
do not reach each other by the LAN. Nodes in no part are with the LAN's host.
Without arguments it is one LAN again. Cables are left as they are.` + exitHelpAlone(labErrors...),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := o.open()
			if err != nil {
				return err
			}
			var groups [][]string
			for _, a := range args {
				groups = append(groups, strings.Split(a, ","))
			}
			if err := l.Part(cmd.Context(), groups...); err != nil {
				return err
			}
			if len(groups) == 0 {
				return o.done(cmd.Context(), l, "the LAN is one")
			}
			return o.done(cmd.Context(), l, "the LAN is in parts: %s", strings.Join(args, " | "))
		},
	}
}

func newLabMulticastCommand(o *labOptions) *cobra.Command {
	refuse := false
	cmd := &cobra.Command{
		Use:   "multicast off|on [NODE...]",
		Short: "Block multicast on nodes, or let it through again",
		Long: `Blocks multicast on all interfaces of the named nodes, or of all nodes: it is
sent, and none arrives, as behind many access points. With --refuse sending
fails too, as a packet filter has it. Everything else goes on.` + exitHelpAlone(labErrors...),
		Args:      cobra.MinimumNArgs(1),
		ValidArgs: []cobra.Completion{"off", "on"},
		RunE: func(cmd *cobra.Command, args []string) error {
			how := lab.MulticastLost
			switch {
			case args[0] == "on" && refuse:
				return fault.Newf(fault.Usage, "leave --refuse out", "what is let through is not refused")
			case args[0] == "on":
				how = ""
			case args[0] != "off":
				return fault.Newf(fault.Usage, "write `tbcluster lab multicast off` or `on`", "multicast cannot be %q", args[0])
			case refuse:
				how = lab.MulticastRefused
			}
			return o.eachNode(cmd.Context(), args[1:], func(l *lab.Lab, ctx context.Context, node string) error {
				return l.SetMulticast(ctx, node, how)
			}, "multicast is "+args[0])
		},
	}
	cmd.Flags().BoolVar(&refuse, "refuse", false, "let sending fail too")
	return cmd
}

// eachNode does something to the named nodes, or to all.
func (o *labOptions) eachNode(ctx context.Context, names []string, do func(*lab.Lab, context.Context, string) error, done string) error {
	l, err := o.open()
	if err != nil {
		return err
	}
	where := strings.Join(names, ", ")
	if len(names) == 0 {
		s, err := l.Status(ctx)
		if err != nil {
			return err
		}
		for _, n := range s.Nodes {
			names = append(names, n.Name)
		}
		where = "all nodes"
	}
	for _, n := range names {
		if err := do(l, ctx, n); err != nil {
			return err
		}
	}
	return o.done(ctx, l, "%s for %s", done, where)
}

// newLabPowerCommand returns a command that does something to a node or its agent.
func newLabPowerCommand(o *labOptions, use, short, long, done string, do func(*lab.Lab, context.Context, string, bool) error) *cobra.Command {
	agentOnly := false
	cmd := &cobra.Command{
		Use:               use,
		Short:             short,
		Long:              long + exitHelp(append([]fault.Reason{fault.NoAgent}, labErrors...)...),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeLabNodes(o),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := o.open()
			if err != nil {
				return err
			}
			if err := do(l, cmd.Context(), args[0], agentOnly); err != nil {
				return err
			}
			what := args[0]
			if agentOnly {
				what = "the agent of " + what
			}
			if agentOnly && strings.HasPrefix(use, "kill") {
				done = "is killed"
			}
			return o.done(cmd.Context(), l, "%s %s", what, done)
		},
	}
	cmd.Flags().BoolVar(&agentOnly, "agent", false, "the agent alone, not the node")
	return cmd
}

type labExecOptions struct {
	*labOptions
	user       string
	noTerminal bool
}

func newLabExecCommand(lo *labOptions) *cobra.Command {
	o := &labExecOptions{labOptions: lo}
	cmd := &cobra.Command{
		Use:   "exec NODE -- COMMAND...",
		Short: "Run a command in a node",
		Long: `Runs a command as root, or as another user of the node, in the user's home. It
gets a terminal of the node if it is run from one. The exit code is that of the
command, or 128 and the number of the signal that ended it. "tbcluster" is on
the PATH, and talks to the node's agent.

The node "` + lab.LANHost + `" is a host on the LAN that is not in the cluster.` + exitHelpAlone(append([]fault.Reason{fault.FileMissing, fault.NoPermission}, labErrors...)...),
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: completeLabNodes(lo),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runLabExec(cmd.Context(), o, args[0], args[1:])
		},
	}
	cmd.Flags().StringVarP(&o.user, "user", "u", "root", "name, UID, or UID:GID")
	cmd.Flags().BoolVarP(&o.noTerminal, "no-terminal", "T", false, "give it no terminal")
	// What follows the node belongs to the command.
	cmd.Flags().SetInterspersed(false)
	return cmd
}

func runLabExec(ctx context.Context, o *labExecOptions, node string, argv []string) error {
	if argv[0] == "--" {
		argv = argv[1:]
	}
	if len(argv) == 0 {
		return fault.Newf(fault.Usage, "`tbcluster lab exec NODE -- COMMAND`", "there is no command to run on %s", node)
	}
	l, err := o.open()
	if err != nil {
		return err
	}
	opts := lab.ExecOptions{
		Argv: argv, User: o.user, Stdin: o.g.in, Stdout: o.g.out, Stderr: o.g.errOut,
		TTY: !o.noTerminal && isTerminal(o.g.in) && isTerminal(o.g.out),
	}
	if term := o.g.getenv("TERM"); term != "" {
		opts.Env = append(opts.Env, "TERM="+term)
	}
	code, err := l.Exec(ctx, node, opts)
	if fault.Is(err, fault.Interrupted) {
		// Whoever pressed ctrl-C knows; what else there is to say the command says.
		return exitStatus(fault.ExitInterrupted)
	}
	if err != nil {
		return err
	}
	return asStatus(code)
}

// completeLabNodes completes the names of a lab's nodes.
func completeLabNodes(o *labOptions) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var names []cobra.Completion
		for _, n := range completionStatus(cmd, o, len(args)).Nodes {
			names = append(names, cobra.CompletionWithDesc(n.Name, string(n.State)))
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeCables completes the cables of a lab.
func completeCables(o *labOptions) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var cables []cobra.Completion
		s := completionStatus(cmd, o, len(args))
		for _, c := range s.Cables {
			if c.Index == 1 {
				cables = append(cables, cobra.CompletionWithDesc(c.A.Node+":"+c.B.Node, string(c.State)))
			}
		}
		for _, n := range s.Nodes {
			cables = append(cables, n.Name+":"+lanPlug)
		}
		return cables, cobra.ShellCompDirectiveNoFileComp
	}
}

// completionStatus is the status of the lab, empty where there is none or no
// more arguments are wanted.
func completionStatus(cmd *cobra.Command, o *labOptions, args int) lab.Status {
	if args > 0 {
		return lab.Status{}
	}
	l, err := o.open()
	if err != nil {
		return lab.Status{}
	}
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	s, err := l.Status(ctx)
	if err != nil {
		return lab.Status{}
	}
	return s
}
