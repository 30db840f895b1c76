//go:build linux

package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
	"tbcluster/mesh/identity"
)

// elsewhere runs a part of a test on a node, as a program of its own.
func (c *cluster) elsewhere(node, test string, env ...string) (out *syncBuffer, ended chan error) {
	c.t.Helper()
	out, ended = &syncBuffer{}, make(chan error, 1)
	go func() {
		code, err := c.lab.Exec(context.Background(), node, lab.ExecOptions{Argv: []string{strangerProgram, "-test.run=^" + test + "$", "-test.v"},
			Env: append([]string{noLinger}, env...), Stdout: out, Stderr: out})
		if err == nil && (code != 0 || !strings.Contains(out.String(), "--- PASS: "+test)) {
			err = fmt.Errorf("exit %d", code)
		}
		ended <- err
	}()
	return out, ended
}

// syncBuffer is a buffer that is read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// says waits until it does.
func (b *syncBuffer) says(t *testing.T, what string, ended chan error) {
	t.Helper()
	for late := time.Now().Add(patience); !strings.Contains(b.String(), what); time.Sleep(20 * time.Millisecond) {
		select {
		case err := <-ended:
			ended <- err
			if !strings.Contains(b.String(), what) {
				t.Fatalf("it ended (%v) and did not say %q:\n%s", err, what, b.String())
			}
		default:
		}
		if time.Now().After(late) {
			t.Fatalf("it does not say %q:\n%s", what, b.String())
		}
	}
}

// done waits for its end.
func (b *syncBuffer) done(t *testing.T, ended chan error) {
	t.Helper()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("%v:\n%s", err, b.String())
		}
	case <-time.After(patience):
		t.Fatalf("it does not end:\n%s", b.String())
	}
}

