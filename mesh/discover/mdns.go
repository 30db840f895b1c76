package discover

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/grandcat/zeroconf"
	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"tbcluster/mesh/identity"
)

const (
	service = "_tbcluster._tcp"
	domain  = "local."
	// maxEntries ends a browse: the library remembers every name it was told, in
	// about a kilobyte. Among the most nodes that there are it is several for each.
	maxEntries = 1024
	// overlap is how long an old browse or announcement goes on beside the new.
	overlap = 200 * time.Millisecond
)

// mdns is all that the rest of the package knows of the library. It listens and
// answers by it, and speaks by itself where the library does not: queries as
// often as we want, their errors, and a goodbye that arrives.
//
// The library delivers a name once per browse, and drops goodbyes. So every
// announcement of ours bears a name of its own, which makes a change arrive at
// once, and a goodbye is an announcement too, with bye=1. For a moment both names
// are answered for, and arrive in any order: turns tell which is the newer. Its
// methods are for one goroutine.
type mdns struct {
	self       identity.NodeID
	found      func(said)
	full       chan struct{} // a browse has heard maxEntries names
	log        *slog.Logger
	interfaces []net.Interface
	addresses  map[string][]netip.Prefix // by interface
	cables     map[string]bool           // interfaces

	// browses are that of the cables (true) and that of the rest: a cable that
	// comes is no reason to ask the whole LAN again.
	browses   map[bool]browse
	browsers  sync.WaitGroup
	browsedAt time.Time
	server    *zeroconf.Server
	serves    map[int]bool   // interfaces of server, by index
	servers   sync.WaitGroup // those being shut down
	spoken    bool
	turn      turn   // of the last announcement
	presence  string // name under which it is said that this node is there still
}

// browse is one that goes on.
type browse struct {
	on   map[string]bool // interfaces
	stop context.CancelFunc
}

// browse listens and asks anew on the interfaces of now: on the cables and on
// the rest, wherever one that changed is or was among them; nil is all.
func (m *mdns) browse(ctx context.Context, changed map[string]bool) {
	if m.browses == nil {
		m.browses = map[bool]browse{}
	}
	m.browsedAt = time.Now()
	for _, cables := range []bool{false, true} {
		var list []net.Interface
		on := map[string]bool{}
		for _, i := range m.interfaces {
			if m.cables[i.Name] == cables {
				list, on[i.Name] = append(list, i), true
			}
		}
		again := changed == nil
		for name := range changed {
			again = again || on[name] || m.browses[cables].on[name]
		}
		if !again {
			continue
		}
		if old := m.browses[cables].stop; old != nil {
			time.AfterFunc(overlap, old)
		}
		delete(m.browses, cables)
		if len(list) > 0 { // the library would take all there are
			m.browses[cables] = browse{on: on, stop: m.browseOn(ctx, list)}
		}
	}
}

// cableNames are the interfaces of cables.
func (m *mdns) cableNames() map[string]bool {
	names := maps.Clone(m.cables)
	maps.DeleteFunc(names, func(_ string, cable bool) bool { return !cable })
	return names
}

