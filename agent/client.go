package agent

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc"

	"tbcluster/agent/root"
	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/host"
	"tbcluster/mesh/channel"
	"tbcluster/mesh/identity"
)

// Bounds of what one client may have under way over the network: far more than a
// person's programs need.
const (
	maxClientMessage = 4 << 20
	maxClientStreams = 64
)

// newClientServer serves the API to clients.
func (a *Agent) newClientServer() *grpc.Server {
	return a.newAPIServer(grpc.Creds(channel.ClientCredentials()), grpc.MaxRecvMsgSize(maxClientMessage), grpc.MaxConcurrentStreams(maxClientStreams),
		grpc.UnaryInterceptor(func(ctx context.Context, q any, info *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			ctx, err := a.authorizeClient(ctx, info.FullMethod)
			if err != nil {
				return nil, err
			}
			return h(ctx, q)
		}),
		grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, h grpc.StreamHandler) error {
			ctx, err := a.authorizeClient(ss.Context(), info.FullMethod)
			if err != nil {
				return err
			}
			return h(srv, &streamWithContext{ss, ctx})
		}))
}

// authorizeClient checks a call of a client against its rule and returns a
// context that knows the caller.
func (a *Agent) authorizeClient(ctx context.Context, method string) (context.Context, error) {
	r, ok := rules[method]
	if !ok || r.client == none {
		return nil, fault.Newf(fault.Denied, "do it on "+a.nodeSelf()+" itself", "%s is not served to clients", method)
	}
	conn, ok := channel.ConnFromContext(ctx)
	if !ok {
		return nil, fault.Newf(fault.Denied, "", "the call comes from no client")
	}
	m, ok := conn.Client()
	if !ok {
		return nil, fault.Newf(fault.NotPaired, "make a new bundle on "+a.nodeSelf()+": tbcluster pair --client NAME", "this client was put out")
	}
	if role := roles[m.Role]; role < r.client {
		return nil, fault.Newf(fault.Denied, "make a bundle with that role: tbcluster pair --client NAME --role "+roleName(r.client),
			"client %s has the role %s, and this needs %s", m.Name, roleName(role), roleName(r.client))
	}
	return withCaller(ctx, caller{asker: clientAsker(m), role: roles[m.Role], client: true}), nil
}

// nodeSelf is the own name where there is one already.
func (a *Agent) nodeSelf() string {
	if a.store == nil {
		return "the node"
	}
	return a.name()
}

// clientAsker is a client as the root half knows it: as a person of a node that is
// the client.
func clientAsker(m identity.Member) host.Asker { return host.Asker{Node: string(m.ID), Name: m.Name} }

// clientUser is the local user as whom a client acts; ok is false for who is none.
func (a *Agent) clientUser(ctx context.Context, who host.Asker) (u root.User, ok bool, err error) {
	if who.Node == "" || a.store == nil || !slices.ContainsFunc(a.store.Clients(), func(m identity.Member) bool { return string(m.ID) == who.Node }) {
		return root.User{}, false, nil
	}
	u, _, err = a.root.Who(ctx, who, false)
	if fault.Is(err, fault.UserUnmapped) {
		err = fault.Newf(fault.UserUnmapped, "make a new bundle on "+a.name()+": tbcluster pair --client NAME", "client %s acts as no user on %s", who.Name, a.name())
	}
	return u, true, err
}

