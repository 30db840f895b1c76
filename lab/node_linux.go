package lab

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
)

// Where things are in a node.
const (
	sysInside     = "/lab/sys"
	enginesInside = "/opt/tbcluster/engines"
)

// lanHostDisk is the disk of the LAN's host in bytes.
const lanHostDisk = 64 << 20

// node is a node as the keeper sees it.
type node struct {
	name   string
	lab    string // its name
	index  int
	dir    string
	tree   *tree // its sysfs
	lanCut bool
	// multicast is what becomes of it: "" or how it is blocked.
	multicast Multicast
	side      int   // of the LAN
	boot      *boot // nil while the node is off
	exit      string
	// lastNumber is the highest N that an interface thunderboltN had.
	lastNumber int
}

// boot is a node from power to power cut.
type boot struct {
	pid  int // of the init, in the keeper's PID namespace
	id   string
	conn *frame.Conn
	ns   netns.NsHandle
	nl   *netlink.Handle
	// answers are the init's answers to orders.
	answers chan news
	done    chan struct{} // closed when every process of the node is dead

	// paused and halted belong to the keeper's lock.
	paused bool
	halted map[int]uint64 // stopped by a pause of the node: PID and start time

	mu       sync.Mutex
	agentPID int    // of the boot command, in the node's PID namespace; 0 once it ended
	ended    int    // PID of one whose end was told before its start; 0 for none
	exit     string // how it ended
}

func (n *node) path(name string) string { return filepath.Join(n.dir, name) }

// makeNode makes what a node has while it is off: a disk, a directory, a tree.
func (k *keeper) makeNode(index int, name string, cables []planned) (*node, error) {
	n := &node{name: name, lab: k.rec.Options.Name, index: index, dir: filepath.Join(k.dir, name), lastNumber: -1}
	for _, d := range []string{"run", "sys", "root", "disk"} {
		if err := os.MkdirAll(n.path(d), 0o755); err != nil {
			return nil, failed("make the directory of "+name, err, "try again")
		}
	}
	size := k.rec.Options.Disk
	if name == LANHost {
		size = lanHostDisk
	}
	// Both are held by the keeper's mount namespace, and gone with it.
	for dir, options := range map[string]string{"disk": fmt.Sprintf("mode=0755,size=%d", size), "sys": "mode=0755"} {
		if err := unix.Mount("tbcluster-"+dir, n.path(dir), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
			return nil, failed("make the disk of "+name, err, "use a kernel with tmpfs")
		}
	}
	count := 0
	var others []foreign
	if name != LANHost {
		var more int
		others, more = foreigners(k.rec.Options, cables, index)
		count = domains(cables, index) + more
	}
	var uuids []string
	for d := range count {
		uuids = append(uuids, deriveUUID(k.rec.Seed, "domain", name, d))
	}
	n.tree = newTree(n.path("sys"), uuids, others...)
	return n, nil
}

// running returns a fault if nothing can be run on the node now.
func (n *node) running() error {
	switch {
	case n.boot == nil:
		return fault.Newf(fault.NodeDown, Command(n.lab, "start "+n.name)+" boots it", "%s is off", n.name)
	case n.boot.paused:
		return fault.Newf(fault.NodeDown, Command(n.lab, "start "+n.name)+" resumes it", "%s is paused", n.name)
	}
	return nil
}

// power boots nodes: all of them get their processes, then their network, then
// their agents.
func (k *keeper) power(nodes []*node) error {
	errs := make([]error, len(nodes))
	each := func(f func(n *node) error) error {
		var wg sync.WaitGroup
		for i, n := range nodes {
			wg.Go(func() { errs[i] = f(n) })
		}
		wg.Wait()
		return errors.Join(errs...)
	}
	if err := each(k.startInit); err != nil {
		return err
	}
	for _, n := range nodes {
		if err := k.joinLAN(n); err != nil {
			return failed("join "+n.name+" to the LAN", err, "try again")
		}
	}
	for _, c := range k.cables {
		if err := k.lay(c); err != nil {
			return err
		}
	}
	return each(func(n *node) error {
		if n.name == LANHost || k.rec.Options.NoBoot {
			return nil
		}
		return n.boot.bootCommand()
	})
}

