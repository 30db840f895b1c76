//go:build linux

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// TestBadTimes asks for what would be right at another time: while a disk is
// full, ports are taken, an instance runs. Each answer names the thing, the node
// and the way out, nothing is left behind, and the same is done once it can be.
func TestBadTimes(t *testing.T) {
	t.Parallel()
	modelFile(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := newCluster(t, lab.Options{Nodes: 2, Disk: 300 << 20, Binds: []lab.Bind{{Source: self, Target: squatterProgram}}})
	model := strings.TrimSuffix(c.giveModel("alpha"), ".gguf")
	for _, n := range c.names {
		c.until(n, "the link and the model", func(s *v1.ClusterState) bool { return links(s, proven) == 1 && len(s.Models) == 1 })
	}
	for _, sub := range []struct {
		name string
		run  func(c *cluster, model string)
	}{
		{"no room for a copy", noRoom},
		{"no room for a record", noRecord},
		{"ports in use", portsInUse},
		{"down while an instance runs", downWhileRunning},
		{"an unknown key in the configuration", unknownKey},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(c.in(t), model) })
	}
}

// nothing fails unless no instance is listed and no engine runs.
func (c *cluster) nothing() {
	c.t.Helper()
	for _, n := range c.names {
		if s := c.until(n, "a state", func(*v1.ClusterState) bool { return true }); len(s.Instances) != 0 {
			c.t.Errorf("%s lists what was left: %s", n, brief(s))
		}
	}
	c.noEngines()
}

// works places the model on alpha and takes it away again.
func (c *cluster) works(model string) {
	c.t.Helper()
	c.placeOn("works", model, "alpha")
	c.run("alpha", "tbcluster", "stop", "--rm", "works")
	for _, n := range c.names {
		c.until(n, "it is gone", func(s *v1.ClusterState) bool { return instance(s, "works") == nil })
	}
	c.nothing()
}

// noRoom: a disk that is full where a model is to be copied.
func noRoom(c *cluster, model string) {
	look := []string{"find", "/root", "-path", "/root/.cache", "-prune", "-o", "!", "-name", "filler", "-print"}
	empty := c.run("beta", look...)
	c.run("beta", "sh", "-c", "head -c 250000000 /dev/zero > filler; sync")
	for _, argv := range [][]string{
		{"cp", "models/" + model + ".gguf", "beta:models/"},
		{"cp", "--model", model, "beta:"},
		{"place", model, "--node", "beta", "--copy"},
	} {
		out := c.fails(fault.ExitFileIO, "alpha", append([]string{"tbcluster"}, argv...)...)
		c.says(out, "beta", "free")
		if out := c.run("beta", look...); out != empty {
			c.t.Errorf("%v left on beta:\n%s\nbefore:\n%s", argv, out, empty)
		}
		c.noEngines()
	}
	c.run("beta", "rm", "filler")
	// What has failed stays listed until it is looked at, and is in nobody's way.
	c.run("alpha", "tbcluster", "place", model, "--node", "beta", "--copy", "--name", "copied")
	c.until("alpha", "ready", ready("copied"))
	s := c.until("alpha", "a state", func(*v1.ClusterState) bool { return true })
	for _, i := range s.Instances {
		c.run("alpha", "tbcluster", "stop", "--rm", i.Name)
	}
	for _, n := range c.names {
		c.until(n, "no instance", func(s *v1.ClusterState) bool { return len(s.Instances) == 0 })
	}
	c.run("alpha", "tbcluster", "models", "rm", model, "--node", "beta", "--yes")
	c.nothing()
}

// noRecord: a disk without a single block for what the agent has to remember.
func noRecord(c *cluster, model string) {
	// What the agent replaces meanwhile makes room again.
	c.run("alpha", "sh", "-c", "for i in $(seq 50); do cat /dev/zero >> filler 2>/dev/null; sync; [ $(df --output=avail /root | tail -1) != 0 ] || exit 0; done; exit 1")
	for _, argv := range [][]string{{"place", model, "--node", "alpha"}, {"cp", "/etc/hostname", "beta:"}} {
		out := c.fails(fault.ExitFileIO, "alpha", append([]string{"tbcluster"}, argv...)...)
		c.says(out, "alpha", "space")
	}
	c.nothing()
	c.run("alpha", "rm", "filler")
	c.works(model)
}

