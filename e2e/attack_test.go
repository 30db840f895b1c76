//go:build linux

package e2e

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// TestAttack is what comes from people and machines that were not let in.
// Alpha and beta have paired; gamma and the LAN's host have not.
func TestAttack(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("a lab that was made without root has one user, and no packet filter that keeps root out")
	}
	modelFile(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := newLab(t, lab.Options{Nodes: 3, Config: map[string]any{"owners": []string{"eve"}},
		Binds: []lab.Bind{{Source: self, Target: strangerProgram}}})
	c.pair("alpha", "beta")
	model := strings.TrimSuffix(c.giveModel("alpha"), ".gguf")
	for _, n := range []string{"alpha", "beta"} {
		c.until(n, "both nodes and their cable", func(s *v1.ClusterState) bool {
			return len(s.Nodes) == 2 && allUp(s) == nil && links(s, proven) == 1 && len(s.Models) == 1
		})
	}
	for _, sub := range []struct {
		name string
		run  func(c *cluster, model string)
	}{
		{"a LAN host routes to a link address", routeToLink},
		{"somebody removes the packet filter", filterRemoved},
		{"a web page asks the gateway", webPage},
		{"a machine that has not paired", stranger},
		{"a user who is no owner", noOwner},
		{"an owner who is not root", otherOwner},
		{"an agent that was taken over", evilRoot},
		{"a program with a bundle", withBundle},
		{"500 slow connections", slowConnections},
		// From here on gamma takes part.
		{"a flood of forged answers", forgedFlood},
		{"a node that was put out", revokedNode},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(c.in(t), model) })
	}
}

// shut and open are how long a connection is tried that must not come about,
// and one that must.
const shut, open = "1", "20"

// reaches reports whether a TCP connection from a node comes about within some
// seconds. Of several it may be asked at once.
func (c *cluster) reaches(from string, to netip.AddrPort, seconds string) bool {
	c.t.Helper()
	out, err := c.tryRun(from, "timeout", seconds, "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%d", to.Addr(), to.Port()))
	switch err {
	case nil:
		return true
	case exitError(1), exitError(124): // refused or unreachable, or nothing came back
		return false
	}
	c.t.Errorf("%s: connect to %s: %v\n%s", from, to, err, out)
	return false
}

// addresses are the IPv4 addresses of an interface of a node.
func (c *cluster) addresses(node, iface string) (out []netip.Addr) {
	c.t.Helper()
	var list []struct {
		AddrInfo []struct{ Local string } `json:"addr_info"`
	}
	if err := json.Unmarshal([]byte(c.run(node, "ip", "-j", "-4", "addr", "show", "dev", iface)), &list); err != nil {
		c.t.Fatal(err)
	}
	for _, l := range list {
		for _, a := range l.AddrInfo {
			out = append(out, netip.MustParseAddr(a.Local))
		}
	}
	if len(out) == 0 {
		c.t.Fatalf("%s has no address on %s", node, iface)
	}
	return out
}

