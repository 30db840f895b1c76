package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"tbcluster/engine/llamacpp"
	"tbcluster/rig"
	"tbcluster/rig/guest"
	"tbcluster/rig/image"
	"tbcluster/scripts/packaging"
)

// wrong is how wrong the clock of the second machine is.
const wrong = 5 * 24 * time.Hour

// The versions that are installed, one after the other.
const (
	first  = "1.0.0"
	second = "1.0.1"
)

// dataDir is where the machine has what the test brings along; it is one of the
// places that engines are looked for in.
const dataDir = "/opt/tbcluster"

// bring makes a directory with packages, engine and model.
func bring(t *testing.T) (dir, model string) {
	t.Helper()
	dir = t.TempDir()
	for _, v := range []string{first, second} {
		switch err := packaging.Build(v, filepath.Join(dir, "packages")); {
		case errors.Is(err, packaging.ErrNoTool):
			t.Skip(err)
		case err != nil:
			t.Fatal(err)
		}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	if _, err := llamacpp.Install(ctx, llamacpp.UserDir(home), func(string) {}); err != nil {
		t.Fatalf("install the engine: %v", err)
	}
	file, err := llamacpp.InstallModel(ctx, llamacpp.ModelDir(home), func(string) {})
	if err != nil {
		t.Fatalf("install the model: %v", err)
	}
	for _, c := range [][]string{
		{"mkdir", filepath.Join(dir, "engines"), filepath.Join(dir, "models")},
		{"cp", "-a", llamacpp.UserDir(home), filepath.Join(dir, "engines")},
		{"cp", file, filepath.Join(dir, "models")},
		{"chown", "-R", "0:0", dir},
		{"chmod", "-R", "a+rX,go-w", dir},
	} {
		if out, err := exec.CommandContext(ctx, c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", c, err, out)
		}
	}
	return dir, strings.TrimSuffix(filepath.Base(file), ".gguf")
}

// lanConnection is what NetworkManager knows of the Ethernet: an address and a
// default route, as at home.
const lanConnection = `[connection]
id=lan
uuid=6f4b1c1e-8d1e-4c0a-9a53-0d3a3f6a7701
type=ethernet
interface-name=eth0

[ipv4]
method=manual
address1=192.168.77.1/24,192.168.77.254

[ipv6]
method=link-local
`

// What systemd-networkd is to do, once NetworkManager is off: the same.
const (
	lanNetwork = `[Match]
Name=eth0

[Network]
Address=192.168.77.1/24
Gateway=192.168.77.254
LinkLocalAddressing=ipv6
`
	cableNetwork = `[Match]
Name=thunderbolt*

[Network]
LinkLocalAddressing=yes
`
)

// downWhileFramesCome is a fault of Linux (seen in 7.3): tbnet_stop()
// disables NAPI before it stops the ring. A frame that comes between the two has
// the interrupt handler mask the ring's interrupt (__ring_interrupt()), and
// nobody unmasks it, for NAPI no longer polls; tb_ring_stop() then finds the
// interrupt disabled and warns. NetworkManager sets an interface down when it is
// told to leave it.
var downWhileFramesCome = guest.Allowance{
	Pattern:   regexp.MustCompile(`(?s)WARNING: .*drivers/thunderbolt/nhi\.c.* ring_interrupt_active.*tb_ring_stop.*tbnet_stop`),
	Reference: "https://git.kernel.org/pub/scm/linux/kernel/git/torvalds/linux.git/tree/drivers/net/thunderbolt/main.c: tbnet_stop(); drivers/thunderbolt/nhi.c: __ring_interrupt(), ring_interrupt_active()",
}

// system is a machine with systemd, a, and one without, b, and a cable.
type system struct {
	t     *testing.T
	r     *rig.Rig
	c     *Cluster
	a, b  *rig.Host
	model string
	// What there was before anything of ours.
	network, files string
	lan            string // what NetworkManager did to the Ethernet
}

// try runs a script as root on a.
func (s *system) try(script string) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	return s.a.Sh(ctx, script)
}

func (s *system) sh(script string) string {
	s.t.Helper()
	out, err := s.try(script)
	if err != nil {
		s.t.Fatalf("%s\n%v\n%s", script, err, out)
	}
	return strings.TrimRight(out, "\n")
}

// oneTry is how long a script that is waited for may take; then it is begun anew.
const oneTry = 45 * time.Second