// TestClientProgram is a program with a bundle on a machine that is no node. It is
// run by TestAttack.
func TestClientProgram(t *testing.T) {
	bundle := []byte(os.Getenv("TBCLUSTER_BUNDLE"))
	if len(bundle) == 0 {
		t.Skip("run by TestAttack")
	}
	mine, err := tls.X509KeyPair(bundle, bundle)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(bundle) {
		t.Fatal("no certificate of the node")
	}
	at := string(regexp.MustCompile(`(?m)^address: (.*)$`).FindSubmatch(bundle)[1])
	good := func() *tls.Config {
		return &tls.Config{Certificates: []tls.Certificate{mine}, RootCAs: roots, ServerName: identity.ServerName}
	}
	dial := func(c *tls.Config) *grpc.ClientConn {
		conn, err := grpc.NewClient(at, grpc.WithTransportCredentials(credentials.NewTLS(c)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	state := func(c *tls.Config) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := v1.NewClusterServiceClient(dial(c)).GetState(ctx, &v1.GetStateRequest{})
		return err
	}
	old := good()
	old.MaxVersion = tls.VersionTLS12
	stranger := good()
	cert, key, err := identity.NewCertificate("laptop", false)
	if err != nil {
		t.Fatal(err)
	}
	other, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	stranger.Certificates = []tls.Certificate{other}
	borrowed := good() // the certificate of one, the key of another
	borrowed.Certificates = []tls.Certificate{{Certificate: mine.Certificate, PrivateKey: other.PrivateKey}}
	nobody := good()
	nobody.Certificates = nil
	for name, c := range map[string]*tls.Config{"TLS 1.2": old, "a key of its own": stranger, "a certificate that is not its own": borrowed, "no certificate": nobody} {
		if err := state(c); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Its certificate opens nothing of what nodes say to each other.
	for _, alpn := range []string{"tbcluster/1", "tbcluster-http/1", "tbcluster-link/1", "tbcluster-pair/1"} {
		c := good()
		c.NextProtos, c.InsecureSkipVerify = []string{alpn}, true
		raw, err := net.DialTimeout("tcp", at, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if err := raw.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		conn := tls.Client(raw, c)
		if err = conn.Handshake(); err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
		if err == nil {
			t.Errorf("a client was let in as %s", alpn)
		}
		_ = raw.Close()
	}
	conn := dial(good())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for name, call := range map[string]struct {
		want codes.Code
		do   func() error
	}{
		"look": {codes.OK, func() error { _, err := v1.NewDoctorServiceClient(conn).Check(ctx, &v1.CheckRequest{}); return err }},
		"plan what there is not": {codes.NotFound, func() error {
			_, err := v1.NewInstanceServiceClient(conn).Plan(ctx, &v1.PlanRequest{Placement: &v1.Placement{Model: "none"}})
			return err
		}},
		"revoke": {codes.PermissionDenied, func() error {
			_, err := v1.NewPairingServiceClient(conn).Revoke(ctx, &v1.RevokeRequest{Node: "beta"})
			return err
		}},
		"rename": {codes.PermissionDenied, func() error {
			_, err := v1.NewNodeServiceClient(conn).Rename(ctx, &v1.RenameRequest{Node: "alpha", Name: "omega"})
			return err
		}},
		"shut down": {codes.PermissionDenied, func() error {
			_, err := v1.NewNodeServiceClient(conn).Shutdown(ctx, &v1.ShutdownRequest{})
			return err
		}},
		"let in another client": {codes.PermissionDenied, func() error {
			_, err := v1.NewPairingServiceClient(conn).AddClient(ctx, &v1.AddClientRequest{Name: "more"})
			return err
		}},
		"another identity": {codes.PermissionDenied, func() error {
			_, err := v1.NewPairingServiceClient(conn).NewIdentity(ctx, &v1.NewIdentityRequest{})
			return err
		}},
		"what nodes say": {codes.Unimplemented, func() error {
			_, err := peerv1.NewPeerServiceClient(conn).Echo(ctx, &peerv1.EchoRequest{})
			return err
		}},
	} {
		if err := call.do(); status.Code(err) != call.want {
			t.Errorf("%s: %v, want %v", name, err, call.want)
		}
	}
	// It acts as eve, on both nodes, and as nobody else.
	for _, c := range []struct {
		from, to string
		want     v1.TransferState
	}{
		{"alpha:own", "beta:from-laptop", v1.TransferState_TRANSFER_STATE_DONE},
		{"alpha:/root/secret", "beta:stolen", v1.TransferState_TRANSFER_STATE_FAILED},
		{"alpha:own", "beta:/root/planted", v1.TransferState_TRANSFER_STATE_FAILED},
	} {
		tc := v1.NewTransferServiceClient(conn)
		r, err := tc.Start(ctx, &v1.StartTransferRequest{Sources: []string{c.from}, Destination: c.to})
		if err != nil {
			t.Errorf("%s to %s: %v", c.from, c.to, err)
			continue
		}
		w, err := tc.Watch(ctx, &v1.WatchTransferRequest{Id: r.Transfer.Id})
		if err != nil {
			t.Fatal(err)
		}
		last := r.Transfer
		for {
			e, err := w.Recv()
			if err != nil {
				break // the stream ends with the transfer
			}
			last = e.Transfer
		}
		if last.State != c.want {
			t.Errorf("%s to %s: %v %v", c.from, c.to, last.State, last.Error)
		}
	}
	w, err := v1.NewClusterServiceClient(conn).Watch(ctx, &v1.WatchRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Recv(); err != nil {
		t.Fatal(err)
	}
	fmt.Println("watching")
	for err == nil {
		_, err = w.Recv()
	}
	if ctx.Err() != nil {
		t.Fatal("a client that was put out goes on watching")
	}
	if err := state(good()); status.Code(err) != codes.Unavailable {
		t.Errorf("a client that was put out: %v", err)
	}
}

// withBundle: a program elsewhere has what its bundle gives it, until it is put
// out, from whichever node.
func withBundle(c *cluster, _ string) {
	for _, n := range []string{"alpha", "beta"} {
		c.addUser(n, "eve", 4002)
		c.run(n, "sh", "-c", "umask 077; echo secret > /root/secret; install -o eve -m 600 /root/secret /home/eve/own")
	}
	c.run("beta", "tbcluster", "pair", "--map", "alpha/eve=eve")
	c.says(c.fails(fault.ExitUsage, "alpha", "tbcluster", "pair", "--client", "laptop", "--role", "operator", "-O", "-"), "root makes the client", "--as NAME")
	bundle := c.run("alpha", "tbcluster", "pair", "--client", "laptop", "--role", "operator", "--as", "eve", "-O", "-")
	out, ended := c.elsewhere("lan", "TestClientProgram", "TBCLUSTER_BUNDLE="+bundle)
	out.says(c.t, "watching", ended)
	c.says(c.run("beta", "tbcluster", "pair", "--list"), "laptop", "operator (client)")
	// Another node serves it nothing: it is alpha's.
	c.run("beta", "tbcluster", "pair", "--revoke", "laptop", "--yes")
	out.done(c.t, ended)
	c.says(c.run("alpha", "tbcluster", "pair", "--list"), "put out")
	if got := c.run("beta", "stat", "-c", "%U", "/home/eve/from-laptop"); got != "eve\n" {
		c.t.Errorf("what it copied belongs to %s", got)
	}
	// A file that is there is never written over, and a client with a bad name is
	// nobody.
	c.run("alpha", "sh", "-c", "echo mine > /tmp/bundle")
	c.fails(fault.ExitFileIO, "alpha", "tbcluster", "pair", "--client", "tv", "--out", "/tmp/bundle")
	c.fails(fault.ExitUsage, "alpha", "tbcluster", "pair", "--client", "No Name", "--out", "/tmp/other")
	if got := c.run("alpha", "sh", "-c", "cat /tmp/bundle; ls /tmp/other 2>/dev/null; true"); got != "mine\n" {
		c.t.Errorf("left: %s", got)
	}
	if got := c.run("alpha", "tbcluster", "pair", "--list"); strings.Contains(got, "tv") {
		c.t.Errorf("a client without a bundle is listed:\n%s", got)
	}
}

// TestForger floods the LAN with forged mDNS answers. It is run by TestAttack.
func TestForger(t *testing.T) {
	rate, err := strconv.Atoi(os.Getenv("TBCLUSTER_FORGE_RATE"))
	if err != nil {
		t.Skip("run by TestAttack")
	}
	number := os.Getenv("TBCLUSTER_FORGE_NUMBER")
	conn, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(224, 0, 0, 251), Port: 5353})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	// Keys of its own, some of which bear the number of the open code, as a forger
	// finds them in a moment.
	var ids []identity.NodeID
	for range 2000 {
		k, err := identity.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, k.ID())
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	begin := time.Now()
	sent := 0
	fmt.Println("forging")
	for time.Since(begin) < 10*time.Minute && !toldToEnd() {
		<-tick.C
		for due := int(time.Since(begin).Seconds() * float64(rate)); sent < due; sent++ {
			b, err := forgedAnswer(sent, ids[sent%len(ids)], number)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(b); err != nil {
				t.Fatal(err)
			}
		}
	}
	fmt.Printf("forged %d answers in %v\n", sent, time.Since(begin).Round(time.Millisecond))
}

// endFile is made on the LAN's host to end what runs there.
const endFile = "/tmp/end"

func toldToEnd() bool {
	_, err := os.Stat(endFile)
	return err == nil
}

// end ends what runs on the LAN's host and waits until it has.
func (c *cluster) end(out *syncBuffer, ended chan error) {
	c.t.Helper()
	c.run("lan", "touch", endFile)
	out.done(c.t, ended)
	c.run("lan", "rm", endFile)
}

// forgedAnswer is the n-th of a row of lies: most are well formed, every fourth is
// something that no program of ours says.
func forgedAnswer(n int, id identity.NodeID, number string) ([]byte, error) {
	const service = "_tbcluster._tcp.local."
	instance := fmt.Sprintf("forged-%d.%s", n, service)
	txt := []string{"proto=1", "id=" + string(id), "name=alpha", "port=7871", "os=linux", "pair=" + number}
	addr := net.IPv4(172, 31, 77, byte(1+n%250))
	switch n % 16 {
	case 3: // a name that steers a terminal
		txt[2] = "name=\x1b[2J\x1b]0;owned\x07\r\n"
	case 7: // oversized
		txt = nil
		for range 200 {
			txt = append(txt, strings.Repeat("x", 255))
		}
	case 11: // bytes that are no message
		b := make([]byte, 512)
		_, err := rand.Read(b)
		return b, err
	case 15: // a name that does not end, and an address that is ours
		txt[1], txt[3] = "id="+strings.Repeat("A", 250), "port=99999"
		addr = net.IPv4(127, 0, 0, 1)
	}
	m := &dns.Msg{MsgHdr: dns.MsgHdr{Response: true, Authoritative: true}}
	h := func(name string, t uint16) dns.RR_Header {
		return dns.RR_Header{Name: name, Rrtype: t, Class: dns.ClassINET, Ttl: 3200}
	}
	host := fmt.Sprintf("forged-%d.local.", n)
	m.Answer = []dns.RR{
		&dns.PTR{Hdr: h(service, dns.TypePTR), Ptr: instance},
		&dns.SRV{Hdr: h(instance, dns.TypeSRV), Port: 7871, Target: host},
		&dns.TXT{Hdr: h(instance, dns.TypeTXT), Txt: txt},
		&dns.A{Hdr: h(host, dns.TypeA), A: addr},
	}
	b, err := m.Pack()
	if err != nil && n%16 == 3 {
		b, err = []byte(txt[2]), nil // the library will not say it; then as it is
	}
	return b, err
}

// TestHolder opens connections to the control port and does nothing with them, or
// hardly anything, until it is told to end. It is run by TestAttack.
func TestHolder(t *testing.T) {
	at := os.Getenv("TBCLUSTER_HOLD")
	if at == "" {
		t.Skip("run by TestAttack")
	}
	const many = 500
	var wg sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	go func() {
		for !toldToEnd() && ctx.Err() == nil {
			time.Sleep(50 * time.Millisecond)
		}
		cancel()
	}()
	opened := make(chan bool, many)
	for i := range many {
		wg.Go(func() {
			for first := true; ctx.Err() == nil; first = false {
				c, err := (&net.Dialer{}).DialContext(ctx, "tcp", at)
				if first {
					opened <- err == nil
				}
				if err != nil {
					continue
				}
				stop := context.AfterFunc(ctx, func() { _ = c.Close() })
				for k := 0; ; k++ { // a byte now and then, of a record that never ends
					if i%2 == 0 {
						break
					}
					if _, err := c.Write([]byte{22, 3, 1, 64, 0, 1, 0}[k%7 : k%7+1]); err != nil {
						break
					}
					select {
					case <-ctx.Done():
					case <-time.After(200 * time.Millisecond):
					}
				}
				_, _ = c.Read(make([]byte, 1)) // until it is put out
				stop()
				_ = c.Close()
				select { // and again
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
			}
		})
	}
	n := 0
	for range many {
		if <-opened {
			n++
		}
	}
	fmt.Printf("holding %d connections\n", n)
	wg.Wait()
	if n < many*9/10 {
		t.Errorf("only %d of %d connections came about", n, many)
	}
}

// slowConnections: 500 connections that never say who they are keep nobody out.
func slowConnections(c *cluster, _ string) {
	at := netip.AddrPortFrom(c.addresses("alpha", "eth0")[0], 7871)
	before := c.resident("alpha")
	out, ended := c.elsewhere("lan", "TestHolder", "TBCLUSTER_HOLD="+at.String())
	out.says(c.t, "holding", ended)
	c.run("beta", "tbcluster", "ping", "alpha") // connections of its own, one for each way
	c.run("beta", "sh", "-c", "echo x > /tmp/during; tbcluster cp /tmp/during alpha:/tmp/during")
	bundle := c.run("alpha", "tbcluster", "pair", "--client", "during", "-O", "-")
	if !strings.Contains(bundle, "PRIVATE KEY") {
		c.t.Error("no bundle")
	}
	// This shell is among them too, and may be what the agent is about to start.
	fds := strings.Fields(c.run("alpha", "sh", "-c", "for p in $(pgrep -f 'tbcluster agent --root-half'); do ls /proc/$p/fd 2>/dev/null | wc -l; done | sort -n"))
	if n, err := strconv.Atoi(fds[len(fds)-1]); err != nil || n > 200 {
		c.t.Errorf("the agent has %v descriptors open, %v", fds, err)
	}
	if s := c.until("beta", "alpha up", func(s *v1.ClusterState) bool { return allUp(s) == nil }); len(s.Nodes) != 2 {
		c.t.Errorf("nodes: %s", brief(s))
	}
	c.bounded("alpha", before)
	c.end(out, ended)
	c.t.Log(strings.TrimSpace(out.String()), "; descriptors:", fds)
}

// bounded fails when an agent has grown out of proportion.
func (c *cluster) bounded(node string, before uint64) {
	c.t.Helper()
	most := uint64(64 << 20)
	if os.Getenv("TBCLUSTER_LONG") != "" {
		most *= 8 // what the race detector takes for itself
	}
	after := c.resident(node)
	if after > before+most {
		c.t.Errorf("%s grew from %d to %d MB", node, before>>20, after>>20)
	}
	c.t.Logf("%s: from %d to %d MB", node, before>>20, after>>20)
}

// forgedFlood: in a flood of forged answers, nobody is trusted, no code is
// guessed, whoever has the code pairs, and the agents do not grow. In the long
// run it goes on until memory has been flat for a minute.
func forgedFlood(c *cluster, _ string) {
	long := os.Getenv("TBCLUSTER_LONG") != ""
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	open, err := v1.NewPairingServiceClient(c.api("alpha")).Open(ctx, &v1.OpenRequest{LocalUser: "root"})
	if err != nil {
		c.t.Fatal(err)
	}
	e, err := open.Recv()
	if err != nil {
		c.t.Fatal(err)
	}
	code := e.GetCode().GetCode()
	before := map[string]uint64{"alpha": c.resident("alpha"), "beta": c.resident("beta"), "gamma": c.resident("gamma")}
	out, ended := c.elsewhere("lan", "TestForger", "TBCLUSTER_FORGE_RATE=1000", "TBCLUSTER_FORGE_NUMBER="+code[:4])
	out.says(c.t, "forging", ended)
	time.Sleep(time.Second) // so that what is asked is asked in the flood; nothing is proved by it
	c.run("gamma", "tbcluster", "pair", code, "--as", "root")
	if e, err = open.Recv(); err != nil || e.GetJoined().GetName() != "gamma" {
		c.t.Fatalf("the inviting node says %v, %v", e, err)
	}
	if long {
		c.flatFor(time.Minute, 8*time.Minute)
	} else {
		time.Sleep(2 * time.Second) // more of it; what is looked at next is looked at in the flood
	}
	for _, n := range []string{"alpha", "beta", "gamma"} {
		s := c.until(n, "the three nodes", func(s *v1.ClusterState) bool { return len(s.Nodes) == 3 && allUp(s) == nil })
		if len(s.Nodes) != 3 {
			c.t.Errorf("%s counts others among the nodes: %s", n, brief(s))
		}
		if got := c.run(n, "tbcluster", "pair", "--list"); strings.Contains(got, "forged") || strings.Contains(got, "owned") {
			c.t.Errorf("trusted on %s:\n%s", n, got)
		}
		c.bounded(n, before[n])
	}
	c.end(out, ended)
	c.t.Log(strings.TrimSpace(out.String()))
}

// flatFor waits until no agent has grown for some time.
func (c *cluster) flatFor(d, most time.Duration) {
	c.t.Helper()
	peak, since := map[string]uint64{}, time.Now()
	for begin := time.Now(); time.Since(since) < d; time.Sleep(time.Second) {
		for _, n := range c.names {
			// What the collector gives back and takes again is no growth.
			if now := c.resident(n); now > peak[n]+peak[n]/50 {
				peak[n], since = now, time.Now()
			}
		}
		if time.Since(begin) > most {
			c.t.Fatalf("memory has not been flat for %v within %v: %v", d, most, peak)
		}
	}
	c.t.Logf("flat for %v: %v", d, peak)
}

// revokedNode: a node that was put out has nothing any more, at once, and comes
// back as another one.
func revokedNode(c *cluster, model string) {
	c.until("gamma", "all nodes", func(s *v1.ClusterState) bool { return len(s.Nodes) == 3 && allUp(s) == nil })
	c.run("gamma", "sh", "-c", "cp /etc/hostname /tmp/before; tbcluster cp /tmp/before alpha:/tmp/before")
	old := node(c.until("alpha", "gamma", func(s *v1.ClusterState) bool { return node(s, "gamma") != nil }), "gamma").Id
	c.run("beta", "tbcluster", "pair", "--revoke", "gamma", "--yes") // by another one than who let it in
	for _, n := range []string{"alpha", "beta"} {
		c.until(n, "two nodes", func(s *v1.ClusterState) bool { return len(s.Nodes) == 2 })
	}
	for _, argv := range [][]string{
		{"cp", "/etc/hostname", "alpha:/tmp/after"}, {"cp", "alpha:models/" + model + ".gguf", "."}, {"place", model, "--node", "alpha"},
	} {
		if out, err := c.tryRun("gamma", append([]string{"tbcluster"}, argv...)...); err == nil {
			c.t.Errorf("a node that was put out may %v:\n%s", argv, out)
		}
	}
	// It may have been told before its connections ended; if not, it finds out.
	told := false
	for l := range strings.Lines(c.run("gamma", "tbcluster", "pair", "--list")) {
		told = told || strings.Contains(l, old) && strings.Contains(l, "put out")
	}
	if !told {
		s := c.until("gamma", "that the others do not let it in", hasFinding("gamma", "node-distrusts"))
		if hasFinding("gamma", "node-blocked")(s) || hasFinding("gamma", "node-down")(s) {
			c.t.Errorf("a node that was put out looks elsewhere: %v", s.Findings)
		}
	}
	// What it says to itself is nothing to others.
	if out, err := c.tryRun("gamma", "tbcluster", "node", "rename", "alpha", "omega"); err != nil {
		c.says(out, "this node was put out of its cluster") // it was told already
	}
	if got := c.run("alpha", "tbcluster", "pair", "--list"); strings.Contains(got, "omega") {
		c.t.Errorf("a node that was put out renames others:\n%s", got)
	}
	if got := c.run("alpha", "sh", "-c", "ls /tmp/after 2>/dev/null; true"); got != "" {
		c.t.Errorf("it wrote %s", got)
	}
	// With the old key a code does not help.
	pairing := func() (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		open, err := v1.NewPairingServiceClient(c.api("alpha")).Open(ctx, &v1.OpenRequest{LocalUser: "root"})
		if err != nil {
			c.t.Fatal(err)
		}
		e, err := open.Recv()
		if err != nil {
			c.t.Fatal(err)
		}
		return c.tryRun("gamma", "tbcluster", "pair", e.GetCode().GetCode(), "--as", "root")
	}
	if out, err := pairing(); err == nil {
		c.t.Errorf("a revoked key is back:\n%s", out)
	}
	c.says(c.run("gamma", "tbcluster", "pair", "--new-identity", "--yes"), "in no cluster")
	s := c.until("gamma", "itself alone", func(s *v1.ClusterState) bool { return len(s.Nodes) == 1 })
	if s.Nodes[0].Id == old {
		c.t.Error("the identity is the old one")
	}
	if out, err := pairing(); err != nil {
		c.t.Errorf("it does not come back: %v\n%s", err, out)
	}
	for _, n := range c.names {
		c.until(n, "three nodes", func(s *v1.ClusterState) bool { return len(s.Nodes) == 3 && allUp(s) == nil })
	}
}
