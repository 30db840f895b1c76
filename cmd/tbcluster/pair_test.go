package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

func members() []*tbv1.Member {
	return []*tbv1.Member{
		{NodeId: "AAAA-1", Name: "alpha", Role: tbv1.Role_ROLE_ADMIN, IntroducedAt: noon},
		{NodeId: "BBBB-2", Name: "beta", Role: tbv1.Role_ROLE_OPERATOR, IntroducedBy: "AAAA-1", IntroducedAt: noon},
		{NodeId: "CCCC-3", Name: "gamma", Role: tbv1.Role_ROLE_ADMIN, IntroducedBy: "BBBB-2", Revoked: true},
	}
}

func opened() []*tbv1.OpenResponse {
	return []*tbv1.OpenResponse{
		{Event: &tbv1.OpenResponse_Code{Code: &tbv1.PairingCode{Code: "7-ABCD-EFGH", ExpiresAt: noon}}},
		{Event: &tbv1.OpenResponse_WrongTryFrom{WrongTryFrom: "192.0.2.7"}},
		{Event: &tbv1.OpenResponse_Joined{Joined: members()[1]}},
	}
}

func TestPairShowsACodeAndWaits(t *testing.T) {
	d := startDouble(t, &agentDouble{open: opened()})
	r := tb(t, d, "pair", "--role", "operator", "--as", "ada")
	r.wantCode(t, 0)
	if !strings.HasPrefix(r.out, "on the other node run:  tbcluster pair 7-ABCD-EFGH\n") || !strings.HasSuffix(r.out, "beta is in the cluster (BBBB-2)\n") {
		t.Errorf("printed\n%s", r.out)
	}
	if !strings.Contains(r.err, "a wrong code came from 192.0.2.7") {
		t.Errorf("said\n%s", r.err)
	}
	if got := request[*tbv1.OpenRequest](t, d); got.GetRole() != tbv1.Role_ROLE_OPERATOR || got.GetLocalUser() != "ada" {
		t.Errorf("asked for %v", got)
	}
	r = tb(t, d, "pair", "-o", "json")
	var first pairEventJSON
	if err := json.Unmarshal([]byte(strings.Split(r.out, "\n")[0]), &first); err != nil || first.Code != "7-ABCD-EFGH" {
		t.Errorf("%v in %s", err, r.out)
	}
}

func TestCtrlCTakesTheCodeBack(t *testing.T) {
	d := startDouble(t, &agentDouble{open: opened()[:1]})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c, err := dial(&endpoint{path: d.socket})
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	_, err = openCode(ctx, c, tbv1.Role_ROLE_ADMIN, "", func(*tbv1.OpenResponse) { cancel() })
	if !fault.Is(err, fault.Interrupted) {
		t.Errorf("ended with %v", err)
	}
}

func TestPairWithACode(t *testing.T) {
	d := startDouble(t, &agentDouble{joined: func(r *tbv1.JoinRequest) (*tbv1.JoinResponse, error) {
		if r.GetCode() != "7-ABCD-EFGH" {
			return nil, fault.New(fault.PairingFailed, "pair by the code", errors.New("the code is wrong"), "two more tries")
		}
		return &tbv1.JoinResponse{Peer: members()[0], Members: members()}, nil
	}})
	r := tb(t, d, "pair", "7-ABCD-EFGH", "--address", "192.0.2.1:7871")
	r.wantCode(t, 0)
	if r.out != "paired with alpha (AAAA-1)\nin the cluster now: alpha, beta\n" {
		t.Errorf("printed\n%s", r.out)
	}
	if got := request[*tbv1.JoinRequest](t, d); got.GetAddress() != "192.0.2.1:7871" {
		t.Errorf("asked for %v", got)
	}
	r = tb(t, d, "pair", "7-ABCD-XXXX")
	r.wantCode(t, fault.ExitDenied)
}

func TestPairListAndRevoke(t *testing.T) {
	d := startDouble(t, &agentDouble{members: members()})
	r := tb(t, d, "pair", "--list")
	r.wantCode(t, 0)
	for _, w := range []string{"alpha  admin     (founder)", "beta   operator  alpha", "gamma  put out   beta"} {
		if !strings.Contains(r.out, w) {
			t.Errorf("the list lacks %q:\n%s", w, r.out)
		}
	}
	r = tb(t, d, "pair", "--revoke", "beta")
	r.wantCode(t, fault.ExitUsage)
	if !request[*tbv1.RevokeRequest](t, d).GetValidateOnly() || !strings.Contains(r.err, "let in by it, and staying: gamma") {
		t.Errorf("nobody could answer, and: %s", r.err)
	}
	r = tb(t, d, "pair", "--revoke", "beta", "--yes", "--with-introduced")
	r.wantCode(t, 0)
	if got := request[*tbv1.RevokeRequest](t, d); got.GetValidateOnly() || !got.GetWithIntroduced() || r.out != "put out: beta\n" {
		t.Errorf("asked for %v, printed %q", got, r.out)
	}
}

