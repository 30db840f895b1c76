package metrics

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "tbcluster/api/tbcluster/v1"
)

var began = time.Date(2026, 11, 20, 9, 0, 0, 0, time.UTC)

// desk is a cluster of everything that is measured.
func desk() *v1.ClusterState {
	gib := uint64(1 << 30)
	return &v1.ClusterState{Revision: 7, SelfNodeId: "AAAAAAA-1",
		Nodes: []*v1.Node{
			{Id: "AAAAAAA-1", Name: "alpha", State: v1.NodeState_NODE_STATE_UP, Self: true, Os: "linux", Arch: "amd64", Version: "1.0",
				Memory: &v1.Memory{TotalBytes: 128 * gib, AvailableBytes: 100 * gib, BudgetBytes: 90 * gib}, DiskFreeBytes: 500 * gib},
			{Id: "BBBBBBB-2", Name: "beta", State: v1.NodeState_NODE_STATE_UP, Os: "darwin", RttUs: 250},
			{Id: "CCCCCCC-3", Name: "gamma", State: v1.NodeState_NODE_STATE_DOWN},
		},
		Links: []*v1.Link{{Id: "l1", A: &v1.LinkEnd{NodeId: "AAAAAAA-1", Port: "0-1"}, B: &v1.LinkEnd{NodeId: "BBBBBBB-2", Port: "0-3"},
			State: v1.LinkState_LINK_STATE_PROVEN, NegotiatedGbps: 20, CapableGbps: 40, MeasuredBytesPerSecond: 2_000_000_000, RttUs: 120,
			Flaps: 3, Errors: 5, ATxBytes: 1000, ARxBytes: 2000}},
		Transfers: []*v1.Transfer{
			{Id: "t1", OwnerNodeId: "AAAAAAA-1", State: v1.TransferState_TRANSFER_STATE_COPYING, DoneBytes: 700, SkippedBytes: 50, BytesPerSecond: 100,
				User: "ada", Sources: []string{"alpha:/home/ada/secret.gguf"}, StartedAt: timestamppb.New(began.Add(time.Minute))},
			{Id: "t2", OwnerNodeId: "BBBBBBB-2", State: v1.TransferState_TRANSFER_STATE_COPYING, DoneBytes: 5, BytesPerSecond: 11, User: "bob"},
		},
		Instances: []*v1.Instance{
			{Id: "i1", Name: "secret", Model: "secret", Engine: "llamacpp", State: v1.InstanceState_INSTANCE_STATE_READY, TokensPerSecond: 12.5, Restarts: 2, User: "ada"},
			{Id: "i2", Name: "other", Engine: "somebody's own", State: v1.InstanceState_INSTANCE_STATE_FAILED, TokensPerSecond: 0.5},
		},
		Findings: []*v1.Finding{
			{Code: "link-slow", Severity: v1.Severity_SEVERITY_WARNING, Subject: "/home/ada"},
			{Code: "link-slow", Severity: v1.Severity_SEVERITY_WARNING},
			{Code: "from-the-future", Severity: v1.Severity_SEVERITY_ERROR},
		},
	}
}

// gather returns what a scrape of a state gives, as Prometheus writes a sample.
func gather(t *testing.T, c *Collector) map[string]float64 {
	t.Helper()
	r, err := c.Registry()
	if err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			var v float64
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				v = m.Counter.GetValue()
			case dto.MetricType_GAUGE:
				v = m.Gauge.GetValue()
			default:
				continue
			}
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			slices.Sort(labels)
			out[f.GetName()+"{"+strings.Join(labels, ",")+"}"] = v
		}
	}
	return out
}

func collector(s *v1.ClusterState) *Collector {
	return New(Options{State: func() *v1.ClusterState { return s }, Codes: []string{"link-slow", "not-paired"}, Version: "1.0", Started: began, Privileged: true})
}

