//go:build linux

package usb4

import (
	"fmt"
	"strings"
)

// describe says what a control packet says, for people.
func (p *packet) describe(fromDriver bool) string {
	switch p.kind {
	case packetRead, packetWrite:
		return p.describeAccess(fromDriver)
	case packetError:
		return p.describeError()
	case packetEvent:
		what := "plug"
		if p.words[2]>>31 != 0 {
			what = "unplug"
		}
		return fmt.Sprintf("EVENT route %x: %s, adapter %d", p.route(), what, p.words[2]&0x3f)
	case packetXDomainRequest, packetXDomainResponse:
		return p.describeXDomain()
	case packetNotifyAck:
		return fmt.Sprintf("NOTIFY ACK route %x", p.route())
	}
	return fmt.Sprintf("type %d route %x: % x", p.kind, p.route(), p.words[2:p.n])
}

var errorNames = map[uint32]string{
	errorNotConnected: "not connected", 1: "link error", errorSpace: "no such space or offset", errorNoPort: "no such port",
	errorAckPlug: "acknowledged", 8: "loop", 12: "header error", 13: "flow control error", errorLocked: "locked",
}

func (p *packet) describeError() string {
	w := p.words[2]
	name, ok := errorNames[w&0xff]
	if !ok {
		name = fmt.Sprintf("code %d", w&0xff)
	}
	if w&0xff == errorAckPlug {
		name = map[uint32]string{2: "plug acknowledged", 3: "unplug acknowledged"}[w>>30]
		if name == "" {
			name = "acknowledged"
		}
		return fmt.Sprintf("ACK route %x: %s, adapter %d", p.route(), name, w>>8&0x3f)
	}
	return fmt.Sprintf("ERROR route %x: %s, adapter %d", p.route(), name, w>>8&0x3f)
}

func (p *packet) describeAccess(fromDriver bool) string {
	kind := "READ"
	if p.kind == packetWrite {
		kind = "WRITE"
	}
	if p.n < 3 {
		return kind + " too short"
	}
	a := address(p.words[2])
	var b strings.Builder
	fmt.Fprintf(&b, "%s route %x ", kind, p.route())
	// In an answer, the field of the adapter has the one it came from.
	name := func(i uint32) string { return fmt.Sprintf("%#x", a.offset()+i) }
	switch a.space() {
	case spaceRouter:
		b.WriteString("router")
		name = func(i uint32) string { return named(routerNames, a.offset()+i) }
	case spaceAdapter:
		b.WriteString("adapter")
		name = func(i uint32) string { return named(adapterNames, a.offset()+i) }
	case spacePaths:
		b.WriteString("path")
		name = func(i uint32) string { o := a.offset() + i; return fmt.Sprintf("hop %d dword %d", o/2, o%2) }
	case spaceCounters:
		b.WriteString("counters")
	}
	if fromDriver && a.space() != spaceRouter {
		fmt.Fprintf(&b, " %d", a.adapter())
	}
	fmt.Fprintf(&b, " %#x+%d seq %d", a.offset(), a.length(), a.sequence())
	if data := p.words[3:p.n]; len(data) > 0 {
		b.WriteByte(':')
		for i, v := range data {
			if i == 8 {
				fmt.Fprintf(&b, ", %d more", len(data)-i)
				break
			}
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, " %s %08x", name(uint32(i)), v)
			if a.space() == spacePaths && (a.offset()+uint32(i))%2 == 0 && v&pathEnable != 0 {
				fmt.Fprintf(&b, " (to adapter %d hop %d)", v>>11&0x3f, v&0x7ff)
			}
		}
	} else if a.length() == 1 && a.space() != spaceCounters {
		b.WriteString(" " + name(0))
	}
	return b.String()
}

// named names a dword of a configuration space.
func named(names map[uint32]string, offset uint32) string {
	if n, ok := names[offset]; ok {
		return n
	}
	return fmt.Sprintf("%#x", offset)
}

var routerNames = map[uint32]string{
	routerIDs: "IDs", routerPorts: "ports", routerRoute: "route", routerEnable: "enable", routerVersion: "version",
	routerControl: "control", routerStatus: "status", routerUID: "UID", routerUID + 1: "UID high",
	routerMeta: "metadata", routerOp: "operation", routerTMU: "TMU", routerTMU + 3: "TMU rate",
}

var adapterNames = map[uint32]string{
	adapterIDs: "IDs", adapterCaps: "capabilities", adapterType: "type", adapterNumber: "number", adapterBuffers: "buffers",
	adapterHops: "hops", laneInfo: "lane", laneState: "lane state", capTMU: "TMU", capUSB4: "USB4 port",
	sideband: "sideband", sideData: "sideband data", portInfo: "port status", portCtl: "port control",
}

// xdomainNames are the packets of the inter-domain protocol (tb_msgs.h, enum
// tb_xdp_type).
var xdomainNames = map[uint32]string{
	1: "UUID request (old)", 2: "UUID response", 3: "properties request", 4: "properties response",
	5: "properties changed request", 6: "properties changed response", 7: "error response",
	12: "UUID request", 15: "link state status request", 16: "link state status response",
	17: "link state change request", 18: "link state change response",
}

// The UUIDs of protocols between domains, as their first dword is on the wire
// (xdomain.c, tb_xdp_uuid; drivers/net/thunderbolt/main.c, tbnet_svc_uuid).
const (
	uuidXDP   = 0x0ed738b6
	uuidTBNet = 0x9e588f79
)

// describeXDomain decodes struct tb_xdp_header: route, length and sequence,
// UUID, type.
func (p *packet) describeXDomain() string {
	kind := "request"
	if p.kind == packetXDomainResponse {
		kind = "response"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "XDOMAIN %s route %x", kind, p.route())
	if p.n < 8 {
		return b.String() + ": too short"
	}
	fmt.Fprintf(&b, " seq %d: ", p.words[2]>>27&3)
	w := p.words[:p.n]
	switch w[3] {
	case uuidXDP:
		name, ok := xdomainNames[w[7]]
		if !ok {
			name = fmt.Sprintf("type %d", w[7])
		}
		b.WriteString(name)
		switch {
		case w[7] == 3 && p.n > 16:
			fmt.Fprintf(&b, ", offset %d", w[16]&0xffff)
		case w[7] == 4 && p.n > 17:
			fmt.Fprintf(&b, ", offset %d of %d dwords, generation %d, %d here", w[16]&0xffff, w[16]>>16, w[17], p.n-18)
		case w[7] == 7 && p.n > 8:
			fmt.Fprintf(&b, " %d", w[8])
		case w[7] == 2 && p.n > 11:
			fmt.Fprintf(&b, " %08x-%08x-%08x-%08x", w[8], w[9], w[10], w[11])
		}
	case uuidTBNet:
		b.WriteString("thunderbolt_net")
		if p.n > 16 {
			name, ok := map[uint32]string{0: "login request", 1: "login response", 2: "logout", 3: "status"}[w[15]]
			if !ok {
				name = fmt.Sprintf("type %d", w[15])
			}
			fmt.Fprintf(&b, " %s", name)
		}
	default:
		fmt.Fprintf(&b, "protocol %08x-%08x-%08x-%08x", w[3], w[4], w[5], w[6])
	}
	return b.String()
}
