package discover

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"tbcluster/mesh/identity"
)

// Bounds of what one announcement may say.
const (
	maxTXT       = 32  // strings
	maxString    = 255 // bytes of one, by the standard
	maxAddresses = 16
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
