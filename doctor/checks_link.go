package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	tbclusterv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
)

// stuckAfter is how long a cable may take to become usable before that is a
// finding.
const stuckAfter = 10 * time.Second

func (f Facts) up(node string) bool {
	return node == f.Self || slices.ContainsFunc(f.Nodes, func(n *tbclusterv1.Node) bool {
		return n.GetId() == node && n.GetState() != tbclusterv1.NodeState_NODE_STATE_DOWN && n.GetState() != tbclusterv1.NodeState_NODE_STATE_UNKNOWN
	})
}

// mine returns the links about which this node speaks, with its own end: a's
// node does, unless it is down.
func (f Facts) mine(visit func(l *tbclusterv1.Link, own *tbclusterv1.LinkEnd)) {
	for _, l := range f.Links {
		a, b := l.GetA(), l.GetB()
		switch {
		case a.GetNodeId() == f.Self:
			visit(l, a)
		case b.GetNodeId() == f.Self && !f.up(a.GetNodeId()):
			visit(l, b)
		}
	}
}

// both reports whether both ends are nodes that are up.
func (f Facts) both(l *tbclusterv1.Link) bool {
	for _, end := range []*tbclusterv1.LinkEnd{l.GetA(), l.GetB()} {
		if _, renewed := f.Renewed[end.GetNodeId()]; renewed || end.GetNodeId() == "" || !f.up(end.GetNodeId()) {
			return false
		}
	}
	return true
}

// xdomain returns what this machine sees on a port now.
func (f Facts) xdomain(port string) (host.XDomain, bool) {
	for _, d := range f.Thunderbolt.Domains {
		for _, x := range d.Peers {
			if x.Port == port {
				return x, true
			}
		}
	}
	return host.XDomain{}, false
}

// linkWords name a link: "alpha–beta (ports 0-1 and 0-2)".
func linkWords(l *tbclusterv1.Link) map[string]string {
	name := func(e *tbclusterv1.LinkEnd) string {
		if e.GetNodeName() != "" {
			return e.GetNodeName()
		}
		return "an unknown machine"
	}
	text := name(l.GetA()) + "–" + name(l.GetB()) + " (port " + l.GetA().GetPort()
	if p := l.GetB().GetPort(); p != "" {
		text += " to " + p
	}
	return map[string]string{"link": text + ")"}
}

func (f Facts) links(pick func(l *tbclusterv1.Link, own *tbclusterv1.LinkEnd) (evidence string, more map[string]string)) []seen {
	var out []seen
	f.mine(func(l *tbclusterv1.Link, own *tbclusterv1.LinkEnd) {
		evidence, more := pick(l, own)
		if evidence == "" {
			return
		}
		words := linkWords(l)
		for k, v := range more {
			words[k] = v
		}
		out = append(out, seen{subject: l.GetId(), evidence: evidence, words: words})
	})
	return out
}

func isDown(l *tbclusterv1.Link) bool { return l.GetState() == tbclusterv1.LinkState_LINK_STATE_DOWN }

func checkNotPaired(f Facts) []seen {
	return f.links(func(l *tbclusterv1.Link, own *tbclusterv1.LinkEnd) (string, map[string]string) {
		x, present := f.xdomain(own.GetPort())
		if isDown(l) || !present || l.GetB() == nil || l.GetB().GetNodeId() != "" {
			return "", nil
		}
		device := l.GetB().GetNodeName()
		if device == "" {
			device = "an unknown machine"
		}
		return fmt.Sprintf("%s %s on port %s, UUID %s", x.Vendor, x.Device, own.GetPort(), x.RemoteUUID), map[string]string{"device": device}
	})
}

func checkLinkSlow(f Facts) []seen {
	return f.links(func(l *tbclusterv1.Link, _ *tbclusterv1.LinkEnd) (string, map[string]string) {
		have, can := l.GetNegotiatedGbps(), l.GetCapableGbps()
		if isDown(l) || have <= 0 || have >= can {
			return "", nil
		}
		return fmt.Sprintf("negotiated %g Gb/s over %d lanes", have, l.GetLanes()),
			map[string]string{"have": fmt.Sprintf("%g", have), "can": fmt.Sprintf("%g", can)}
	})
}