func TestPairRevokesNobodyTwice(t *testing.T) {
	d := startDouble(t, &agentDouble{members: members()})
	for _, args := range [][]string{{"--yes"}, nil} {
		r := tb(t, d, append([]string{"pair", "--revoke", "gamma"}, args...)...)
		r.wantCode(t, 0)
		if r.out != "gamma is out already: there is nobody to put out\n" || r.err != "" {
			t.Errorf("with %v printed %q and %q", args, r.out, r.err)
		}
	}
	r := tb(t, d, "pair", "--revoke", "gamma", "-o", "json")
	r.wantCode(t, 0)
	var doc revokedJSON
	if err := json.Unmarshal([]byte(r.out), &doc); err != nil || doc.Revoked == nil || len(doc.Revoked) > 0 {
		t.Errorf("printed %s (%v)", r.out, err)
	}
}

func TestPairMapsAUser(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	r := tb(t, d, "pair", "--map", "beta/ada=ada.l")
	r.wantCode(t, 0)
	if got := request[*tbv1.MapRequest](t, d); got.GetNode() != "beta" || got.GetUser() != "ada" || got.GetLocalUser() != "ada.l" || r.out != "beta/ada=ada.l\n" {
		t.Errorf("asked for %v, printed %q", got, r.out)
	}
	r = tb(t, d, "pair", "--map", "beta/ada=")
	r.wantCode(t, 0)
	if r.out != "no user of another node is mapped here\n" {
		t.Errorf("printed %q", r.out)
	}
}

func TestAMappingOfANodeThatIsNotThereNamesTheNode(t *testing.T) {
	d := startDouble(t, &agentDouble{members: append(members(), &tbv1.Member{NodeId: "LLLL-9", Name: "laptop", Client: true})})
	c := mustDial(t, d)
	for name, known := range map[string]bool{"beta": true, "BBBB-2": true, "bbbb": true, "bbb": false, "nosuch": false, "gamma": false, "laptop": false} {
		err := unknownNode(t.Context(), c, name)
		if known != (err == nil) || !known && !fault.Is(err, fault.NodeUnknown) {
			t.Errorf("%s: %v", name, err)
		}
		if f := fault.As(err); f != nil && f.Fix != "the nodes are alpha, beta" {
			t.Errorf("%s: to do is %q", name, f.Fix)
		}
	}
}

func TestPairWritesABundleOnceAndForItsOwnerAlone(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	file := filepath.Join(t.TempDir(), "laptop.pem")
	r := tb(t, d, "pair", "--client", "laptop", "--out", file)
	r.wantCode(t, 0)
	if got := request[*tbv1.AddClientRequest](t, d); got.GetRole() != tbv1.Role_ROLE_VIEWER || got.GetName() != "laptop" {
		t.Errorf("asked for %v", got)
	}
	i, err := os.Stat(file)
	if err != nil || i.Mode() != 0o600 {
		t.Fatalf("%v, %v", i, err)
	}
	if !strings.Contains(r.out, file) || !strings.Contains(r.out, "--revoke laptop") {
		t.Errorf("printed %s", r.out)
	}
	r = tb(t, d, "pair", "--client", "laptop", "--out", file, "--role", "admin")
	r.wantCode(t, fault.ExitFileIO)
	if data, err := os.ReadFile(file); err != nil || string(data) != "a bundle\n" {
		t.Errorf("%q, %v", data, err)
	}
	r = tb(t, d, "pair", "--client", "tv", "--role", "operator", "-O", "-")
	r.wantCode(t, 0)
	if got := request[*tbv1.AddClientRequest](t, d); got.GetRole() != tbv1.Role_ROLE_OPERATOR || r.out != "a bundle\n" {
		t.Errorf("asked for %v, printed %q", got, r.out)
	}
	failing := startDouble(t, &agentDouble{fault: map[string]error{"AddClient": fault.Newf(fault.NodeInUse, "", "taken")}})
	other := filepath.Join(t.TempDir(), "tv.pem")
	tb(t, failing, "pair", "--client", "tv", "--out", other).wantCode(t, fault.Table[fault.NodeInUse].Exit)
	if _, err := os.Stat(other); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
}

