package gateway

import (
	"log/slog"
	"net/http"
)

// Guard admits requests to a handler that is not the gateway's by the
// gateway's own rules: those about Host, Origin and keys.
type Guard struct {
	// LocalNames returns further host names of this machine that a client may
	// use in Host, as in Options.
	LocalNames func() []string
	// Keys are the keys of Keyed.
	Keys []string
	// Log gets refusals; nil means none.
	Log *slog.Logger
}

// Loopback serves clients of loopback listeners, as LoopbackHandler does.
func (d Guard) Loopback(h http.Handler) http.Handler {
	g := d.gateway()
	return g.admit(g.checkLoopback, h)
}

// Keyed serves clients of other listeners who have a key, as OpenHandler does.
func (d Guard) Keyed(h http.Handler) http.Handler {
	g := d.gateway()
	return g.admit(g.checkKey, h)
}

// Keyless serves everybody but web pages of another origin.
func (d Guard) Keyless(h http.Handler) http.Handler { return d.gateway().admit(checkOrigin, h) }

func (d Guard) gateway() *Gateway {
	return New(Options{LocalNames: d.LocalNames, APIKeys: func() []string { return d.Keys }, Log: d.Log})
}

// admit hands to h what passes the check.
func (g *Gateway) admit(check func(*http.Request) *problem, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p := check(r); p != nil {
			g.log.Warn("request refused", "why", p.code, "remote", r.RemoteAddr, "host", r.Host, "origin", r.Header.Get("Origin"))
			p.write(w)
			return
		}
		h.ServeHTTP(w, r)
	})
}
