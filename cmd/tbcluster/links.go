package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type linksOptions struct {
	g       *globals
	names   []string
	details bool
}

func newLinksCommand(g *globals) *cobra.Command {
	o := &linksOptions{g: g}
	cmd := &cobra.Command{
		Use:     "links [A:B|LINK...]",
		Aliases: []string{"link"},
		Short:   "Show the cables with all that is known of them, or measure one",
		GroupID: groupCluster,
		Long: `Lists the cables of the cluster, one a line. With --details, or for cables that
are named, it shows all that is known of each: its ends, what its state rests on,
the counters of both interfaces, when it went down and came back. Two nodes
("alpha:beta") name all cables between them, an ID names one.

Gb/s is what the cable runs at, "20 of 40" that both ends could do 40. MEASURED
is the slower direction of the last "links bench"; it is forgotten when the cable
runs at another rate. ERRORS and DROPS count since the interface appeared, FLAPS
since the agent started. A peer that is more than one hop away is behind a hub.` +
			exitHelp(fault.LinkUnknown, fault.NodeUnknown, fault.Interrupted),
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: complete(g, -1, linkNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.names = args
			return runLinks(cmd.Context(), o)
		},
	}
	cmd.Flags().BoolVarP(&o.details, "details", "d", false, "show all that is known of each cable")
	cmd.AddCommand(newLinksBenchCommand(g))
	return cmd
}

// linksJSON is `tbcluster links -o json`.
type linksJSON struct {
	Links []linkJSON `json:"links"`
}

func runLinks(ctx context.Context, o *linksOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	state, err := c.state(ctx)
	if err != nil {
		return err
	}
	links := state.GetLinks()
	if len(o.names) > 0 {
		if links, err = findLinks(state, o.names); err != nil {
			return err
		}
	}
	switch {
	case o.g.json():
		writeJSON(o.g.out, linksJSON{mapped(links, toLinkJSON)})
	case len(links) == 0:
		o.g.printf("no cable is plugged in between these nodes\n")
	case o.details || len(o.names) > 0:
		for i, l := range links {
			if i > 0 {
				o.g.printf("\n")
			}
			writeLink(o.g.out, l, time.Now())
		}
	default:
		writeLinks(o.g.out, links)
	}
	return nil
}

// findLinks returns the links that names mean, each once: an ID, the beginning
// of one, or two nodes.
func findLinks(s *tbv1.ClusterState, names []string) ([]*tbv1.Link, error) {
	var out []*tbv1.Link
	for _, name := range names {
		fit, err := findLink(s, name)
		if err != nil {
			return nil, err
		}
		for _, l := range fit {
			if !slices.Contains(out, l) {
				out = append(out, l)
			}
		}
	}
	return out, nil
}

func findLink(s *tbv1.ClusterState, name string) ([]*tbv1.Link, error) {
	links := s.GetLinks()
	if a, b, pair := strings.Cut(name, ":"); pair {
		var fit []*tbv1.Link
		is := func(e *tbv1.LinkEnd, name string) bool {
			return e.GetNodeId() != "" && isNode(e.GetNodeName(), e.GetNodeId(), name)
		}
		for _, l := range links {
			if is(l.GetA(), a) && is(l.GetB(), b) || is(l.GetA(), b) && is(l.GetB(), a) {
				fit = append(fit, l)
			}
		}
		if len(fit) == 0 {
			for _, n := range []string{a, b} {
				if err := noNode(s, n); err != nil {
					return nil, err
				}
			}
			return nil, fault.Newf(fault.LinkUnknown, "`tbcluster links` lists the cables", "no cable is known between %q and %q", a, b).With("link", name)
		}
		return fit, nil
	}
	var fit []*tbv1.Link
	for _, l := range links {
		if l.GetId() == name {
			return []*tbv1.Link{l}, nil
		}
		if len(name) >= 3 && strings.HasPrefix(l.GetId(), name) {
			fit = append(fit, l)
		}
	}
	switch len(fit) {
	case 1:
		return fit, nil
	case 0:
		return nil, fault.Newf(fault.LinkUnknown, "write two nodes, alpha:beta, or an ID of `tbcluster links`", "no cable is called %q", name).With("link", name)
	}
	var ids []string
	for _, l := range fit {
		ids = append(ids, l.GetId())
	}
	return nil, fault.Newf(fault.LinkUnknown, "name one of: "+strings.Join(ids, ", "), "several cables have an ID that begins with %q", name).With("link", name)
}

