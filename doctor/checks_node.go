package doctor

import (
	"fmt"
	"slices"
	"strings"
	"time"

	tbclusterv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
)

const (
	// A disk is nearly full below both: a share alone accuses large disks, a
	// number alone small ones.
	diskFree  = 10 << 30
	diskShare = 10 // one in so many
	// memoryShare of all memory must be available.
	memoryShare = 20 // one in so many
	// maxSkew is well above what a heartbeat's way adds.
	maxSkew = 5 * time.Second
)

// speaker is the node with the lowest ID that is up: it speaks about what all
// of them see.
func (f Facts) speaker() string {
	lowest := f.Self
	for _, n := range f.Nodes {
		if n.GetState() == tbclusterv1.NodeState_NODE_STATE_UP && n.GetId() < lowest {
			lowest = n.GetId()
		}
	}
	return lowest
}

func (f Facts) nodeName(id string) string {
	for _, n := range f.Nodes {
		if n.GetId() == id && n.GetName() != "" {
			return n.GetName()
		}
	}
	return id
}

func checkNodeDown(f Facts) []seen {
	if f.speaker() != f.Self {
		return nil
	}
	var out []seen
	for _, n := range f.Nodes {
		if _, renewed := f.Renewed[n.GetId()]; renewed {
			continue
		}
		if n.GetState() == tbclusterv1.NodeState_NODE_STATE_DOWN && n.GetId() != f.Self && !f.heard(n) && !f.Untrusting[n.GetId()] {
			out = append(out, seen{subject: n.GetId(), evidence: n.GetReason(), words: map[string]string{"peer": n.GetName()}})
		}
	}
	return out
}

func checkUntrusting(f Facts) []seen {
	var out []seen
	for _, n := range f.Nodes {
		down := n.GetState() == tbclusterv1.NodeState_NODE_STATE_DOWN || n.GetState() == tbclusterv1.NodeState_NODE_STATE_UNKNOWN
		// Word of who was let in takes a moment to get around.
		since := f.Now.Sub(n.GetStateSince().AsTime())
		if _, renewed := f.Renewed[n.GetId()]; f.Untrusting[n.GetId()] && down && since >= heardFor && !renewed {
			out = append(out, seen{subject: n.GetId(), evidence: n.GetReason(), words: map[string]string{"peer": n.GetName()}})
		}
	}
	return out
}

func checkRenewed(f Facts) []seen {
	var out []seen
	for _, n := range f.Nodes {
		r, ok := f.Renewed[n.GetId()]
		if !ok { // who knows it says it: the new node, which may speak for all, never met the old one
			continue
		}
		again := "Then let the machine in again: run `tbcluster pair` here and `tbcluster pair CODE` there."
		if r.Member {
			again = fmt.Sprintf("%s is in the cluster already; `tbcluster node rename %s %s` then gives it the old name.", r.Node, r.Node, n.GetName())
		}
		out = append(out, seen{subject: n.GetId(), evidence: strings.TrimSuffix(r.Where+"; "+n.GetReason(), "; "),
			words: map[string]string{"peer": n.GetName(), "now": r.Node, "again": again}})
	}
	return out
}

// heardFor is how long a node has to announce itself without being connected: a
// connection takes a moment.
const heardFor = 10 * time.Second

// heard reports whether a node that is not connected announces itself.
func (f Facts) heard(n *tbclusterv1.Node) bool {
	h, ok := f.Heard[n.GetId()]
	switch n.GetState() {
	case tbclusterv1.NodeState_NODE_STATE_DOWN, tbclusterv1.NodeState_NODE_STATE_UNKNOWN:
		return ok && f.Now.Sub(h.Since) >= heardFor
	}
	return false
}

func checkBlocked(f Facts) []seen {
	var out []seen
	for _, n := range f.Nodes {
		if !f.heard(n) || f.Untrusting[n.GetId()] {
			continue
		}
		h := f.Heard[n.GetId()]
		out = append(out, seen{subject: n.GetId(), evidence: strings.TrimSuffix("it announces "+h.Address+"; "+n.GetReason(), "; "),
			words: map[string]string{"peer": n.GetName(), "port": fmt.Sprint(h.Port)}})
	}
	return out
}

func checkNoPermission(f Facts) []seen {
	if len(f.Wanted) == 0 {
		return nil
	}
	var what []string
	for _, c := range f.Wanted {
		what = append(what, c.String())
	}
	return []seen{{evidence: strings.Join(what, "; "), words: map[string]string{"commands": strings.Join(f.Commands, "\n")}}}
}