// until waits until a script on a ends well.
func (s *system) until(what, script string) {
	s.t.Helper()
	s.eventually(what, func() string {
		ctx, cancel := context.WithTimeout(s.t.Context(), oneTry)
		defer cancel()
		out, err := s.a.Sh(ctx, "exec 2>&1\n"+script)
		if err != nil {
			return fmt.Sprintf("%s\n%v\n%s", script, err, out)
		}
		return ""
	})
}

// in runs a part of the test; the next needs it.
func (s *system) in(name string, f func(s *system)) {
	s.t.Helper()
	begun := time.Now()
	ok := s.t.Run(name, func(t *testing.T) {
		part := *s
		part.t = t
		f(&part)
		s.network, s.files, s.lan = part.network, part.files, part.lan
	})
	s.t.Logf("%5.1f s  %s", time.Since(begun).Seconds(), name)
	if !ok {
		s.t.FailNow()
	}
}

// networkScript prints everything that a program may have set up in the network.
// The numbers of interfaces are left out: a cable that was pulled has another
// afterwards. The kernel's protocol of an address is there, its lifetime is not.
const networkScript = `ip -br link; grep . /sys/class/net/*/mtu
ip -o addr | sed -E 's/^[0-9]+: //; s/ *valid_lft.*//; s/\\//' | sort
ip -4 route show table all; ip -6 route show table all | sort
ip -4 rule; ip -6 rule; tc qdisc show | grep -v fq_codel # the kernel's own
echo nft:; nft list ruleset
sysctl -a -r '^net\.ipv[46]\.(ip_forward|conf\..*)$' 2>/dev/null | sort
if systemctl -q is-active NetworkManager; then
	nmcli -t -f DEVICE,TYPE,STATE,CONNECTION device | sort
	nmcli -t -f NAME,UUID,TYPE,AUTOCONNECT,DEVICE connection | sort
else
	networkctl --no-legend --no-pager list | awk '{print $2, $3, $4, $5}' | sort
fi
find /run/NetworkManager/conf.d /run/systemd/network /etc/NetworkManager /etc/systemd/network -type f 2>/dev/null | sort || true`

// networkNow is what the network is. The other end of the cable is kept up, also
// when its agent no longer needs it: no carrier comes or goes.
func (s *system) networkNow() string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if _, err := s.b.Run(ctx, "ip", "link", "set", "thunderbolt0", "up"); err != nil {
		s.t.Fatal(err)
	}
	return s.sh(networkScript)
}

// settledNetwork waits until managers have done what they do, and returns it.
func (s *system) settledNetwork(up string) string {
	s.t.Helper()
	s.until("the network to be set up", up)
	last := ""
	s.eventually("the network to be at rest", func() string {
		now := s.networkNow()
		if now == last {
			return ""
		}
		was := last
		last = now
		return differences(was, now)
	})
	return last
}

// eventually waits until nothing is missing.
func (s *system) eventually(what string, missing func() string) {
	s.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(500 * time.Millisecond) {
		lack := missing()
		if lack == "" {
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("waited for %s:\n%s", what, lack)
		}
	}
}

// sameNetwork waits until the network is what it was.
func (s *system) sameNetwork(when, want string) {
	s.t.Helper()
	s.eventually("the network as it was, "+when, func() string { return differences(want, s.networkNow()) })
}

// differences are the lines that one text has and the other has not.
func differences(before, after string) string {
	b, a := strings.Split(before, "\n"), strings.Split(after, "\n")
	var out strings.Builder
	for _, l := range b {
		if !slices.Contains(a, l) {
			fmt.Fprintln(&out, "- "+l)
		}
	}
	for _, l := range a {
		if !slices.Contains(b, l) {
			fmt.Fprintln(&out, "+ "+l)
		}
	}
	return out.String()
}

// filesScript prints what is on the disk, who may read it and how long it is;
// what is in /etc byte by byte. Homes are people's own.
func filesScript() string {
	prune := []string{"-path /home", "-path " + dataDir, "-path /var/lib/NetworkManager", "-path /root"}
	for _, v := range packaging.Volatile() {
		prune = append(prune, "-path /"+strings.TrimSuffix(v, "/"))
	}
	return `find / -xdev \( ` + strings.Join(prune, " -o ") + ` \) -prune -o -type f -printf '%p %M %U:%G %s\n' -o -printf '%p %M %U:%G %l\n' | sort
find /etc -type f ! -name '*-' ! -name .updated ! -name ld.so.cache ! -name machine-id ! -name .pwd.lock -exec sha256sum {} + | sort
find /run /sys/fs/cgroup -name '*tbcluster*' ! -name 'tbcluster-rig*' 2>/dev/null | sort
systemctl list-units --all --plain --no-legend 'tbcluster*' 'system-tbcluster*' | grep -v tbcluster-rig || true`
}

