package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

func TestStatusForPeople(t *testing.T) {
	var b bytes.Buffer
	writeStatus(&b, deskState(), noon.AsTime().Add(5*time.Minute))
	golden(t, "status.txt", b.String())
}

func TestStatusOfOneNodeAlone(t *testing.T) {
	s := deskState()
	s.Nodes, s.Links, s.Transfers, s.Instances, s.Models, s.Findings = s.Nodes[:1], nil, nil, nil, nil, nil
	var b bytes.Buffer
	writeStatus(&b, s, noon.AsTime())
	golden(t, "status-alone.txt", b.String())
}

// As on the screen, what is only worth knowing is nothing to look at.
func TestTheFirstLineCountsWhatIsToDo(t *testing.T) {
	s := deskState()
	finding := func(severity tbv1.Severity) *tbv1.Finding { return &tbv1.Finding{Severity: severity} }
	s.Findings = []*tbv1.Finding{finding(tbv1.Severity_SEVERITY_INFO), finding(tbv1.Severity_SEVERITY_INFO)}
	if got := summary(s); strings.Contains(got, "to look at") || strings.Contains(got, "broken") {
		t.Errorf("with what is worth knowing alone: %s", got)
	}
	s.Findings = append(s.Findings, finding(tbv1.Severity_SEVERITY_WARNING), finding(tbv1.Severity_SEVERITY_WARNING), finding(tbv1.Severity_SEVERITY_ERROR))
	if got := summary(s); !strings.HasSuffix(got, ", 1 broken, 2 to look at") {
		t.Errorf("with one that is broken and two to look at: %s", got)
	}
}

func TestStatusAsJSONIsStable(t *testing.T) {
	d := startDouble(t, &agentDouble{state: deskState()})
	r := tb(t, d, "status", "-o", "json")
	r.wantCode(t, 0)
	golden(t, "status.json", r.out)
	var doc struct {
		Links []map[string]any `json:"links"`
	}
	if err := json.Unmarshal([]byte(r.out), &doc); err != nil {
		t.Fatal(err)
	}
	if b, there := doc.Links[1]["b"]; !there || b != nil {
		t.Errorf("the unknown end of a cable is %v (there: %v), want null", b, there)
	}
}

func TestEmptyStatusHasEmptyLists(t *testing.T) {
	d := startDouble(t, &agentDouble{state: &tbv1.ClusterState{}})
	r := tb(t, d, "status", "-o", "json")
	r.wantCode(t, 0)
	if strings.Contains(r.out, "null") {
		t.Errorf("a list is null:\n%s", r.out)
	}
}

// TestEveryFieldIsDocumented reads docs/json.md for each field of each shape.
func TestEveryFieldIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/json.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[reflect.Type]bool{}
	var walk func(reflect.Type)
	walk = func(ty reflect.Type) {
		for ty.Kind() == reflect.Pointer || ty.Kind() == reflect.Slice {
			ty = ty.Elem()
		}
		if ty.Kind() != reflect.Struct || ty == reflect.TypeFor[time.Time]() || seen[ty] {
			return
		}
		seen[ty] = true
		for i := range ty.NumField() {
			name, _, _ := strings.Cut(ty.Field(i).Tag.Get("json"), ",")
			if !ty.Field(i).Anonymous && !strings.Contains(string(doc), "`"+name+"`") {
				t.Errorf("docs/json.md does not tell of %s (%s)", name, ty.Name())
			}
			walk(ty.Field(i).Type)
		}
	}
	for _, v := range []any{stateJSON{}, nodesJSON{}, linksJSON{}, benchJSON{}, instancesJSON{}, modelsJSON{}, planJSON{}, pingJSON{}, doctorJSON{}, membersJSON{},
		joinedJSON{}, revokedJSON{}, mappingsJSON{}, pairEventJSON{}, copyEventJSON{}, logLineJSON{}, removedJSON{}, doneJSON{}, downJSON{}, configJSON{},
		enginesJSON{}, installedJSON{}, chatJSON{}, bugreportJSON{}, versionJSON{}, faultJSON{}, labReport{}, labListJSON{}, lab.Status{}} {
		walk(reflect.TypeOf(v))
	}
}