func checkLinkSilent(f Facts) []seen {
	return f.links(func(l *tbclusterv1.Link, own *tbclusterv1.LinkEnd) (string, map[string]string) {
		_, present := f.xdomain(own.GetPort())
		nic, _ := f.Network.Interface(own.GetInterface())
		if !isDown(l) || !present || !f.both(l) || !nic.Carrier || own.GetAddress() == "" || f.walled(l) {
			return "", nil
		}
		return fmt.Sprintf("%s has carrier and %s; %s", nic.Name, own.GetAddress(), l.GetReason()), nil
	})
}

func checkLinkDown(f Facts) []seen {
	return f.links(func(l *tbclusterv1.Link, own *tbclusterv1.LinkEnd) (string, map[string]string) {
		x, present := f.xdomain(own.GetPort())
		nic, _ := f.Network.Interface(own.GetInterface())
		if !isDown(l) || !present || !f.both(l) || nic.Carrier && own.GetAddress() != "" {
			return "", nil
		}
		return fmt.Sprintf("port %s sees %s %s; %s", own.GetPort(), x.Vendor, x.Device, l.GetReason()), nil
	})
}

func checkLinkUnplugged(f Facts) []seen {
	return f.links(func(l *tbclusterv1.Link, own *tbclusterv1.LinkEnd) (string, map[string]string) {
		if _, present := f.xdomain(own.GetPort()); !isDown(l) || present || !f.both(l) {
			return "", nil
		}
		times := "once"
		if n := l.GetFlaps(); n != 1 {
			times = fmt.Sprintf("%d times", n)
		}
		return fmt.Sprintf("nothing is seen on port %s; it went down %s", own.GetPort(), times), nil
	})
}

// noneFree reports whether both ends found no address that is free.
func noneFree(l *tbclusterv1.Link) bool {
	return l.GetObstacle() == tbclusterv1.LinkObstacle_LINK_OBSTACLE_NO_ADDRESS
}

func checkLinkNoAddress(f Facts) []seen {
	return f.links(func(l *tbclusterv1.Link, _ *tbclusterv1.LinkEnd) (string, map[string]string) {
		if !noneFree(l) || l.GetState() != tbclusterv1.LinkState_LINK_STATE_CABLED || !f.both(l) || age(f, l) < stuckAfter {
			return "", nil
		}
		return l.GetReason(), nil
	})
}

func checkLinkStuck(f Facts) []seen {
	if len(f.Wanted) > 0 { // no-permission says why
		return nil
	}
	return f.links(func(l *tbclusterv1.Link, _ *tbclusterv1.LinkEnd) (string, map[string]string) {
		s := l.GetState()
		if noneFree(l) { // link-without-address says why
			return "", nil
		}
		if s != tbclusterv1.LinkState_LINK_STATE_CABLED && s != tbclusterv1.LinkState_LINK_STATE_ADDRESSED || !f.both(l) || age(f, l) < stuckAfter || f.walled(l) {
			return "", nil
		}
		return strings.Trim(fmt.Sprintf("%s for %v; %s", l.GetEvidence(), age(f, l).Round(time.Second), l.GetReason()), "; "), nil
	})
}

// mtuAfter is how long both ends of a cable that has just come to where it stands
// take to say which MTU they have set.
const mtuAfter = 5 * time.Second

func checkMTU(f Facts) []seen {
	return f.links(func(l *tbclusterv1.Link, _ *tbclusterv1.LinkEnd) (string, map[string]string) {
		a, b := l.GetA().GetMtu(), l.GetB().GetMtu()
		if isDown(l) || a == 0 || b == 0 || a == b || age(f, l) < mtuAfter {
			return "", nil
		}
		return fmt.Sprintf("%s has %d, %s has %d", l.GetA().GetNodeName(), a, l.GetB().GetNodeName(), b), map[string]string{"mtu": fmt.Sprint(min(a, b))}
	})
}

func checkDriver(f Facts) []seen {
	if f.Machine.OS != "linux" || f.Thunderbolt.DriverLoaded {
		return nil
	}
	return []seen{{evidence: "the kernel shows no Thunderbolt bus"}}
}