// routeToLink: the LAN's host, with routes made by hand, reaches no port of an
// engine or a rank, at whatever address.
func routeToLink(c *cluster, model string) {
	c.run("alpha", "tbcluster", "place", model, "--node", "alpha,beta", "--ranks", "2", "--name", "two")
	var ps struct {
		Instances []struct {
			Ranks []struct {
				Node    string
				Listens []string
			}
		}
	}
	if err := json.Unmarshal([]byte(c.run("alpha", "tbcluster", "ps", "-o", "json")), &ps); err != nil {
		c.t.Fatal(err)
	}
	if len(ps.Instances) != 1 || len(ps.Instances[0].Ranks) != 2 {
		c.t.Fatalf("instances: %+v", ps)
	}
	s := c.until("alpha", "ready", ready("two"))
	tried := 0
	var tries sync.WaitGroup
	defer tries.Wait()
	for _, rank := range ps.Instances[0].Ranks {
		lan := c.addresses(rank.Node, "eth0")[0]
		for _, l := range rank.Listens {
			at := netip.MustParseAddrPort(l)
			// At its own address, the node's others, and those of the LAN.
			places := append(c.addresses(rank.Node, "eth0"), netip.MustParseAddr(node(s, rank.Node).NodeAddress))
			if !at.Addr().IsLoopback() {
				places = append(places, at.Addr())
				if !c.reaches("alpha", at, open) {
					c.t.Errorf("alpha does not reach %s of %s over the cable", at, rank.Node)
				}
			}
			for _, p := range places {
				to := netip.AddrPortFrom(p, at.Port())
				if p != lan {
					c.run("lan", "ip", "route", "replace", p.String()+"/32", "via", lan.String())
				}
				tried++
				tries.Go(func() {
					if c.reaches("lan", to, shut) {
						c.t.Errorf("a LAN host reaches %s of %s", to, rank.Node)
					}
				})
			}
		}
	}
	tries.Wait()
	if tried < 5 {
		c.t.Errorf("only %d places were tried: %+v", tried, ps)
	}
	// Gamma is at the end of a cable of beta, and has not paired. Systems bring
	// such interfaces up by themselves.
	l := between(c.until("beta", "a cable to gamma", func(s *v1.ClusterState) bool { return between(s, "beta", "Linux gamma") != nil }), "beta", "Linux gamma")
	near := l.A.Interface
	if l.B.NodeName == "beta" {
		near = l.B.Interface
	}
	c.run("beta", "ip", "link", "set", near, "up")
	mine := c.addresses("gamma", "eth0")[0]
	for _, far := range strings.Fields(c.run("gamma", "sh", "-c", "cd /sys/class/net && ls -d thunderbolt*")) {
		c.run("gamma", "ip", "link", "set", far, "up")
		for _, l := range ps.Instances[0].Ranks[1].Listens {
			at := netip.MustParseAddrPort(l)
			c.run("gamma", "ip", "route", "replace", at.Addr().String()+"/32", "dev", far, "src", mine.String())
			if c.reaches("gamma", at, shut) {
				c.t.Errorf("gamma, which has not paired, reaches %s over %s", at, far)
			}
			c.run("gamma", "ip", "route", "del", at.Addr().String()+"/32")
		}
	}
	// The same way to a machine that keeps nobody out, so that the above proves
	// something.
	unguarded, lan := netip.MustParseAddr("10.77.255.254"), c.addresses("gamma", "eth0")[0]
	c.run("gamma", "ip", "addr", "add", unguarded.String()+"/32", "dev", "lo")
	c.run("lan", "ip", "route", "replace", unguarded.String()+"/32", "via", lan.String())
	if to := netip.AddrPortFrom(unguarded, 7871); !c.reaches("lan", to, open) {
		c.t.Errorf("a LAN host does not even reach %s", to)
	}
}

// filterRemoved: who removes all rules of a node, as a restart of nftables.service
// does, opens its link addresses to the LAN for moments only.
func filterRemoved(c *cluster, _ string) {
	l := between(c.until("alpha", "the cable", func(s *v1.ClusterState) bool { return between(s, "alpha", "beta").GetState() == proven }), "alpha", "beta")
	end := l.A
	if l.B.NodeName == "alpha" {
		end = l.B
	}
	prefix, err := netip.ParsePrefix(end.Address)
	if err != nil {
		c.t.Fatal(err)
	}
	to := netip.AddrPortFrom(prefix.Addr(), 7871) // its control port listens at every address
	c.run("lan", "ip", "route", "replace", to.Addr().String()+"/32", "via", c.addresses("alpha", "eth0")[0].String())
	if c.reaches("lan", to, shut) {
		c.t.Errorf("a LAN host reaches %s before anybody did anything", to)
	}
	set := c.run("alpha", "nft", "-s", "list", "table", "inet", "tbcluster")
	c.run("alpha", "nft", "flush", "ruleset")
	var now string
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) { // the kernel tells only root
		if now, err = c.tryRun("alpha", "nft", "-s", "list", "table", "inet", "tbcluster"); err == nil {
			break
		}
		if time.Now().After(end) {
			c.t.Fatalf("the packet filter of alpha is not put back: %v\n%s", err, now)
		}
	}
	if now != set {
		c.t.Errorf("the packet filter was\n%s\nand is now\n%s", set, now)
	}
	if c.reaches("lan", to, shut) {
		c.t.Errorf("a LAN host reaches %s after the packet filter was removed and put back", to)
	}
	if !c.reaches("beta", to, open) {
		c.t.Errorf("beta does not reach %s over the cable", to)
	}
	c.findings("alpha", "alpha", "a closed LAN", none("filter-inactive"))
}

