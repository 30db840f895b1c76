package identity

import (
	"bytes"
	"crypto/ed25519"
	"fmt"
	"sort"
)

// view is what a set of records means. It is made once and never changed.
type view struct {
	cluster  string
	name     string
	found    *record
	records  []*record // that stand, all tombstones, and what makes those count; sorted by hash
	standing map[hash]bool
	members  []Member // sorted by ID, revoked ones last
	byID     map[NodeID]*Member
	clients  []Member // sorted by ID, revoked ones last
	names    map[NodeID]*record
	forgets  map[NodeID]*record
	top      uint64 // highest sequence
}

// evaluate says what a founding and records mean together. It depends on the
// set only, never on order or time.
//
// First the tombstones: each counts that was signed by a node which some chain
// of introductions makes an admin, revoked or not. That errs to the side of
// fewer members: two admins who revoke each other are both out.
//
// Then what stands: from the founder outwards, a record stands when its signer
// is admitted, has the role for it, and is not revoked or a standing tombstone
// of it, signed by somebody else, lists the record. So a revoked admin, however
// many old friends spread what it signs now, lets nobody in.
//
// dropped says why records do not count.
func evaluate(found *record, records []*record) (v *view, dropped []error) {
	v = &view{
		cluster: clusterID(found), name: found.payload.ClusterName, found: found,
		standing: map[hash]bool{found.hash: true},
		byID:     map[NodeID]*Member{}, names: map[NodeID]*record{}, forgets: map[NodeID]*record{},
	}
	var ours []*record
	seen := map[hash]bool{found.hash: true}
	for _, r := range records {
		switch {
		case seen[r.hash]:
		case r.payload.Kind == kindFound || r.payload.Cluster != v.cluster:
			dropped = append(dropped, fmt.Errorf("a record (%s of %s) of another cluster", r.payload.Kind, r.subject.Short()))
		default:
			ours = append(ours, r)
		}
		seen[r.hash] = true
	}
	sort.Slice(ours, func(i, j int) bool { return bytes.Compare(ours[i].hash[:], ours[j].hash[:]) < 0 })

	tombs, chains := tombstones(found, ours)
	clients := map[NodeID]*record{}
	roles := map[NodeID]Role{found.subject: Admin}
	by := map[NodeID]*record{found.subject: found}
	for again := true; again; {
		again = false
		for _, r := range ours {
			if v.standing[r.hash] || !v.may(r, roles) || !v.notPutOut(r, tombs) {
				continue
			}
			v.standing[r.hash], again = true, true
			if r.payload.Kind == kindIntroduce {
				roles[r.subject] = max(roles[r.subject], r.payload.Role)
				if first := by[r.subject]; first == nil || first != found && earlier(r, first) {
					by[r.subject] = r
				}
			}
		}
	}

	for _, r := range ours {
		switch kept := isTomb(tombs, r) || chains[r.hash]; {
		case !v.standing[r.hash] && !kept:
			dropped = append(dropped, v.why(r, roles))
			continue
		case !v.standing[r.hash]:
		case r.payload.Kind == kindName:
			latest(v.names, r)
		case r.payload.Kind == kindForget:
			latest(v.forgets, r)
		case r.payload.Kind == kindClient:
			latest(clients, r)
		}
	}
	for _, r := range ours {
		superseded := r.payload.Kind == kindName && v.names[r.subject] != r ||
			r.payload.Kind == kindForget && v.forgets[r.subject] != r ||
			r.payload.Kind == kindClient && v.standing[r.hash] && clients[r.subject] != r
		if (v.standing[r.hash] || isTomb(tombs, r) || chains[r.hash]) && !superseded {
			v.records = append(v.records, r)
			v.top = max(v.top, r.payload.Sequence)
		}
	}

	for id, role := range roles {
		r := by[id]
		m := Member{
			ID: id, Key: ed25519.PublicKey(r.payload.Key), Name: r.payload.Name, Role: role,
			IntroducedAt: r.time(),
		}
		if r != found {
			m.IntroducedBy = r.signer
		}
		if n := v.names[id]; n != nil {
			m.Name = n.payload.Name
		}
		m.bury(tombs[id])
		v.members = append(v.members, m)
	}
	for id, r := range clients {
		m := Member{ID: id, Key: ed25519.PublicKey(r.payload.Key), Name: r.payload.Name, Role: r.payload.Role,
			IntroducedBy: r.signer, IntroducedAt: r.time(), Client: true}
		m.bury(tombs[id])
		v.clients = append(v.clients, m)
	}
	sort.Slice(v.clients, func(i, j int) bool {
		a, b := &v.clients[i], &v.clients[j]
		if a.Revoked != b.Revoked {
			return b.Revoked
		}
		return a.ID < b.ID
	})
	v.uniqueNames(by)
	sort.Slice(v.members, func(i, j int) bool {
		a, b := &v.members[i], &v.members[j]
		if a.Revoked != b.Revoked {
			return b.Revoked
		}
		return a.ID < b.ID
	})
	for i := range v.members {
		v.byID[v.members[i].ID] = &v.members[i]
	}
	return v, dropped
}

// bury marks a member as put out by the first of its tombstones.
func (m *Member) bury(tombs []*record) {
	for _, t := range tombs {
		if !m.Revoked || t.time().Before(m.RevokedAt) {
			m.RevokedBy, m.RevokedAt = t.signer, t.time()
		}
		m.Revoked = true
	}
}