// boot boots nodes that are off; of those that fail to it leaves nothing on.
func (k *keeper) boot(nodes ...*node) error {
	err := k.power(nodes)
	if err != nil {
		for _, n := range nodes {
			k.cutPower(n)
		}
		if fault.As(err) == nil {
			err = failed("boot the nodes", err, "see console.log in the directory of the node")
		}
	}
	return err
}

// startInit starts the init of a node and has it build the file system.
func (k *keeper) startInit(n *node) error {
	what := "boot " + n.name
	fix := "see " + n.path("console.log")
	if err := clearDir(n.path("run")); err != nil {
		return failed(what, err, fix)
	}
	if err := n.tree.reset(); err != nil {
		return failed(what, err, fix)
	}
	b, err := k.forkInit(n)
	if err != nil {
		return failed(what, err, fix)
	}
	n.boot = b
	if b.ns, err = netns.GetFromPid(b.pid); err != nil {
		return failed(what, err, fix)
	}
	if b.nl, err = netlink.NewHandleAt(b.ns); err != nil {
		return failed(what, err, fix)
	}
	s, err := k.setupOf(n)
	if err != nil {
		return failed(what, err, fix)
	}
	_, err = b.order(order{Setup: s})
	return err
}

func (k *keeper) setupOf(n *node) (*setup, error) {
	o := k.rec.Options
	s := &setup{
		Lab: o.Name, Name: n.name, BootID: n.boot.id, MachineID: machineID(k.rec.Seed, n.name),
		Hosts: k.hosts(), Dir: n.dir, Program: o.Program, Engines: o.Engines, Binds: o.Binds,
		Boot: o.Boot, Rootless: k.rec.Rootless,
	}
	if n.name == LANHost {
		return s, nil
	}
	config := map[string]any{
		"sysfs_root":   sysInside,
		"memory_bytes": o.Memory,
		"engine_dirs":  []string{enginesInside},
		"root_work":    "yes", // nodes have no other person
	}
	for key, v := range o.Config {
		config[key] = v
	}
	var err error
	s.Config, err = toml.Marshal(config)
	return s, err
}

// hosts is /etc/hosts of every node.
func (k *keeper) hosts() string {
	var b strings.Builder
	b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	for _, n := range k.nodes {
		fmt.Fprintf(&b, "%s\t%s\n", n.lanAddress(), n.name)
	}
	return b.String()
}

// forkInit starts the init in namespaces of its own.
func (k *keeper) forkInit(n *node) (*boot, error) {
	b := &boot{answers: make(chan news, 1), done: make(chan struct{}), halted: map[int]uint64{}}
	id, err := randomUUID()
	if err != nil {
		return nil, err
	}
	b.id = id
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	mine, its := os.NewFile(uintptr(fds[0]), "init"), os.NewFile(uintptr(fds[1]), "keeper")
	defer its.Close()
	ln, err := listen(n.path("init.sock"))
	if err != nil {
		mine.Close()
		return nil, err
	}
	defer ln.Close()
	lnFile, err := ln.File()
	if err != nil {
		mine.Close()
		return nil, err
	}
	defer lnFile.Close()
	console, err := os.OpenFile(n.path("console.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		mine.Close()
		return nil, err
	}
	defer console.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		mine.Close()
		return nil, err
	}
	defer null.Close()
	pid, ended, err := k.reaper.start(k.rec.Options.Program, []string{k.rec.Options.Program, "lab-init"}, &syscall.ProcAttr{
		Dir: "/", Env: environment(nil),
		Files: []uintptr{null.Fd(), console.Fd(), console.Fd(), its.Fd(), lnFile.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true, Cloneflags: namespaces},
	})
	if err != nil {
		mine.Close()
		return nil, err
	}
	b.pid = pid
	if i := n.index; i < len(k.rec.Cgroups) && k.rec.Memory != reportedOnly {
		if err := enterCgroup(k.rec.Cgroups[i], pid); err != nil {
			log.Printf("%s: memory is not limited: %v", n.name, err)
		}
	}
	b.conn = frame.New(mine)
	go b.listen()
	go func() {
		status := <-ended
		close(b.done)
		_, words := exitStatus(status)
		log.Printf("%s: init: %s", n.name, words)
		k.mu.Lock()
		defer k.mu.Unlock()
		if n.boot == b {
			k.gone(n)
		}
	}()
	return b, nil
}

