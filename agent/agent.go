package agent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"tbcluster/agent/config"
	"tbcluster/agent/metrics"
	"tbcluster/agent/root"
	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/gateway"
	"tbcluster/host"
	"tbcluster/host/sock"
	"tbcluster/mesh/address"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/discover"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
	"tbcluster/mesh/member"
	"tbcluster/mesh/pair"
)

// Options of an Agent.
type Options struct {
	Paths   Paths
	Config  config.Config
	Host    host.Host
	Root    *root.Client
	Program string // the tbcluster program, to start workers with
	Version string
	// Privileged says that there is a root half with rights over the machine.
	Privileged bool
	// RootPID is the process of the root half; 0 where it is not known.
	RootPID int
	Log     *slog.Logger
	// LogFile is where Log writes, for NodeService.Logs; "" where it is nowhere.
	LogFile string
}

// Agent is one running agent.
type Agent struct {
	opt  Options
	log  *slog.Logger
	root *root.Client

	key      *identity.Key
	apiCert  tls.Certificate // by which clients know this node
	store    *identity.Store
	channel  *channel.Channel
	finder   *discover.Finder
	pairer   *pair.Pairer
	member   *member.Manager
	tracker  *link.Tracker
	address  *address.Manager
	moves    *transfers
	models   *models
	ranks    *instances
	gateway  *gateway.Gateway
	metrics  *metrics.Collector
	board    *board
	sections *sectionCache
	shown    *shown

	started     time.Time
	controlPort uint16
	gatewayAddr atomic.Pointer[string]
	metricsAddr atomic.Pointer[string]
	pairNumber  atomic.Pointer[string]

	// others is how many other nodes the last picture had.
	others atomic.Int64
	// candidates, lastOwn, published, steadies and lastRTT are what was found,
	// published and posted last; they belong to the reconcile loop.
	candidates []discover.Candidate
	lastOwn    own
	published  map[string][]byte
	steadies   map[string]steady
	lastRTT    map[string]uint64
	// benching is the ID of the cable of this node that is measured.
	benching atomic.Pointer[string]
	// carrying are the interfaces of cables that are not severed, as last seen
	// by the loop.
	carrying map[string]bool

	looking sync.Mutex
	// examining is held while the doctor collects facts; heardSince is its
	// memory of nodes that announce themselves and are not connected.
	examining  sync.Mutex
	heardSince map[string]time.Time
	// twins are nodes with the same Thunderbolt domain that were up at one time.
	twins   map[twoNodes]bool
	facts   atomic.Pointer[facts]
	known   atomic.Pointer[map[string]nodeSections]
	poked   chan struct{}
	waiting chan chan struct{} // whoever waits for the next picture
	leaving chan leaveRequest
	// renewed is set when Run has ended for a new identity.
	renewed bool

	// tasks are what Shutdown waits for.
	tasks sync.WaitGroup
}

// facts are what the machine was when it was last looked at.
type facts struct {
	machine host.Machine
	tb      host.Thunderbolt
	net     host.Network
}

// leaveRequest ends Run: with undo the root half too, with renew for a new
// identity.
type leaveRequest struct{ undo, renew bool }