// AddClient makes a bundle for a program on another machine.
func (s *pairingServer) AddClient(ctx context.Context, q *v1.AddClientRequest) (*v1.AddClientResponse, error) {
	role := identity.Viewer
	if q.Role != v1.Role_ROLE_UNSPECIFIED {
		var ok bool
		if role, ok = fromRole[q.Role]; !ok {
			return nil, fault.Newf(fault.Usage, "choose viewer, operator or admin", "there is no role %d", q.Role).With("field", "role")
		}
	}
	user := ""
	if role > identity.Viewer { // who only looks is nobody here
		var err error
		if user, err = s.a.localUser(ctx, q.LocalUser, true); err != nil {
			return nil, err
		}
	}
	cert, key, err := identity.NewCertificate(q.Name, false)
	if err != nil {
		return nil, fault.New(fault.Internal, "make a client's certificate", err, "")
	}
	block, _ := pem.Decode(cert)
	parsed, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fault.New(fault.Internal, "make a client's certificate", err, "")
	}
	spki := parsed.RawSubjectPublicKeyInfo
	id := string(identity.ClientID(spki))
	who, release, err := callerOf(ctx).hold()
	if err != nil {
		return nil, err
	}
	defer release()
	// First as whom it acts: a client that is let in and is nobody would be of no
	// use.
	if user != "" {
		if _, err := s.a.root.Map(ctx, who, id, q.Name, user); err != nil {
			return nil, err
		}
	}
	m, err := s.a.store.AddClient(spki, q.Name, role)
	if err != nil {
		if user != "" {
			_, uerr := s.a.root.Map(ctx, who, id, q.Name, "")
			err = errors.Join(err, uerr)
		}
		return nil, err
	}
	s.a.poke()
	_, cluster := s.a.store.Cluster()
	var addresses []string
	for _, addr := range lanAddresses(s.a.facts.Load().net) {
		addresses = append(addresses, net.JoinHostPort(addr, strconv.Itoa(int(s.a.controlPort))))
	}
	return &v1.AddClientResponse{Client: memberView(m), Bundle: identity.Bundle{
		Name: m.Name, Role: m.Role.String(), Cluster: cluster, Node: s.a.key.ID(), NodeName: s.a.name(), Addresses: addresses,
		Server: s.a.apiCert.Certificate[0], Certificate: cert, Key: key,
	}.Text()}, nil
}

// unmapClients takes from clients that were put out what they were here.
func (s *pairingServer) unmapClients(ctx context.Context, out []identity.Member) {
	c := callerOf(ctx)
	if c.local == nil {
		return // only a person of this node may; a key that is not trusted is nobody
	}
	who, release, err := c.hold()
	if err != nil {
		return
	}
	defer release()
	for _, m := range out {
		if !m.Client || m.IntroducedBy != s.a.key.ID() {
			continue
		}
		if _, err := s.a.root.Map(ctx, who, string(m.ID), m.Name, ""); err != nil {
			s.a.log.Warn("forget as whom a client acted", "client", m.Name, "error", err)
		}
	}
}

// removedWithin is how long the records of what has ended may take to go.
const removedWithin = 10 * time.Second

// NewIdentity makes this machine another node.
func (s *pairingServer) NewIdentity(ctx context.Context, _ *v1.NewIdentityRequest) (*v1.NewIdentityResponse, error) {
	a := s.a
	if err := a.idle("`tbcluster stop` and `tbcluster cp` end what runs"); err != nil {
		return nil, err
	}
	out := &v1.NewIdentityResponse{OldNodeId: a.id()}
	for _, m := range a.store.Members() {
		if !m.Self && !m.Revoked {
			out.Others = append(out.Others, m.Name)
		}
	}
	// What has ended is of the node that this machine was.
	for _, i := range a.ranks.manager.List() {
		if _, err := a.ranks.manager.Stop(ctx, i.ID, true); err != nil {
			return nil, err
		}
	}
	for gone, until := len(a.ranks.manager.List()) == 0, time.Now().Add(removedWithin); !gone; gone = len(a.ranks.manager.List()) == 0 {
		select {
		case <-ctx.Done():
			return nil, fault.FromStatus(ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(until) {
			return nil, fault.Newf(fault.Timeout, "`tbcluster ps` says what is still there; try again", "the records of ended instances are still being removed after %s", removedWithin)
		}
	}
	if err := a.address.Down(ctx); err != nil {
		return nil, err
	}
	a.leaveSoon(leaveRequest{renew: true})
	return out, nil
}
