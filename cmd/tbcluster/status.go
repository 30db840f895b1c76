package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type statusOptions struct {
	g     *globals
	watch bool
}

func newStatusCommand(g *globals) *cobra.Command {
	o := &statusOptions{g: g}
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "Show nodes, cables, transfers, instances, models and findings",
		GroupID: groupCluster,
		Long: `Shows the whole cluster as the node that answers sees it.

A node is "up" when it was heard from within its heartbeat, "suspect" when it is
late, "down" when it is gone, and "unknown" when the node that answers has not
heard from it since its agent started. It stays listed until you run "tbcluster
node forget" or "tbcluster pair --revoke".

A cable is "cabled" when the Thunderbolt layer sees the other machine, "addressed"
when both ends have an address, "proven" when a packet went each way on that very
cable and came back from the right node, and "down" when it was there and is not,
or carries nothing. Only a proven cable carries models.

"20 of 40" Gb/s means that the cable runs at 20 though both ends can do 40;
unplugging it and plugging it in again often helps.` + exitHelp(fault.Interrupted),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runStatus(cmd.Context(), o) },
	}
	cmd.Flags().BoolVarP(&o.watch, "watch", "w", false, "show it anew at every change, until you stop it; with -o json one document a line")
	return cmd
}

func runStatus(ctx context.Context, o *statusOptions) error {
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	if !o.watch {
		state, err := c.state(ctx)
		if err != nil {
			return err
		}
		if o.g.json() {
			writeJSON(o.g.out, toStateJSON(state))
			return nil
		}
		writeStatus(o.g.out, state, time.Now())
		return nil
	}
	clear := isTerminal(o.g.out)
	paint := throttle{gap: 250 * time.Millisecond}
	return paint.run(ctx, func(ctx context.Context, show func(func())) error {
		return watchState(ctx, c, func(state *tbv1.ClusterState) bool {
			if o.g.json() {
				line := compactJSON(toStateJSON(state))
				show(func() { fmt.Fprintf(o.g.out, "%s\n", line) })
				return false
			}
			var b bytes.Buffer
			writeStatus(&b, state, time.Now())
			show(func() {
				if clear {
					io.WriteString(o.g.out, "\x1b[H\x1b[2J")
				} else {
					fmt.Fprintf(o.g.out, "--- %s\n", time.Now().Format(time.TimeOnly))
				}
				o.g.out.Write(b.Bytes())
			})
			return false
		})
	})
}

// compactJSON returns v as JSON on one line.
func compactJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // our own structs of strings and numbers
	}
	return b
}

// writeStatus prints the state for people. Parts with nothing in them are left
// out, but never the cables: "no cable" is what many look for.
func writeStatus(w io.Writer, s *tbv1.ClusterState, now time.Time) {
	fmt.Fprintln(w, summary(s))

	t := newTable("NODE", "STATE", "SYSTEM", "MEMORY>", "FREE DISK>", "ENGINES", "VERSION", "WHY")
	for _, n := range s.GetNodes() {
		name := n.GetName()
		if n.GetSelf() {
			name += "*"
		}
		t.add(name, nodeStateWord(n.GetState()), orDash(n.GetOsVersion()), memoryText(n.GetMemory().GetTotalBytes()),
			sizeOrDash(n.GetDiskFreeBytes()), engineNames(n), orDash(n.GetVersion()), nodeWhy(n, now))
	}
	fmt.Fprintln(w)
	t.write(w)

	fmt.Fprintln(w)
	if len(s.GetLinks()) == 0 {
		fmt.Fprintln(w, "no cable is plugged in between these nodes")
	} else {
		t = newTable("CABLE", "STATE", "Gb/s>", "MEASURED>", "RTT>", "ADDRESSES", "WHY")
		for _, l := range s.GetLinks() {
			t.add(cableText(l), linkStateWord(l.GetState()), cableRate(l), rateText(l.GetMeasuredBytesPerSecond()), rttText(l.GetRttUs()), cableAddresses(l), l.GetReason())
		}
		t.write(w)
	}
	if len(s.GetTransfers()) > 0 {
		fmt.Fprintln(w)
		t = newTable("TRANSFER", "STATE", "DONE>", "RATE>", "LEFT>", "FROM", "TO")
		for _, tr := range s.GetTransfers() {
			t.add(shortID(tr.GetId()), transferStateWord(tr.GetState()), percent(tr), rateText(tr.GetBytesPerSecond()),
				etaText(tr), strings.Join(tr.GetSources(), " "), tr.GetDestination())
		}
		t.write(w)
	}
	if len(s.GetInstances()) > 0 {
		fmt.Fprintln(w)
		writeInstances(w, s.GetInstances(), now)
	}
	if len(s.GetModels()) > 0 {
		fmt.Fprintln(w)
		writeModels(w, s.GetModels())
	}
	if len(s.GetFindings()) > 0 {
		fmt.Fprintln(w)
		writeFindings(w, s.GetFindings())
	}
}