// New opens the state and prepares everything; nothing is served yet.
func New(ctx context.Context, opt Options) (*Agent, error) {
	a := &Agent{opt: opt, log: opt.Log, root: opt.Root, board: newBoard(), lastRTT: map[string]uint64{}, twins: map[twoNodes]bool{}, steadies: map[string]steady{}, started: time.Now(),
		poked: make(chan struct{}, 1), waiting: make(chan chan struct{}), leaving: make(chan leaveRequest, 1)}
	if err := os.MkdirAll(opt.Paths.Own(), 0o700); err != nil {
		return nil, fault.New(fault.FileIO, "make the state directory", err, "make it writable").At(opt.Paths.Own())
	}
	if err := a.look(ctx); err != nil {
		return nil, err
	}
	key, created, err := identity.OpenKey(opt.Paths.Own())
	if err != nil {
		return nil, err
	}
	if created {
		a.log.Info("made a new identity", "node", key.ID())
	}
	a.key = key
	if a.apiCert, err = identity.OpenAPI(opt.Paths.Own()); err != nil {
		return nil, err
	}
	name := opt.Config.Name
	if name == "" {
		name = a.facts.Load().machine.Hostname
	}
	if a.store, err = identity.OpenStore(opt.Paths.Own(), key, identity.StoreOptions{Name: name}); err != nil {
		return nil, err
	}
	a.sections, a.shown = newSectionCache(), newShown()
	a.channel = channel.New(key, a.store, channel.Options{
		Dialer: func(ctx context.Context, network, addr, iface string, src netip.Addr) (net.Conn, error) {
			return sock.DialContext(ctx, network, addr, sock.BindOptions{Interface: iface, Source: src, DeadAfter: deadAfter})
		},
		InterfaceOf: a.interfaceOf,
		NameOf:      a.nameOf,
		Log:         a.log.With("part", "channel"),
	})
	a.pairer = pair.New(key, a.store, a.channel, pair.Options{InTouch: a.inTouch, Log: a.log.With("part", "pair")})
	if a.finder, err = discover.New(discover.Options{
		Self: key.ID(), Dir: opt.Paths.Own(), Static: opt.Config.Peers, Interfaces: a.discoverable,
		Known:   func(id identity.NodeID) bool { _, ok := a.store.Member(id); return ok },
		Invites: func(id identity.NodeID, number string) bool { return pair.Number(id) == number },
		Log:     a.log.With("part", "discover"),
	}); err != nil {
		return nil, err
	}
	if a.member, err = a.newMember(); err != nil {
		return nil, err
	}
	history, err := link.OpenHistory(opt.Paths.Own(linkHistory), a.log.With("part", "link"))
	if err != nil {
		return nil, err
	}
	a.tracker = link.NewTracker(link.Config{Self: string(key.ID()), Dialer: a, Acked: acked, History: history, Log: a.log.With("part", "link"), Changed: a.poke})
	blocks := opt.Config.Blocks() // config.Load has checked them
	if a.address, err = address.New(address.Config{
		Self: string(key.ID()), Block: blocks[0], Spares: blocks[1:], StateFile: opt.Paths.Own(linkMemory), Peer: a, Applier: a.root,
		MTU: opt.Config.MTU, Old: !has(featureRanges), Forward: has(featureForward) && opt.Config.Forward && a.facts.Load().machine.OS == "linux",
		InUse: a.addressInUse, Log: a.log.With("part", "address"), Changed: a.poke,
	}); err != nil {
		return nil, err
	}
	if a.moves, err = openTransfers(opt.Paths.Own(transfersMemory), time.Now, a.poke); err != nil {
		return nil, err
	}
	if a.models, err = a.openModels(ctx); err != nil {
		return nil, err
	}
	if a.ranks, err = a.openInstances(); err != nil {
		return nil, err
	}
	a.gateway = a.newGateway()
	a.metrics = a.newMetrics()
	return a, nil
}

// linkMemory is the file of the addresses that were agreed for links.
const linkMemory = "links.json"

// linkHistory is the file of when links went down and what benches found.
const linkHistory = "link-history.json"

// modelsMemory is the file of models that were added by hand.
const modelsMemory = "models.json"

// transfersMemory is the file of transfers.
const transfersMemory = "transfers.json"

// deadAfter is how long a connection may go unacknowledged before the system
// ends it.
const deadAfter = 3 * time.Second

func (a *Agent) newMember() (*member.Manager, error) {
	return member.New(member.Options{
		Self: a.key.ID(), Store: a.store, Dir: a.opt.Paths.Own(), Version: a.opt.Version, Features: featureList(),
		Dial: func(ctx context.Context, node identity.NodeID) (member.Session, error) {
			return a.channel.Session(ctx, node)
		},
		Peer: func(ctx context.Context) (identity.NodeID, string, bool) {
			c, ok := channel.ConnFromContext(ctx)
			if !ok {
				return "", "", false
			}
			w := c.Via()
			return c.Peer(), w.Interface + " " + w.Addr.String(), true
		},
		Keep: []string{sectionNode, sectionInstances, sectionModels},
		Log:  a.log.With("part", "member"),
	})
}

// id returns the own node ID.
func (a *Agent) id() string { return string(a.key.ID()) }

// name returns the own name.
func (a *Agent) name() string { return a.store.Self().Name }

// nameOf returns a node's name for people.
func (a *Agent) nameOf(id identity.NodeID) string {
	if a.store != nil {
		if id == a.key.ID() {
			return a.store.Self().Name
		}
		if m, ok := a.store.Member(id); ok {
			return m.Name
		}
	}
	return id.Short()
}

// nodeName is nameOf for an ID in plain text.
func (a *Agent) nodeName(id string) string { return a.nameOf(identity.NodeID(id)) }