// squatterProgram is this test's program inside of a node.
const squatterProgram = "/lab/squatter"

// TestSquatter is the part of TestBadTimes that takes ports on a node until its
// standard input ends.
func TestSquatter(t *testing.T) {
	host := os.Getenv("TBCLUSTER_SQUAT")
	if host == "" {
		t.Skip("run by TestBadTimes")
	}
	for port := 21000; port <= 21999; port++ { // where ports of ranks are taken from
		l, err := net.Listen("tcp4", net.JoinHostPort(host, fmt.Sprint(port)))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }() // its end closes them all
	}
	fmt.Println("squatting")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		t.Fatal(err)
	}
}

// squat takes every port that ranks may have on a node's address until leave is
// called.
func (c *cluster) squat(node, host string) (leave func()) {
	c.t.Helper()
	inR, inW, err := os.Pipe()
	if err != nil {
		c.t.Fatal(err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		c.t.Fatal(err)
	}
	end := make(chan error, 1)
	go func() {
		code, err := c.lab.Exec(context.Background(), node, lab.ExecOptions{Argv: []string{squatterProgram, "-test.run=^TestSquatter$"},
			Env: []string{noLinger, "TBCLUSTER_SQUAT=" + host}, Stdin: inR, Stdout: outW, Stderr: outW})
		if err == nil && code != 0 {
			err = exitError(code)
		}
		_ = outW.Close() // only now is there nothing more to read
		end <- err
	}()
	r := bufio.NewReader(outR)
	if line, err := r.ReadString('\n'); line != "squatting\n" {
		c.t.Fatalf("take the ports of %s: %q, %v, %v", node, line, err, <-end)
	}
	return func() {
		c.t.Helper()
		c.must(inW.Close())
		c.must(<-end)
		for _, f := range []*os.File{inR, outR} {
			c.must(f.Close())
		}
	}
}

// portsInUse: none of the ports that ranks may have is free, on the head's node
// and on the other.
func portsInUse(c *cluster, model string) {
	for _, x := range []struct{ node, host, nodes, ranks string }{
		{"alpha", "127.0.0.1", "alpha", "1"},
		{"beta", "0.0.0.0", "alpha,beta", "2"},
	} {
		leave := c.squat(x.node, x.host)
		out := c.fails(fault.ExitPrecondition, "alpha", "tbcluster", "place", model, "--node", x.nodes, "--ranks", x.ranks, "--name", "ports")
		c.says(out, x.node, "ports 21000 to 21999", "end what listens")
		c.nothing()
		leave()
		// No grant is left on either node: the same is done now.
		c.placeOn("ports", model, strings.Split(x.nodes, ",")...)
		c.run("alpha", "tbcluster", "stop", "--rm", "ports")
		for _, n := range c.names {
			c.until(n, "it is gone", func(s *v1.ClusterState) bool { return len(s.Instances) == 0 })
		}
	}
}

// downWhileRunning: an agent does not end under an instance unless it is told
// what becomes of it.
func downWhileRunning(c *cluster, model string) {
	ctx := context.Background()
	i := c.placeOn("keeps", model, "alpha")
	out := c.fails(fault.ExitPrecondition, "alpha", "tbcluster", "down")
	c.says(out, "keeps", "--stop", "--leave")
	// On a loaded machine it is not ready now and then; what was ended does not
	// come back.
	c.until("beta", "nothing changed by a refused down", func(s *v1.ClusterState) bool { return allUp(s) == nil && ready("keeps")(s) })
	// Beta hears of the end a moment later: what it showed before is not taken for
	// what it shows after the next start.
	away := func(s *v1.ClusterState) bool { return stays("alpha")(s) != nil }
	c.run("alpha", "tbcluster", "down", "--leave")
	c.until("beta", "alpha away", away)
	if left := c.processes("alpha", "llama-server"); len(left) == 0 {
		c.t.Error("down --leave has ended the engine")
	}
	c.must(c.lab.Start(ctx, "alpha", true))
	back := instance(c.until("beta", "alpha and its instance", func(s *v1.ClusterState) bool {
		return allUp(s) == nil && ready("keeps")(s) && links(s, proven) == 1
	}), "keeps")
	if back.Ranks[0].Pid != i.Ranks[0].Pid {
		c.t.Errorf("process %d was taken up as %d", i.Ranks[0].Pid, back.Ranks[0].Pid)
	}
	c.run("alpha", "tbcluster", "down", "--stop")
	c.noEngines()
	c.until("beta", "alpha away", away)
	c.must(c.lab.Start(ctx, "alpha", true))
	c.until("beta", "alpha up", func(s *v1.ClusterState) bool { return allUp(s) == nil && links(s, proven) == 1 })
	c.run("beta", "tbcluster", "stop", "--rm", "keeps")
	c.works(model)
}

// unknownKey: a configuration with a key that is none stops an agent before it
// has done anything.
func unknownKey(c *cluster, _ string) {
	c.run("alpha", "sh", "-c", "printf 'name = \"x\"\\n# a comment\\ngateway_prot = 9000\\n' > /tmp/bad.toml")
	out := c.fails(fault.ExitUsage, "alpha", "tbcluster", "agent", "--config", "/tmp/bad.toml", "--state-dir", "/tmp/state", "--run-dir", "/tmp/run")
	c.says(out, "/tmp/bad.toml line 3", "gateway_prot", `"gateway_port"`, "tbcluster config show")
	if out, err := c.tryRun("alpha", "ls", "/tmp/run"); err == nil {
		c.t.Errorf("it has made its sockets: %s", out)
	}
}

// TestWithoutRights runs agents that may set no addresses: everything else
// works, and the commands are shown that a person runs instead.
func TestWithoutRights(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("a lab that was made without root has no other user")
	}
	file := modelFile(t)
	c := newLab(t, lab.Options{Nodes: 2, NoBoot: true})
	const home, run = "/home/ada", "/run/ada"
	ada := func(node string, stdin *os.File, stdout io.Writer, argv ...string) int {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		o := lab.ExecOptions{Argv: argv, User: "ada", Env: []string{noLinger, "XDG_RUNTIME_DIR=" + run}, Stdout: stdout, Stderr: stdout}
		if stdin != nil {
			o.Stdin = stdin
		}
		code, err := c.lab.Exec(ctx, node, o)
		if err != nil {
			t.Errorf("%s: %v: %v", node, argv, err)
		}
		return code
	}
	says := func(code int, node string, argv ...string) string {
		t.Helper()
		var out strings.Builder
		if got := ada(node, nil, &out, append([]string{"tbcluster"}, argv...)...); got != code {
			t.Errorf("%s: %v: exit %d, want %d\n%s", node, argv, got, code, out.String())
		}
		return out.String()
	}
	for _, n := range c.names {
		c.addUser(n, "ada", 4003)
		c.run(n, "sh", "-c", "install -d -o ada -g ada -m 700 "+run+" "+home+"/.config "+home+"/.config/tbcluster && install -o ada /etc/tbcluster/config.toml "+home+"/.config/tbcluster/")
		conn, err := grpc.NewClient("unix:"+filepath.Join(c.lab.NodeDir(n), run, "tbcluster/agent.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.WaitForReady(true)), grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second, Backoff: quick}))
		if err != nil {
			t.Fatal(err)
		}
		c.conns[n] = conn
		if code := ada(n, nil, os.Stderr, "sh", "-c", "setsid tbcluster agent </dev/null >"+run+"/log 2>&1 &"); code != 0 {
			t.Fatalf("start the agent of %s: exit %d", n, code)
		}
		c.until(n, "its agent", func(*v1.ClusterState) bool { return true })
	}

	// They pair as people do.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	invited := make(chan int, 1)
	go func() {
		invited <- ada("alpha", nil, w, "tbcluster", "pair")
		_ = w.Close() // ends the reading below
	}()
	form := regexp.MustCompile(`[0-9]+-[0-9A-Z]{4}-[0-9A-Z]{4}`)
	lines, code := bufio.NewScanner(r), ""
	for code == "" && lines.Scan() {
		code = form.FindString(lines.Text())
	}
	says(fault.ExitOK, "beta", "pair", code)
	for lines.Scan() {
		t.Log(lines.Text())
	}
	if code := <-invited; code != 0 {
		t.Errorf("who invited: exit %d", code)
	}
	c.must(r.Close())

	denied := func(s *v1.ClusterState, node string) *v1.Finding {
		for _, f := range s.Findings {
			if f.Code == "no-permission" && f.NodeName == node {
				return f
			}
		}
		return nil
	}
	for _, n := range c.names {
		// Its node address is wanted before that of the cable, which both agree on.
		s := c.until(n, "both nodes, their cable, and what is wrong", func(s *v1.ClusterState) bool {
			l, fix := between(s, "alpha", "beta"), denied(s, n).GetFix()
			return len(s.Nodes) == 2 && allUp(s) == nil && l.GetState() == v1.LinkState_LINK_STATE_CABLED && strings.Contains(fix, "ip address add 10.77.") &&
				strings.Contains(fix, "dev "+l.A.Interface)
		})
		l := between(s, "alpha", "beta")
		t.Logf("%s: the cable is %s: %s", n, l.State, l.Reason)
		c.says(says(fault.ExitOK, n, "status"), "\n         ip address add 10.77.", "dev "+l.A.Interface, "sudo tbcluster up")
	}

	// What needs no addresses works.
	c.run("alpha", "sh", "-c", "install -d -o ada "+home+"/models")
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	if code := ada("alpha", f, os.Stderr, "sh", "-c", "cat > smol.part && mv smol.part models/smol.gguf"); code != 0 {
		t.Fatalf("put the model there: exit %d", code)
	}
	c.must(f.Close())
	says(fault.ExitOK, "alpha", "cp", "models/smol.gguf", "beta:models/")
	says(fault.ExitOK, "alpha", "models", "add", home+"/models/smol.gguf")
	says(fault.ExitOK, "alpha", "place", "smol", "--node", "alpha", "--name", "alone")
	c.until("beta", "ready", ready("alone"))
	says(fault.ExitOK, "alpha", "stop", "--rm", "alone")

	// The commands are what it takes.
	for _, n := range c.names {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		changes, err := v1.NewNodeServiceClient(c.api(n)).Changes(ctx, &v1.ChangesRequest{})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		for _, cmd := range changes.Commands {
			t.Logf("%s: %s", n, cmd)
			if strings.HasPrefix(cmd, "nft ") {
				continue // bare machines have none; so the ports stay open
			}
			c.run(n, "sh", "-c", cmd)
		}
	}
	for _, n := range c.names {
		c.until(n, "the cable proven", func(s *v1.ClusterState) bool { return links(s, proven) == 1 })
	}
	// Ports of ranks that nobody closes are not opened.
	out := says(fault.ExitPrecondition, "alpha", "place", "smol", "--node", "alpha,beta", "--ranks", "2")
	c.says(out, "closed to the LAN", "alpha", "beta", "as root", "--insecure-ranks")
	c.nothing()
	says(fault.ExitOK, "alpha", "place", "smol", "--node", "alpha,beta", "--ranks", "2", "--insecure-ranks", "--name", "open")
	c.until("beta", "ready", ready("open"))
	says(fault.ExitOK, "alpha", "stop", "--rm", "open")
	for _, n := range c.names {
		says(fault.ExitOK, n, "down")
	}
	c.noEngines()
}