// isNode reports whether a node is meant: by its name, its ID or the beginning of
// that.
func isNode(name, id, meant string) bool {
	return name == meant || id == meant || len(meant) >= 4 && strings.HasPrefix(id, strings.ToUpper(meant))
}

// noNode is the error of a name that no node has, with those that there are.
func noNode(s *tbv1.ClusterState, name string) error {
	var names []string
	for _, n := range s.GetNodes() {
		if isNode(n.GetName(), n.GetId(), name) {
			return nil
		}
		names = append(names, n.GetName())
	}
	return fault.Newf(fault.NodeUnknown, "the nodes are "+strings.Join(names, ", "), "no node is called %q", name).With("node", name)
}

func linkNames(s *tbv1.ClusterState) []cobra.Completion {
	var out []cobra.Completion
	seen := map[string]bool{}
	for _, l := range s.GetLinks() {
		if a, b := l.GetA().GetNodeName(), l.GetB(); b.GetNodeId() != "" && !seen[a+":"+b.GetNodeName()] {
			seen[a+":"+b.GetNodeName()] = true
			out = append(out, cobra.CompletionWithDesc(a+":"+b.GetNodeName(), linkStateWord(l.GetState())))
		}
	}
	for _, l := range s.GetLinks() {
		out = append(out, cobra.CompletionWithDesc(l.GetId(), cableText(l)))
	}
	return out
}

// drops counts what both interfaces dropped.
func drops(l *tbv1.Link) uint64 {
	n := uint64(0)
	for _, e := range []*tbv1.LinkEnd{l.GetA(), l.GetB()} {
		n += e.GetRxDropped() + e.GetTxDropped()
	}
	return n
}

// faultyPackets counts the errors of both interfaces.
func faultyPackets(l *tbv1.Link) uint64 {
	n := uint64(0)
	for _, e := range []*tbv1.LinkEnd{l.GetA(), l.GetB()} {
		n += e.GetRxErrors() + e.GetTxErrors()
	}
	return n
}

// writeLinks prints one line for each link.
func writeLinks(w io.Writer, links []*tbv1.Link) {
	t := newTable("ID", "CABLE", "STATE", "Gb/s>", "MEASURED>", "RTT>", "ERRORS>", "DROPS>", "FLAPS>", "WHY")
	for _, l := range links {
		t.add(l.GetId(), cableText(l), linkStateWord(l.GetState()), cableRate(l), rateText(l.GetMeasuredBytesPerSecond()), rttText(l.GetRttUs()),
			fmt.Sprint(faultyPackets(l)), fmt.Sprint(drops(l)), fmt.Sprint(l.GetFlaps()), l.GetReason())
	}
	t.write(w)
}

