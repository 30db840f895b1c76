package discover

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"

	"tbcluster/mesh/identity"
)

// Bounds of what one announcement may say.
const (
	maxTXT       = 32  // strings
	maxString    = 255 // bytes of one, by the standard
	maxAddresses = 16
	maxInstances = 16 // names in one message
)

// proto is the major version of the control protocol that we announce.
const proto = 1

// said is what somebody announced, cleaned. None of it is true for that.
type said struct {
	node  identity.NodeID
	name  string
	os    string
	proto int
	port  uint16
	pair  string
	bye   bool
	alone bool         // an answer to this node, which nobody else heard
	addrs []netip.Addr // without zones
	// instance is the name under which it was said: another one with every
	// announcement.
	instance string
	// turn orders what one process said; zero of those that do not count.
	turn turn
}

// turn is the place of an announcement among those of one process.
type turn struct {
	process string // other after every start
	n       uint64 // from 1 on
}

// before reports whether t was said earlier than u, as far as that can be told.
func (t turn) before(u turn) bool {
	return t.process != "" && t.process == u.process && t.n < u.n
}

func (t turn) String() string { return t.process + "." + strconv.FormatUint(t.n, 10) }

// parseTurn reads a turn; one that is none, or of a newer version, orders nothing.
func parseTurn(s string) turn {
	process, number, _ := strings.Cut(s, ".")
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return turn{}
	}
	return turn{word(process, 16), n}
}

// parseSaid reads an announcement: its name, TXT strings, SRV port and addresses.
// Unknown keys are of newer versions.
func parseSaid(instance string, txt []string, port int, ips []net.IP) (said, error) {
	s := said{instance: word(instance, 64)}
	if len(txt) > maxTXT {
		return said{}, fmt.Errorf("%d TXT strings", len(txt))
	}
	for _, t := range txt {
		if len(t) > maxString {
			return said{}, errors.New("a TXT string that is too long")
		}
		key, value, _ := strings.Cut(t, "=")
		var err error
		switch key {
		case "id":
			s.node, err = identity.ParseID(value)
		case "name":
			s.name = identity.CleanName(value)
		case "os":
			s.os = word(value, 16)
		case "proto":
			s.proto, err = strconv.Atoi(value)
			if err == nil && (s.proto < 0 || s.proto > 1<<16) {
				err = fmt.Errorf("protocol version %d", s.proto)
			}
		case "port":
			port, err = strconv.Atoi(value)
		case "pair":
			if s.pair = word(value, 8); strings.Trim(s.pair, "0123456789") != "" {
				err = errors.New("a pairing number that is none")
			}
		case "turn":
			s.turn = parseTurn(value)
		case "bye":
			s.bye = value == "1"
		}
		if err != nil {
			return said{}, err
		}
	}
	if s.node == "" {
		return said{}, errors.New("no node ID")
	}
	if s.bye {
		return s, nil
	}
	if port < 1 || port > 65535 {
		return said{}, fmt.Errorf("port %d", port)
	}
	s.port = uint16(port)
	for _, ip := range ips {
		a, ok := netip.AddrFromSlice(ip)
		if a = a.Unmap(); ok && usable(a) && len(s.addrs) < maxAddresses {
			s.addrs = append(s.addrs, a)
		}
	}
	return s, nil
}

// parseAnswer reads the announcements in a message, of the first maxInstances names
// in it. One that cannot be read is left out; the error is that of the last.
func parseAnswer(data []byte) (list []said, err error) {
	msg := new(dns.Msg)
	if err := msg.Unpack(data); err != nil {
		return nil, err
	}
	if !msg.Response {
		return nil, errors.New("a question")
	}
	const serviceName = service + "." + domain
	records := slices.Concat(msg.Answer, msg.Ns, msg.Extra)
	var names []string
	for _, r := range records {
		// A name that is not to be kept for a moment is one that goes.
		if p, ok := r.(*dns.PTR); ok && p.Hdr.Name == serviceName && p.Hdr.Ttl > 0 && len(names) < maxInstances && !slices.Contains(names, p.Ptr) {
			names = append(names, p.Ptr)
		}
	}
	for _, name := range names {
		var txt []string
		var ips []net.IP
		port, host := 0, ""
		for _, r := range records {
			if r.Header().Name != name {
				continue
			}
			switch r := r.(type) {
			case *dns.SRV:
				port, host = int(r.Port), r.Target
			case *dns.TXT:
				txt = r.Txt
			}
		}
		for _, r := range records {
			if host == "" || r.Header().Name != host {
				continue
			}
			switch r := r.(type) {
			case *dns.A:
				ips = append(ips, r.A)
			case *dns.AAAA:
				ips = append(ips, r.AAAA)
			}
		}
		s, wrong := parseSaid(strings.TrimSuffix(name, "."+serviceName), txt, port, ips)
		if wrong != nil {
			err = wrong
			continue
		}
		list = append(list, s)
	}
	return list, err
}

// usable says whether a node can be at such an address.
func usable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() &&
		a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// word keeps letters, digits, "-", "." and "_" of s, n of them at most.
func word(s string, n int) string {
	var b strings.Builder
	for _, r := range strings.ToLower(s) {
		if (r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || strings.ContainsRune("-._", r)) && b.Len() < n {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// txt is what this node announces.
func (a Announcement) txt(self identity.NodeID, at turn) []string {
	t := []string{
		"proto=" + strconv.Itoa(proto), "id=" + string(self), "name=" + identity.CleanName(a.Name),
		"port=" + strconv.Itoa(int(a.Port)), "os=" + word(a.OS, 16), "turn=" + at.String(),
	}
	if a.Pair != "" {
		t = append(t, "pair="+a.Pair)
	}
	return t
}
