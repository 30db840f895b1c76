// Package transport is the seam between transfer and what carries its frames
// from worker to worker. Each transport is a package of its own; a Set holds
// those that a worker knows, by name.
//
// Chunks, digests, resending and resuming are not a transport's matter: it
// delivers frames in order on one connection, or fails.
package transport

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"net/netip"
	"sort"

	"tbcluster/transfer/wire"
)

// Hash is the SHA-256 of a certificate in DER form.
type Hash [sha256.Size]byte

// Identity is what one worker proves itself with and whom it accepts.
type Identity struct {
	Certificate tls.Certificate
	// Peer reports whether a certificate is one that the coordinator named.
	Peer func(Hash) bool
}

// Conn is one connection. Send may be called from several goroutines, Receive
// from one. Close may be called at any time, more than once.
type Conn interface {
	// Send hands over one frame; payload is free again when it returns.
	Send(h wire.Header, payload []byte) error
	// Receive reads one frame. Its payload is read into buf; one that does not
	// fit is an error.
	Receive(buf []byte) (wire.Header, []byte, error)
	Close() error
}

// Pace is called before n bytes are written; it waits while they would be too
// many, and counts them. It may be nil.
type Pace func(ctx context.Context, n int) error

// DialRequest is one connection to make.
type DialRequest struct {
	Interface string     // to bind to; "" for none
	Local     netip.Addr // source address
	Remote    netip.Addr
	// Port is what the other side's Listener said.
	Port     uint16
	Identity Identity
	Pace     Pace
}

// ListenRequest is where to wait for connections.
type ListenRequest struct {
	Interface string
	Local     netip.Addr
	Identity  Identity
}

// Listener gives connections whose peers have proven themselves; others are
// dropped without a word to the caller.
type Listener interface {
	Accept(ctx context.Context) (Conn, error)
	// Port to tell the dialling side.
	Port() uint16
	Close() error
}

// Transport is one way to carry frames.
type Transport interface {
	Name() string
	Dial(ctx context.Context, r DialRequest) (Conn, error)
	Listen(ctx context.Context, r ListenRequest) (Listener, error)
}

// Set holds transports by name.
type Set map[string]Transport

// NewSet returns a Set of ts.
func NewSet(ts ...Transport) Set {
	s := Set{}
	for _, t := range ts {
		s[t.Name()] = t
	}
	return s
}

// Get returns the transport of that name.
func (s Set) Get(name string) (Transport, error) {
	if t, ok := s[name]; ok {
		return t, nil
	}
	names := make([]string, 0, len(s))
	for n := range s {
		names = append(names, n)
	}
	sort.Strings(names)
	return nil, fmt.Errorf("no transport %q here, only %v", name, names)
}