// status asks the agent of a.
func (s *system) status() Status {
	s.t.Helper()
	st, err := s.c.Status(s.t.Context(), s.a)
	if err != nil {
		s.t.Fatal(err)
	}
	return st
}

// proven waits until both hosts show the cable as proven.
func (s *system) proven(what string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	for _, h := range s.r.Hosts() {
		if _, err := s.c.Wait(ctx, h, what, func(st Status) bool { return st.Up() == 2 && st.Proven() == 1 }); err != nil {
			s.t.Fatal(err)
		}
	}
}

// answers waits until an agent of a version answers.
func (s *system) answers(version string) {
	s.t.Helper()
	s.until("an agent "+version, fmt.Sprintf(`out=$(tbcluster status -o json); echo "$out"; case $out in *'"version": "%s"'*'"privileged": true'*|*'"privileged": true'*'"version": "%s"'*) ;; *) false;; esac`, version, version))
}

// process is what /proc says of one.
func (s *system) process(pid string) (status, group string) {
	s.t.Helper()
	out := s.sh("cat /proc/" + pid + "/status; echo; cat /proc/" + pid + "/cgroup")
	status, group, _ = strings.Cut(out, "\n\n")
	return status, group
}

func (s *system) has(who, status string, want ...string) {
	s.t.Helper()
	for _, w := range want {
		if !strings.Contains(status+"\n", w+"\n") {
			s.t.Errorf("%s has no %q:\n%s", who, w, status)
		}
	}
}

// The processes of the two halves.
const (
	rootHalf  = `$(systemctl show -P MainPID tbcluster.service)`
	agentHalf = `$(pgrep -u tbcluster -f 'agent --root-half')`
)

const ada = "runuser -u ada -- "

// TestSystemd is what needs a systemd, cgroups of version 2 and network managers:
// the package on a machine whose thunderbolt driver is real, with a cable to
// another machine. One boot; each part goes on where the one before has ended.
func TestSystemd(t *testing.T) {
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can bring along files that are root's")
	}
	data, model := bring(t)
	topology := rig.Pair()
	topology.LAN = true
	topology.Hosts[0] = rig.HostSpec{System: true, CPUs: 2, Memory: 3072, Data: data, Allow: []guest.Allowance{downWhileFramesCome}, Files: []image.File{
		{Path: "/etc/NetworkManager/system-connections/lan.nmconnection", Mode: 0o600, Data: []byte(lanConnection)},
		{Path: "/etc/systemd/network/20-lan.network", Mode: 0o644, Data: []byte(lanNetwork)},
		{Path: "/etc/systemd/network/30-cable.network", Mode: 0o644, Data: []byte(cableNetwork)},
	}}
	topology.Hosts[1] = rig.HostSpec{ClockOffset: wrong, Files: Files(program(t))}
	begun := time.Now()
	r := rig.Start(t, topology)
	s := &system{t: t, r: r, c: New(r), a: r.Host("a"), b: r.Host("b"), model: model}
	s.c.As = map[string]string{"a": "ada"}
	t.Cleanup(s.c.Close)
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		out, err := s.a.Sh(ctx, `journalctl -b --no-pager -o short-precise -n 200 -u tbcluster -u 'tbcluster-agent@*' -u NetworkManager -u systemd-networkd; tail -n 40 /var/lib/tbcluster/agent/agent.log || true; nmcli device; ip addr`)
		t.Logf("the journal (%v):\n%s", err, out)
		if log, err := os.ReadFile(s.c.Log(s.b)); err == nil {
			t.Logf("the log of b:\n%s", log)
		}
	})
	t.Logf("%5.1f s  packages, engine, model, boot", time.Since(begun).Seconds())

	s.in("before", before)
	s.in("installed", installed)
	s.in("paired, with a clock that is wrong by days", paired)
	s.in("NetworkManager leaves the cable alone", released)
	s.in("copies over a bad cable", badCable)
	s.in("an instance serves through an upgrade", upgraded)
	s.in("killed in the middle of a change", bothKilled)
	s.in("down gives the cable back to NetworkManager", down)
	s.in("systemd-networkd leaves the cable alone", networkd)
	s.in("removed and purged", purged)
	if err := r.Verify(t.Context()); err != nil {
		t.Error(err)
	}
}