func checkAuthorised(f Facts) []seen {
	var out []seen
	for _, d := range f.Thunderbolt.Domains {
		for _, o := range d.Others {
			if !o.Authorized {
				out = append(out, seen{subject: o.Port, evidence: fmt.Sprintf("%s %s, security level %q", o.Vendor, o.Name, d.Security),
					words: map[string]string{"device": o.Vendor + " " + o.Name, "port": o.Port}})
			}
		}
	}
	return out
}

func (f Facts) peers(pick func(x host.XDomain) string) []seen {
	var out []seen
	for _, d := range f.Thunderbolt.Domains {
		for _, x := range d.Peers {
			if evidence := pick(x); evidence != "" {
				device := x.Device
				if device == "" {
					device = "a machine"
				}
				out = append(out, seen{subject: x.Port, evidence: evidence, words: map[string]string{"device": device, "port": x.Port}})
			}
		}
	}
	return out
}

func checkNetModule(f Facts) []seen {
	if !f.Diagnosis.NoNetModule {
		return nil
	}
	return f.peers(func(x host.XDomain) string {
		if x.Interface != "" {
			return ""
		}
		return "port " + x.Port + " has no network interface, and thunderbolt_net is not loaded"
	})
}

func checkHostsOff(f Facts) []seen {
	if !f.Diagnosis.HostsOff {
		return nil
	}
	return []seen{{evidence: "the parameter xdomain of the module thunderbolt is N"}}
}

func checkDMA(f Facts) []seen {
	var out []seen
	for _, d := range f.Thunderbolt.Domains {
		if d.Security == "none" && !d.IOMMU {
			out = append(out, seen{subject: "domain " + d.ID, evidence: "domain " + d.ID + ": security none, iommu_dma_protection 0"})
		}
	}
	return out
}

func checkOffload(f Facts) []seen {
	var out []seen
	for _, name := range sorted(f.Diagnosis.Offloads) {
		on := f.Diagnosis.Offloads[name]
		out = append(out, seen{subject: name, evidence: strings.Join(on, " and ") + " are on, and so is forwarding",
			words: map[string]string{"interface": name, "off": strings.Join(on, " off ") + " off"}})
	}
	return out
}

// silentFor is how long a cable with addresses may be silent before a firewall
// is suspected.
const silentFor = 3 * time.Second

// checkFirewall is about this node's own end of a cable, whichever that is: the
// other node cannot see the firewall.
func checkFirewall(f Facts) []seen {
	if len(f.Firewalls) == 0 {
		return nil
	}
	var out []seen
	for _, l := range f.Links {
		if !f.walled(l) {
			continue
		}
		own, _ := f.own(l)
		nic, _ := f.Network.Interface(own.GetInterface())
		w := f.Firewalls[0]
		words := linkWords(l)
		words["firewall"], words["allow"] = w.Name, allow(w, nic.Name)
		var names []string
		for _, w := range f.Firewalls {
			names = append(names, w.Name)
		}
		out = append(out, seen{subject: l.GetId(), evidence: nic.Name + " has carrier and " + own.GetAddress() + "; what may drop: " + strings.Join(names, ", "), words: words})
	}
	return out
}

// allow is what lets in what comes over an interface.
func allow(w host.Firewall, iface string) string {
	switch w.Tool {
	case "ufw":
		return "sudo ufw allow in on " + iface
	case "firewalld":
		return "sudo firewall-cmd --permanent --zone=trusted --add-interface=" + iface + " && sudo firewall-cmd --reload"
	case "macOS":
		return "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add $(which tbcluster)"
	}
	return "sudo nft insert rule " + w.Family + " " + w.Table + " " + w.Chain + " iifname " + iface + " accept"
}

// walled reports whether this node has a firewall that may explain why a link
// carries nothing; that is said instead.
func (f Facts) walled(l *tbclusterv1.Link) bool {
	own, _ := f.own(l)
	nic, _ := f.Network.Interface(own.GetInterface())
	return len(f.Firewalls) > 0 && nic.Carrier && f.Suspicious(l)
}

