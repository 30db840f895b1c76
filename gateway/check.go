package gateway

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
)

// checkLoopback admits what a program on this machine sends, and refuses what
// a web page could make a browser send: under a name that only resolves here
// (DNS rebinding), or from another origin.
func (g *Gateway) checkLoopback(r *http.Request) *problem {
	if a, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
		return &problem{status: http.StatusForbidden, kind: notAllowed, code: "not_loopback",
			message: "this listener serves loopback addresses only"}
	}
	if !g.isLocalHost(r.Host) {
		return &problem{status: http.StatusForbidden, kind: notAllowed, code: "host_not_allowed",
			message: "the Host header is no name of this machine; use 127.0.0.1, [::1], localhost or its host name"}
	}
	return checkOrigin(r)
}

// checkKey admits who holds a key. A page in a browser has none, whatever name
// it uses, so Host may be anything.
func (g *Gateway) checkKey(r *http.Request) *problem {
	keys := g.o.APIKeys()
	if len(keys) == 0 {
		return &problem{status: http.StatusForbidden, kind: badKey, code: "no_api_key_set",
			message: "this address is served only with an API key, and none is set; set gateway_keys in the configuration"}
	}
	given, ok := bearer(r.Header)
	if !ok {
		return &problem{status: http.StatusUnauthorized, kind: badKey, code: "missing_api_key",
			message: "an API key is needed here: Authorization: Bearer KEY"}
	}
	// Hashes have one length and tell nothing about where two keys differ.
	sum := sha256.Sum256([]byte(given))
	match := 0
	for _, k := range keys {
		s := sha256.Sum256([]byte(k))
		if k != "" {
			match |= subtle.ConstantTimeCompare(sum[:], s[:])
		}
	}
	if match != 1 {
		return &problem{status: http.StatusUnauthorized, kind: badKey, code: "invalid_api_key", message: "the API key is not one of those set here"}
	}
	return checkOrigin(r)
}

func bearer(h http.Header) (string, bool) {
	v := h.Values("Authorization")
	if len(v) != 1 {
		return "", false
	}
	scheme, key, ok := strings.Cut(v[0], " ")
	key = strings.TrimSpace(key)
	return key, ok && strings.EqualFold(scheme, "Bearer") && key != ""
}

// checkOrigin refuses what a browser sends for a page that is not of this very
// address. The gateway serves no pages, so that is every page.
func checkOrigin(r *http.Request) *problem {
	foreign := &problem{status: http.StatusForbidden, kind: notAllowed, code: "origin_not_allowed",
		message: "requests of web pages of another origin are refused; programs send no Origin header"}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin":
	default:
		return foreign
	}
	origins := r.Header.Values("Origin")
	switch len(origins) {
	case 0:
		return nil
	case 1:
	default:
		return foreign
	}
	u, err := url.Parse(origins[0])
	if err != nil || u.Scheme != "http" || !strings.EqualFold(u.Host, r.Host) {
		return foreign
	}
	return nil
}

// isLocalHost reports whether a Host header names this machine.
func (g *Gateway) isLocalHost(hostport string) bool {
	host := hostName(hostport)
	if host == "" {
		return false
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return a.Zone() == "" && a.Unmap().IsLoopback()
	}
	if host == "localhost" {
		return true
	}
	for _, n := range g.o.LocalNames() {
		if n = strings.ToLower(strings.TrimSuffix(n, ".")); n != "" && n == host {
			return true
		}
	}
	return false
}

// hostName is the host of a Host header, lower case, without port, brackets
// and the dot of the root; "" when it is not of that form.
func hostName(hostport string) string {
	host := hostport
	switch {
	case strings.HasPrefix(hostport, "["):
		end := strings.IndexByte(hostport, ']')
		if end < 0 {
			return ""
		}
		host = hostport[1:end]
		if rest := hostport[end+1:]; rest != "" && !isPort(rest) {
			return ""
		}
		if a, err := netip.ParseAddr(host); err != nil || !a.Is6() {
			return ""
		}
		return strings.ToLower(host)
	case strings.Count(hostport, ":") == 1:
		i := strings.IndexByte(hostport, ':')
		if !isPort(hostport[i:]) {
			return ""
		}
		host = hostport[:i]
	case strings.Contains(hostport, ":"):
		return "" // an IPv6 address without brackets is no Host
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// isPort reports whether s is a colon with a port number.
func isPort(s string) bool {
	if len(s) < 2 || len(s) > 6 || s[0] != ':' {
		return false
	}
	for _, c := range []byte(s[1:]) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}