// before notes what there is, and makes people.
func before(s *system) {
	s.until("systemd to be up", `systemctl is-system-running --wait | grep -x running`)
	s.sh("useradd -m -s /bin/bash ada; useradd -m -s /bin/bash bob; mkdir -p " + dataDir + "; mount -o ro LABEL=" + rig.DataLabel + " " + dataDir)
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if err := s.r.Settle(ctx); err != nil { // the host without systemd boots sooner
		s.t.Fatal(err)
	}
	// The other end is up, as it will be: no carrier comes or goes.
	if _, err := s.b.Run(ctx, "ip", "link", "set", "thunderbolt0", "up"); err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.a.WaitCarrier(ctx, 0); err != nil {
		s.t.Fatal(err)
	}
	s.network = s.settledNetwork(`nmcli -t -f DEVICE,STATE device | grep -x thunderbolt0:connected && nmcli -t -f DEVICE,STATE device | grep -x eth0:connected`)
	s.files = s.sh(filesScript())
	s.lan = s.lanHistory()
	if !strings.Contains(s.network, "default via 192.168.77.254 dev eth0 proto static") {
		s.t.Errorf("the machine has no default route of NetworkManager's:\n%s", s.network)
	}
}

// lanHistory is what NetworkManager has done to the Ethernet since it started.
func (s *system) lanHistory() string {
	s.t.Helper()
	return s.sh(`journalctl -b --no-pager -o cat -u NetworkManager | grep -F 'device (eth0)' || true`)
}

// installed is the package: units, rights, who may ask.
func installed(s *system) {
	s.sh(`mkdir -p /etc/tbcluster; printf 'owners = ["ada"]\nmodel_dirs = ["` + dataDir + `/models"]\n' >/etc/tbcluster/config.toml
		dpkg -i ` + dataDir + `/packages/` + filepath.Base(packaging.Deb("", first)))
	s.answers(first)
	if out := s.sh(`systemctl is-enabled tbcluster.service; systemctl is-active tbcluster.service tbcluster-agent.socket`); out != "enabled\nactive\nactive" {
		s.t.Errorf("the units are %q", out)
	}
	// The root half: the nine capabilities that its unit explains.
	mask := uint64(0)
	for _, c := range []int{0, 1, 3, 4, 5, 6, 7, 12, 19} { // <linux/capability.h>
		mask |= 1 << c
	}
	caps := fmt.Sprintf("%016x", mask)
	status, group := s.process(rootHalf)
	s.has("the root half", status, "CapEff:\t"+caps, "CapPrm:\t"+caps, "CapBnd:\t"+caps, "CapAmb:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2")
	if group != "0::/system.slice/tbcluster.service" {
		s.t.Errorf("the root half is in the control group %q", group)
	}
	status, group = s.process(agentHalf)
	const none = "0000000000000000"
	s.has("the agent", status, "CapEff:\t"+none, "CapPrm:\t"+none, "CapBnd:\t"+none, "CapAmb:\t"+none, "NoNewPrivs:\t1", "Seccomp:\t2")
	if !strings.HasPrefix(group, `0::/system.slice/system-tbcluster\x2dagent.slice/tbcluster-agent@`) {
		s.t.Errorf("the agent is in the control group %q", group)
	}
	for unit, most := range map[string]string{"tbcluster.service": "63", "tbcluster-agent@*": "20"} {
		out, err := s.try(`unit=$(systemctl list-units --plain --no-legend '` + unit + `' | cut -d' ' -f1); systemd-analyze security --no-pager --threshold=` + most + ` "$unit" | tail -n 1`)
		if err != nil {
			s.t.Errorf("%s is more open than %s tenths: %v\n%s", unit, most, err, out)
		}
		s.t.Logf("%s", strings.TrimSpace(out))
	}
	// Whoever has an account may look. Owners may do more, others may not.
	for _, who := range []string{"ada", "bob"} {
		if out, err := s.try("runuser -u " + who + " -- tbcluster status"); err != nil || !strings.Contains(out, "a*") {
			s.t.Errorf("%s does not see the status: %v\n%s", who, err, out)
		}
	}
	if out, err := s.try("runuser -u bob -- tbcluster down 2>&1"); err == nil || !strings.Contains(out+err.Error(), "owner") {
		s.t.Errorf("bob took it down, or was not told who may: %v\n%s", err, out)
	}
}

