package agent

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/mesh/identity"
)

func TestEveryCallHasARowAndEveryRowACall(t *testing.T) {
	s := (&Agent{}).newLocalServer()
	peerv1.RegisterPeerServiceServer(s, &peerServer{})
	served := map[string]bool{}
	for service, info := range s.GetServiceInfo() {
		for _, m := range info.Methods {
			name := "/" + service + "/" + m.Name
			served[name] = true
			if _, ok := rules[name]; !ok {
				t.Errorf("%s has no row in the table of who may do what", name)
			}
		}
	}
	for name := range rules {
		if !served[name] {
			t.Errorf("the table has a row for %s, which is not served", name)
		}
	}
}

func TestWhatIsForwardedIsWhatTheTableAllows(t *testing.T) {
	have := map[string]bool{}
	for _, f := range (&Agent{}).forwardable() {
		have[f.method] = true
		if rules[f.method].remote == none {
			t.Errorf("%s is forwarded, and the table does not allow it", f.method)
		}
	}
	for name, r := range rules {
		if r.remote != none && !have[name] && name[:len("/tbcluster.v1.")] == "/tbcluster.v1." {
			t.Errorf("the table allows %s from other nodes, and it is not forwarded", name)
		}
	}
}

func TestCallsOfNobodyAreRefused(t *testing.T) {
	a := &Agent{}
	if _, err := a.authorizeLocal(t.Context(), "/tbcluster.v1.ClusterService/GetState"); err == nil {
		t.Error("a local call without a connection was let in")
	}
	if _, err := a.authorizeLocal(t.Context(), "/tbcluster.peer.v1.PeerService/Worker"); err == nil {
		t.Error("a call between agents was let in locally")
	}
	if _, err := a.authorizePeer(t.Context(), "/tbcluster.peer.v1.PeerService/Worker"); err == nil {
		t.Error("a call of nobody who has paired was let in")
	}
	if _, err := a.authorizePeer(t.Context(), "/tbcluster.v1.NodeService/Shutdown"); err == nil {
		t.Error("shutdown was let in from another node")
	}
	if _, err := a.peerUnary(context.Background(), nil, &grpc.UnaryServerInfo{FullMethod: "/x/y"}, nil); err == nil {
		t.Error("a call that is in no table was let in")
	}
}

func TestWhoIsNotFoundIsToldWhoIsThere(t *testing.T) {
	err := noSuchMember("nosuch", []identity.Member{{Name: "alpha"}, {Name: "beta", Revoked: true}}, []identity.Member{{Name: "laptop"}})
	f := fault.As(err)
	if f == nil || f.Reason != fault.NodeUnknown || !strings.Contains(f.What, `"nosuch"`) || !strings.Contains(f.Fix, "the nodes are alpha; the clients are laptop; ") {
		t.Errorf("it says %+v", f)
	}
	if f := fault.As(noSuchMember("x", []identity.Member{{Name: "alpha"}}, nil)); strings.Contains(f.Fix, "clients") {
		t.Errorf("without clients it says %q", f.Fix)
	}
}

func TestAUserWhoIsNotThereIsSaidInWords(t *testing.T) {
	_, err := resolver{}.ByName(t.Context(), "no-such-user-here")
	if err == nil || strings.Contains(err.Error(), "exit status") || !strings.Contains(err.Error(), `no user is called "no-such-user-here"`) {
		t.Errorf("it says %v", err)
	}
	if u, err := (resolver{}).ByName(t.Context(), "root"); err != nil || u.UID != 0 {
		t.Errorf("root is %+v, %v", u, err)
	}
}

func TestRolesAreOrdered(t *testing.T) {
	if !(v1.Role_ROLE_UNSPECIFIED < v1.Role_ROLE_VIEWER && v1.Role_ROLE_VIEWER < v1.Role_ROLE_OPERATOR && v1.Role_ROLE_OPERATOR < v1.Role_ROLE_ADMIN) {
		t.Error("roles are compared by their numbers")
	}
}