// webPage: what a browser sends for a page of somebody else is refused.
func webPage(c *cluster, _ string) {
	s := c.until("alpha", "its gateway", func(s *v1.ClusterState) bool { return node(s, "alpha").GetGatewayAddress() != "" })
	at := netip.MustParseAddrPort(node(s, "alpha").GatewayAddress)
	for _, x := range []struct {
		headers string
		want    string
	}{
		{"Host: localhost", "200"},
		{"Host: " + at.String(), "200"},
		{"Host: evil.example", "403"},
		{"Host: localhost.evil.example:" + fmt.Sprint(at.Port()), "403"},
		{"Host: localhost\r\nOrigin: http://evil.example", "403"},
		{"Host: localhost\r\nOrigin: null", "403"},
		{"Host: localhost\r\nSec-Fetch-Site: cross-site", "403"},
		{"Host: localhost\r\nHost: evil.example", "400"},
	} {
		out := c.run("alpha", "timeout", "10", "bash", "-c", `exec 3<>/dev/tcp/$0/$1; printf 'GET /v1/models HTTP/1.1\r\n%b\r\nConnection: close\r\n\r\n' "$2" >&3; cat <&3`,
			at.Addr().String(), fmt.Sprint(at.Port()), x.headers)
		if first, _, _ := strings.Cut(out, "\r\n"); !strings.HasPrefix(first, "HTTP/1.1 "+x.want+" ") {
			c.t.Errorf("%q is answered by %q, want %s", x.headers, first, x.want)
		}
	}
	for _, n := range []string{"lan", "beta"} {
		if to := netip.AddrPortFrom(c.addresses("alpha", "eth0")[0], at.Port()); c.reaches(n, to, shut) {
			c.t.Errorf("%s reaches alpha's gateway at %s", n, to)
		}
	}
}

// strangerProgram is this test's program inside of a node.
const strangerProgram = "/lab/stranger"