// paired joins the other machine, whose clock is days ahead.
func paired(s *system) {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if err := s.c.Start(ctx, s.b); err != nil {
		s.t.Fatal(err)
	}
	begun := time.Now()
	if err := s.c.Pair(ctx, s.a, s.b); err != nil {
		s.t.Fatal(err)
	}
	s.proven("wait until the cable is proven")
	s.t.Logf("paired and proven within %.1f s", time.Since(begun).Seconds())
	s.until("the finding about clocks", ada+`tbcluster doctor | tee /run/doctor; grep -F '[clock-skew]' /run/doctor && grep -F 'the clock of '  /run/doctor | grep -F ' 5 days '`)
}

// told is what the manager was told, and how a person hears of it.
func (s *system) told(file, manager, lan string) {
	s.t.Helper()
	s.until(manager+" to be told", "test -s "+file)
	s.until("the person to be told of it", ada+"tbcluster doctor | tee /run/doctor; grep -F '"+manager+" was told to leave thunderbolt0 of a alone' /run/doctor && grep -F "+file+" /run/doctor && ! grep -F '[interface-managed]' /run/doctor")
	if now := s.sh("ip -o -4 addr show dev eth0 | sed 's/ *valid_lft.*//'; ip -4 route show dev eth0; ip -6 addr show dev eth0 scope link | sed 's/ *valid_lft.*//'"); now != lan {
		s.t.Errorf("the Ethernet is not what it was:\n%s", differences(lan, now))
	}
}

// lanNow is what the Ethernet has.
func (s *system) lanNow() string {
	s.t.Helper()
	return s.sh("ip -o -4 addr show dev eth0 | sed 's/ *valid_lft.*//'; ip -4 route show dev eth0; ip -6 addr show dev eth0 scope link | sed 's/ *valid_lft.*//'")
}

const nmFile = "/run/NetworkManager/conf.d/90-tbcluster-thunderbolt0.conf"

func released(s *system) {
	s.until("NetworkManager to leave the device", `nmcli -t -f DEVICE,STATE,CONNECTION device | grep -x thunderbolt0:unmanaged:`)
	s.told(nmFile, "NetworkManager", s.lanNow())
	for _, l := range s.status().Links {
		for _, e := range []*LinkEnd{l.A, l.B} {
			if e.Node == "a" && !strings.Contains(s.sh("ip -o -4 addr show dev thunderbolt0"), " "+e.Address+" ") {
				s.t.Errorf("thunderbolt0 has not the address %s", e.Address)
			}
		}
	}
	// Its own address is gone, and its other connections are as they were.
	if out := s.sh("ip -o -4 addr show dev thunderbolt0"); strings.Contains(out, "169.254.") || strings.Count(out, "\n") != 0 {
		s.t.Errorf("thunderbolt0 has other addresses:\n%s", out)
	}
	if now := s.lanHistory(); now != s.lan {
		s.t.Errorf("NetworkManager has done something to the Ethernet:\n%s", differences(s.lan, now))
	}
	if !strings.Contains(s.lanNow(), "default via 192.168.77.254") {
		s.t.Errorf("the default route is gone:\n%s", s.lanNow())
	}
}

// badCable copies both ways while frames are late, lost, swapped and corrupted.
func badCable(s *system) {
	for _, where := range []string{"thunderbolt0", "eth0"} {
		s.sh("modprobe sch_netem; tc qdisc add dev " + where + " root netem delay 4ms 2ms 25% loss 1% reorder 5% 50% corrupt 1%")
	}
	s.sh("head -c 2M /dev/urandom >/home/ada/out; chown ada: /home/ada/out; " + ada + "tbcluster cp /home/ada/out b:/root/there")
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	there, err := s.b.Sh(ctx, "sha256sum </root/there; tbcluster cp /root/there a:/home/ada/back")
	if err != nil {
		s.t.Fatalf("%v\n%s", err, there)
	}
	sum := s.sh("sha256sum </home/ada/out")
	if back := s.sh("sha256sum </home/ada/back; stat -c %U /home/ada/back"); !strings.HasPrefix(there, sum) || back != sum+"\nada" {
		s.t.Errorf("sent was %s, there is %s, and back came %s", sum, there, back)
	}
	var said []struct {
		Kind  string
		Drops int
	}
	if err := json.Unmarshal([]byte(s.sh("tc -s -j qdisc show dev thunderbolt0")), &said); err != nil {
		s.t.Fatal(err)
	}
	if len(said) == 0 || said[0].Kind != "netem" || said[0].Drops == 0 {
		s.t.Errorf("the cable was not bad: %+v", said)
	}
	s.sh("tc qdisc del dev thunderbolt0 root; tc qdisc del dev eth0 root")
}