// writeLink prints all that is known of a link.
func writeLink(w io.Writer, l *tbv1.Link, now time.Time) {
	line := func(label, format string, args ...any) {
		fmt.Fprintf(w, "  %-10s %s\n", label, plain(fmt.Sprintf(format, args...)))
	}
	fmt.Fprintf(w, "%s (%s) %s\n", plain(cableText(l)), plain(l.GetId()), linkStateWord(l.GetState()))
	if since := l.GetStateSince(); since != nil {
		line("since", "%s (%s)", momentText(now, since.AsTime()), agoText(now, since.AsTime()))
	}
	if l.GetReason() != "" {
		line("why", "%s", l.GetReason())
	}
	line("evidence", "%s", orDash(l.GetEvidence()))
	lanes := ""
	if n := l.GetLanes(); n > 0 {
		lanes = ", " + count(int(n), "lane")
	}
	if h := l.GetHops(); h > 1 {
		lanes += fmt.Sprintf(", behind a hub: %d hops", h)
	}
	line("runs at", "%s Gb/s%s", cableRate(l), lanes)
	for _, e := range []*tbv1.LinkEnd{l.GetA(), l.GetB()} {
		if e == nil {
			line("end", "unknown")
			continue
		}
		line("end", "%s", linkEndText(e))
		if e.GetInterface() != "" {
			line("", "sent %s, received %s; errors %d sending, %d receiving; dropped %d sending, %d receiving",
				bytesText(e.GetTxBytes()), bytesText(e.GetRxBytes()), e.GetTxErrors(), e.GetRxErrors(), e.GetTxDropped(), e.GetRxDropped())
		}
	}
	for _, p := range l.GetPaths() {
		line("path", "%s, %s %s to %s", p.GetTransport(), orDash(p.GetInterface()+p.GetDevice()), orDash(p.GetAddress()), orDash(p.GetPeerAddress()))
	}
	if l.GetRttUs() > 0 {
		line("round trip", "%s", rttText(l.GetRttUs()))
	}
	if m := l.GetMeasurement(); m != nil {
		line("measured", "%s", measuredText(l, m, now))
	} else if l.GetState() == tbv1.LinkState_LINK_STATE_PROVEN {
		line("measured", "never; `tbcluster links bench %s` does it", l.GetId())
	}
	if n := len(l.GetFlapHistory()); n > 0 {
		line("went down", "%s, %d since the agent started", count(n, "time"), l.GetFlaps())
		for _, f := range l.GetFlapHistory() {
			line("", "%s", flapText(f, now))
		}
	}
}

func linkEndText(e *tbv1.LinkEnd) string {
	text := orDash(e.GetNodeName())
	if e.GetPort() != "" {
		text += ", port " + e.GetPort()
	}
	if e.GetInterface() != "" {
		text += ", " + e.GetInterface()
	}
	if e.GetAddress() != "" {
		text += " " + e.GetAddress()
	}
	if e.GetMtu() > 0 {
		text += fmt.Sprintf(", MTU %d", e.GetMtu())
	}
	return text
}

// measuredText tells of a measurement in one line.
func measuredText(l *tbv1.Link, m *tbv1.LinkMeasurement, now time.Time) string {
	text := ratesText(l, m)
	if m.GetMeasuredAt() != nil {
		text += ", at " + momentText(now, m.GetMeasuredAt().AsTime())
	}
	if m.GetShared() {
		text += ", while something else used it"
	}
	return text
}

func flapText(f *tbv1.LinkFlap, now time.Time) string {
	text := momentText(now, f.GetDownAt().AsTime())
	if f.GetBackAt() != nil {
		text += fmt.Sprintf(", for %s", f.GetBackAt().AsTime().Sub(f.GetDownAt().AsTime()).Round(100*time.Millisecond))
	}
	if f.GetReason() != "" {
		text += ": " + f.GetReason()
	}
	if len(f.GetSeenBy()) > 0 {
		text += " (seen by " + strings.Join(f.GetSeenBy(), " and ") + ")"
	}
	return text
}

// momentText is a moment for people, where now is.
func momentText(now, t time.Time) string { return t.In(now.Location()).Format(time.DateTime) }

type linksBenchOptions struct {
	g       *globals
	names   []string
	seconds float64
	force   bool
}

func newLinksBenchCommand(g *globals) *cobra.Command {
	o := &linksBenchOptions{g: g}
	cmd := &cobra.Command{
		Use:   "bench [A:B|LINK...]",
		Short: "Measure how fast cables are, each direction and the round trip",
		Long: `Measures proven cables, one after the other: named by two nodes ("alpha:beta",
each cable between them) or by ID, else every cable of the node that answers.
Each is measured for a moment with a byte going to and fro, and then loaded in
each direction for the given time. The result is kept as the cable's measured
rate and shown everywhere.

A cable that a transfer or an instance uses is refused; --force measures what is
left beside it.` + exitHelp(fault.LinkUnknown, fault.NodeUnknown, fault.StillRunning, fault.Denied, fault.NodeDown, fault.Connection, fault.Usage),
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: complete(g, -1, linkNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.names = args
			return runLinksBench(cmd.Context(), o)
		},
	}
	cmd.Flags().Float64Var(&o.seconds, "seconds", 2, "how long each direction is loaded, 0.2 to 10")
	cmd.Flags().BoolVar(&o.force, "force", false, "also where something uses the cable")
	return cmd
}

