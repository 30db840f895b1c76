package metrics

import (
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	v1 "tbcluster/api/tbcluster/v1"
)

// Most nodes and links of which anything is said.
const (
	maxNodes = 256
	maxLinks = 2048
)

// maxLabel bounds a label that another node chose, in characters.
const maxLabel = 64

// Options of a Collector.
type Options struct {
	// State returns the cluster's state as it is now; it is not changed.
	State func() *v1.ClusterState
	// Codes are the codes of findings that may be labels.
	Codes []string
	// Version of this program, Started when the agent did, Privileged whether it
	// may change addresses.
	Version    string
	Started    time.Time
	Privileged bool
}

// Collector says all metrics of the table.
type Collector struct {
	o     Options
	descs map[string]desc
	codes map[string]bool
	flow  flow
}

type desc struct {
	*prometheus.Desc
	kind   prometheus.ValueType
	labels int
}

// New returns a collector. Observe tells it of what passes.
func New(o Options) *Collector {
	c := &Collector{o: o, descs: map[string]desc{}, codes: map[string]bool{}, flow: newFlow(o.Started)}
	for _, m := range All {
		kind := prometheus.GaugeValue
		if m.Kind == Counter {
			kind = prometheus.CounterValue
		}
		c.descs[m.Name] = desc{prometheus.NewDesc(m.Name, m.Help, m.Labels, nil), kind, len(m.Labels)}
	}
	for _, code := range o.Codes {
		c.codes[code] = true
	}
	return c
}