// engine is the process of the engine.
const engine = `$(pgrep -u ada -x llama-server)`

// serves asks the instance, and that it is the same process.
func (s *system) serves(when, pid string) {
	s.t.Helper()
	s.until("an answer "+when, ada+`tbcluster chat --max-tokens 4 one 'The capital of France is' | grep .`)
	if now := s.sh("echo " + engine); now != pid {
		s.t.Errorf("%s: the engine was process %s and is %s", when, pid, now)
	}
}

// upgraded installs the next version while an engine serves.
func upgraded(s *system) {
	s.until("the model to be found", ada+"tbcluster models list | grep -F "+s.model)
	s.sh(ada + "tbcluster place " + s.model + " --name one --node a --context 512")
	pid := s.sh("echo " + engine)
	status, group := s.process(pid)
	s.has("the engine", status, "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1")
	if !strings.HasPrefix(group, "0::/tbcluster.slice/tbcluster-rank-") {
		s.t.Errorf("the engine is in the control group %q", group)
	}
	// Its memory is its own, and a limit of all engines holds.
	dir := "/sys/fs/cgroup" + strings.TrimPrefix(group, "0::")
	s.sh("systemctl set-property tbcluster.slice MemoryMax=1200M")
	if out := s.sh("cat /sys/fs/cgroup/tbcluster.slice/memory.max; test $(cat " + dir + "/memory.current) -gt 1000000; test -e " + dir + "/pids.current; grep -xc " + pid + " " + dir + "/cgroup.procs"); out != "1258291200\n1" {
		s.t.Errorf("the control group of the engine: %q", out)
	}
	for _, half := range []string{rootHalf, agentHalf} {
		if _, g := s.process(half); strings.Contains(g, "tbcluster.slice") {
			s.t.Errorf("a half of the agent is in the control group of engines: %s", g)
		}
	}
	s.serves("before the upgrade", pid)

	// The engine is asked all the while, at its own port.
	s.sh(`cat >/run/ask <<'EOF'
port=$(tr '\0' '\n' </proc/$1/cmdline | grep -x -A1 -e --port | tail -n 1)
address=$(tr '\0' '\n' </proc/$1/cmdline | grep -x -A1 -e --host | tail -n 1)
while [ ! -e /run/asked-enough ]; do
	exec 3<>/dev/tcp/$address/$port && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 && grep -q -F '"ok"' <&3 && echo answered || echo refused
	exec 3>&-
	sleep 0.2
done
EOF
systemd-run -q --unit ask --property StandardOutput=file:/run/answers bash /run/ask ` + pid)
	s.until("a first answer", "grep -x answered /run/answers")
	begun := time.Now()
	s.sh("dpkg -i " + dataDir + "/packages/" + filepath.Base(packaging.Deb("", second)))
	s.answers(second)
	s.t.Logf("an agent of the next version answers %.1f s after the upgrade began", time.Since(begun).Seconds())
	out := s.sh("touch /run/asked-enough; while systemctl -q is-active ask; do sleep 0.1; done; sort /run/answers | uniq -c")
	s.t.Logf("the engine, during the upgrade: %s", strings.Join(strings.Fields(out), " "))
	if strings.Contains(out, "refused") || !strings.Contains(out, "answered") {
		s.t.Errorf("the engine did not answer all the while:\n%s", out)
	}
	s.serves("after the upgrade", pid)
	s.proven("wait until the cable is proven after the upgrade")
}