// benchJSON is `tbcluster links bench -o json`: one line for each cable.
type benchJSON struct {
	Link   linkJSON `json:"link"`
	UsedBy []string `json:"used_by"`
}

func runLinksBench(ctx context.Context, o *linksBenchOptions) error {
	if !(o.seconds >= 0.2 && o.seconds <= 10) {
		return fault.Newf(fault.Usage, "choose between 0.2 and 10", "a cable cannot be measured for %g seconds", o.seconds).With("field", "seconds")
	}
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	state, err := c.state(ctx)
	if err != nil {
		return err
	}
	links, err := toBench(state, o.names)
	if err != nil {
		return err
	}
	var first error
	for _, l := range links {
		resp, err := c.link.Bench(ctx, &tbv1.BenchRequest{Link: l.GetId(), EvenIfUsed: o.force,
			Duration: durationpb.New(time.Duration(o.seconds * float64(time.Second)))})
		if err != nil {
			if len(links) == 1 || ctx.Err() != nil {
				return err
			}
			// The others are measured all the same; the command ends as the first failed.
			if f := fault.FromStatus(err); o.g.json() {
				printFaultJSON(o.g.errOut, f)
			} else {
				printFault(o.g.errOut, f)
			}
			if first == nil {
				first = exitStatus(fault.FromStatus(err).Exit())
			}
			continue
		}
		if o.g.json() {
			fmt.Fprintf(o.g.out, "%s\n", compactJSON(benchJSON{toLinkJSON(resp.GetLink()), texts(resp.GetUsedBy())}))
			continue
		}
		if len(resp.GetUsedBy()) > 0 {
			o.g.notef("%s is used by %s: what was measured is what that left", plain(cableText(l)), plain(strings.Join(resp.GetUsedBy(), ", ")))
		}
		o.g.printf("%s: %s\n", plain(cableText(resp.GetLink())), plain(benchText(resp.GetLink(), resp.GetMeasurement())))
	}
	return first
}

// toBench returns what to measure: what is named, or every proven cable of the
// node that answers.
func toBench(s *tbv1.ClusterState, names []string) ([]*tbv1.Link, error) {
	if len(names) > 0 {
		return findLinks(s, names)
	}
	var own []*tbv1.Link
	for _, l := range s.GetLinks() {
		if (l.GetA().GetNodeId() == s.GetSelfNodeId() || l.GetB().GetNodeId() == s.GetSelfNodeId()) && l.GetState() == tbv1.LinkState_LINK_STATE_PROVEN {
			own = append(own, l)
		}
	}
	if len(own) == 0 {
		return nil, fault.Newf(fault.LinkUnknown, "`tbcluster links` says why", "this node has no proven cable that could be measured")
	}
	return own, nil
}

// benchText tells of what was just measured.
func benchText(l *tbv1.Link, m *tbv1.LinkMeasurement) string {
	text := ratesText(l, m)
	if n := l.GetNegotiatedGbps(); n > 0 {
		text += fmt.Sprintf("; the cable runs at %s Gb/s", cableRate(l))
	}
	return text
}

// ratesText says how fast a link is each way.
func ratesText(l *tbv1.Link, m *tbv1.LinkMeasurement) string {
	a, b := l.GetA().GetNodeName(), l.GetB().GetNodeName()
	return fmt.Sprintf("%s → %s %s, %s → %s %s, round trip %s",
		a, b, rateText(m.GetAToBBytesPerSecond()), b, a, rateText(m.GetBToABytesPerSecond()), rttText(m.GetRttUs()))
}