// browseOn begins one browse.
func (m *mdns) browseOn(ctx context.Context, list []net.Interface) context.CancelFunc {
	ctx, stop := context.WithCancel(ctx)
	// Apart, so that one works where the other cannot.
	for family, ip := range map[string]zeroconf.IPType{"IPv4": zeroconf.IPv4, "IPv6": zeroconf.IPv6} {
		resolver, err := zeroconf.NewResolver(zeroconf.SelectIPTraffic(ip), zeroconf.SelectIfaces(list))
		if err != nil {
			m.log.Debug("cannot browse", "family", family, "error", err)
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		entries := make(chan *zeroconf.ServiceEntry, 32)
		if err := resolver.Browse(ctx, service, domain, entries); err != nil {
			m.log.Debug("cannot browse", "family", family, "error", err)
			cancel() // it closes entries
		}
		m.browsers.Go(func() {
			defer cancel()
			names := map[string]bool{}
			// To the end, or the library hangs in a send.
			for e := range entries {
				if e == nil || len(names) >= maxEntries {
					continue
				}
				if names[e.Instance] = true; len(names) == maxEntries {
					cancel()
					signal(m.full)
					continue
				}
				s, err := parseSaid(e.Instance, e.Text, e.Port, append(e.AddrIPv4, e.AddrIPv6...))
				if err != nil {
					m.log.Debug("an announcement that is none of ours", "error", err)
					continue
				}
				m.found(s)
			}
		})
	}
	return stop
}

// announceOn says a again where the interfaces changed, and nowhere else as far as
// it can: all nodes of a LAN would hear it whenever somebody pulls a cable.
func (m *mdns) announceOn(a Announcement, changed map[string]bool) {
	here := map[int]bool{}
	for _, i := range m.interfaces {
		if m.server == nil || !m.serves[i.Index] && !hearsAll {
			m.announce(a)
			return
		}
		here[i.Index] = true
	}
	m.serves = here // one that comes back is served anew
	if m.server != nil && a.Port != 0 {
		m.say(m.instance(identity.CleanName(a.Name)), a.txt(m.self, m.next()), a.Port, changed)
	}
}

// hearsAll says that a socket hears what is sent to a group on any interface where
// some socket of the machine has joined it (ip(7), IP_MULTICAST_ALL). So a server
// answers on an interface that came after it as soon as a browse has begun there.
const hearsAll = runtime.GOOS == "linux"

// say sends an announcement on the interfaces named, or on every one for nil.
func (m *mdns) say(name string, txt []string, port uint16, on map[string]bool) {
	v := newVoice()
	defer v.close()
	m.speak(v, on, func(i net.Interface) *dns.Msg { return response(name, int(port), txt, m.addresses[i.Name], 120) })
}

// present says a once more, to all. The library tells of a name only once, unless
// it went between: so it goes, and comes.
func (m *mdns) present(a Announcement) {
	if a.Port == 0 {
		return
	}
	if m.presence == "" {
		m.presence = m.instance("here")
	}
	v := newVoice()
	defer v.close()
	txt := a.txt(m.self, m.next())
	for _, ttl := range []uint32{0, 120} {
		m.speak(v, nil, func(i net.Interface) *dns.Msg {
			return response(m.presence, int(a.Port), txt, m.addresses[i.Name], ttl)
		})
	}
}

// next returns the turn of one more announcement.
func (m *mdns) next() turn {
	if m.turn.process == "" {
		m.turn.process = random()
	}
	m.turn.n++
	return m.turn
}

// announce says a from now on, in place of what was said before.
func (m *mdns) announce(a Announcement) {
	old := m.server
	m.server, m.serves = nil, map[int]bool{}
	if a.Port != 0 && len(m.interfaces) > 0 {
		name, txt := m.instance(identity.CleanName(a.Name)), a.txt(m.self, m.next())
		server, err := zeroconf.RegisterProxy(name, service, domain, int(a.Port), name, nil, txt, m.interfaces)
		if err != nil {
			m.log.Warn("cannot announce this node", "error", err)
		} else {
			m.server = server
			m.spoken = true
			for _, i := range m.interfaces {
				m.serves[i.Index] = true
			}
			// The library probes for half a second before it says anything.
			m.say(name, txt, a.Port, nil)
		}
	}
	if old != nil {
		// Not at once: the library counts its goroutines as they start, and a
		// new name should be known before the old one goes.
		m.servers.Go(func() {
			time.Sleep(overlap)
			old.Shutdown()
		})
	}
}

// instance returns a name that was not used before.
func (m *mdns) instance(name string) string {
	return fmt.Sprintf("%.32s-%s-%s", name, strings.ToLower(m.self.Short()), random())
}

// random returns eight digits that nobody had before.
func random() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // it does not fail
	return hex.EncodeToString(b[:])
}

// goodbye tells the others that this node goes.
func (m *mdns) goodbye() {
	if !m.spoken {
		return
	}
	v := newVoice()
	defer v.close()
	name, txt := m.instance("bye"), []string{"id=" + string(m.self), "bye=1"}
	m.speak(v, nil, func(i net.Interface) *dns.Msg { return response(name, DefaultPort, txt, m.addresses[i.Name], 1) })
}

// close ends everything.
func (m *mdns) close() {
	for _, b := range m.browses {
		b.stop()
	}
	if m.server != nil {
		m.server.Shutdown()
	}
	m.servers.Wait()
	m.browsers.Wait()
}

// ask sends a query on the interfaces named, or on every one for nil, and says
// where that does not work. Among a crowd those on the LAN are asked to answer to
// this node alone: else each of them would hear the answers of all.
func (m *mdns) ask(ctx context.Context, on map[string]bool, crowd bool) []Trouble {
	v, alone := newVoice(), false
	troubles := m.speak(v, on, func(i net.Interface) *dns.Msg {
		q := new(dns.Msg)
		q.SetQuestion(service+"."+domain, dns.TypePTR)
		q.Id, q.RecursionDesired = 0, false
		if crowd && !m.cables[i.Name] {
			q.Question[0].Qclass |= unicastAnswer
			alone = true
		}
		return q
	})
	if !alone {
		v.close()
		return troubles
	}
	m.browsers.Go(func() {
		defer v.close()
		defer context.AfterFunc(ctx, v.close)()
		m.listen(v)
	})
	return troubles
}

// unicastAnswer asks for an answer to the asking node alone (RFC 6762, 5.4).
const unicastAnswer = 1 << 15

const (
	// answerWithin is how long answers to this node alone are waited for.
	answerWithin = time.Second
	// maxAnswers bounds how many are read, by each family.
	maxAnswers = maxEntries
	// maxAnswer is the longest message of mDNS, bytes (RFC 6762, 17).
	maxAnswer = 9000
)