func TestPairAsksBeforeANewIdentityAndWaitsForIt(t *testing.T) {
	d := startDouble(t, &agentDouble{state: &tbv1.ClusterState{SelfNodeId: "AAAA-1"}, members: members()})
	r := tb(t, d, "pair", "--new-identity")
	r.wantCode(t, fault.ExitUsage)
	if !strings.Contains(r.err, "leave the cluster of beta") {
		t.Errorf("said %s", r.err)
	}
	r = tb(t, d, "pair", "--new-identity", "--yes")
	r.wantCode(t, 0)
	if !strings.Contains(r.out, "node NEW-1") || !strings.Contains(r.out, "tbcluster pair --revoke AAAA-1") {
		t.Errorf("printed %s", r.out)
	}
}

func TestPairUsage(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	for _, args := range [][]string{{"pair", "x", "--list"}, {"pair", "--role", "king"}, {"pair", "--address", "x"},
		{"pair", "--map", "beta"}, {"pair", "--map", "beta=ada"}, {"pair", "--map", "/x=y"}, {"pair", "--map", "a/b=c", "--list"},
		{"pair", "--client", "x", "--new-identity"}, {"pair", "--out", "x"}, {"pair", "--client", "x", "-O", "-", "-o", "json"}} {
		tb(t, d, args...).wantCode(t, fault.ExitUsage)
	}
}

func TestPairShowsNoCodeToWhoAskedForSomethingElse(t *testing.T) {
	d := startDouble(t, &agentDouble{open: opened(), members: members()})
	for _, c := range []struct {
		args string // "''" is an empty argument
		want string
	}{
		{"--revoke ''", "--revoke needs the name"},
		{"--revoke= --yes", "--revoke needs the name"},
		{"--client ''", "--client needs a name"},
		{"--client " + strings.Repeat("a", 300), "is no name of a client"},
		{"--client ../x", "is no name of a client"},
		{"--client Laptop", "use 1 to 63"},
		{"--map ''", "--map needs NODE/USER=LOCAL"},
		{"''", "the code is empty"},
		{"'' --list", "do not go together"},
		{"--revoke '' --list", "do not go together"},
		{"--as ''", "--as needs"},
		{"--address ''", "--address needs"},
		{"--out ''", "--out needs"},
		{"--client x --out ''", "--out needs"},
		{"--role ''", "no role is called"},
		{"--with-introduced", "--with-introduced belongs to --revoke"},
		{"--with-introduced --list", "--with-introduced belongs"},
		{"--yes", "--yes belongs"},
		{"-y --list", "--yes belongs"},
		{"--role viewer --list", "--role belongs"},
		{"--role viewer --revoke beta -y", "--role belongs"},
		{"--role viewer 7-ABCD-EFGH", "--role belongs"},
		{"--as ada --list", "--as belongs"},
		{"--as ada --map beta/eve=eve", "--as belongs"},
		{"--address x --list", "--address needs a code"},
		{"--out x --list", "--out belongs"},
		{"--list=false", "--list=false is no choice"},
		{"--new-identity=false", "--new-identity=false is no choice"},
	} {
		args := []string{"pair"}
		for _, a := range strings.Fields(c.args) {
			args = append(args, strings.Trim(a, "'"))
		}
		r := tb(t, d, args...)
		r.wantCode(t, fault.ExitUsage)
		if r.out != "" || !strings.Contains(r.err, c.want) {
			t.Errorf("pair %s printed %q and says\n%s", c.args, r.out, r.err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.calls) != 0 {
		t.Errorf("the agent was asked for %v", d.calls)
	}
}

func TestTwoNodesPairByTheCodeThatOneShows(t *testing.T) {
	used := make(chan string, 1)
	inviter := startDouble(t, &agentDouble{open: opened()})
	joiner := startDouble(t, &agentDouble{joined: func(r *tbv1.JoinRequest) (*tbv1.JoinResponse, error) {
		used <- r.GetCode()
		return &tbv1.JoinResponse{}, nil
	}})
	a, b := mustDial(t, inviter), mustDial(t, joiner)
	if err := pairTwo(t.Context(), a, b); err != nil {
		t.Fatal(err)
	}
	if code := <-used; code != "7-ABCD-EFGH" {
		t.Errorf("used the code %q", code)
	}
	// A joiner that fails ends the wait of the inviter, and its own words count.
	inviter.open = opened()[:1]
	joiner.joined = func(*tbv1.JoinRequest) (*tbv1.JoinResponse, error) {
		return nil, fault.Newf(fault.PairingFailed, "", "nobody shows the code 7")
	}
	if err := pairTwo(t.Context(), a, b); !fault.Is(err, fault.PairingFailed) || !strings.Contains(err.Error(), "nobody shows the code 7") {
		t.Errorf("ended with %v", err)
	}
}

func mustDial(t *testing.T, d *agentDouble) *client {
	t.Helper()
	c, err := dial(&endpoint{path: d.socket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return c
}
