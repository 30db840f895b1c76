package discover

import (
	"context"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
)

// static is a peer of the configuration.
type static struct {
	text string
	host string
	port uint16
	now  *resolution
}

// resolution is where it is, as far as is known now.
type resolution struct {
	mu    sync.Mutex
	addrs []netip.Addr
}

func parseStatic(text string) (static, error) {
	bad := func(why string) (static, error) {
		f := fault.Newf(fault.ConfigInvalid, "write a host name or address, with \":port\" where it is not "+strconv.Itoa(DefaultPort),
			"%q is no peer", text).With("field", "peers")
		f.Why = why
		return static{}, f
	}
	s := static{text: text, host: text, port: DefaultPort, now: &resolution{}}
	if addr, err := netip.ParseAddr(text); err == nil {
		return s.fixed(addr), nil
	}
	if strings.Contains(text, ":") {
		h, p, err := net.SplitHostPort(text)
		if err != nil {
			return bad(err.Error())
		}
		port, err := strconv.ParseUint(p, 10, 16)
		if err != nil || port == 0 {
			return bad("its port is no number from 1 to 65535")
		}
		s.host, s.port = h, uint16(port)
		if addr, err := netip.ParseAddr(h); err == nil {
			return s.fixed(addr), nil
		}
	}
	if s.host == "" || len(s.host) > 253 || strings.ContainsAny(s.host, " \t\n/[]:%") {
		return bad("its host is neither a name nor an address")
	}
	return s, nil
}

// fixed is s for an address, which needs no looking up.
func (s static) fixed(addr netip.Addr) static {
	s.host = ""
	s.now.addrs = []netip.Addr{addr.Unmap()}
	return s
}

func (s static) resolved() []netip.AddrPort {
	s.now.mu.Lock()
	defer s.now.mu.Unlock()
	var list []netip.AddrPort
	for _, a := range s.now.addrs {
		list = append(list, netip.AddrPortFrom(a, s.port))
	}
	return list
}

// Resolve returns where "host" or "host:port" is, as a person writes it. Faults:
// CONFIG_INVALID for what is neither, CONNECTION for a name that is not found.
func Resolve(ctx context.Context, text string) ([]netip.AddrPort, error) {
	s, err := parseStatic(text)
	if err != nil {
		return nil, err
	}
	if s.host != "" {
		addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", s.host)
		if err != nil {
			return nil, fault.New(fault.Connection, "look up "+s.host, err, "write its address")
		}
		for _, a := range addrs[:min(len(addrs), maxAddresses)] {
			s.now.addrs = append(s.now.addrs, a.Unmap())
		}
	}
	return s.resolved(), nil
}

// resolve looks up the names of static peers until ctx ends.
func (f *Finder) resolve(ctx context.Context) {
	tick := time.NewTicker(resolveEvery)
	defer tick.Stop()
	for {
		for _, s := range f.statics {
			if s.host != "" {
				f.resolveOne(ctx, s)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (f *Finder) resolveOne(ctx context.Context, s static) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", s.host)
	if err != nil {
		f.o.Log.Warn("cannot look up a peer of the configuration", "peer", s.text, "error", err)
		return // where it was before may still be right
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	s.now.mu.Lock()
	s.now.addrs = addrs[:min(len(addrs), maxAddresses)]
	s.now.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tell()
}
