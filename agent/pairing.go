package agent

import (
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/agent/root"
	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/discover"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/member"
	"tbcluster/mesh/pair"
)

// pairingServer lets nodes into the cluster.
type pairingServer struct {
	v1.UnimplementedPairingServiceServer
	a *Agent
}

var fromRole = map[v1.Role]identity.Role{
	v1.Role_ROLE_UNSPECIFIED: identity.Admin,
	v1.Role_ROLE_VIEWER:      identity.Viewer,
	v1.Role_ROLE_OPERATOR:    identity.Operator,
	v1.Role_ROLE_ADMIN:       identity.Admin,
}

func memberView(m identity.Member) *v1.Member {
	out := &v1.Member{NodeId: string(m.ID), Name: m.Name, Role: roles[m.Role], IntroducedBy: string(m.IntroducedBy), Revoked: m.Revoked, Client: m.Client}
	if !m.IntroducedAt.IsZero() {
		out.IntroducedAt = timestamppb.New(m.IntroducedAt)
	}
	return out
}

// Open shows a code and reports what becomes of it.
func (s *pairingServer) Open(q *v1.OpenRequest, out grpc.ServerStreamingServer[v1.OpenResponse]) error {
	ctx := out.Context()
	role, ok := fromRole[q.Role]
	if !ok {
		return fault.Newf(fault.Usage, "choose viewer, operator or admin", "there is no role %d", q.Role).With("field", "role")
	}
	user, err := s.a.localUser(ctx, q.LocalUser, false)
	if err != nil {
		return err
	}
	var lifetime time.Duration
	if q.Lifetime != nil {
		lifetime = q.Lifetime.AsDuration()
	}
	if err := s.a.needDefaultUser(ctx); err != nil {
		return err
	}
	inv, err := s.a.pairer.Open(ctx, role, lifetime)
	if err != nil {
		return err
	}
	s.a.pairNumber.Store(&inv.Number)
	s.a.announce()
	defer func() {
		s.a.pairNumber.CompareAndSwap(&inv.Number, nil)
		s.a.announce()
	}()
	if err := out.Send(&v1.OpenResponse{Event: &v1.OpenResponse_Code{Code: &v1.PairingCode{Code: inv.Code, ExpiresAt: timestamppb.New(inv.Expires)}}}); err != nil {
		return err
	}
	for e := range inv.Events {
		switch {
		case e.Ended != nil:
			return e.Ended
		case e.Joined != nil:
			if err := s.a.setDefaultUser(ctx, user); err != nil {
				return err
			}
			s.a.poke()
			return out.Send(&v1.OpenResponse{Event: &v1.OpenResponse_Joined{Joined: memberView(*e.Joined)}})
		default:
			if err := out.Send(&v1.OpenResponse{Event: &v1.OpenResponse_WrongTryFrom{WrongTryFrom: e.WrongTryFrom}}); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// setDefaultUser records as whom people who paired on other nodes act here,
// unless the first pairing has already said so.
func (a *Agent) setDefaultUser(ctx context.Context, user string) error {
	have, err := a.root.Mappings(ctx)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(have, func(m root.Mapping) bool { return m.Node == "*" }) {
		return nil
	}
	who, release, err := callerOf(ctx).hold()
	if err != nil {
		return err
	}
	defer release()
	if err := a.root.MapDefault(ctx, who, user); err != nil {
		return err
	}
	a.models.askUser(ctx)
	a.models.rescan()
	a.settled(ctx)
	return nil
}

// needDefaultUser refuses a client where nobody has said as whom people of other
// nodes act here: only a person of this machine can.
func (a *Agent) needDefaultUser(ctx context.Context) error {
	if callerOf(ctx).local != nil {
		return nil
	}
	have, err := a.root.Mappings(ctx)
	if err != nil || slices.ContainsFunc(have, func(m root.Mapping) bool { return m.Node == "*" }) {
		return err
	}
	return fault.Newf(fault.Denied, "pair the first node on "+a.name()+" itself: tbcluster pair", "nobody has paired on %s yet, so that nobody knows as whom people of other nodes act there", a.name())
}

// joinFor is how long Join looks for the inviting node, and askEvery how often
// it asks meanwhile: a question or its answer may be lost.
const (
	joinFor  = 15 * time.Second
	askEvery = 3 * time.Second
	// askSoon is how soon it asks for the second time, for all to hear.
	askSoon = time.Second
)

// Join pairs with the node that showed a code.
func (s *pairingServer) Join(ctx context.Context, q *v1.JoinRequest) (*v1.JoinResponse, error) {
	number, _, err := pair.ParseCode(q.Code)
	if err != nil {
		return nil, err
	}
	user, err := s.a.localUser(ctx, q.LocalUser, false)
	if err != nil {
		return nil, err
	}
	candidates, err := s.a.inviters(ctx, number, q.Address)
	if err != nil {
		return nil, err
	}
	m, err := s.a.pairer.Join(ctx, q.Code, candidates)
	for begun := time.Now(); notReached(err) && q.Address == "" && time.Since(begun) < joinFor && ctx.Err() == nil; {
		// Nothing was said yet, so no try is lost.
		select {
		case <-ctx.Done():
		case <-time.After(joinAgain):
		}
		s.a.finder.Ask() // it may be elsewhere by now
		if candidates, err = s.a.inviters(ctx, number, q.Address); err == nil {
			m, err = s.a.pairer.Join(ctx, q.Code, candidates)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := s.a.setDefaultUser(ctx, user); err != nil {
		return nil, err
	}
	s.a.announce()
	s.a.poke()
	out := &v1.JoinResponse{Peer: memberView(m)}
	for _, m := range s.a.store.Members() {
		if !m.Forgotten {
			out.Members = append(out.Members, memberView(m))
		}
	}
	return out, nil
}

// inTouch reports whether a node is in the cluster and connected.
func (a *Agent) inTouch(id identity.NodeID) bool {
	m, ok := a.store.Member(id)
	if !ok || m.Revoked {
		return false
	}
	v, ok := a.member.Node(id)
	return ok && v.State == member.Up
}

// joinAgain is how soon Join tries again where the way is not ready.
const joinAgain = 500 * time.Millisecond

// notReached reports whether nobody could be reached, though somebody announces
// the code: for a second or two after a cable was plugged in, the system still
// looks whether its link-local address is free.
func notReached(err error) bool {
	f := fault.As(err)
	return f != nil && f.Reason == fault.NodeDown && f.Meta["stage"] == pair.StageConnect
}

// inviters lists where the node that shows code number n may be, waiting a
// while for mDNS to find it.
func (a *Agent) inviters(ctx context.Context, number, address string) ([]pair.Candidate, error) {
	if address != "" {
		addrs, err := discover.Resolve(ctx, address)
		if err != nil {
			return nil, err
		}
		var out []pair.Candidate
		for _, at := range addrs {
			out = append(out, pair.Candidate{Way: channel.Way{Kind: channel.LAN, Addr: at}})
		}
		return out, nil
	}
	news, cancel := a.finder.Subscribe()
	defer cancel()
	deadline := time.NewTimer(joinFor)
	defer deadline.Stop()
	again, wait := time.NewTimer(0), askSoon // it may be known already
	defer again.Stop()
	for {
		var out []pair.Candidate
		for _, c := range a.finder.Candidates() {
			if c.Pair != number {
				continue
			}
			for _, at := range c.Addresses {
				w := channel.Way{Kind: channel.LAN, Interface: at.Interface, Addr: at.Addr}
				if at.Cable {
					w.Kind = channel.Cable
				}
				out = append(out, pair.Candidate{Node: c.Node, Way: w})
			}
		}
		if len(out) > 0 {
			return out, nil
		}
		select {
		case <-ctx.Done():
			return nil, fault.FromStatus(ctx.Err())
		case <-news:
		case <-again.C:
			a.finder.Ask()
			again.Reset(wait)
			wait = askEvery
		case <-deadline.C:
			return nil, fault.Newf(fault.PairingFailed,
				"see that `tbcluster pair` still waits there and that a cable or the network joins both; or name it: tbcluster pair CODE --address HOST",
				"no node nearby shows the code %s-…", number)
		}
	}
}

// List says who is in the cluster and who let whom in.
func (s *pairingServer) List(context.Context, *v1.PairingServiceListRequest) (*v1.PairingServiceListResponse, error) {
	out := &v1.PairingServiceListResponse{}
	for _, m := range append(s.a.store.Members(), s.a.store.Clients()...) {
		out.Members = append(out.Members, memberView(m))
	}
	slices.SortStableFunc(out.Members, func(a, b *v1.Member) int {
		switch {
		case a.Revoked == b.Revoked:
			return 0
		case b.Revoked:
			return -1
		}
		return 1
	})
	return out, nil
}

// Revoke puts a node out for good.
func (s *pairingServer) Revoke(ctx context.Context, q *v1.RevokeRequest) (*v1.RevokeResponse, error) {
	id, err := s.a.memberOrClient(q.Node)
	if err != nil {
		return nil, err
	}
	revoked, stay, err := s.a.store.Revoke(id, q.WithIntroduced, q.ValidateOnly)
	if err != nil {
		return nil, err
	}
	out := &v1.RevokeResponse{}
	for _, m := range revoked {
		if !q.ValidateOnly && !m.Client {
			s.a.address.Forget(string(m.ID))
		}
		out.Revoked = append(out.Revoked, memberView(m))
	}
	if !q.ValidateOnly {
		s.unmapClients(ctx, revoked)
	}
	for _, m := range stay {
		out.Introduced = append(out.Introduced, memberView(m))
	}
	s.a.poke()
	return out, nil
}

// memberNamed finds a member that may be listed no more.
func (a *Agent) memberNamed(name string) (identity.NodeID, error) {
	if n, err := a.findNode(name); err == nil {
		return identity.NodeID(n.Id), nil
	}
	for _, m := range a.store.Members() {
		if m.Name == name || string(m.ID) == name {
			return m.ID, nil
		}
	}
	_, err := a.findNode(name)
	return "", err
}

// memberOrClient is memberNamed that also finds clients, those first that were not
// put out.
func (a *Agent) memberOrClient(name string) (identity.NodeID, error) {
	var fit, gone []identity.NodeID
	for _, m := range a.store.Clients() {
		switch {
		case m.Name != name && string(m.ID) != name:
		case m.Revoked:
			gone = append(gone, m.ID)
		default:
			fit = append(fit, m.ID)
		}
	}
	id, err := a.memberNamed(name)
	switch {
	case err == nil && len(fit) == 0:
		return id, nil
	case err != nil && len(fit) == 1:
		return fit[0], nil
	case err != nil && len(fit) == 0 && len(gone) > 0:
		return gone[0], nil
	case err != nil && len(fit) == 0:
		if fault.Is(err, fault.NodeUnknown) {
			err = noSuchMember(name, a.store.Members(), a.store.Clients())
		}
		return "", err
	}
	if err == nil {
		fit = append(fit, id)
	}
	return "", fault.Newf(fault.NodeAmbiguous, "name it by its ID; `tbcluster pair --list` shows them", "%d nodes or clients are called %q", len(fit), name).With("node", name)
}

// noSuchMember says who could have been meant: nodes and clients that are in, with
// those that are listed no more.
func noSuchMember(name string, nodes, clients []identity.Member) error {
	words := func(what string, list []identity.Member) string {
		var names []string
		for _, m := range list {
			if !m.Revoked {
				names = append(names, m.Name)
			}
		}
		if len(names) == 0 {
			return ""
		}
		return "the " + what + " are " + strings.Join(names, ", ") + "; "
	}
	return fault.Newf(fault.NodeUnknown, words("nodes", nodes)+words("clients", clients)+"`tbcluster pair --list` shows all with their IDs",
		"no node or client is called %q", name).With("node", name)
}

// Map says as whom a person of another node acts here.
func (s *pairingServer) Map(ctx context.Context, q *v1.MapRequest) (*v1.MapResponse, error) {
	id, err := s.a.memberNamed(q.Node)
	if err != nil {
		return nil, err
	}
	if q.User == "" {
		return nil, fault.Newf(fault.Usage, "write NODE/USER=LOCALUSER", "no user of %s is named", q.Node).With("field", "user")
	}
	const most = 256
	if len(q.User) > most || len(q.LocalUser) > most {
		return nil, fault.Newf(fault.Usage, "write the name that the user logs in with", "a user name has at most %d bytes", most).With("field", "user")
	}
	who, release, err := callerOf(ctx).hold()
	if err != nil {
		return nil, err
	}
	defer release()
	list, err := s.a.root.Map(ctx, who, string(id), q.User, q.LocalUser)
	if err != nil {
		return nil, err
	}
	out := &v1.MapResponse{}
	for _, m := range list {
		if slices.ContainsFunc(s.a.store.Clients(), func(c identity.Member) bool { return string(c.ID) == m.Node }) {
			continue // `pair --list` shows them
		}
		if m.Node == "*" {
			out.Mappings = append(out.Mappings, "*/*="+m.Local)
			continue
		}
		out.Mappings = append(out.Mappings, s.a.nameOf(identity.NodeID(m.Node))+"/"+m.Remote+"="+m.Local)
	}
	return out, nil
}