// TestStranger is the part of TestAttack that runs on a machine that has not
// paired: it tries every protocol of the control port with a key of its own.
func TestStranger(t *testing.T) {
	at := os.Getenv("TBCLUSTER_STRANGER")
	if at == "" {
		t.Skip("run by TestAttack")
	}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, pub, key)
	if err != nil {
		t.Fatal(err)
	}
	mine := []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}
	for _, alpn := range []string{"tbcluster/1", "tbcluster-http/1", "tbcluster-link/1", "tbcluster-pair/1", "h2", ""} {
		for name, certs := range map[string][]tls.Certificate{"a key of its own": mine, "no key": nil} {
			conf := &tls.Config{InsecureSkipVerify: true, Certificates: certs}
			if alpn != "" {
				conf.NextProtos = []string{alpn}
			}
			raw, err := net.DialTimeout("tcp", at, 5*time.Second)
			if err != nil {
				t.Fatal(err) // the port is open to everybody; the door behind it is not
			}
			if err := raw.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
				t.Fatal(err)
			}
			conn := tls.Client(raw, conf)
			b := make([]byte, 1)
			if err = conn.Handshake(); err == nil {
				// TLS 1.3 tells a client only now that it was refused.
				_, err = conn.Read(b)
			}
			if err == nil {
				t.Errorf("%q with %s was let in: it got %v", alpn, name, b)
			} else if ne, ok := err.(net.Error); ok && ne.Timeout() {
				t.Errorf("%q with %s was not told that it is refused: %v", alpn, name, err)
			}
			if err := raw.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// stranger: a machine that has not paired gets nothing.
func stranger(c *cluster, model string) {
	at := netip.AddrPortFrom(c.addresses("alpha", "eth0")[0], 7871)
	var out strings.Builder
	code, err := c.lab.Exec(context.Background(), "gamma", lab.ExecOptions{Argv: []string{strangerProgram, "-test.run=^TestStranger$", "-test.v"},
		Env: []string{noLinger, "TBCLUSTER_STRANGER=" + at.String()}, Stdout: &out, Stderr: &out})
	if err != nil || code != 0 || !strings.Contains(out.String(), "--- PASS: TestStranger") {
		c.t.Errorf("exit %d, %v:\n%s", code, err, out.String())
	}
	for _, argv := range [][]string{
		{"ping", "alpha"}, {"cp", "/etc/hostname", "alpha:"}, {"cp", "alpha:models/" + model + ".gguf", "."},
		{"place", model, "--node", "alpha"}, {"place", model}, {"stop", "two"},
	} {
		out := c.fails(fault.ExitUnknown, "gamma", append([]string{"tbcluster"}, argv...)...)
		c.says(out, "tbcluster: ", "do: ")
	}
	if s := c.until("gamma", "a state", func(*v1.ClusterState) bool { return true }); len(s.Nodes) != 1 || len(s.Models) != 0 {
		c.t.Errorf("a node that has not paired knows of others: %s", brief(s))
	}
	if s := c.until("alpha", "a state", func(*v1.ClusterState) bool { return true }); len(s.Nodes) != 2 {
		c.t.Errorf("it is counted among the nodes: %s", brief(s))
	}
}

// addUser makes an ordinary user on a node.
func (c *cluster) addUser(node, name string, id int) {
	c.t.Helper()
	c.run(node, "sh", "-c", fmt.Sprintf("grep -q ^%[1]s: /etc/passwd || { echo '%[1]s:x:%[2]d:%[2]d::/home/%[1]s:/bin/sh' >> /etc/passwd; echo '%[1]s:x:%[2]d:' >> /etc/group; mkdir -p /home/%[1]s && chown %[2]d:%[2]d /home/%[1]s && chmod 700 /home/%[1]s; }", name, id))
}

// as runs tbcluster on alpha as an ordinary user.
func (c *cluster) as(user string, argv ...string) (string, int) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var out strings.Builder
	code, err := c.lab.Exec(ctx, "alpha", lab.ExecOptions{Argv: append([]string{"tbcluster"}, argv...), User: user, Env: []string{noLinger}, Stdout: &out, Stderr: &out})
	if err != nil {
		c.t.Fatalf("%s: %v: %v\n%s", user, argv, err, out.String())
	}
	return out.String(), code
}

// noOwner: any local user may look; who is no owner changes nothing.
func noOwner(c *cluster, model string) {
	c.addUser("alpha", "mallory", 4001)
	for _, user := range []string{"mallory", "4711:4711"} { // the system knows only one of them
		for _, argv := range [][]string{{"status"}, {"ps"}, {"models"}, {"plan", model}, {"pair", "--list"}} {
			if out, code := c.as(user, argv...); code != 0 {
				c.t.Errorf("%s may not even look at %v: exit %d\n%s", user, argv, code, out)
			}
		}
		for _, argv := range [][]string{
			{"cp", "/etc/hostname", "beta:"}, {"cp", "/etc/hostname", "/tmp/copy"}, {"place", model}, {"stop", "two"}, {"logs", "two"}, {"down"}, {"pair"},
			{"pair", "1-AAAA-AAAA"}, {"pair", "--map", "beta/root=root"}, {"pair", "--revoke", "beta", "--yes"}, {"node", "rename", "beta", "better"},
			{"node", "forget", "beta"}, {"models", "add", "/etc/hostname"}, {"models", "rm", model, "--yes"},
		} {
			out, code := c.as(user, argv...)
			if code != fault.ExitDenied {
				c.t.Errorf("%s: %v: exit %d, want %d\n%s", user, argv, code, fault.ExitDenied, out)
			}
		}
	}
	out, _ := c.as("mallory", "place", model)
	c.says(out, "mallory", "alpha", "owners", "config.toml")
	s := c.until("alpha", "a state", func(*v1.ClusterState) bool { return true })
	if len(s.Transfers) != 0 || len(s.Instances) != 1 || stopped(instance(s, "two")) || node(s, "beta") == nil || len(s.Models) != 1 {
		c.t.Errorf("something was changed all the same: %s", brief(s))
	}
}