func checkFilter(f Facts) []seen {
	wanted := slices.ContainsFunc(f.Wanted, func(c host.Change) bool { return c.Kind == host.ChangeAddress })
	if f.FilterReason == "" || wanted { // no addresses, nothing to reach
		return nil
	}
	return []seen{{evidence: f.FilterReason}}
}

func checkConflict(f Facts) []seen {
	var out []seen
	for _, c := range f.Conflicts {
		s := seen{subject: c.Prefix, evidence: strings.TrimSpace(c.Prefix + " " + c.Port), words: map[string]string{"prefix": c.Prefix, "with": c.With}}
		if c.Node != "" {
			s.node, s.nodeName = c.Node, f.nodeName(c.Node)
			s.evidence += ", seen by " + f.Name + ", which has no route to it over a cable"
		}
		out = append(out, s)
	}
	return out
}

func checkDisk(f Facts) []seen {
	var out []seen
	for _, d := range f.Disks {
		if d.Total > 0 && d.Free < diskFree && d.Free < d.Total/diskShare {
			out = append(out, seen{subject: d.Path, evidence: fmt.Sprintf("%s of %s are free", size(d.Free), size(d.Total)),
				words: map[string]string{"path": d.Path, "free": size(d.Free)}})
		}
	}
	return out
}

func checkMemory(f Facts) []seen {
	m := f.Machine.Memory
	total := m.Total
	if f.Config.MemoryLimitBytes > 0 {
		total = f.Config.MemoryLimitBytes
	}
	if total == 0 || m.Available >= total/memoryShare {
		return nil
	}
	return []seen{{evidence: fmt.Sprintf("%s available", memory(m.Available)), words: map[string]string{"free": memory(m.Available), "total": memory(total)}}}
}

func checkEngine(f Facts) []seen {
	install, why := "", ""
	for _, e := range f.Engines {
		if e.Available {
			return nil
		}
		if e.Installable && install == "" {
			install = e.Name
		}
		why += fmt.Sprintf("%s: %s; ", e.Name, e.Reason)
	}
	if len(f.Engines) == 0 || install == "" {
		return nil
	}
	return []seen{{evidence: strings.TrimSuffix(why, "; "), words: map[string]string{"engine": install}}}
}

func checkClock(f Facts) []seen {
	var out []seen
	for _, id := range sorted(f.ClockOffsets) {
		offset := f.ClockOffsets[id]
		if offset.Abs() < maxSkew || id < f.Self { // the lower ID of a pair speaks
			continue
		}
		direction := "ahead of"
		if offset < 0 {
			direction = "behind"
		}
		out = append(out, seen{subject: id, evidence: fmt.Sprintf("%v by its last heartbeat", offset.Round(time.Millisecond)),
			words: map[string]string{"peer": f.nodeName(id), "offset": span(offset.Abs()), "direction": direction}})
	}
	return out
}

// span is a time as people say it: a clock may be wrong by days.
func span(d time.Duration) string {
	const day = 24 * time.Hour
	if d < 2*day {
		return d.Round(time.Second).String()
	}
	days := d.Round(time.Hour) / day
	if hours := d.Round(time.Hour) % day / time.Hour; hours > 0 {
		return fmt.Sprintf("%d days %d h", days, hours)
	}
	return fmt.Sprintf("%d days", days)
}

func checkVersion(f Facts) []seen {
	count := map[string]int{}
	if f.Version != "" {
		count[f.Version]++
	}
	for _, n := range f.Nodes {
		if n.GetId() != f.Self && n.GetState() == tbclusterv1.NodeState_NODE_STATE_UP && n.GetVersion() != "" {
			count[n.GetVersion()]++
		}
	}
	most := ""
	for _, v := range sorted(count) { // of equally many the later one
		if most == "" || count[v] >= count[most] {
			most = v
		}
	}
	if f.Version == "" || f.Version == most {
		return nil
	}
	total := 0
	for _, n := range count {
		total += n
	}
	others := howMany(count[most], total, "runs", "run")
	return []seen{{evidence: fmt.Sprintf("%d of %d nodes run %s", count[most], total, most), words: map[string]string{"have": f.Version, "most": most, "others": others}}}
}

// howMany nodes of all are of one kind, with a verb: one, some or most.
func howMany(n, total int, one, several string) string {
	switch {
	case n == 1:
		return "another node " + one
	case 2*n > total:
		return "most nodes " + several
	}
	return fmt.Sprintf("%d other nodes %s", n, several)
}