// bothKilled kills both halves at once, each time at another point of what they do
// when a cable is plugged in. The unit starts them again.
func bothKilled(s *system) {
	pid := s.sh("echo " + engine)
	cable := s.r.Cable("a.0")
	for _, at := range []struct{ when, seen string }{
		{"NetworkManager is told", "test -e " + nmFile},
		{"the interface has an address", "grep -q . <(ip -o -4 addr show dev thunderbolt0 to 10.0.0.0/8 2>/dev/null)"},
	} {
		cable.Unplug()
		s.r.Settled(s.t)
		s.until("the interface to be gone, and all that was its", "! test -e /sys/class/net/thunderbolt0 && ! test -e "+nmFile)
		s.sh(`cat >/run/kill <<'EOF'
root=` + rootHalf + ` agent=` + agentHalf + `
: >/run/armed
until ` + at.seen + `; do :; done
kill -9 $root $agent
echo "killed $root and $agent"
: >/run/killed
EOF
rm -f /run/armed /run/killed
systemd-run -q --unit kill --property CollectMode=inactive-or-failed --property StandardOutput=file:/run/kill.log --property StandardError=inherit bash /run/kill
until [ -e /run/armed ]; do sleep 0.05; done`)
		before := s.sh("systemctl show -P InvocationID tbcluster.service")
		cable.Plug()
		s.r.Settled(s.t)
		s.until("both to be killed once "+at.when+", and to be back", `cat /run/kill.log; systemctl is-active tbcluster.service; test -e /run/killed && systemctl -q is-active tbcluster.service && test $(systemctl show -P InvocationID tbcluster.service) != `+before)
		s.answers(second)
		s.proven("wait until the cable is proven after both were killed, once " + at.when)
		s.serves("after both were killed, once "+at.when, pid)
	}
}

// down takes everything back; the service stays down.
func down(s *system) {
	s.sh(ada + "tbcluster stop one")
	s.until("the engine to be gone", "! pgrep -x llama-server")
	s.sh(ada + "tbcluster down")
	s.until("the service to be down", `test "$(systemctl is-active tbcluster.service)" = inactive`)
	s.sameNetwork("after down", s.network)
	if now := s.lanHistory(); now != s.lan {
		s.t.Errorf("NetworkManager has done something to the Ethernet:\n%s", differences(s.lan, now))
	}
	if out := s.sh(`pgrep -a -x tbcluster || true`); out != "" {
		s.t.Errorf("there runs:\n%s", out)
	}
}

// networkd is the same with the other manager.
func networkd(s *system) {
	const file = "/run/systemd/network/10-tbcluster-thunderbolt0.network"
	s.sh("systemctl stop NetworkManager.service; for i in thunderbolt0 eth0; do ip addr flush dev $i; ip link set $i down; done; systemctl start systemd-networkd.service")
	s.network = s.settledNetwork(`networkctl --no-pager list; networkctl --no-legend --no-pager list thunderbolt0 | grep -w configured && networkctl --no-legend --no-pager list eth0 | grep -w configured && ip route | grep -F 'default via 192.168.77.254'`)
	lan := s.lanNow()
	s.sh("systemctl start tbcluster.service")
	s.answers(second)
	s.proven("wait until the cable is proven beside systemd-networkd")
	s.until("systemd-networkd to leave the device", `networkctl --no-legend --no-pager list thunderbolt0 | grep unmanaged`)
	s.told(file, "systemd-networkd", lan)
	s.sh(ada + "tbcluster down")
	s.until("the service to be down", `test "$(systemctl is-active tbcluster.service)" = inactive`)
	s.sameNetwork("after down, beside systemd-networkd", s.network)
	// Once more for the removal.
	s.sh("systemctl start tbcluster.service")
	s.answers(second)
	s.proven("wait until the cable is proven once more")
	s.until("systemd-networkd to be told", "test -s "+file)
}

// purged removes the package while it runs.
func purged(s *system) {
	s.sh("dpkg --remove tbcluster")
	s.sameNetwork("after the package was removed", s.network)
	if out := s.sh(`pgrep -a -x tbcluster || true; ls -d /run/tbcluster /run/tbcluster-agent.sock 2>/dev/null || true; systemctl list-units --all --plain --no-legend 'tbcluster*' | grep -v tbcluster-rig || true`); out != "" {
		s.t.Errorf("after the package was removed there is left:\n%s", out)
	}
	s.sh("dpkg --purge tbcluster; getent passwd tbcluster && exit 1; getent group tbcluster && exit 1; true")
	if lost := differences(s.files, s.sh(filesScript())); lost != "" {
		s.t.Errorf("the package has left, or taken along:\n%s", lost)
	}
}