// summary returns the first line of status.
func summary(s *tbv1.ClusterState) string {
	var up, proven, ready int
	var gbps float64
	for _, n := range s.GetNodes() {
		if n.GetState() == tbv1.NodeState_NODE_STATE_UP {
			up++
		}
	}
	for _, l := range s.GetLinks() {
		if l.GetState() == tbv1.LinkState_LINK_STATE_PROVEN {
			proven++
			gbps += l.GetNegotiatedGbps()
		}
	}
	for _, i := range s.GetInstances() {
		if i.GetState() == tbv1.InstanceState_INSTANCE_STATE_READY {
			ready++
		}
	}
	name := s.GetClusterName()
	if name == "" {
		name = "cluster"
	}
	parts := []string{fmt.Sprintf("%d of %s up", up, count(len(s.GetNodes()), "node")), "no cable"}
	if len(s.GetLinks()) > 0 {
		parts[1] = fmt.Sprintf("%d of %s proven", proven, count(len(s.GetLinks()), "cable"))
	}
	if gbps > 0 {
		parts[1] += fmt.Sprintf(" (%g Gb/s)", gbps)
	}
	parts = append(parts, count(ready, "instance")+" ready")
	var broken, look int
	for _, f := range s.GetFindings() {
		switch f.GetSeverity() {
		case tbv1.Severity_SEVERITY_ERROR:
			broken++
		case tbv1.Severity_SEVERITY_WARNING:
			look++
		}
	}
	if broken > 0 {
		parts = append(parts, fmt.Sprintf("%d broken", broken))
	}
	if look > 0 {
		parts = append(parts, fmt.Sprintf("%d to look at", look))
	}
	return plain(name) + ": " + strings.Join(parts, ", ")
}

// sizeOrDash returns a size, "-" when it is not known.
func sizeOrDash(n uint64) string {
	if n == 0 {
		return "-"
	}
	return bytesText(n)
}

func engineNames(n *tbv1.Node) string {
	var names []string
	for _, e := range n.GetEngines() {
		if e.GetAvailable() {
			names = append(names, e.GetName())
		}
	}
	return orDash(strings.Join(names, " "))
}

func nodeWhy(n *tbv1.Node, now time.Time) string {
	if n.GetState() == tbv1.NodeState_NODE_STATE_UP {
		return ""
	}
	why := n.GetReason()
	if since := n.GetStateSince(); since != nil {
		why = strings.TrimSpace(why + " (since " + agoText(now, since.AsTime()) + ")")
	}
	return why
}

// cableText names a link by its ends: "alpha 0-1 – beta 0-2".
func cableText(l *tbv1.Link) string { return endText(l.GetA()) + " – " + endText(l.GetB()) }

func endText(e *tbv1.LinkEnd) string {
	if e == nil {
		return "?"
	}
	name := e.GetNodeName()
	if name == "" {
		name = "?"
	}
	return strings.TrimSpace(name + " " + e.GetPort())
}

func cableRate(l *tbv1.Link) string {
	n, c := l.GetNegotiatedGbps(), l.GetCapableGbps()
	if n > 0 && c > n {
		return gbpsText(n) + " of " + gbpsText(c)
	}
	return gbpsText(n)
}

func cableAddresses(l *tbv1.Link) string {
	a, b := l.GetA().GetAddress(), l.GetB().GetAddress()
	if a == "" && b == "" {
		return "-"
	}
	return orDash(a) + " – " + orDash(b)
}

// shortID returns enough of an ID to tell it from others on one screen.
func shortID(id string) string {
	if len(id) > 10 {
		return id[:10]
	}
	return id
}

func percent(t *tbv1.Transfer) string {
	switch {
	case t.GetState() == tbv1.TransferState_TRANSFER_STATE_DONE:
		return "100 %"
	case t.GetTotalBytes() == 0:
		return "-"
	}
	return fmt.Sprintf("%d %%", int(100*float64(t.GetDoneBytes())/float64(t.GetTotalBytes())))
}

func etaText(t *tbv1.Transfer) string {
	if t.GetEta() == nil {
		return "-"
	}
	return clockText(t.GetEta().AsDuration())
}

// writeFindings prints findings, worst first as they come, each with what to
// do about it.
func writeFindings(w io.Writer, findings []*tbv1.Finding) {
	for _, f := range findings {
		fmt.Fprintf(w, "%-8s %s (%s) [%s]\n", strings.ToUpper(severityWord(f.GetSeverity())), plain(f.GetTitle()), plain(f.GetNodeName()), plain(f.GetCode()))
		for _, part := range []struct{ label, text string }{{"means", f.GetMeaning()}, {"seen", f.GetEvidence()}, {"do", f.GetFix()}} {
			if part.text != "" {
				// Commands to run stand on lines of their own.
				fmt.Fprintf(w, "  %-6s %s\n", part.label+":", strings.ReplaceAll(plainText(part.text), "\n", "\n         "))
			}
		}
	}
}