// own returns this node's end of a link.
func (f Facts) own(l *tbclusterv1.Link) (*tbclusterv1.LinkEnd, bool) {
	switch f.Self {
	case l.GetA().GetNodeId():
		return l.GetA(), true
	case l.GetB().GetNodeId():
		return l.GetB(), true
	}
	return nil, false
}

// Suspicious reports whether a link has addresses at both ends, with both nodes
// alive, and carries nothing all the same.
func (f Facts) Suspicious(l *tbclusterv1.Link) bool {
	s := l.GetState()
	return (s == tbclusterv1.LinkState_LINK_STATE_ADDRESSED || s == tbclusterv1.LinkState_LINK_STATE_DOWN) &&
		l.GetA().GetAddress() != "" && l.GetB().GetAddress() != "" && f.alive(l.GetA().GetNodeId()) && f.alive(l.GetB().GetNodeId()) &&
		age(f, l) >= silentFor
}

// alive reports whether a node is up, or announces itself at least.
func (f Facts) alive(node string) bool {
	return node != "" && (f.up(node) || slices.ContainsFunc(f.Nodes, func(n *tbclusterv1.Node) bool { return n.GetId() == node && f.heard(n) }))
}

// Towards returns the addresses at the other ends of this node's cables, by the
// interface that leads to each.
func (f Facts) Towards() map[netip.Addr]string {
	out := map[netip.Addr]string{}
	f.towards(func(a netip.Addr, iface string, _ *tbclusterv1.LinkEnd) { out[a] = iface })
	return out
}

func (f Facts) towards(visit func(far netip.Addr, iface string, end *tbclusterv1.LinkEnd)) {
	for _, l := range f.Links {
		own, ok := f.own(l)
		if !ok || l.GetState() != tbclusterv1.LinkState_LINK_STATE_PROVEN && l.GetState() != tbclusterv1.LinkState_LINK_STATE_ADDRESSED {
			continue
		}
		end := l.GetB()
		if end == own {
			end = l.GetA()
		}
		mine, err := netip.ParsePrefix(own.GetAddress())
		far, err2 := netip.ParsePrefix(end.GetAddress())
		nic, there := f.Network.Interface(own.GetInterface())
		// An address that nobody has set leads nowhere, which is another finding.
		if err == nil && err2 == nil && there && slices.Contains(nic.Addresses, mine) {
			visit(far.Addr(), nic.Name, end)
		}
	}
}

func checkWay(f Facts) []seen {
	var out []seen
	f.towards(func(far netip.Addr, iface string, end *tbclusterv1.LinkEnd) {
		i := slices.IndexFunc(f.Diagnosis.Ways, func(w host.Way) bool { return w.To == far })
		if i < 0 || f.Diagnosis.Ways[i].Interface == iface {
			return
		}
		w := f.Diagnosis.Ways[i]
		way, evidence := w.Interface, far.String()+" is reached over "+w.Interface
		if w.Interface == "" {
			way, evidence = "no way at all", "no route leads to "+far.String()
		}
		if w.Gateway.IsValid() {
			evidence += " by " + w.Gateway.String()
		}
		command := "ip route get " + far.String()
		if f.Machine.OS == "darwin" {
			command = "route -n get " + far.String()
		}
		out = append(out, seen{subject: far.String(), evidence: evidence + ", its cable is " + iface,
			words: map[string]string{"peer": f.nodeName(end.GetNodeId()), "way": way, "address": far.String(), "command": command}})
	})
	return out
}

// cableNets are the interfaces of cables, and the bridges that cables are
// members of.
func (f Facts) cableNets() (names []string) {
	for _, i := range f.Network.Interfaces {
		if !i.Cable {
			continue
		}
		names = append(names, i.Name)
		if i.Bridge != "" && !slices.Contains(names, i.Bridge) {
			names = append(names, i.Bridge)
		}
	}
	return names
}

func checkDefaultRoute(f Facts) []seen {
	var out []seen
	for _, name := range f.cableNets() {
		i := slices.IndexFunc(f.Network.Routes, func(r host.Route) bool {
			return r.Interface == name && r.Destination.IsValid() && r.Destination.Bits() == 0
		})
		if i < 0 {
			continue
		}
		r := f.Network.Routes[i]
		evidence := r.Destination.String() + " on " + name
		if r.Gateway.IsValid() {
			evidence += " by " + r.Gateway.String()
		}
		out = append(out, seen{subject: name, evidence: evidence, words: map[string]string{"interface": name}})
	}
	return out
}