// client returns the client of that ID, revoked ones too.
func (v *view) client(id NodeID) (Member, bool) {
	for _, c := range v.clients {
		if c.ID == id {
			return c, true
		}
	}
	return Member{}, false
}

// tombstones returns those that count, by whom they put out, and the
// introductions that make their signers admins. Those are kept though they may
// stand for nothing else any more: without them the same tombstones would not
// count the next time, and what a node holds to be true would depend on the
// order in which it heard of it.
func tombstones(found *record, records []*record) (tombs map[NodeID][]*record, chains map[hash]bool) {
	admins := map[NodeID]bool{found.subject: true}
	introduces := func(r *record) bool {
		return r.payload.Kind == kindIntroduce && r.payload.Role == Admin && admins[r.signer]
	}
	for again := true; again; {
		again = false
		for _, r := range records {
			if introduces(r) && !admins[r.subject] {
				admins[r.subject], again = true, true
			}
		}
	}
	tombs, chains = map[NodeID][]*record{}, map[hash]bool{}
	signers := map[NodeID]bool{}
	for _, r := range records {
		if r.payload.Kind == kindRevoke && admins[r.signer] {
			tombs[r.subject] = append(tombs[r.subject], r)
			signers[r.signer] = true
		}
	}
	for again := true; again; {
		again = false
		for _, r := range records {
			if introduces(r) && signers[r.subject] && !chains[r.hash] {
				chains[r.hash], signers[r.signer], again = true, true, true
			}
		}
	}
	return tombs, chains
}

// may says whether the signer's role allows the record.
func (v *view) may(r *record, roles map[NodeID]Role) bool {
	role := roles[r.signer]
	switch r.payload.Kind {
	case kindIntroduce, kindClient:
		return role == Admin && r.payload.Role <= role
	case kindRevoke:
		return role == Admin
	case kindName:
		return role == Admin || role >= Viewer && r.signer == r.subject
	case kindForget:
		return role >= Operator
	}
	return false
}

func (v *view) notPutOut(r *record, tombs map[NodeID][]*record) bool {
	of := tombs[r.signer]
	if len(of) == 0 {
		return true
	}
	for _, t := range of {
		if t.signer != r.signer && v.standing[t.hash] && t.keep[r.hash] {
			return true
		}
	}
	return false
}

func (v *view) why(r *record, roles map[NodeID]Role) error {
	if !v.may(r, roles) {
		return fmt.Errorf("%s, as which %s may not %s %s", roleWords(roles[r.signer]), r.signer.Short(), r.payload.Kind, r.subject.Short())
	}
	return fmt.Errorf("%s was revoked, so that it cannot %s %s", r.signer.Short(), r.payload.Kind, r.subject.Short())
}

// uniqueNames gives those a number who bear the name of somebody before them:
// first who was introduced under a name, then who came earlier.
func (v *view) uniqueNames(by map[NodeID]*record) {
	sort.Slice(v.members, func(i, j int) bool {
		a, b := &v.members[i], &v.members[j]
		if a.Revoked != b.Revoked {
			return b.Revoked
		}
		if ao, bo := a.Name == by[a.ID].payload.Name, b.Name == by[b.ID].payload.Name; ao != bo {
			return ao
		}
		if !a.IntroducedAt.Equal(b.IntroducedAt) {
			return a.IntroducedAt.Before(b.IntroducedAt)
		}
		return a.ID < b.ID
	})
	wanted, taken := map[string]bool{}, map[string]bool{}
	for i := range v.members {
		wanted[v.members[i].Name] = true
	}
	for i := range v.members {
		m := &v.members[i]
		if m.Revoked {
			continue
		}
		m.Name = freeName(m.Name, func(s string) bool { return taken[s] || s != m.Name && wanted[s] })
		taken[m.Name] = true
	}
}

// freeName returns name, or the first of name-2, name-3, … that is not taken.
func freeName(name string, taken func(string) bool) string {
	free := name
	for n := 2; taken(free); n++ {
		suffix := fmt.Sprintf("-%d", n)
		free = name[:min(len(name), 63-len(suffix))] + suffix
	}
	return free
}

func isTomb(tombs map[NodeID][]*record, r *record) bool {
	for _, t := range tombs[r.subject] {
		if t == r {
			return true
		}
	}
	return false
}

func earlier(a, b *record) bool {
	if a.payload.Time != b.payload.Time {
		return a.payload.Time < b.payload.Time
	}
	return bytes.Compare(a.hash[:], b.hash[:]) < 0
}

func latest(of map[NodeID]*record, r *record) {
	old := of[r.subject]
	if old == nil || r.payload.Sequence > old.payload.Sequence ||
		r.payload.Sequence == old.payload.Sequence && bytes.Compare(r.hash[:], old.hash[:]) > 0 {
		of[r.subject] = r
	}
}

func roleWords(r Role) string {
	if r == 0 {
		return "not a member"
	}
	return r.String()
}

// String returns the role in words.
func (r Role) String() string {
	switch r {
	case Viewer:
		return "viewer"
	case Operator:
		return "operator"
	case Admin:
		return "admin"
	}
	return fmt.Sprintf("role %d", int(r))
}
