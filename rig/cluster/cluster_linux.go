package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"tbcluster/api/fault"
	"tbcluster/rig"
	"tbcluster/rig/guest"
	"tbcluster/rig/image"
)

// Path is where the program lies in guests.
const Path = "/usr/bin/tbcluster"

// Files are what hosts need to run the program, for rig.Options.Files. program
// is a static tbcluster.
func Files(program string) []image.File {
	return []image.File{{Path: Path, Mode: 0o755, Source: program}}
}

// Modules are what the agent needs of the kernel: its packet filter.
const modules = "nf_tables nft_ct nft_limit nft_reject_inet nft_log nf_conntrack"

// Cluster is the hosts of a rig as a cluster.
type Cluster struct {
	// As names, by host, the local user as whom people of other hosts act there;
	// who is not in it is root. It is set before hosts pair.
	As map[string]string

	rig    *rig.Rig
	ctx    context.Context // of the agents
	cancel context.CancelFunc
	// Report hears, in a line, of what people would have to do again; nil is
	// silence. It is set before the first call.
	Report func(line string)

	mu     sync.Mutex
	agents map[string]*guest.Process
}

// New returns the hosts of a rig as a cluster; no agent runs yet.
func New(r *rig.Rig) *Cluster {
	c := &Cluster{rig: r, agents: map[string]*guest.Process{}, Report: func(string) {}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// Close ends the agents.
func (c *Cluster) Close() { c.cancel() }

// Log is the file of the machine in which the agent of a host writes.
func (c *Cluster) Log(h *rig.Host) string {
	return filepath.Join(c.rig.Dir(), h.Name(), "agent.log")
}

// Start starts the agent of a host and returns when it answers.
func (c *Cluster) Start(ctx context.Context, h *rig.Host) error {
	log, err := os.OpenFile(c.Log(h), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return fault.New(fault.FileIO, "keep the log of an agent", err, "").At(c.Log(h))
	}
	// One that the kernel has built in, or has not at all, is the agent's affair.
	if _, err := h.Sh(ctx, "for m in "+modules+"; do modprobe -q $m || true; done"); err != nil {
		return errors.Join(err, log.Close())
	}
	p, err := h.Start(c.ctx, guest.Command{Args: []string{Path, "agent", "--root"}, Stdout: log, Stderr: log})
	if err != nil {
		return errors.Join(err, log.Close())
	}
	c.mu.Lock()
	c.agents[h.Name()] = p
	c.mu.Unlock()
	ended := make(chan error, 1)
	go func() { ended <- errors.Join(p.Wait(), log.Close()) }()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case err := <-ended:
			cancel(fmt.Errorf("the agent of host %s has ended: %w; its log is %s", h.Name(), err, c.Log(h)))
		case <-ctx.Done():
		}
	}()
	// Nobody is told of an agent that answers, so the guest looks. A socket alone
	// may be that of one that was killed.
	_, err = h.Sh(ctx, "until [ -S /run/tbcluster/agent.sock ] && "+Path+" status -o json >/dev/null 2>&1; do sleep 0.05; done")
	if cause := context.Cause(ctx); cause != nil {
		return fault.New(fault.NoAgent, "start the agent of host "+h.Name(), cause, "")
	}
	return err
}

// Stop kills the agent of a host, if one was started.
func (c *Cluster) Stop(h *rig.Host) error {
	c.mu.Lock()
	p := c.agents[h.Name()]
	delete(c.agents, h.Name())
	c.mu.Unlock()
	if p == nil {
		return nil
	}
	if err := p.Kill(); err != nil {
		return err
	}
	<-p.Done()
	return nil
}