func checkLease(f Facts) []seen {
	lost := checkDefaultRoute(f)
	var out []seen
	for _, name := range f.cableNets() {
		leased := slices.Contains(f.Diagnosis.Leases, name) || slices.ContainsFunc(f.Network.Routes, func(r host.Route) bool { return r.Interface == name && r.DHCP })
		// The default route, which came with the lease, is the worse of the two.
		if !leased || slices.ContainsFunc(lost, func(s seen) bool { return s.subject == name }) {
			continue
		}
		nic, _ := f.Network.Interface(name)
		var have []string
		for _, p := range nic.Addresses {
			if p.Addr().Is4() && !p.Addr().IsLinkLocalUnicast() {
				have = append(have, p.String())
			}
		}
		out = append(out, seen{subject: name, evidence: strings.TrimSpace(name + " has a lease by DHCP " + strings.Join(have, " ")), words: map[string]string{"interface": name}})
	}
	return out
}

func checkResetters(f Facts) []seen {
	var out []seen
	for _, label := range f.Diagnosis.Resetters {
		out = append(out, seen{subject: label, evidence: "launchd knows the service " + label, words: map[string]string{"program": label}})
	}
	return out
}

// rdmaGbps is the rate above which a Mac's cable can carry RDMA: macOS makes
// devices for Thunderbolt 4 ports too, which stay down.
const rdmaGbps = 40

func checkRDMA(f Facts) []seen {
	var out []seen
	for _, p := range f.Diagnosis.RDMA {
		x, cabled := f.cableOf(p.Interface)
		if p.Active || !cabled || f.Machine.OS == "darwin" && x.RxGbps <= rdmaGbps {
			continue
		}
		out = append(out, seen{subject: p.Device, evidence: fmt.Sprintf("port %d of %s is %s, and port %s sees %s", p.Port, p.Device, p.State, x.Port, x.Device),
			words: map[string]string{"device": p.Device}})
	}
	return out
}

// cableOf returns what is at the other end of the cable with that interface.
func (f Facts) cableOf(iface string) (host.XDomain, bool) {
	for _, d := range f.Thunderbolt.Domains {
		for _, x := range d.Peers {
			if iface != "" && x.Interface == iface {
				return x, true
			}
		}
	}
	return host.XDomain{}, false
}

// foreignServices are what the module thunderbolt_ibverbs announces of itself
// on a cable.
var foreignServices = []string{"tbverbs", "tbverb1", "tbverb2", "tbverb3"}

func checkForeignRDMA(f Facts) []seen {
	return f.peers(func(x host.XDomain) string {
		for _, s := range foreignServices {
			if _, ok := x.Services[s]; ok {
				return "port " + x.Port + " announces the service " + s
			}
		}
		return ""
	})
}

func checkHub(f Facts) []seen {
	return f.peers(func(x host.XDomain) string {
		if !x.BehindHub {
			return ""
		}
		return "route " + x.Port
	})
}

func checkReleased(f Facts) []seen {
	var out []seen
	for _, r := range f.Released {
		out = append(out, seen{subject: r.Interface, evidence: strings.Join(r.Did, "; "), words: map[string]string{"manager": r.Manager, "interface": r.Interface}})
	}
	return out
}

func checkManaged(f Facts) []seen {
	// As long as there is no address to take away, none is told.
	addressed := map[string]bool{}
	f.mine(func(_ *tbclusterv1.Link, own *tbclusterv1.LinkEnd) {
		addressed[own.GetInterface()] = addressed[own.GetInterface()] || own.GetAddress() != ""
	})
	for _, c := range f.Wanted {
		addressed[c.Interface] = true
	}
	var out []seen
	for _, i := range f.Network.Interfaces {
		if i.Cable && i.ManagedBy != "" && addressed[i.Name] {
			out = append(out, seen{subject: i.Name, evidence: i.ManagedBy + " lists " + i.Name + " as its own",
				words: map[string]string{"manager": i.ManagedBy, "interface": i.Name}})
		}
	}
	return out
}
