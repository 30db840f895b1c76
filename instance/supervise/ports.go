package supervise

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"syscall"

	"tbcluster/api/fault"
)

// PortRange is where ports of ranks are taken from, both ends included.
type PortRange struct{ First, Last uint16 }

// DefaultPorts are below the ports that Linux and macOS give to outgoing
// connections.
var DefaultPorts = PortRange{21000, 21999}

// ports hands out ports: each is held by one holder at a time and was free a
// moment ago.
type ports struct {
	within PortRange
	held   map[netip.AddrPort]string // holder
	next   uint16
}

// newPorts begins where seed says, so that the agents of several users of one
// machine seldom try the same ports at the same time.
func newPorts(r PortRange, seed string) *ports {
	if r.First == 0 || r.Last < r.First {
		r = DefaultPorts
	}
	h := fnv.New32a()
	h.Write([]byte(seed))
	return &ports{within: r, held: map[netip.AddrPort]string{}, next: r.First + uint16(h.Sum32()%(uint32(r.Last-r.First)+1))}
}

// take finds a port on addr. Numbers go round, so that one that was just given
// back is not used again at once.
func (p *ports) take(addr netip.Addr, holder string) (uint16, error) {
	n := int(p.within.Last) - int(p.within.First) + 1
	var last error
	for range n {
		at := netip.AddrPortFrom(addr, p.next)
		if p.next++; p.next > p.within.Last || p.next < p.within.First {
			p.next = p.within.First
		}
		if _, ok := p.held[at]; ok {
			continue
		}
		if err := probe(at); err != nil {
			last = err
			if errors.Is(err, syscall.EADDRNOTAVAIL) {
				break
			}
			continue
		}
		p.held[at] = holder
		return at.Port(), nil
	}
	fix := "end what listens on them: `ss -ltnp` on Linux, `lsof -iTCP -sTCP:LISTEN` on macOS"
	if errors.Is(last, syscall.EADDRNOTAVAIL) {
		fix = "the cable that the address belongs to may just have been pulled: try again"
	}
	return 0, fault.New(fault.PortInUse, fmt.Sprintf("none of the ports %d to %d on %s is free for a rank", p.within.First, p.within.Last, addr), last, fix)
}

// probe binds a port as an engine would.
func probe(at netip.AddrPort) error {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return err
	}
	return l.Close()
}

// release gives back everything of a holder.
func (p *ports) release(holder string) {
	for at, h := range p.held {
		if h == holder {
			delete(p.held, at)
		}
	}
}