func TestEveryNumberIsWhatTheStateSays(t *testing.T) {
	s := desk()
	c := collector(s)
	c.Observe(s)
	got := gather(t, c)
	link := `node_a="alpha",node_b="beta",port_a="0-1",port_b="0-3"`
	want := map[string]float64{
		`tbcluster_nodes{state="up"}`: 2, `tbcluster_nodes{state="down"}`: 1, `tbcluster_nodes{state="suspect"}`: 0, `tbcluster_nodes{state="unknown"}`: 0,
		`tbcluster_node_up{node="alpha"}`: 1, `tbcluster_node_up{node="gamma"}`: 0,
		`tbcluster_node_info{arch="amd64",node="alpha",os="linux",version="1.0"}`: 1,
		`tbcluster_node_memory_bytes{node="alpha"}`:                               128 << 30, `tbcluster_node_memory_available_bytes{node="alpha"}`: 100 << 30,
		`tbcluster_node_memory_budget_bytes{node="alpha"}`: 90 << 30, `tbcluster_node_disk_free_bytes{node="alpha"}`: 500 << 30,
		`tbcluster_node_rtt_seconds{node="beta"}`: 250e-6,
		`tbcluster_links{state="proven"}`:         1, `tbcluster_links{state="down"}`: 0, `tbcluster_links{state="cabled"}`: 0, `tbcluster_links{state="addressed"}`: 0,
		"tbcluster_link_proven{" + link + "}": 1, "tbcluster_link_negotiated_bits_per_second{" + link + "}": 20e9, "tbcluster_link_capable_bits_per_second{" + link + "}": 40e9,
		"tbcluster_link_measured_bytes_per_second{" + link + "}": 2e9, "tbcluster_link_rtt_seconds{" + link + "}": 120e-6,
		"tbcluster_link_flaps_total{" + link + "}": 3, "tbcluster_link_errors_total{" + link + "}": 5,
		`tbcluster_link_bytes_total{direction="a_to_b",` + link + "}": 1000, `tbcluster_link_bytes_total{direction="b_to_a",` + link + "}": 2000,
		`tbcluster_transfers{state="copying"}`: 2, `tbcluster_transfers{state="done"}`: 0,
		`tbcluster_transfer_bytes_per_second{}`: 111, `tbcluster_transfer_bytes_total{}`: 700,
		`tbcluster_instances{engine="llamacpp",state="ready"}`: 1, `tbcluster_instances{engine="other",state="failed"}`: 1,
		`tbcluster_instance_tokens_per_second{}`: 13, `tbcluster_instance_restarts{}`: 2,
		`tbcluster_findings{code="link-slow",severity="warning"}`: 2, `tbcluster_findings{code="other",severity="error"}`: 1,
		`tbcluster_agent_info{node="alpha",version="1.0"}`: 1, `tbcluster_agent_start_time_seconds{}`: float64(began.Unix()), `tbcluster_agent_privileged{}`: 1,
		`tbcluster_agent_state_revision{}`: 7, `tbcluster_metrics_left_out{}`: 0,
	}
	seen := map[string]bool{}
	for k, v := range want {
		have, ok := got[k]
		if !ok || have != v {
			t.Errorf("%s is %v (%v), want %v", k, have, ok, v)
		}
		seen[k[:strings.IndexByte(k, '{')]] = true
	}
	for _, m := range All {
		if !seen[m.Name] && m.Name != transfersEnded {
			t.Errorf("%s is in the table, and no number of it is looked at here", m.Name)
		}
	}
	for k := range got {
		if strings.HasPrefix(k, "go_") || strings.HasPrefix(k, "process_") {
			continue
		}
		name := k[:strings.IndexByte(k, '{')]
		if !slices.ContainsFunc(All, func(m Metric) bool { return m.Name == name }) {
			t.Errorf("%s is said and not in the table", k)
		}
		for _, private := range []string{"ada", "bob", "secret", "home", "somebody"} {
			if strings.Contains(k, private) {
				t.Errorf("%s tells a name", k)
			}
		}
	}
}