// Up starts the agents of all hosts, pairs them, and waits until every plugged
// cable is proven.
func (c *Cluster) Up(ctx context.Context) error {
	hosts := c.rig.Hosts()
	errs := make([]error, len(hosts))
	var all sync.WaitGroup
	for i, h := range hosts {
		all.Go(func() { errs[i] = c.Start(ctx, h) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, h := range hosts[1:] {
		if err := c.PairPatiently(ctx, hosts[0], h); err != nil {
			return err
		}
	}
	plugged := 0
	for _, cable := range c.rig.Cables() {
		if cable.Plugged() {
			plugged++
		}
	}
	_, err := c.Wait(ctx, hosts[0], fmt.Sprintf("wait for %d proven cables", plugged), func(s Status) bool {
		return s.Up() == len(hosts) && s.Proven() == plugged
	})
	return err
}

// attempts is how often hosts try to pair: emulated ones on a busy machine may be
// slower than an exchange may be. The program says so then, and to try again.
const attempts = 3

// PairPatiently is Pair, again where the program says that the time was too
// short, and for no other reason.
func (c *Cluster) PairPatiently(ctx context.Context, inviter, joiner *rig.Host, args ...string) error {
	for n := 1; ; n++ {
		err := c.Pair(ctx, inviter, joiner, args...)
		var exit *guest.ExitError
		if !errors.As(err, &exit) || exit.Code != fault.ExitTimeout || n == attempts || ctx.Err() != nil {
			return err
		}
		c.Report(fmt.Sprintf("host %s and host %s were too slow to pair, attempt %d: %v", inviter.Name(), joiner.Name(), n, err))
	}
}

// as is the local user of people of other hosts.
func (c *Cluster) as(h *rig.Host) string {
	if user := c.As[h.Name()]; user != "" {
		return user
	}
	return "root"
}

// Pair lets one host into the cluster of another, by root on both. args are given
// to the joining one besides.
func (c *Cluster) Pair(ctx context.Context, inviter, joiner *rig.Host, args ...string) error {
	what := "pair " + joiner.Name() + " with " + inviter.Name()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out, in := io.Pipe()
	p, err := inviter.Start(ctx, guest.Command{Args: []string{Path, "pair", "--as", c.as(inviter), "-o", "json"}, Stdout: in})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		err := p.Wait()
		in.CloseWithError(errors.Join(err, io.EOF))
		ended <- err
	}()
	var event struct{ Code string }
	if err := json.NewDecoder(bufio.NewReader(out)).Decode(&event); err != nil {
		return fault.New(fault.PairingFailed, what, err, "")
	}
	go func() { _, _ = io.Copy(io.Discard, out) }() // it must not wait for somebody to read
	if _, err := joiner.Run(ctx, append([]string{Path, "pair", event.Code, "--as", c.as(joiner)}, args...)...); err != nil {
		cancel()
		return errors.Join(err, <-ended)
	}
	return <-ended
}

// Status is what `tbcluster status -o json` says, as far as it is looked at.
type Status struct {
	Nodes    []Node
	Links    []Link
	Findings []Finding
}

// Node is a host as the cluster sees it.
type Node struct {
	Name, ID, State, Reason string
	Self, Privileged        bool
	BootID                  string `json:"boot_id"`
	// ControlPath is how the host that was asked reaches it: "thunderbolt0
	// 10.77.0.1:7871".
	ControlPath string `json:"control_path"`
}

// Finding is what is to be looked at.
type Finding struct {
	Code, Severity, Node, Subject, Title, Evidence string
}

// Link is a cable as the cluster sees it.
type Link struct {
	A, B           *LinkEnd
	State          string
	Evidence       string
	Reason         string
	NegotiatedGbps float64 `json:"negotiated_gbps"`
	CapableGbps    float64 `json:"capable_gbps"`
	Lanes          int
	Flaps          uint64
	Errors         uint64
	RTTUs          uint64       `json:"rtt_us"`
	Measurement    *Measurement // the last of `tbcluster links bench`
}

// Measurement is what a cable was measured at, bytes a second.
type Measurement struct {
	AToB    uint64 `json:"a_to_b_bytes_per_second"`
	BToA    uint64 `json:"b_to_a_bytes_per_second"`
	RTTUs   uint64 `json:"rtt_us"`
	Seconds float64
	Shared  bool
}

// LinkEnd is one end of it.
type LinkEnd struct {
	Node, Port, Interface, Address string
	MTU                            int
}

// Up counts the nodes that are up.
func (s Status) Up() int {
	n := 0
	for _, x := range s.Nodes {
		if x.State == "up" {
			n++
		}
	}
	return n
}

// Proven counts the cables that are proven.
func (s Status) Proven() int {
	n := 0
	for _, l := range s.Links {
		if l.State == "proven" {
			n++
		}
	}
	return n
}

// Status asks a host for the state of the cluster.
func (c *Cluster) Status(ctx context.Context, h *rig.Host) (Status, error) {
	var s Status
	out, err := h.Run(ctx, Path, "status", "-o", "json")
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		return s, fault.New(fault.Protocol, "read the status of host "+h.Name(), err, "")
	}
	return s, nil
}

// Wait follows the state of the cluster, as a host sees it, until it fits.
func (c *Cluster) Wait(ctx context.Context, h *rig.Host, what string, fits func(Status) bool) (Status, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out, in := io.Pipe()
	p, err := h.Start(ctx, guest.Command{Args: []string{Path, "status", "--watch", "-o", "json"}, Stdout: in})
	if err != nil {
		return Status{}, err
	}
	go func() { in.CloseWithError(errors.Join(p.Wait(), io.EOF)) }()
	defer out.Close()
	var last Status
	decoder := json.NewDecoder(out)
	for {
		var s Status
		if err := decoder.Decode(&s); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
			return last, &fault.Fault{Reason: fault.Timeout, What: what + " on host " + h.Name(), Where: c.Log(h), Why: fmt.Sprintf("%v; it says: %s", err, last), Err: err}
		}
		if last = s; fits(s) {
			return s, nil
		}
	}
}

// String is a status in a line.
func (s Status) String() string {
	var words []string
	for _, n := range s.Nodes {
		words = append(words, strings.Join(strings.Fields(n.Name+" "+n.State+" "+n.ControlPath+" "+n.Reason), " "))
	}
	for _, l := range s.Links {
		end := func(e *LinkEnd) string {
			if e == nil {
				return "?"
			}
			return fmt.Sprintf("%s/%s(%s %s)", e.Node, e.Port, e.Interface, e.Address)
		}
		words = append(words, strings.TrimSpace(fmt.Sprintf("%s-%s %s %s %s", end(l.A), end(l.B), l.State, l.Evidence, l.Reason)))
	}
	return strings.Join(words, "; ")
}