// Registry returns a registry of c's metrics and those of the process.
func (c *Collector) Registry() (*prometheus.Registry, error) {
	r := prometheus.NewPedanticRegistry()
	for _, x := range []prometheus.Collector{c, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})} {
		if err := r.Register(x); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// Observe takes in the state after a change.
func (c *Collector) Observe(s *v1.ClusterState) { c.flow.observe(s) }

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range All {
		ch <- c.descs[m.Name].Desc
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	w := &writer{c: c, ch: ch}
	s := c.o.State()
	names := w.nodes(s.GetNodes())
	w.links(s.GetLinks(), names)
	w.transfers(s.GetTransfers())
	w.instances(s.GetInstances())
	w.findings(s.GetFindings())
	w.say(agentInfo, 1, names[s.GetSelfNodeId()], label(c.o.Version))
	w.say(agentStart, float64(c.o.Started.UnixNano())/1e9)
	w.say(agentPrivileged, flag(c.o.Privileged))
	w.say(agentRevision, float64(s.GetRevision()))
	w.say(leftOut, float64(w.left))
}

// writer says metrics of one moment.
type writer struct {
	c    *Collector
	ch   chan<- prometheus.Metric
	left int
}

func (w *writer) say(name string, value float64, labels ...string) {
	d := w.c.descs[name]
	m, err := prometheus.NewConstMetric(d.Desc, d.kind, value, labels...)
	if err != nil {
		m = prometheus.NewInvalidMetric(d.Desc, err) // the table and the code differ
	}
	w.ch <- m
}

// states counts by state; every state of the list is said, at 0 too.
func (w *writer) states(name string, list []string, n map[string]int) {
	for _, s := range list {
		w.say(name, float64(n[s]), s)
	}
}

// nodes says what there is of nodes and returns the label of each, by ID.
func (w *writer) nodes(list []*v1.Node) map[string]string {
	n := map[string]int{}
	names := map[string]string{}
	taken := map[string]int{}
	for _, x := range list {
		taken[label(x.GetName())]++
	}
	used := map[string]bool{}
	for _, x := range list {
		state := word(x.GetState().String(), "NODE_STATE_", nodeStates)
		n[state]++
		name := label(x.GetName())
		if name == "" || taken[name] > 1 {
			// Two of one name are told apart as people do it.
			name = label(name + "-" + short(x.GetId()))
		}
		if used[name] || len(names) >= maxNodes {
			w.left++
			continue
		}
		used[name] = true
		names[x.GetId()] = name
		w.say(nodeUp, flag(x.GetState() == v1.NodeState_NODE_STATE_UP), name)
		w.say(nodeInfo, 1, name, label(x.GetOs()), label(x.GetArch()), label(x.GetVersion()))
		if m := x.GetMemory(); m != nil {
			w.say(nodeMemory, float64(m.GetTotalBytes()), name)
			w.say(nodeAvailable, float64(m.GetAvailableBytes()), name)
			w.say(nodeBudget, float64(m.GetBudgetBytes()), name)
		}
		w.say(nodeDisk, float64(x.GetDiskFreeBytes()), name)
		if us := x.GetRttUs(); us > 0 {
			w.say(nodeRTT, float64(us)/1e6, name)
		}
	}
	w.states(nodes, nodeStates, n)
	return names
}

func short(id string) string { return id[:min(len(id), 7)] }

func (w *writer) links(list []*v1.Link, names map[string]string) {
	n := map[string]int{}
	type ends [4]string
	used := map[ends]bool{}
	for _, x := range list {
		n[word(x.GetState().String(), "LINK_STATE_", linkStates)]++
		e := ends{names[x.GetA().GetNodeId()], label(x.GetA().GetPort()), names[x.GetB().GetNodeId()], label(x.GetB().GetPort())}
		if used[e] || len(used) >= maxLinks {
			w.left++
			continue
		}
		used[e] = true
		l := e[:]
		w.say(linkProven, flag(x.GetState() == v1.LinkState_LINK_STATE_PROVEN), l...)
		w.say(linkNegotiated, x.GetNegotiatedGbps()*1e9, l...)
		w.say(linkCapable, x.GetCapableGbps()*1e9, l...)
		if r := x.GetMeasuredBytesPerSecond(); r > 0 {
			w.say(linkMeasured, float64(r), l...)
		}
		if us := x.GetRttUs(); us > 0 {
			w.say(linkRTT, float64(us)/1e6, l...)
		}
		w.say(linkFlaps, float64(x.GetFlaps()), l...)
		w.say(linkErrors, float64(x.GetErrors()), l...)
		w.say(linkSent, float64(x.GetATxBytes()), append(slices.Clone(l), "a_to_b")...)
		w.say(linkSent, float64(x.GetARxBytes()), append(slices.Clone(l), "b_to_a")...)
	}
	w.states(links, linkStates, n)
}

func (w *writer) transfers(list []*v1.Transfer) {
	n, rate := map[string]int{}, 0.0
	for _, x := range list {
		n[word(x.GetState().String(), "TRANSFER_STATE_", transferStates)]++
		if !ended(x.GetState()) {
			rate += float64(x.GetBytesPerSecond())
		}
	}
	w.states(transfers, transferStates, n)
	w.say(transferRate, rate)
	bytes, by := w.c.flow.read()
	w.say(transferBytes, float64(bytes))
	for _, s := range endStates {
		w.say(transfersEnded, float64(by[s]), s)
	}
}

func (w *writer) instances(list []*v1.Instance) {
	type key struct{ state, engine string }
	n := map[key]int{}
	tokens, restarts := 0.0, 0.0
	for _, x := range list {
		engine := x.GetEngine()
		if !slices.Contains(engines, engine) {
			engine = "other"
		}
		n[key{word(x.GetState().String(), "INSTANCE_STATE_", instanceStates), engine}]++
		tokens += x.GetTokensPerSecond()
		restarts += float64(x.GetRestarts())
	}
	for k, v := range n {
		w.say(instances, float64(v), k.state, k.engine)
	}
	w.say(instanceTokens, tokens)
	w.say(instanceRestart, restarts)
}

func (w *writer) findings(list []*v1.Finding) {
	type key struct{ code, severity string }
	n := map[key]int{}
	for _, x := range list {
		code := x.GetCode()
		if !w.c.codes[code] {
			code = "other"
		}
		n[key{code, word(x.GetSeverity().String(), "SEVERITY_", severities)}]++
	}
	for k, v := range n {
		w.say(findings, float64(v), k.code, k.severity)
	}
}

// The words of the closed lists. What is in none of them is their last one, be
// it of a newer version or nonsense.
var (
	nodeStates     = []string{"up", "suspect", "down", "unknown"}
	linkStates     = []string{"cabled", "addressed", "proven", "down"}
	transferStates = []string{"scanning", "connecting", "copying", "syncing", "paused", "done", "cancelled", "failed"}
	endStates      = []string{"done", "failed", "cancelled"}
	instanceStates = []string{"planned", "copying", "starting", "loading", "warming", "ready", "degraded", "stopping", "stopped", "failed"}
	severities     = []string{"info", "warning", "error"}
	engines        = []string{"llamacpp", "vllm", "mlx", "exo"}
)

// word is a name of a protobuf enumeration as people write it.
func word(name, prefix string, known []string) string {
	w := strings.ToLower(strings.TrimPrefix(name, prefix))
	if slices.Contains(known, w) {
		return w
	}
	return known[len(known)-1]
}

func flag(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// label makes of what another node said a label that is short and can be shown.
func label(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	if r := []rune(s); len(r) > maxLabel {
		s = string(r[:maxLabel])
	}
	return s
}