func TestBytesOfTransfersOnlyGrow(t *testing.T) {
	s := &v1.ClusterState{SelfNodeId: "A"}
	c := collector(s)
	set := func(list ...*v1.Transfer) map[string]float64 {
		s.Transfers = list
		c.Observe(s)
		return gather(t, c)
	}
	at := func(id string, state v1.TransferState, done uint64, start time.Duration) *v1.Transfer {
		return &v1.Transfer{Id: id, OwnerNodeId: "A", State: state, DoneBytes: done, StartedAt: timestamppb.New(began.Add(start))}
	}
	const copying, done, failed = v1.TransferState_TRANSFER_STATE_COPYING, v1.TransferState_TRANSFER_STATE_DONE, v1.TransferState_TRANSFER_STATE_FAILED
	old := at("old", done, 1<<40, -time.Hour)
	for i, step := range []struct {
		list                []*v1.Transfer
		bytes, done, failed float64
	}{
		{[]*v1.Transfer{old}, 0, 0, 0}, // the agent before has counted it
		{[]*v1.Transfer{old, at("x", copying, 10, 1)}, 10, 0, 0},
		{[]*v1.Transfer{old, at("x", copying, 5, 1)}, 10, 0, 0}, // a connection was lost
		{[]*v1.Transfer{old, at("x", copying, 12, 1)}, 12, 0, 0},
		{[]*v1.Transfer{at("x", done, 20, 1), at("y", failed, 3, 2)}, 23, 1, 1},
		{[]*v1.Transfer{at("x", done, 20, 1), at("y", failed, 3, 2)}, 23, 1, 1},
		{nil, 23, 1, 1}, // listed no more
	} {
		got := set(step.list...)
		if got["tbcluster_transfer_bytes_total{}"] != step.bytes || got[`tbcluster_transfers_ended_total{state="done"}`] != step.done || got[`tbcluster_transfers_ended_total{state="failed"}`] != step.failed {
			t.Errorf("step %d: %v bytes, %v done, %v failed", i, got["tbcluster_transfer_bytes_total{}"], got[`tbcluster_transfers_ended_total{state="done"}`], got[`tbcluster_transfers_ended_total{state="failed"}`])
		}
	}
}

// Whatever other nodes say of themselves, a scrape works, and is not large.
func TestHostileStates(t *testing.T) {
	s := &v1.ClusterState{}
	for i := range 10_000 {
		s.Nodes = append(s.Nodes, &v1.Node{Id: fmt.Sprintf("%07d-x", i), Name: fmt.Sprintf("n%d", i), Version: strings.Repeat("\x1b[2J\xff", 1000), State: v1.NodeState(i)})
		s.Links = append(s.Links, &v1.Link{A: &v1.LinkEnd{NodeId: s.Nodes[0].Id, Port: fmt.Sprint(i)}, B: &v1.LinkEnd{NodeId: "nobody"}, State: v1.LinkState(i)})
		s.Instances = append(s.Instances, &v1.Instance{Engine: fmt.Sprint(i), State: v1.InstanceState(i)})
		s.Findings = append(s.Findings, &v1.Finding{Code: fmt.Sprint(i), Severity: v1.Severity(i)})
		s.Transfers = append(s.Transfers, &v1.Transfer{Id: fmt.Sprint(i), State: v1.TransferState(i)})
	}
	s.Nodes = append(s.Nodes, &v1.Node{Id: "AAAAAAA-1", Name: "n1"}, &v1.Node{Id: "AAAAAAA-2", Name: "n1"}, &v1.Node{})
	s.Links = append(s.Links, nil, s.Links[0], &v1.Link{})
	s.Nodes = append([]*v1.Node{nil}, s.Nodes...)
	c := collector(s)
	c.Observe(s)
	got := gather(t, c)
	if len(got) > maxNodes*7+maxLinks*10+500 {
		t.Errorf("%d series", len(got))
	}
	if got["tbcluster_metrics_left_out{}"] < 10_000-maxNodes {
		t.Errorf("left out: %v", got["tbcluster_metrics_left_out{}"])
	}
	for k := range got {
		if len(k) > 1000 || strings.Contains(k, `\x1b`) {
			t.Errorf("%.100q", k)
		}
	}
}

func TestNodesOfOneNameAreToldApart(t *testing.T) {
	s := &v1.ClusterState{Nodes: []*v1.Node{{Id: "AAAAAAA-1", Name: "mini", State: v1.NodeState_NODE_STATE_UP}, {Id: "BBBBBBB-1", Name: "mini"}}}
	got := gather(t, collector(s))
	if got[`tbcluster_node_up{node="mini-AAAAAAA"}`] != 1 {
		t.Errorf("%v", got)
	}
	if _, ok := got[`tbcluster_node_up{node="mini-BBBBBBB"}`]; !ok {
		t.Errorf("%v", got)
	}
}