// listen takes the answers to a question of v.
func (m *mdns) listen(v *voice) {
	var wg sync.WaitGroup
	end := time.Now().Add(answerWithin)
	for _, c := range []*net.UDPConn{v.c4, v.c6} {
		if c == nil {
			continue
		}
		wg.Go(func() {
			if err := c.SetReadDeadline(end); err != nil {
				return // closed: the end
			}
			buffer := make([]byte, maxAnswer)
			for range maxAnswers {
				n, _, err := c.ReadFromUDPAddrPort(buffer)
				if err != nil {
					return
				}
				list, err := parseAnswer(buffer[:n])
				if err != nil {
					m.log.Debug("an answer that is none of ours", "error", err)
				}
				for _, s := range list {
					s.alone = true
					m.found(s)
				}
			}
		})
	}
	wg.Wait()
}

var (
	group4 = &net.UDPAddr{IP: net.IPv4(224, 0, 0, 251), Port: 5353}
	group6 = &net.UDPAddr{IP: net.ParseIP("ff02::fb"), Port: 5353}
)

// voice is a socket of each family to speak by.
type voice struct {
	c4, c6     *net.UDPConn // nil where there is none
	err4, err6 error
}

func newVoice() *voice {
	v := &voice{}
	if v.c4, v.err4 = net.ListenUDP("udp4", nil); v.err4 == nil {
		v.err4 = ipv4.NewPacketConn(v.c4).SetMulticastTTL(255)
	}
	if v.c6, v.err6 = net.ListenUDP("udp6", nil); v.err6 == nil {
		v.err6 = ipv6.NewPacketConn(v.c6).SetMulticastHopLimit(255)
	}
	return v
}

// close ends a voice; twice is no harm.
func (v *voice) close() {
	for _, c := range []*net.UDPConn{v.c4, v.c6} {
		if c != nil {
			_ = c.Close() // nothing was written that is not sent
		}
	}
}

// speak sends a message on the interfaces named, or on every one for nil, over
// both families.
func (m *mdns) speak(v *voice, on map[string]bool, of func(net.Interface) *dns.Msg) (troubles []Trouble) {
	for _, i := range m.interfaces {
		if on != nil && !on[i.Name] {
			continue
		}
		data, err := of(i).Pack()
		if err != nil {
			m.log.Error("cannot pack an mDNS message", "error", err)
			return troubles
		}
		has4, has6 := false, false
		for _, p := range m.addresses[i.Name] {
			has4 = has4 || p.Addr().Is4()
			has6 = has6 || p.Addr().Is6()
		}
		var errs []error
		if has4 {
			err := v.err4
			if err == nil {
				_, err = ipv4.NewPacketConn(v.c4).WriteTo(data, &ipv4.ControlMessage{IfIndex: i.Index}, group4)
			}
			errs = append(errs, err)
		}
		if has6 {
			err := v.err6
			if err == nil {
				_, err = ipv6.NewPacketConn(v.c6).WriteTo(data, &ipv6.ControlMessage{IfIndex: i.Index}, group6)
			}
			errs = append(errs, err)
		}
		// One family is enough.
		failed := len(errs) > 0
		for _, err := range errs {
			failed = failed && err != nil
		}
		if failed {
			err := errors.Join(errs...)
			troubles = append(troubles, Trouble{Interface: i.Name, Err: err, Cause: causeOf(runtime.GOOS, err)})
		}
	}
	return troubles
}

// response is an announcement of one instance at the addresses of an interface.
func response(instance string, port int, txt []string, addrs []netip.Prefix, ttl uint32) *dns.Msg {
	serviceName := service + "." + domain
	name, hostName := instance+"."+serviceName, instance+"."+domain
	header := func(name string, rrtype uint16) dns.RR_Header {
		return dns.RR_Header{Name: name, Rrtype: rrtype, Class: dns.ClassINET, Ttl: ttl}
	}
	msg := new(dns.Msg)
	msg.Response, msg.Authoritative, msg.Compress = true, true, true
	msg.Answer = []dns.RR{
		&dns.PTR{Hdr: header(serviceName, dns.TypePTR), Ptr: name},
		&dns.SRV{Hdr: header(name, dns.TypeSRV), Port: uint16(port), Target: hostName},
		&dns.TXT{Hdr: header(name, dns.TypeTXT), Txt: txt},
	}
	for _, p := range addrs {
		if len(msg.Answer) >= 3+maxAddresses {
			break
		}
		if a := p.Addr(); a.Is4() {
			msg.Answer = append(msg.Answer, &dns.A{Hdr: header(hostName, dns.TypeA), A: a.AsSlice()})
		} else {
			msg.Answer = append(msg.Answer, &dns.AAAA{Hdr: header(hostName, dns.TypeAAAA), AAAA: a.AsSlice()})
		}
	}
	return msg
}
