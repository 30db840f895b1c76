package lab

import (
	"errors"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"

	"github.com/google/renameio/v2"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
)

// keeper holds a lab together: the disks, the LAN, the cables, the inits.
type keeper struct {
	dir     string
	rec     record
	reaper  *reaper
	nl      *netlink.Handle // of the LAN's network namespace, which is its own
	bridges map[int]int     // indexes of the LAN's bridges, by side

	// mu is held for the whole of an operation: they are short, and what one
	// does to a node or cable must not meet another.
	mu     sync.Mutex
	nodes  []*node // the last is the LAN's host
	cables []*cable
}

// KeeperMain is `tbcluster lab-keeper`: the process that holds a lab together.
// Up starts it; for nobody else it is of use.
func KeeperMain(args []string) int {
	if len(args) != 1 || os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "lab-keeper is started by `tbcluster lab up` and is of no other use")
		return fault.ExitUsage
	}
	log.SetFlags(log.Ldate | log.Lmicroseconds)
	ready := frame.New(os.NewFile(keeperReady, "ready"))
	goAhead := os.NewFile(keeperGo, "go")
	// Until it is recorded nobody could find it, so without that it ends.
	if n, err := goAhead.Read(make([]byte, 1)); n != 1 {
		fmt.Fprintln(os.Stderr, "lab-keeper: not recorded:", err)
		return fault.ExitFailed
	}
	goAhead.Close()
	unix.CloseOnExec(keeperReady)
	end := make(chan os.Signal, 1)
	signal.Notify(end, unix.SIGTERM, unix.SIGINT)
	signal.Ignore(unix.SIGHUP, unix.SIGPIPE)

	k := &keeper{dir: args[0], reaper: newReaper()}
	ln, err := k.up()
	if sendErr := ready.Send(reply{Fault: toWire(err)}); sendErr != nil {
		// Up was killed; the lab stands all the same, and Down finds it.
		log.Printf("nobody waits for the lab: %v", sendErr)
	}
	ready.Close()
	if err != nil {
		log.Printf("up: %v", err)
		return fault.ExitFailed
	}
	go k.serve(ln)
	<-end
	k.shutdown()
	return 0
}

// up makes the lab. On an error the caller ends the process, and by that
// everything that was made.
func (k *keeper) up() (net.Listener, error) {
	unix.Umask(0o022)
	var err error
	if k.rec, err = readRecord(k.dir); err != nil {
		return nil, failed("read the record of the lab", err, "try again").At(k.dir)
	}
	if err := ownMounts(); err != nil {
		return nil, failed("make the mounts of the lab private", err,
			"/proc must be mounted, and not hidden in parts as in some containers")
	}
	if err := k.makeLAN(); err != nil {
		return nil, failed("make the LAN of the lab", err, "use a kernel with bridge and veth")
	}
	cables := plan(k.rec.Options)
	names := NodeNames(k.rec.Options.Nodes)
	for i, name := range append(names, LANHost) {
		n, err := k.makeNode(i, name, cables)
		if err != nil {
			return nil, err
		}
		k.nodes = append(k.nodes, n)
	}
	for _, p := range cables {
		k.cables = append(k.cables, &cable{planned: p, state: Plugged})
	}
	// Sockets first, so that a command that comes early waits and does not fail.
	ln, err := listen(filepath.Join(k.dir, "keeper.sock"))
	if err != nil {
		return nil, failed("listen for commands", err, "try again").At(k.dir)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return ln, k.boot(k.nodes...)
}

// listen makes a Unix socket for the owner of the lab alone.
func listen(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil {
		ln.Close()
		return nil, err
	}
	return ln, nil
}

// ownMounts makes sure that no mount made from here on is seen outside, and
// mounts the /proc of the lab's PID namespace.
func ownMounts() error {
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if errors.Is(err, unix.EINVAL) {
		// In a chroot / is no mount point, and what is mounted below it would
		// spread to the mount, out of our reach, that holds it. So the tree moves
		// into a place that can be made private first.
		err = privateRoot()
	}
	if err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	return nil
}

// privateRoot enters a private copy of a root that is no mount point.
func privateRoot() error {
	if err := unix.Mount("", "/proc", "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make /proc private: %w", err)
	}
	// Any directory of procfs that is there and that nobody here needs.
	for _, place := range []string{"/proc/tty", "/proc/fs", "/proc/bus"} {
		if st, err := os.Stat(place); err != nil || !st.IsDir() {
			continue
		}
		if err := unix.Mount("/", place, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind / to %s: %w", place, err)
		}
		if err := unix.Mount("", place, "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make the copy of / private: %w", err)
		}
		if err := unix.Chroot(place); err != nil {
			return err
		}
		return unix.Chdir("/")
	}
	return errors.New("/proc has none of the directories tty, fs and bus")
}