// Run serves until ctx ends or somebody asks for Shutdown. It returns true
// when the root half should end too.
func (a *Agent) Run(ctx context.Context) (leave bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	control, err := a.listenControl(ctx)
	if err != nil {
		return false, err
	}
	api, err := a.listenUnix(ctx, root.SocketAPI, a.opt.Paths.Socket())
	if err != nil {
		return false, errors.Join(err, control.Close())
	}
	fail := func(what string, err error) {
		if err != nil && ctx.Err() == nil {
			cancel(fmt.Errorf("%s: %w", what, err))
		}
	}
	peers := grpc.NewServer(append(channel.ServerOptions(), grpc.UnaryInterceptor(a.peerUnary), grpc.StreamInterceptor(a.peerStream))...)
	peerv1.RegisterPeerServiceServer(peers, &peerServer{a: a})
	local, clients := a.newLocalServer(), a.newClientServer()

	said := make(chan struct{}) // closed once the others have been told goodbye
	var running sync.WaitGroup
	start := func(what string, f func() error) { running.Go(func() { fail(what, f()) }) }
	remove := a.channel.Handle(channel.Link, a.serveLink)
	defer remove()
	start("serve other agents", func() error { return peers.Serve(a.channel.Listener(channel.Control)) })
	removeHTTP := a.channel.Handle(channel.HTTP, func(c *channel.Conn) { a.servePeerGateway(ctx, c) })
	defer removeHTTP()
	start("the control port", func() error { return a.channel.Serve(ctx, control) })
	// Nobody is answered before there is a state to answer from: an empty one says
	// that this node is in no cluster.
	serve := func(s *grpc.Server, l net.Listener) error {
		select {
		case <-a.board.begun:
			return s.Serve(l)
		case <-ctx.Done():
			return l.Close()
		}
	}
	programs := a.channel.ClientListener(channel.ClientServer{Certificate: a.apiCert, Trusted: a.store.TrustedClient})
	start("clients", func() error { return serve(clients, programs) })
	start("the API socket", func() error { return serve(local, api) })
	start("discovery", func() error { return a.finder.Run(ctx) })
	start("membership", func() error { defer close(said); return a.member.Run(ctx) })
	start("addresses", func() error { return a.address.Run(ctx) })
	start("instances", func() error { return a.ranks.run(ctx) })
	start("the gateway", func() error { return a.serveGateway(ctx) })
	start("metrics", func() error { return a.serveMetrics(ctx) })
	running.Go(func() { a.watchHost(ctx) })
	running.Go(func() { a.reconcileLoop(ctx) })
	running.Go(func() { a.meetStatic(ctx) })
	running.Go(func() { a.scanLoop(ctx) })
	running.Go(func() { a.digestLoop(ctx) })
	running.Go(func() { a.doctorLoop(ctx) })
	a.announce()
	a.log.Info("agent started", "node", a.id(), "name", a.name(), "version", a.opt.Version, "control_port", a.controlPort,
		"socket", a.opt.Paths.Socket(), "privileged", a.opt.Privileged)

	var gone <-chan struct{}
	if a.root.Done != nil {
		gone = a.root.Done
	}
	select {
	case <-ctx.Done():
	case <-gone:
		err = fault.Newf(fault.Internal, "start it again: `tbcluster up`", "the root half is gone")
	case q := <-a.leaving:
		leave, a.renewed = q.undo, q.renew
	}
	if err == nil {
		err = context.Cause(ctx)
		if errors.Is(err, context.Canceled) {
			err = nil
		}
	}
	a.log.Info("agent ends", "leave", leave, "cause", err)
	cancel(nil)
	select {
	case <-said:
	case <-time.After(goodbyeFor):
	}
	ended := make(chan error, 1)
	go func() {
		// Streams of watchers end only with their clients: they are cut off.
		local.Stop()
		clients.Stop()
		peers.Stop()
		a.tracker.Close()
		a.gateway.Close()
		err := a.channel.Close()
		a.tasks.Wait()
		running.Wait()
		ended <- err
	}()
	select {
	case cerr := <-ended:
		err = errors.Join(err, cerr)
	case <-time.After(endFor):
		// Everything that must last is on disk at any moment. Whoever waits for
		// the end is not kept waiting by what hangs, and it is said what did.
		stacks := make([]byte, 1<<20)
		a.log.Error("something does not end and is left", "after", endFor, "stacks", string(stacks[:runtime.Stack(stacks, true)]))
	}
	return leave, err
}

// endFor bounds how long the end waits for what was begun.
const endFor = 10 * time.Second

// goodbyeFor bounds how long the end waits for others to hear of it.
const goodbyeFor = 2 * time.Second

// listenControl listens on the configured control port, or the next free one.
func (a *Agent) listenControl(ctx context.Context) (net.Listener, error) {
	const tries = 32
	var last error
	for i := range tries {
		port := a.opt.Config.ControlPort + i
		if port > 65535 {
			break
		}
		l, err := sock.Listen(ctx, "tcp", ":"+strconv.Itoa(port), "")
		if err == nil {
			a.controlPort = uint16(port)
			return l, nil
		}
		last = err
	}
	return nil, fault.New(fault.PortInUse, fmt.Sprintf("listen on a control port from %d on", a.opt.Config.ControlPort), last,
		"set another control_port in "+a.opt.Paths.Config)
}

// listenUnix makes a socket in the run directory; the root half does it where
// there is one.
func (a *Agent) listenUnix(ctx context.Context, name root.SocketName, path string) (net.Listener, error) {
	if a.opt.Privileged {
		return a.root.Listen(ctx, name)
	}
	return root.ListenUnix(path)
}

// poke wakes the loop that makes one picture of all that changed.
func (a *Agent) poke() {
	select {
	case a.poked <- struct{}{}:
	default:
	}
}

// settled returns when what has changed up to now is in the cluster's state, so
// that whoever is answered next is not answered from before it.
func (a *Agent) settled(ctx context.Context) {
	done := make(chan struct{})
	select {
	case a.waiting <- done:
	case <-ctx.Done():
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}