// listen takes in what the init says.
func (b *boot) listen() {
	for {
		var w news
		if err := b.conn.Receive(&w); err != nil {
			close(b.answers)
			return
		}
		b.mu.Lock()
		switch {
		case w.Exit != "":
			if b.agentPID != w.Pid {
				b.ended = w.Pid // its start is still to be told
			}
			b.agentPID, b.exit = 0, w.Exit
		case w.Pid != 0 && w.Pid == b.ended:
			b.ended = 0
		case w.Pid != 0:
			b.agentPID, b.exit, b.ended = w.Pid, "", 0
		}
		b.mu.Unlock()
		if w.Answer {
			b.answers <- w
		}
	}
}

// order has the init do something and waits for its answer. The caller holds
// the keeper's lock, so there is one order at a time.
func (b *boot) order(o order) (news, error) {
	const patience = 30 * time.Second
	fix := "see console.log in the directory of the node"
	if err := b.conn.Send(o); err != nil {
		return news{}, failed("talk to the init of the node", err, fix)
	}
	select {
	case w, ok := <-b.answers:
		if !ok {
			return news{}, failed("boot the node", errors.New("its init ended"), fix)
		}
		return w, w.Fault.err()
	case <-time.After(patience):
		return news{}, failed("boot the node", fmt.Errorf("its init did not answer in %v", patience), fix)
	}
}

func (b *boot) bootCommand() error {
	_, err := b.order(order{Boot: true})
	return err
}

// kill kills every process of the node and waits for their end.
func (b *boot) kill() {
	// The init is a child of ours that the reaper has not seen the end of, or
	// done is closed: the number is its own in both cases.
	select {
	case <-b.done:
		return
	default:
	}
	if err := unix.Kill(b.pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		log.Printf("kill init %d: %v", b.pid, err)
	}
	<-b.done
}

// cutPower ends all that runs on a node and takes its cables dead.
func (k *keeper) cutPower(n *node) {
	if n.boot == nil {
		return
	}
	n.boot.kill()
	k.gone(n)
}

// gone takes note that a node is off.
func (k *keeper) gone(n *node) {
	b := n.boot
	for _, c := range k.cables {
		if c.node[0] == n.index || c.node[1] == n.index {
			if err := k.unlay(c); err != nil {
				log.Printf("%s is off: %v", n.name, err)
			}
		}
	}
	if err := k.leaveLAN(n); err != nil {
		log.Printf("%s is off: %v", n.name, err)
	}
	b.mu.Lock()
	n.exit = b.exit
	b.mu.Unlock()
	b.conn.Close()
	if b.nl != nil {
		b.nl.Close()
	}
	if b.ns.IsOpen() && b.ns != 0 {
		b.ns.Close()
	}
	n.boot = nil
	n.lastNumber = -1
	if err := errors.Join(clearDir(n.path("run")), n.tree.reset()); err != nil {
		log.Printf("%s is off: %v", n.name, err)
	}
}

func (k *keeper) nodeStatus(n *node) NodeStatus {
	s := NodeStatus{
		Name: n.name, State: Off, Agent: Stopped, AgentExit: n.exit, LANCut: n.lanCut, LANSide: n.side, Multicast: n.multicast,
		MachineID: machineID(k.rec.Seed, n.name), Address: n.lanAddress().String(),
		Socket: filepath.Join(n.dir, "run", agentSocket),
		Memory: k.rec.Options.Memory, Disk: k.rec.Options.Disk,
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(n.path("disk"), &fs); err == nil {
		s.DiskUsed = (fs.Blocks - fs.Bfree) * uint64(fs.Bsize)
	}
	b := n.boot
	if b == nil {
		return s
	}
	s.State, s.BootID = Running, b.id
	if b.paused {
		s.State = Paused
	}
	b.mu.Lock()
	s.AgentExit = b.exit
	b.mu.Unlock()
	if agent, err := k.agentOf(b); err == nil && len(agent) > 0 {
		s.Agent, s.AgentExit = Paused, ""
		for _, st := range agent {
			if st.state != 'T' && !b.paused {
				s.Agent = Running
			}
		}
	}
	return s
}

func randomUUID() (string, error) {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		return "", err
	}
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]), nil
}

// clearDir empties a directory.
func clearDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) lanAddress() net.IP {
	if n.name == LANHost {
		return lanHost.AsSlice()
	}
	return lanAddress(n.index).AsSlice()
}