// serve answers clients until the listener fails.
func (k *keeper) serve(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			log.Printf("accept: %v", err)
			return
		}
		go k.answer(c.(*net.UnixConn))
	}
}

func (k *keeper) answer(c *net.UnixConn) {
	defer c.Close()
	uid, err := askedBy(c)
	if err != nil || int(uid) != os.Geteuid() && uid != 0 {
		log.Printf("refused user %d: %v", uid, err)
		return
	}
	conn := frame.New(c)
	var req request
	if err := conn.Receive(&req); err != nil {
		return
	}
	r, err := k.do(req)
	r.Fault = toWire(err)
	if err != nil {
		log.Printf("%s %s %s: %v", req.Op, req.Node, req.Other, err)
	}
	if err := conn.Send(r); err != nil {
		log.Printf("answer %s: %v", req.Op, err)
	}
}

// do carries out one request.
func (k *keeper) do(req request) (reply, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch req.Op {
	case opStatus:
		s := k.status()
		return reply{Status: &s}, nil
	case opShutdown:
		k.killAll()
		os.Exit(0)
	case opCut:
		return reply{}, k.eachCable(req, func(c *cable) error { return k.cut(c, req.Silent, hidden(req)) })
	case opMend:
		return reply{}, k.eachCable(req, func(c *cable) error { return k.mend(c, req.Rename, req.Move) })
	}
	n, err := k.find(req.Node)
	if err != nil {
		return reply{}, err
	}
	if req.Op == opCheck {
		return reply{}, n.running()
	}
	if n.name == LANHost {
		return reply{}, fault.Newf(fault.Usage, "it is there for "+Command(k.rec.Options.Name, "exec "+LANHost+" -- COMMAND"),
			"%s is the host on the LAN, no node of the cluster", LANHost)
	}
	ops := map[string]func(*node, bool) error{
		opKill: k.kill, opStart: k.start, opPause: k.pause, opResume: k.resume,
		opCutLAN:  func(n *node, _ bool) error { return k.setLAN(n, false) },
		opMendLAN: func(n *node, _ bool) error { return k.setLAN(n, true) },
		opSide:    func(n *node, _ bool) error { return k.setSide(n, req.Side) },
		opMulti:   func(n *node, _ bool) error { return k.setMulticast(n, Multicast(req.How)) },
	}
	op, ok := ops[req.Op]
	if !ok {
		return reply{}, fault.Newf(fault.Unsupported, "use the tbcluster that made the lab, or make it anew", "the lab's keeper knows no %q", req.Op)
	}
	return reply{}, op(n, req.Agent)
}

// hidden is the node that is to see a cable no more; "" if both do.
func hidden(req request) string {
	if req.Half {
		return req.Other
	}
	return ""
}

// find returns the node of that name.
func (k *keeper) find(name string) (*node, error) {
	var names []string
	for _, n := range k.nodes {
		if n.name == name {
			return n, nil
		}
		names = append(names, n.name)
	}
	return nil, fault.Newf(fault.NodeUnknown, "it has "+strings.Join(names, ", "), "the lab %s has no node %q", k.rec.Options.Name, name)
}

// shutdown ends every node; the end of the keeper does the rest.
func (k *keeper) shutdown() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.killAll()
}

func (k *keeper) killAll() {
	for _, n := range k.nodes {
		if n.boot != nil {
			n.boot.kill()
		}
	}
}

func (k *keeper) status() Status {
	s := Status{
		Name: k.rec.Options.Name, State: Running, Dir: k.dir,
		Rootless: k.rec.Rootless, Memory: k.rec.Memory, Notes: k.rec.Notes,
		Nodes: []NodeStatus{}, Cables: []CableStatus{},
	}
	for _, n := range k.nodes {
		if n.name != LANHost {
			s.Nodes = append(s.Nodes, k.nodeStatus(n))
		}
	}
	for _, c := range k.cables {
		s.Cables = append(s.Cables, CableStatus{
			Index: c.index, State: c.state, Rate: k.rec.Options.Rate,
			A: k.cableEnd(c, 0), B: k.cableEnd(c, 1),
		})
	}
	return s
}

func (k *keeper) cableEnd(c *cable, end int) CableEnd {
	e := CableEnd{Node: k.nodes[c.node[end]].name, Port: c.port[end].String()}
	if c.laid {
		e.Interface = c.names[end]
	}
	return e
}

// writeFile writes a small file that others may read at the same time.
func writeFile(path, content string) error {
	return renameio.WriteFile(path, []byte(content), 0o644)
}