// checkEngineVersion compares own engines with those of the other nodes. Of two
// versions that equally many have, the later one counts.
func checkEngineVersion(f Facts) []seen {
	count := map[string]map[string]int{}
	own := map[string]string{}
	for _, n := range f.Nodes {
		if n.GetState() != tbclusterv1.NodeState_NODE_STATE_UP {
			continue
		}
		for _, e := range n.GetEngines() {
			if !e.GetAvailable() || e.GetVersion() == "" {
				continue
			}
			if count[e.GetName()] == nil {
				count[e.GetName()] = map[string]int{}
			}
			count[e.GetName()][e.GetVersion()]++
			if n.GetId() == f.Self {
				own[e.GetName()] = e.GetVersion()
			}
		}
	}
	var out []seen
	for _, name := range sorted(own) {
		most := ""
		for _, v := range sorted(count[name]) {
			if most == "" || count[name][v] >= count[name][most] {
				most = v
			}
		}
		if most == own[name] {
			continue
		}
		total := 0
		for _, n := range count[name] {
			total += n
		}
		n := count[name][most]
		out = append(out, seen{subject: name, evidence: fmt.Sprintf("%d of %d nodes have %s", n, total, most),
			words: map[string]string{"engine": name, "have": own[name], "most": most, "others": howMany(n, total, "has", "have")}})
	}
	return out
}

// memlockLeast is what RDMA needs at the least: engines register buffers of
// hundreds of MiB.
const memlockLeast = 1 << 30

func checkMemlock(f Facts) []seen {
	l := f.Diagnosis.Memlock
	if len(f.Diagnosis.RDMA) == 0 || !l.Known || l.Unlimited || l.Bytes >= memlockLeast {
		return nil
	}
	return []seen{{evidence: fmt.Sprintf("RLIMIT_MEMLOCK is %d bytes, and there is the RDMA device %s", l.Bytes, f.Diagnosis.RDMA[0].Device),
		words: map[string]string{"limit": memory(l.Bytes)}}}
}

func checkMulticast(f Facts) []seen {
	here := map[string]string{"where": "at " + f.Name}
	var why, names []string
	if f.Multicast != "" {
		why = append(why, f.Multicast)
	}
	unheard := func(names string) string {
		return "nothing is heard of what " + names + " announces, though it is on the same network and answers: " +
			"multicast is blocked here or there, or lost on the way"
	}
	var out []seen
	for _, id := range f.Unheard {
		if !f.Hears {
			names = append(names, f.nodeName(id))
			continue
		}
		out = append(out, seen{subject: id, evidence: unheard(f.nodeName(id)),
			words: map[string]string{"where": "between " + f.Name + " and " + f.nodeName(id)}})
	}
	if len(names) > 0 {
		why = append(why, unheard(strings.Join(names, ", ")))
	}
	if len(why) > 0 {
		out = append([]seen{{evidence: strings.Join(why, "; "), words: here}}, out...)
	}
	return out
}

func checkData(f Facts) []seen {
	var out []seen
	for _, id := range sorted(f.DataInterface) {
		name := f.DataInterface[id]
		i, ok := f.Network.Interface(name)
		if !ok || i.Cable || !f.provenTo(id) {
			continue
		}
		out = append(out, seen{subject: id, evidence: "its data connections use " + name, words: map[string]string{"peer": f.nodeName(id), "interface": name}})
	}
	return out
}

// provenTo reports whether a cable between this node and another carries.
func (f Facts) provenTo(id string) bool {
	return slices.ContainsFunc(f.Links, func(l *tbclusterv1.Link) bool {
		a, b := l.GetA().GetNodeId(), l.GetB().GetNodeId()
		return l.GetState() == tbclusterv1.LinkState_LINK_STATE_PROVEN && (a == f.Self && b == id || a == id && b == f.Self)
	})
}

func sorted[V any](of map[string]V) []string {
	var out []string
	for k := range of {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// size in words, by powers of 1000 as disks are sold.
func size(n uint64) string {
	units := []string{"B", "kB", "MB", "GB", "TB"}
	v := float64(n)
	for v >= 1000 && len(units) > 1 {
		v /= 1000
		units = units[1:]
	}
	if units[0] == "B" || v >= 100 {
		return fmt.Sprintf("%.0f %s", v, units[0])
	}
	return fmt.Sprintf("%.1f %s", v, units[0])
}

// memory in words, by powers of 1024 as memory is sold.
func memory(n uint64) string {
	const kib, mib, gib = 1 << 10, 1 << 20, 1 << 30
	switch v := float64(n); {
	case n < mib:
		return fmt.Sprintf("%d KiB", n/kib)
	case n < gib:
		return fmt.Sprintf("%d MiB", n/mib)
	case v < 10*gib:
		return fmt.Sprintf("%.1f GiB", v/gib)
	default:
		return fmt.Sprintf("%.0f GiB", v/gib)
	}
}
