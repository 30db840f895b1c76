package gateway

import (
	"context"
	"encoding/hex"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Instance is what the gateway needs to know of one instance.
type Instance struct {
	// ID and Name of the instance.
	ID   string
	Name string
	// ServedNames are the model names under which people ask for it. Name and
	// ModelID find it too.
	ServedNames []string
	ModelID     string
	// Engine is its engine's name, for /v1/models.
	Engine string
	// State is its state in one word ("ready", "loading", "failed"). What is
	// "stopping", "stopped" or "failed" has its requests broken off.
	State string
	// Ready says whether requests may be sent to it.
	Ready bool
	// Reason says why it is not ready, for people.
	Reason string
	// OwnerNode and OwnerName are ID and name of the node of rank 0.
	OwnerNode string
	OwnerName string
	// HeadAddr is the engine's HTTP address on this node's loopback
	// ("127.0.0.1:41237"), when this node owns the instance.
	HeadAddr string
	// Secret is the bearer token that the engine wants, "" for none; known only
	// where HeadAddr is.
	Secret string
	// Created is when it was asked for.
	Created time.Time
}

// Options are what a Gateway needs. Functions are called for each request and
// must be quick.
type Options struct {
	// Self is the node ID of this node.
	Self string
	// Instances returns every instance of the cluster as it is known now.
	Instances func() []Instance
	// DialPeer opens a connection to the gateway of another node
	// (tbcluster-http/1); HTTP/1.1 is spoken over it.
	DialPeer func(ctx context.Context, nodeID string) (net.Conn, error)
	// LocalNames returns further host names of this machine that a client may
	// use in Host; localhost and loopback addresses always may. Nil means none.
	LocalNames func() []string
	// APIKeys returns the keys that admit a client on listeners that are not
	// loopback; while it returns none, such listeners refuse everything.
	APIKeys func() []string
	// Activity is told +1 when a request is handed to an instance and -1 when
	// its answer has ended. Nil means nobody asks.
	Activity func(instanceID string, delta int)
	// Log gets refusals and failures, never prompts or answers. Nil means none.
	Log *slog.Logger
	// MaxBodyBytes bounds a request's body; 0 means 32 MiB.
	MaxBodyBytes int64
	// MaxConcurrent bounds the requests under way; 0 means 256.
	MaxConcurrent int
	// DialTimeout bounds connecting to an engine or a peer; 0 means 5 s.
	DialTimeout time.Duration
}

// Gateway routes requests to instances. Its methods may be called at once.
type Gateway struct {
	o     Options
	log   *slog.Logger
	local *http.Transport // to engines on this node
	peers *http.Transport // to gateways of other nodes

	times times
	slots chan struct{} // requests under way
	held  atomic.Int64  // bytes of requests that are held in memory

	mu    sync.Mutex
	turn  uint64
	loads map[string]*load // by instance ID
}

// times bounds how long clients and engines are waited for.
type times struct {
	header time.Duration // for the header of a request
	body   time.Duration // for its body, and more while it comes fast enough
	idle   time.Duration // between two requests of a connection
	client time.Duration // for the client to take one piece of an answer
	ended  time.Duration // how often it is asked whether an instance has ended
	last   time.Duration // for requests under way when serving ends
}

var usualTimes = times{
	header: 10 * time.Second, body: 15 * time.Second, idle: 2 * time.Minute, client: 2 * time.Minute,
	// An engine that hangs on a dead cable closes no connection.
	ended: 500 * time.Millisecond, last: 2 * time.Second,
}

// load is what one instance has to do for this gateway.
type load struct {
	open int
	last uint64 // turn in which it was taken last
}

const (
	defaultBody       = 32 << 20
	defaultConcurrent = 256
	defaultDial       = 5 * time.Second
	// heldBytes bounds the memory of all requests under way together.
	heldBytes = 256 << 20
)

// New returns a gateway. It listens nowhere until Serve or ServeConn is called.
func New(o Options) *Gateway {
	if o.MaxBodyBytes <= 0 {
		o.MaxBodyBytes = defaultBody
	}
	if o.MaxConcurrent <= 0 {
		o.MaxConcurrent = defaultConcurrent
	}
	if o.DialTimeout <= 0 {
		o.DialTimeout = defaultDial
	}
	if o.LocalNames == nil {
		o.LocalNames = func() []string { return nil }
	}
	if o.APIKeys == nil {
		o.APIKeys = func() []string { return nil }
	}
	if o.Activity == nil {
		o.Activity = func(string, int) {}
	}
	g := &Gateway{o: o, log: o.Log, times: usualTimes, slots: make(chan struct{}, o.MaxConcurrent), loads: map[string]*load{}}
	if g.log == nil {
		g.log = slog.New(slog.DiscardHandler)
	}
	dial := net.Dialer{Timeout: o.DialTimeout}
	g.local = &http.Transport{
		DialContext: dial.DialContext,
		// Nothing is to be gained on loopback, and an engine that was started
		// anew is never met over a connection to the old one.
		DisableKeepAlives:  true,
		DisableCompression: true,
	}
	g.peers = &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			id, err := nodeOf(addr)
			if err != nil {
				return nil, err
			}
			ctx, cancel := context.WithTimeout(ctx, o.DialTimeout)
			defer cancel()
			return o.DialPeer(ctx, id)
		},
		DisableCompression:  true,
		MaxIdleConnsPerHost: 4,
		IdleConnTimeout:     30 * time.Second,
	}
	return g
}

// hostOf writes a node ID as the host of a URL; nodeOf reads it back.
func hostOf(nodeID string) string { return hex.EncodeToString([]byte(nodeID)) + ".node" }

func nodeOf(addr string) (string, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	id, err := hex.DecodeString(strings.TrimSuffix(host, ".node"))
	return string(id), err
}

// LoopbackHandler serves clients of loopback listeners: Host and Origin are
// checked, no key is needed. On a connection to any other address it refuses
// everything.
func (g *Gateway) LoopbackHandler() http.Handler { return g.front(g.checkLoopback) }

// OpenHandler serves clients of listeners on other addresses: a key is needed
// (Authorization: Bearer KEY), and Origin is checked.
func (g *Gateway) OpenHandler() http.Handler { return g.front(g.checkKey) }

// SocketHandler serves clients of a Unix socket, which a web page cannot reach:
// nothing is checked.
func (g *Gateway) SocketHandler() http.Handler {
	return g.front(func(*http.Request) *problem { return nil })
}

// PeerHandler serves the gateways of other nodes over connections that are
// already authenticated. It serves only instances that this node owns.
func (g *Gateway) PeerHandler() http.Handler { return http.HandlerFunc(g.servePeer) }

// RefusePeer answers the gateway of a node that may not have models answer, so
// that whoever asks there reads why.
func RefusePeer(why string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		// What is left of the request is not read.
		w.Header().Set("Connection", "close")
		(&problem{status: http.StatusForbidden, kind: notAllowed, code: "role_too_low", elsewhere: true, message: why}).write(w)
	})
}

// Close ends the connections to other nodes that are idle.
func (g *Gateway) Close() { g.peers.CloseIdleConnections() }
