package discover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// listener is the library at work in a network namespace that has nobody else in
// it: what is sent there is answers of a hostile neighbour.
type listener struct {
	*mdns
	said    chan said
	sending *net.UDPConn
}

// alone runs f on a thread with a network of its own and a listener there. The
// error wraps os.ErrPermission where there are no network namespaces.
func alone(f func(l *listener) error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its network
		done <- func() error {
			ns, err := netns.New()
			if err != nil {
				return err
			}
			defer ns.Close()
			l, err := newListener()
			if err != nil {
				return err
			}
			defer l.close()
			defer l.sending.Close()
			return f(l)
		}()
	}()
	return <-done
}

func newListener() (*listener, error) {
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "lan0"}, PeerName: "lan1"}
	if err := netlink.LinkAdd(veth); err != nil {
		return nil, err
	}
	var near *net.Interface
	for i, name := range []string{"lan0", "lan1"} {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return nil, err
		}
		addr, err := netlink.ParseAddr(fmt.Sprintf("192.0.2.%d/24", i+1))
		if err != nil {
			return nil, err
		}
		for _, err := range []error{netlink.AddrAdd(link, addr), netlink.LinkSetUp(link)} {
			if err != nil {
				return nil, err
			}
		}
		if near, err = net.InterfaceByName(name); err != nil {
			return nil, err
		}
	}
	l := &listener{said: make(chan said, 1000)}
	l.mdns = &mdns{self: forgedID(), full: make(chan struct{}, 1), log: slog.New(slog.DiscardHandler),
		interfaces: []net.Interface{*near}, addresses: map[string][]netip.Prefix{},
		found: func(s said) {
			select {
			case l.said <- s:
			default: // nobody waits for so many
			}
		}}
	var err error
	// It arrives where it was sent: multicast is looped back.
	l.sending, err = net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(192, 0, 2, 2)}, group4)
	return l, err
}

// honest waits until the announcement of an honest node is heard; it is sent as
// often as that takes, since UDP may lose it.
func (l *listener) honest(ctx context.Context) error {
	id := forgedID()
	txt := Announcement{Name: "honest", Port: 7871}.txt(id, turn{"honest", 1})
	deadline := time.After(time.Minute)
	for {
		data, err := response(l.instance("honest"), 7871, txt, prefixes("192.0.2.7/24"), 120).Pack()
		if err != nil {
			return err
		}
		if _, err := l.sending.Write(data); err != nil {
			return err
		}
		again := time.After(100 * time.Millisecond)
	wait:
		for {
			select {
			case s := <-l.said:
				if s.node == id {
					return nil
				}
			case <-again:
				break wait
			case <-deadline:
				return errors.New("an honest node is heard no more")
			}
		}
		select {
		case <-l.full:
			l.browse(ctx, nil)
		default:
		}
	}
}

func TestABrowseThatHasHeardTooMuchSaysSo(t *testing.T) {
	err := alone(func(l *listener) error {
		l.browse(t.Context(), nil)
		if err := l.honest(t.Context()); err != nil {
			return err
		}
		deadline := time.After(time.Minute)
		for {
			txt := Announcement{Name: "forged", Port: 7871}.txt(forgedID(), turn{"forged", 1})
			data, err := response(l.instance("forged"), 7871, txt, prefixes("192.0.2.9/24"), 120).Pack()
			if err != nil {
				return err
			}
			if _, err := l.sending.Write(data); err != nil {
				return err
			}
			select {
			case <-l.full:
				// It hears nobody until it is begun anew, and then everybody.
				l.browse(t.Context(), nil)
				return l.honest(t.Context())
			case <-deadline:
				return errors.New("it goes on and on")
			case <-time.After(time.Millisecond):
			}
		}
	})
	if errors.Is(err, os.ErrPermission) {
		t.Skip("no network namespaces here:", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// FuzzAnswer sends what a neighbour may send to the library as it runs. Nothing
// panics, nothing of it is believed, and an honest node is heard afterwards.
func FuzzAnswer(f *testing.F) {
	id := forgedID()
	name := "n." + service + "." + domain
	for _, txt := range [][]string{
		Announcement{Name: "a", Port: 1}.txt(id, turn{"a", 1}), {"id=" + string(id), "bye=1"}, {""}, {"id=x", "port=99999"}, {"id=" + string(id), "pair=\x1b[2J"},
	} {
		m := response("n", 7871, txt, prefixes("192.0.2.9/24", "fe80::9/64"), 120)
		for _, change := range []func(*dns.Msg){
			func(*dns.Msg) {},
			func(m *dns.Msg) { m.Answer = append(m.Answer, m.Answer...) },
			func(m *dns.Msg) { m.Answer = m.Answer[2:] },
			func(m *dns.Msg) { m.Ns, m.Answer = m.Answer, nil },
			func(m *dns.Msg) { m.Response = false },
			func(m *dns.Msg) { m.Answer[0].Header().Ttl = 0 },
		} {
			c := m.Copy()
			change(c)
			if data, err := c.Pack(); err == nil {
				f.Add(data)
			}
		}
	}
	many := new(dns.Msg)
	many.Response = true
	for i := range 200 {
		many.Answer = append(many.Answer, &dns.PTR{Hdr: dns.RR_Header{Name: service + "." + domain, Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: 9}, Ptr: fmt.Sprintf("%d.%s", i, name)})
	}
	if data, err := many.Pack(); err == nil {
		f.Add(data)
	}
	f.Add([]byte{})
	f.Add([]byte{0, 0, 0x84, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xc0, 0x0c})
	type ask struct {
		data []byte
		done chan error
	}
	asks, ended := make(chan ask), make(chan error, 1)
	ready := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	// One listener for all inputs of this process.
	go func() {
		ended <- alone(func(l *listener) error {
			close(ready)
			l.browse(ctx, nil)
			n := 0
			for a := range asks {
				if n++; n%maxEntries == 0 {
					l.browse(ctx, nil) // as the finder does every ten seconds
				}
				_, _ = l.sending.Write(a.data[:min(len(a.data), 9000)]) // what cannot be sent harms nobody
				a.done <- l.honest(ctx)
			}
			return nil
		})
	}()
	select {
	case <-ready:
	case err := <-ended:
		if errors.Is(err, os.ErrPermission) {
			f.Skip("no network namespaces here:", err)
		}
		f.Fatal(err)
	}
	f.Cleanup(func() {
		close(asks)
		if err := <-ended; err != nil {
			f.Error(err)
		}
	})
	f.Fuzz(func(t *testing.T, data []byte) {
		a := ask{data, make(chan error, 1)}
		asks <- a
		if err := <-a.done; err != nil {
			t.Fatal(err)
		}
	})
}
