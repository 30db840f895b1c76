package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// knownLink is the first link of deskState with all that can be known of one.
func knownLink() *tbv1.Link {
	l := deskState().Links[0]
	l.Measurement = &tbv1.LinkMeasurement{AToBBytesPerSecond: 2_100_000_000, BToABytesPerSecond: 1_900_000_000, RttUs: 95, MeasuredAt: noon,
		Duration: durationpb.New(2 * time.Second), NegotiatedGbps: 20}
	l.MeasuredBytesPerSecond = 1_900_000_000
	l.A.TxBytes, l.A.RxErrors, l.B.TxDropped = 5_000_000_000, 2, 3
	l.Flaps, l.Hops = 1, 2
	l.FlapHistory = []*tbv1.LinkFlap{
		{DownAt: timestamppb.New(noon.AsTime().Add(-26 * time.Hour)), BackAt: timestamppb.New(noon.AsTime().Add(-26*time.Hour + 4300*time.Millisecond)),
			Reason: "the cable is unplugged", SeenBy: []string{"alpha", "beta"}},
		{DownAt: noon, Reason: "the cable has carrier, but nothing answers\x1b[2J", SeenBy: []string{"beta"}},
	}
	return l
}

func TestLinksShowsEveryCable(t *testing.T) {
	s := deskState()
	s.Links[0] = knownLink()
	d := startDouble(t, &agentDouble{state: s})
	r := tb(t, d, "links")
	r.wantCode(t, 0)
	golden(t, "links.txt", r.out)
	r = tb(t, d, "links", "-o", "json")
	r.wantCode(t, 0)
	var doc linksJSON
	if err := json.Unmarshal([]byte(r.out), &doc); err != nil {
		t.Fatal(err)
	}
	if l := doc.Links[0]; len(doc.Links) != 2 || l.Measurement.AToB != 2_100_000_000 || l.Measurement.Seconds != 2 || l.Hops != 2 ||
		len(l.FlapHistory) != 2 || l.FlapHistory[0].BackAt == nil || l.FlapHistory[1].BackAt != nil || l.B.TxDropped != 3 {
		t.Errorf("printed %s", r.out)
	}
	if doc.Links[1].Measurement != nil || doc.Links[1].FlapHistory == nil {
		t.Errorf("what is not known of the second: %s", r.out)
	}
	for _, name := range []string{"beta:alpha", "l-1"} {
		if r := tb(t, d, "links", name); r.code != 0 || !strings.Contains(r.out, "measured   alpha → beta 2.10 GB/s") || strings.Contains(r.out, "l-2") {
			t.Errorf("%s: %d\n%s", name, r.code, r.out)
		}
	}
	for _, args := range [][]string{{"links", "alpha:gamma"}, {"links", "bench", "gamma:alpha"}} {
		r := tb(t, d, args...)
		r.wantCode(t, fault.ExitUnknown)
		if !strings.Contains(r.err, `no node is called "gamma"`) || !strings.Contains(r.err, "the nodes are alpha, beta") {
			t.Errorf("%v says\n%s", args, r.err)
		}
	}
	for _, name := range []string{"alpha:alpha", "bbbb-2:beta"} {
		if r := tb(t, d, "links", name); r.code != fault.ExitUnknown || !strings.Contains(r.err, "no cable is known between") {
			t.Errorf("%s: %d\n%s", name, r.code, r.err)
		}
	}
	for _, name := range []string{"alpha:gamma", "l-", "nonsense"} {
		if r := tb(t, d, "links", name); r.code != fault.ExitUnknown || r.out != "" {
			t.Errorf("%s: %d\n%s", name, r.code, r.out)
		}
	}
	s.Links = nil
	if r := tb(t, d, "links"); r.out != "no cable is plugged in between these nodes\n" {
		t.Errorf("printed %q", r.out)
	}
}

func TestAllThatIsKnownOfACable(t *testing.T) {
	var b bytes.Buffer
	writeLink(&b, knownLink(), noon.AsTime().UTC())
	b.WriteString("\n")
	writeLink(&b, deskState().Links[1], noon.AsTime().UTC())
	golden(t, "link.txt", b.String())
}

func TestLinksBench(t *testing.T) {
	l := knownLink()
	d := startDouble(t, &agentDouble{state: deskState(), bench: map[string]*tbv1.BenchResponse{"l-1": {Measurement: l.Measurement, Link: l}}})
	d.state.SelfNodeId = "AAAA-1"
	r := tb(t, d, "links", "bench")
	r.wantCode(t, 0)
	if want := "alpha 0-1 – beta 0-2: alpha → beta 2.10 GB/s, beta → alpha 1.90 GB/s, round trip 0.10 ms; the cable runs at 20 of 40 Gb/s\n"; r.out != want {
		t.Errorf("printed\n%s want\n%s", r.out, want)
	}
	q := request[*tbv1.BenchRequest](t, d)
	if q.Link != "l-1" || q.Duration.AsDuration() != 2*time.Second || q.EvenIfUsed {
		t.Errorf("asked for %v", q)
	}
	d.bench["l-1"].UsedBy = []string{"transfer cp-1"}
	r = tb(t, d, "links", "bench", "alpha:beta", "--seconds", "0.5", "--force", "-o", "json")
	r.wantCode(t, 0)
	var doc benchJSON
	if err := json.Unmarshal([]byte(r.out), &doc); err != nil || doc.Link.ID != "l-1" || len(doc.UsedBy) != 1 {
		t.Errorf("%v: printed %s", err, r.out)
	}
	q = request[*tbv1.BenchRequest](t, d)
	if q.Duration.AsDuration() != 500*time.Millisecond || !q.EvenIfUsed {
		t.Errorf("asked for %v", q)
	}
	if r = tb(t, d, "links", "bench", "--force"); !strings.Contains(r.err, "is used by transfer cp-1") {
		t.Errorf("said %q", r.err)
	}
	// One that fails ends the command, another one keeps the rest from nothing.
	if r = tb(t, d, "links", "bench", "l-2"); r.code != fault.ExitPrecondition {
		t.Errorf("%d: %s", r.code, r.err)
	}
	r = tb(t, d, "links", "bench", "l-2", "l-1")
	if r.code != fault.ExitPrecondition || !strings.Contains(r.out, "2.10 GB/s") || !strings.Contains(r.err, "the cable l-2 is used") {
		t.Errorf("%d: %s%s", r.code, r.out, r.err)
	}
	for _, seconds := range []string{"0", "0.1", "11", "-1", "NaN", "x"} {
		if r = tb(t, d, "links", "bench", "--seconds", seconds); r.code != fault.ExitUsage {
			t.Errorf("--seconds %s: %d %s", seconds, r.code, r.err)
		}
	}
	d.state.Links[0].State = tbv1.LinkState_LINK_STATE_DOWN
	if r = tb(t, d, "links", "bench"); r.code != fault.ExitUnknown {
		t.Errorf("without a proven cable: %d %s", r.code, r.err)
	}
}
