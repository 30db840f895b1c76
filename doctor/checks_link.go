package doctor

import (
	"fmt"
	"slices"
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
	return l.GetB().GetNodeId() != "" && f.up(l.GetA().GetNodeId()) && f.up(l.GetB().GetNodeId())
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
		if !isDown(l) || !present || !f.both(l) || !nic.Carrier || own.GetAddress() == "" {
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

func checkLinkStuck(f Facts) []seen {
	if len(f.Wanted) > 0 { // no-permission says why
		return nil
	}
	return f.links(func(l *tbclusterv1.Link, _ *tbclusterv1.LinkEnd) (string, map[string]string) {
		s := l.GetState()
		if s != tbclusterv1.LinkState_LINK_STATE_CABLED && s != tbclusterv1.LinkState_LINK_STATE_ADDRESSED || !f.both(l) || age(f, l.GetStateSince()) < stuckAfter {
			return "", nil
		}
		reason := l.GetReason()
		if reason == "" {
			reason = "Unplug it and plug it in again."
		}
		return fmt.Sprintf("%s for %v; %s", l.GetEvidence(), age(f, l.GetStateSince()).Round(time.Second), l.GetReason()), map[string]string{"reason": reason}
	})
}

func checkMTU(f Facts) []seen {
	return f.links(func(l *tbclusterv1.Link, _ *tbclusterv1.LinkEnd) (string, map[string]string) {
		a, b := l.GetA().GetMtu(), l.GetB().GetMtu()
		if isDown(l) || a == 0 || b == 0 || a == b {
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
	if !f.NetModuleMissing {
		return nil
	}
	return f.peers(func(x host.XDomain) string {
		if x.Interface != "" {
			return ""
		}
		return "port " + x.Port + " has no network interface, and thunderbolt_net is not loaded"
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

func checkManaged(f Facts) []seen {
	var out []seen
	for _, i := range f.Network.Interfaces {
		if i.Cable && i.ManagedBy != "" {
			out = append(out, seen{subject: i.Name, evidence: i.ManagedBy + " lists " + i.Name + " as its own",
				words: map[string]string{"manager": i.ManagedBy, "interface": i.Name}})
		}
	}
	return out
}
