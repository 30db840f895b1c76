package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// demoInstance is the name of the instance that the demonstration runs.
const demoInstance = "smol"

// demoPrompt is what the demonstration asks.
const demoPrompt = "What is the capital of France? Answer in one sentence."

// demo is the main job on a lab: a model copied from the first node to the
// second, run there, and asked through the last.
type demo struct {
	o       *upOptions
	machine virtualCluster
	clients []*client
	nodes   []string
	state   *tbv1.ClusterState
	model   string // file name in ~/models
}

// demoReport is what came out.
type demoReport struct {
	Answer string `json:"answer"`
	// Asked is the node whose gateway was asked, Ran the one that ran the model.
	Asked          string       `json:"asked"`
	Ran            string       `json:"ran"`
	From           string       `json:"from"`
	CopiedBytes    uint64       `json:"copied_bytes"`
	CopySeconds    float64      `json:"copy_seconds"`
	BytesPerSecond uint64       `json:"bytes_per_second"`
	Carried        []demoWayOut `json:"carried"`
}

// demoWayOut is what one interface of the source node sent during the copy.
type demoWayOut struct {
	Kind      string `json:"kind"` // "cable" or "lan"
	Interface string `json:"interface"`
	To        string `json:"to"` // node at the other end of a cable
	Bytes     uint64 `json:"bytes"`
}

func (r *demoReport) lines() []string {
	var ways []string
	for _, w := range r.Carried {
		name := "LAN " + w.Interface
		if w.Kind == "cable" {
			name = "cable " + w.Interface + " to " + w.To
		}
		ways = append(ways, fmt.Sprintf("%s %s", name, bytesText(w.Bytes)))
	}
	return []string{
		fmt.Sprintf("answer:   %s", plain(strings.Join(strings.Fields(r.Answer), " "))),
		fmt.Sprintf("          (%s on %s, asked through the gateway of %s)", demoInstance, r.Ran, r.Asked),
		fmt.Sprintf("copy:     %s from %s to %s in %.2f s, %s, verified", bytesText(r.CopiedBytes), r.From, r.Ran, r.CopySeconds, rateText(r.BytesPerSecond)),
		fmt.Sprintf("carried:  %s (bytes sent by %s, by the counters of its interfaces)", strings.Join(ways, ", "), r.From),
	}
}

func (d *demo) run(ctx context.Context) (*demoReport, error) {
	from, to, asked := 0, 1, len(d.nodes)-1
	if len(d.nodes) == 2 {
		asked = 0
	}
	r := &demoReport{From: d.nodes[from], Ran: d.nodes[to], Asked: d.nodes[asked]}
	if err := d.clear(ctx, to); err != nil {
		return nil, err
	}
	before, err := d.counters(ctx, r.From)
	if err != nil {
		return nil, err
	}
	t, err := d.copy(ctx, from, to)
	if err != nil {
		return nil, err
	}
	after, err := d.counters(ctx, r.From)
	if err != nil {
		return nil, err
	}
	r.CopiedBytes = t.GetDoneBytes()
	r.CopySeconds = t.GetFinishedAt().AsTime().Sub(t.GetStartedAt().AsTime()).Seconds()
	if r.CopySeconds > 0 {
		r.BytesPerSecond = uint64(float64(r.CopiedBytes) / r.CopySeconds)
	}
	r.Carried = d.carried(r.From, before, after)
	if err := wrongWay(r); err != nil {
		return nil, err
	}
	if err := d.place(ctx, to); err != nil {
		return nil, err
	}
	if r.Answer, err = d.ask(ctx, r.Asked); err != nil {
		return nil, err
	}
	d.o.step("%s answered through %s", demoInstance, r.Asked)
	return r, nil
}

// clear takes away what an earlier demonstration left on the lab, so that this
// one is real.
func (d *demo) clear(ctx context.Context, to int) error {
	c := d.clients[to]
	list, err := c.instance.List(ctx, &tbv1.ListInstancesRequest{})
	if err != nil {
		return err
	}
	for _, i := range list.GetInstances() {
		if i.GetName() == demoInstance {
			if _, err := stopInstance(ctx, c, i.GetId(), &stopOptions{g: d.o.g, remove: true}); err != nil {
				return err
			}
		}
	}
	_, err = d.exec(ctx, d.nodes[to], "/bin/sh", "-c", `rm -f "$HOME/models/$1"`, "sh", d.model)
	return err
}

// exec runs a command in a node and returns what it printed.
func (d *demo) exec(ctx context.Context, node string, argv ...string) (string, error) {
	var out, errOut strings.Builder
	code, err := d.machine.Exec(ctx, node, lab.ExecOptions{Argv: argv, Stdout: &out, Stderr: &errOut})
	if err == nil && code != 0 {
		err = fmt.Errorf("exit %d: %s", code, strings.TrimSpace(errOut.String()+" "+out.String()))
	}
	if err != nil {
		return "", fault.New(fault.LabFailed, "run "+argv[0]+" on "+node, err, "`tbcluster lab exec "+node+" -- …` runs it by hand").At(node)
	}
	return out.String(), nil
}

// counters returns the bytes that each interface of a node has sent.
func (d *demo) counters(ctx context.Context, node string) (map[string]uint64, error) {
	out, err := d.exec(ctx, node, "cat", "/proc/net/dev")
	if err != nil {
		return nil, err
	}
	return parseNetDev(out)
}