func FuzzLabel(f *testing.F) {
	f.Add("alpha")
	f.Add("\x1b[31m\xff\u202e")
	f.Fuzz(func(t *testing.T, s string) {
		l := label(s)
		if len([]rune(l)) > maxLabel || label(l) != l {
			t.Errorf("%q becomes %q", s, l)
		}
	})
}

const page = "../../docs/metrics.md"

// The table in the documentation is the one in the program.
func TestDocumentation(t *testing.T) {
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	const from, to = "<!-- metrics: written by UPDATE_GOLDEN=1 go test ./agent/metrics -->\n", "<!-- /metrics -->\n"
	before, rest, ok := strings.Cut(string(data), from)
	have, after, ok2 := strings.Cut(rest, to)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the table", page)
	}
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(page, []byte(before+from+Table()+to+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if have != Table() {
		t.Errorf("%s is not what the table says: UPDATE_GOLDEN=1 go test ./agent/metrics", page)
	}
}

// What the dashboard asks for is there, and it shows all there is.
func TestDashboard(t *testing.T) {
	data, err := os.ReadFile("../../docs/grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	type panel struct {
		ID      int
		Title   string
		Type    string
		GridPos struct{ X, Y, W, H int }
		Targets []struct{ Expr, LegendFormat string }
	}
	var board struct {
		Title      string
		UID        string
		Panels     []panel
		Templating struct {
			List []struct{ Name, Type, Query string }
		}
	}
	if err := json.Unmarshal(data, &board); err != nil {
		t.Fatal(err)
	}
	if board.Title == "" || board.UID == "" {
		t.Error("the dashboard has no title or no uid")
	}
	s := desk()
	c := collector(s)
	r, err := c.Registry()
	if err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string][]string{}
	for _, f := range families {
		labels[f.GetName()] = []string{"job", "instance"}
		for _, l := range f.Metric[0].Label {
			labels[f.GetName()] = append(labels[f.GetName()], l.GetName())
		}
	}
	asked := map[string]bool{}
	name := regexp.MustCompile(`\b(tbcluster|go|process)_[a-z0-9_]+`)
	label := regexp.MustCompile(`\{\{ ?([a-z_]+) ?\}\}`)
	check := func(where, query string) (names []string) {
		names = name.FindAllString(query, -1)
		if len(names) == 0 {
			t.Errorf("%s asks for nothing: %q", where, query)
		}
		for _, n := range names {
			asked[n] = true
			if labels[n] == nil {
				t.Errorf("%s asks for %s, which is not there", where, n)
			}
		}
		return names
	}
	for _, v := range board.Templating.List {
		if v.Type == "query" {
			check("variable "+v.Name, v.Query)
		}
	}
	ids := map[int]bool{}
	for i, p := range board.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the number %d", p.ID)
		}
		ids[p.ID] = true
		if p.Type == "row" {
			continue
		}
		if p.Title == "" || len(p.Targets) == 0 {
			t.Errorf("panel %d has no title or asks for nothing", p.ID)
		}
		for _, q := range p.Targets {
			names := check(p.Title, q.Expr)
			if strings.Count(q.Expr, "(") != strings.Count(q.Expr, ")") || strings.Count(q.Expr, "{") != strings.Count(q.Expr, "}") {
				t.Errorf("%s: %q is no expression", p.Title, q.Expr)
			}
			for _, l := range label.FindAllStringSubmatch(q.LegendFormat, -1) {
				if !slices.ContainsFunc(names, func(n string) bool { return slices.Contains(labels[n], l[1]) }) {
					t.Errorf("%s: the legend names %s, which no label is", p.Title, l[1])
				}
			}
		}
		g := p.GridPos
		if g.W < 1 || g.H < 1 || g.X+g.W > 24 {
			t.Errorf("%s is not on the screen", p.Title)
		}
		for _, o := range board.Panels[:i] {
			if h := o.GridPos; g.X < h.X+h.W && h.X < g.X+g.W && g.Y < h.Y+h.H && h.Y < g.Y+g.H {
				t.Errorf("%s lies on %s", p.Title, o.Title)
			}
		}
	}
	for _, m := range All {
		if !asked[m.Name] {
			t.Errorf("%s is on no panel", m.Name)
		}
	}
}