func TestTextFromTheNetworkCannotSteerTheTerminal(t *testing.T) {
	s := deskState()
	s.Nodes[0].Name = "al\x1b[2Jpha\u202e"
	s.Findings[0].Title = "line\nbreak\x07"
	var b bytes.Buffer
	writeStatus(&b, s, noon.AsTime())
	if out := b.String(); strings.ContainsAny(out, "\x1b\x07\u202e") || !strings.Contains(out, `al\x1b[2Jpha\u202e`) || !strings.Contains(out, `line\x0abreak`) {
		t.Errorf("not made harmless:\n%q", out)
	}
}

func TestWatchShowsEveryNewState(t *testing.T) {
	first := deskState()
	d := startDouble(t, &agentDouble{events: []*tbv1.WatchResponse{
		{Revision: 42, Event: &tbv1.WatchResponse_Snapshot{Snapshot: first}},
		{Revision: 43, Event: &tbv1.WatchResponse_Delta{Delta: &tbv1.ClusterDelta{
			Nodes:          []*tbv1.Node{{Id: "BBBB-2", Name: "beta", State: tbv1.NodeState_NODE_STATE_UP}, {Id: "CCCC-3", Name: "aaa"}},
			RemovedLinkIds: []string{"l-2"}, FindingsChanged: true,
		}}},
	}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pipe, w := io.Pipe()
	g := &globals{in: eof{}, out: w, errOut: io.Discard, getenv: func(string) string { return "" }, run: "/nonexistent"}
	code := make(chan int, 1)
	go func() {
		code <- run(ctx, g, []string{"status", "--watch", "-o", "json", "--socket", d.socket})
		w.Close()
	}()
	lines := bufio.NewScanner(pipe)
	lines.Buffer(nil, 1<<20)
	var got stateJSON
	for got.Revision != 43 && lines.Scan() {
		got = stateJSON{}
		if err := json.Unmarshal(lines.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
	}
	var names []string
	for _, n := range got.Nodes {
		names = append(names, n.Name+" "+n.State)
	}
	if strings.Join(names, ", ") != "aaa unknown, alpha up, beta up" || len(got.Links) != 1 || len(got.Findings) != 0 || len(got.Models) != 1 {
		t.Errorf("after the change: nodes %v, %d links, %d findings, %d models", names, len(got.Links), len(got.Findings), len(got.Models))
	}
	cancel()
	if _, err := io.Copy(io.Discard, pipe); err != nil {
		t.Fatal(err)
	}
	if c := <-code; c != 130 {
		t.Errorf("stopping the watch ends with %d, want 130", c)
	}
}

func TestChangesBeforeAStateAreAnError(t *testing.T) {
	if _, err := applyEvent(nil, &tbv1.WatchResponse{Event: &tbv1.WatchResponse_Delta{Delta: &tbv1.ClusterDelta{}}}); err == nil {
		t.Error("a delta without a snapshot was taken")
	}
}

func TestThrottlePaintsTheLastState(t *testing.T) {
	var painted []int
	err := throttle{gap: time.Hour}.run(t.Context(), func(_ context.Context, show func(func())) error {
		for i := range 100 {
			show(func() { painted = append(painted, i) })
		}
		return nil
	})
	if err != nil || len(painted) == 0 || painted[len(painted)-1] != 99 || len(painted) > 2 {
		t.Errorf("painted %v, %v; want at most the first that was caught, and 99", painted, err)
	}
}

func TestTabCompletesNames(t *testing.T) {
	d := startDouble(t, &agentDouble{state: deskState()})
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"__complete", "ping", ""}, "alpha\tup\nbeta\tdown\n"},
		{[]string{"__complete", "place", ""}, "smollm2\t98.4 MB\n"},
		{[]string{"__complete", "stop", ""}, "smol\tfailed\n"},
		{[]string{"__complete", "place", "smollm2", "--node", ""}, "alpha\tup\nbeta\tdown\n"},
		{[]string{"__complete", "cp", "x", ""}, "alpha:\tup\nbeta:\tdown\n"},
	} {
		args := append([]string{c.args[0], "--socket", d.socket}, c.args[1:]...)
		r := tb(t, nil, args...)
		if !strings.HasPrefix(r.out, c.want+":") {
			t.Errorf("%v completes to %q, want %q", c.args, r.out, c.want)
		}
	}
	start := time.Now()
	r := tb(t, nil, "__complete", "--socket", "/nonexistent/agent.sock", "ping", "")
	if !strings.HasPrefix(r.out, ":") || time.Since(start) > 30*time.Second {
		t.Errorf("without an agent: %q after %s", r.out, time.Since(start))
	}
}