// parseNetDev reads /proc/net/dev and returns the bytes sent by interface.
func parseNetDev(s string) (map[string]uint64, error) {
	sent := map[string]uint64{}
	lines := bufio.NewScanner(strings.NewReader(s))
	for n := 0; lines.Scan(); n++ {
		if n < 2 {
			continue // the heading
		}
		name, numbers, ok := strings.Cut(lines.Text(), ":")
		f := strings.Fields(numbers)
		if !ok || len(f) < 9 {
			return nil, fault.Newf(fault.Internal, "this is a bug: `tbcluster bugreport` collects what we need", "a line of /proc/net/dev cannot be read: %q", lines.Text())
		}
		v, err := strconv.ParseUint(f[8], 10, 64)
		if err != nil {
			return nil, fault.New(fault.Internal, "read the bytes sent in /proc/net/dev", err, "this is a bug: `tbcluster bugreport` collects what we need")
		}
		sent[strings.TrimSpace(name)] = v
	}
	if err := lines.Err(); err != nil {
		return nil, fault.New(fault.Internal, "read /proc/net/dev", err, "this is a bug: `tbcluster bugreport` collects what we need")
	}
	return sent, nil
}

// copy copies the model, shown as cp shows it.
func (d *demo) copy(ctx context.Context, from, to int) (*tbv1.Transfer, error) {
	src, dst := d.nodes[from]+":models/"+d.model, d.nodes[to]+":models/"
	d.o.step("tbcluster cp %s %s", src, dst)
	o := &cpOptions{g: d.o.g, sources: []string{src}, destination: dst, transport: "auto", progress: "auto"}
	if d.o.g.json() {
		o.g = &globals{in: d.o.g.in, out: d.o.g.errOut, errOut: d.o.g.errOut, getenv: d.o.g.getenv, output: "text"}
	}
	c := d.clients[from]
	req, err := o.request(c.endpoint)
	if err != nil {
		return nil, err
	}
	return followCopy(ctx, c, req, newCopyView(o))
}

// carried returns what each interface sent between two readings, cables first;
// the loopback does not count.
func (d *demo) carried(node string, before, after map[string]uint64) []demoWayOut {
	peers := map[string]string{}
	for _, l := range d.state.GetLinks() {
		for _, ends := range [][2]*tbv1.LinkEnd{{l.GetA(), l.GetB()}, {l.GetB(), l.GetA()}} {
			if ends[0].GetNodeName() == node && ends[0].GetInterface() != "" {
				peers[ends[0].GetInterface()] = ends[1].GetNodeName()
			}
		}
	}
	var out []demoWayOut
	for name, sent := range after {
		if name == "lo" {
			continue
		}
		w := demoWayOut{Kind: "lan", Interface: name, Bytes: sent - min(before[name], sent)}
		if peer, ok := peers[name]; ok {
			w.Kind, w.To = "cable", peer
		}
		out = append(out, w)
	}
	slices.SortFunc(out, func(a, b demoWayOut) int {
		if a.Kind != b.Kind {
			return strings.Compare(a.Kind, b.Kind)
		}
		return strings.Compare(a.Interface, b.Interface)
	})
	return out
}

// wrongWay is an error when the bytes did not go over a cable.
func wrongWay(r *demoReport) error {
	var cable, lan uint64
	for _, w := range r.Carried {
		if w.Kind == "cable" {
			cable += w.Bytes
		} else {
			lan += w.Bytes
		}
	}
	if cable < r.CopiedBytes || lan > r.CopiedBytes/10 {
		return fault.New(fault.Connection, "the copy did not go over the cables",
			fmt.Errorf("%s were copied; the cables carried %s, the LAN %s", bytesText(r.CopiedBytes), bytesText(cable), bytesText(lan)),
			"this is a bug: `tbcluster bugreport` collects what we need").At(r.From)
	}
	return nil
}

// place runs the model on the node that it was copied to.
func (d *demo) place(ctx context.Context, on int) error {
	c := d.clients[on]
	scan, err := c.model.Scan(ctx, &tbv1.ScanRequest{})
	if err != nil {
		return err
	}
	model := ""
	for _, m := range scan.GetModels() {
		for _, cp := range m.GetCopies() {
			if filepath.Base(cp.GetPath()) == d.model && cp.GetNodeName() == d.nodes[on] && cp.GetComplete() {
				model = m.GetName()
			}
		}
	}
	if model == "" {
		return fault.New(fault.ModelUnknown, "the model that was copied is not found on "+d.nodes[on], errors.New("~/models/"+d.model+" is not in its list"), "`tbcluster models list` says what is known").At(d.nodes[on])
	}
	d.o.step("tbcluster place %s --node %s --name %s", model, d.nodes[on], demoInstance)
	o := &placeOptions{g: d.o.g, start: d.o.start}
	o.model, o.nodes, o.name = model, []string{d.nodes[on]}, demoInstance
	_, err = place(ctx, d.o.g, c, o)
	return err
}

// ask asks the instance from within a node, as a person there would.
func (d *demo) ask(ctx context.Context, node string) (string, error) {
	d.o.step("tbcluster lab exec %s -- tbcluster chat %s %q", node, demoInstance, demoPrompt)
	answer, err := d.exec(ctx, node, "tbcluster", "chat", "--max-tokens", "40", demoInstance, demoPrompt)
	if err != nil {
		return "", err
	}
	if answer = strings.TrimSpace(answer); answer == "" {
		return "", fault.Newf(fault.EngineFailed, "`tbcluster logs "+demoInstance+"` shows what the engine said", "the model answered nothing")
	}
	return answer, nil
}