// stopped says whether somebody has ended an instance; a slow machine is no
// reason to call it that.
func stopped(i *v1.Instance) bool {
	switch i.GetState() {
	case v1.InstanceState_INSTANCE_STATE_READY, v1.InstanceState_INSTANCE_STATE_DEGRADED:
		return false
	}
	return true
}

// otherOwner: an owner copies what he himself may read to where he himself may
// write, here and on the other node.
func otherOwner(c *cluster, model string) {
	for _, n := range []string{"alpha", "beta"} {
		c.addUser(n, "eve", 4002)
		c.run(n, "sh", "-c", "umask 077; echo secret > /root/secret; install -o eve -m 600 /root/secret /home/eve/own")
	}
	// Nobody has said who eve is on beta.
	out, code := c.as("eve", "cp", "own", "beta:")
	if code != fault.ExitDenied {
		c.t.Errorf("an unmapped user was served: exit %d\n%s", code, out)
	}
	c.says(out, "beta", "tbcluster pair --map alpha/eve=")
	c.run("beta", "tbcluster", "pair", "--map", "alpha/eve=eve")
	for _, argv := range [][]string{
		{"cp", "/root/secret", "mine"}, {"cp", "/root/secret", "beta:mine"}, {"cp", "beta:/root/secret", "mine"}, {"cp", "own", "beta:/root/planted"},
		{"cp", "own", "/root/planted"}, {"cp", "own", "beta:/etc/planted"},
	} {
		out, code := c.as("eve", argv...)
		if code != fault.ExitFileIO {
			c.t.Errorf("eve: %v: exit %d, want %d\n%s", argv, code, fault.ExitFileIO, out)
		}
		c.says(out, "permission")
	}
	for _, n := range []string{"alpha", "beta"} {
		if out := c.run(n, "sh", "-c", "ls -d /etc/planted 2>/dev/null; find /root /home/eve -newer /root/secret -type f ! -name own"); out != "" {
			c.t.Errorf("left on %s: %s", n, out)
		}
	}
	if out, code := c.as("eve", "cp", "own", "beta:mine"); code != 0 {
		c.t.Errorf("eve cannot copy her own: exit %d\n%s", code, out)
	}
	if out := c.run("beta", "stat", "-c", "%U %a", "/home/eve/mine"); out != "eve 600\n" {
		c.t.Errorf("it belongs to %s", out)
	}
	// The model is root's, in a home that is closed to her.
	c.run("alpha", "chmod", "700", "/root")
	out, code = c.as("eve", "place", model, "--node", "alpha", "--name", "hers")
	if code == 0 {
		c.t.Errorf("eve runs a model that she may not read:\n%s", out)
	}
	c.says(out, "alpha")
	if s := c.until("alpha", "a state", func(*v1.ClusterState) bool { return true }); instance(s, "hers") != nil {
		c.t.Errorf("it was left: %s", brief(s))
	}
	c.run("alpha", "tbcluster", "stop", "--rm", "two")
	c.until("alpha", "no instance", func(s *v1.ClusterState) bool { return len(s.Instances) == 0 })
	c.noEngines()
}
