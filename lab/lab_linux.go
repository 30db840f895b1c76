package lab

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
)

// Lab is a virtual cluster. Its methods may be called from several goroutines
// and several processes at once.
type Lab struct {
	name string
	dir  string
}

func named(name string) *Lab {
	return &Lab{name: name, dir: filepath.Join(baseDir(), name)}
}

// Open finds a lab by its name ("" is DefaultName). It may be dead: what is
// left of it can be removed with Down. Without such a lab it returns a fault
// with reason LabFailed.
func Open(name string) (*Lab, error) {
	if name == "" {
		name = DefaultName
	}
	if err := checkName(name); err != nil {
		return nil, err
	}
	l := named(name)
	if _, err := os.Stat(l.dir); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fault.Newf(fault.LabFailed, Command(name, "up")+" makes one", "no lab is called %s", name)
		}
		return nil, failed("find the lab "+name, err, "check the rights of the directory").At(l.dir)
	}
	return l, nil
}

// Name returns the name of the lab.
func (l *Lab) Name() string { return l.name }

// Dir returns the directory of the lab on the host.
func (l *Lab) Dir() string { return l.dir }

// NodeDir returns the directory of a node on the host: run/ there is the
// node's /run, console.log what its init and its boot command wrote.
func (l *Lab) NodeDir(node string) string { return filepath.Join(l.dir, node) }

// SocketPath returns the path on the host of the API socket of a node's agent.
func (l *Lab) SocketPath(node string) string {
	return filepath.Join(l.NodeDir(node), "run", agentSocket)
}

// Up makes a lab and boots its nodes; it returns when the boot command of each
// runs. What is left of a dead lab of the name is removed first. Interrupted at
// any moment it leaves nothing, or something that Down removes.
func Up(ctx context.Context, o Options) (*Lab, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	if err := o.findFiles(); err != nil {
		return nil, err
	}
	l := named(o.Name)
	if p := l.SocketPath("epsilon"); len(p) > maxSocketPath {
		return nil, fault.Newf(fault.Usage, "choose a shorter name", "the paths of sockets of the lab %s would be too long", o.Name).At(p)
	}
	unlock, err := lockName(ctx, baseDir(), o.Name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if old, err := readRecord(l.dir); err == nil && old.Keeper.alive() {
		return nil, fault.Newf(fault.LabFailed, Command(o.Name, "down")+" ends it; or choose another name",
			"a lab called %s is running already", o.Name)
	}
	if err := l.remove(ctx); err != nil {
		return nil, err
	}
	if err := l.make(ctx, o); err != nil {
		// The caller's context may be what ended; cleaning up must not depend on it.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 15*time.Second)
		defer cancel()
		if cleanErr := l.remove(clean); cleanErr != nil {
			return nil, errors.Join(err, cleanErr)
		}
		return nil, err
	}
	return l, nil
}

// findFiles completes the options by what this machine has.
func (o *Options) findFiles() error {
	if o.Program == "" {
		exe, err := os.Executable()
		if err != nil {
			return failed("find the tbcluster binary", err, "name it in Options.Program")
		}
		o.Program = exe
	}
	var err error
	if o.Program, err = filepath.Abs(o.Program); err != nil {
		return failed("find the tbcluster binary", err, "give its absolute path")
	}
	if err := unix.Access(o.Program, unix.X_OK); err != nil {
		return failed("use the tbcluster binary", err, "build it with `make build`").At(o.Program)
	}
	for _, b := range o.Binds {
		if _, err := os.Stat(b.Source); err != nil {
			return failed("show "+b.Source+" to the nodes", err, "name something that is there")
		}
	}
	if o.Engines == "" {
		if cache, err := os.UserCacheDir(); err == nil {
			o.Engines = filepath.Join(cache, "tbcluster", "engines")
		}
	}
	if st, err := os.Stat(o.Engines); err != nil || !st.IsDir() {
		o.Engines = ""
	}
	return nil
}

// make starts the keeper of a lab and waits until the nodes have booted.
func (l *Lab) make(ctx context.Context, o Options) error {
	fix := "try again; " + Command(l.name, "down") + " removes what is left"
	if err := os.Mkdir(l.dir, 0o755); err != nil {
		return failed("make the directory of the lab", err, fix).At(l.dir)
	}
	seed := make([]byte, 16)
	if _, err := rand.Read(seed); err != nil {
		return failed("draw random numbers", err, fix)
	}
	rec := record{Options: o, Seed: hex.EncodeToString(seed)}
	rec.Notes = o.notes()
	rec.Memory, rec.Cgroups = cgroupPaths(o.Name, NodeNames(o.Nodes))
	// Written before they are made, so that Down knows of them in any case.
	if err := rec.write(l.dir); err != nil {
		return failed("write the record of the lab", err, fix).At(l.dir)
	}
	for _, path := range rec.Cgroups {
		if err := makeCgroup(rec.Memory, path, o.Memory+o.Disk); err != nil {
			rec.Notes = append(rec.Notes, fmt.Sprintf("memory is not limited: %v", err))
			rec.Memory = reportedOnly
			break
		}
	}
	var k *starting
	var err error
	if os.Geteuid() == 0 {
		k, err = startKeeper(l.dir, o.Program, false)
	}
	if k == nil && (err == nil || errors.Is(err, unix.EPERM)) {
		// Root of a container may lack the right to make namespaces, and can
		// make a user namespace like anybody else.
		rec.Rootless = true
		k, err = startKeeper(l.dir, o.Program, true)
	}
	if err != nil {
		return l.noNamespaces(err)
	}
	defer k.close()
	if rec.Keeper, err = identify(k.pid); err == nil {
		err = rec.write(l.dir)
	}
	if err != nil {
		k.kill()
		return failed("write the record of the lab", err, fix).At(l.dir)
	}
	return k.await(ctx, l)
}

// notes are warnings about what the nodes are going to see.
func (o Options) notes() []string {
	var notes []string
	if o.Engines != "" {
		if st, err := os.Stat(o.Engines); err == nil && st.Mode()&0o005 != 0o005 {
			notes = append(notes, fmt.Sprintf("users of the nodes cannot read the engines: `chmod o+rx %s`", o.Engines))
		}
	}
	// The kernel bounds the neighbours of all network namespaces together.
	if text, err := os.ReadFile("/proc/sys/net/ipv4/neigh/default/gc_thresh3"); err == nil {
		have, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if need := o.Nodes * o.Nodes; err == nil && have < need {
			notes = append(notes, fmt.Sprintf("the kernel has room for %d neighbours, and the nodes have up to %d: some will not reach each other; "+
				"`sysctl -w net.ipv4.neigh.default.gc_thresh3=%d net.ipv6.neigh.default.gc_thresh3=%d` makes room", have, need, 4*need, 4*need))
		}
	}
	return notes
}

func (l *Lab) noNamespaces(err error) error {
	f := failed("make the namespaces of the lab", err, "")
	switch {
	case errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES):
		f.Fix = "run it as root; or allow user namespaces: `sysctl kernel.unprivileged_userns_clone=1`, " +
			"on Ubuntu `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; they cannot be made within a chroot"
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EUSERS):
		f.Fix = "allow more namespaces: `sysctl user.max_user_namespaces=10000`"
	case errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS):
		f.Fix = "use a kernel with user, PID, mount, network, IPC and UTS namespaces"
	default:
		f.Fix = "run it as root"
	}
	return f
}

// Down ends every process of the lab, wherever it stands, and removes all that
// is left of it.
func (l *Lab) Down(ctx context.Context) error {
	unlock, err := lockName(ctx, filepath.Dir(l.dir), l.name)
	if err != nil {
		return err
	}
	defer unlock()
	return l.remove(ctx)
}

// remove removes the lab. The caller holds its lock.
func (l *Lab) remove(ctx context.Context) error {
	again := Command(l.name, "down") + " again"
	rec, err := readRecord(l.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		// Without the record of a keeper there is nothing that runs: it waits
		// until it is recorded.
		rec = record{}
	}
	if err := l.endKeeper(ctx, rec.Keeper); err != nil {
		return failed("end the processes of the lab "+l.name, err, again)
	}
	for _, path := range rec.Cgroups {
		if err := removeCgroup(ctx, path); err != nil {
			return failed("remove what is left of the lab "+l.name, err, again)
		}
	}
	if err := os.RemoveAll(l.dir); err != nil {
		return failed("remove what is left of the lab "+l.name, err, again).At(l.dir)
	}
	return nil
}

// endKeeper kills the keeper, and by that the kernel kills all that it keeps.
func (l *Lab) endKeeper(ctx context.Context, p process) error {
	fd, err := p.open()
	if err != nil {
		return l.askEnd(ctx)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	for !exited(fd, 20) {
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// askEnd ends a keeper that this process cannot see, being in another PID
// namespace. Where none answers there is none.
func (l *Lab) askEnd(ctx context.Context) error {
	c, err := l.dial(ctx)
	if err != nil {
		return nil
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	conn := frame.New(c)
	if err := conn.Send(request{Op: opShutdown}); err != nil {
		return err
	}
	// The answer is the end of the connection.
	var r reply
	for conn.Receive(&r) == nil {
		if err := r.Fault.err(); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (l *Lab) dial(ctx context.Context) (*net.UnixConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", filepath.Join(l.dir, "keeper.sock"))
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// ask has the keeper do something.
func (l *Lab) ask(ctx context.Context, req request) (reply, error) {
	c, err := l.dial(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return reply{}, l.interrupted(ctx)
		}
		return reply{}, failed("reach the keeper of the lab "+l.name, err,
			"the lab is dead: "+Command(l.name, "down")+" cleans up, "+Command(l.name, "up")+" makes a new one")
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	conn := frame.New(c)
	var r reply
	if err := conn.Send(req); err == nil {
		err = conn.Receive(&r)
		if err == nil {
			return r, r.Fault.err()
		}
	}
	if ctx.Err() != nil {
		return reply{}, l.interrupted(ctx)
	}
	return reply{}, fault.Newf(fault.LabFailed, "see "+filepath.Join(l.dir, "keeper.log")+"; "+Command(l.name, "down")+" cleans up",
		"the keeper of the lab %s ended while it was asked for %q", l.name, req.Op)
}

func (l *Lab) interrupted(ctx context.Context) error {
	stands := Command(l.name, "status") + " shows how the lab stands"
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fault.New(fault.Timeout, "wait for the lab "+l.name, ctx.Err(), stands)
	}
	return fault.New(fault.Interrupted, "interrupted", nil, stands)
}

// Status tells how the lab stands; a dead lab has a status too.
func (l *Lab) Status(ctx context.Context) (Status, error) {
	r, err := l.ask(ctx, request{Op: opStatus})
	if err == nil && r.Status != nil {
		return *r.Status, nil
	}
	rec, recErr := readRecord(l.dir)
	if recErr != nil || ctx.Err() != nil || rec.Keeper.alive() {
		return Status{}, err
	}
	s := Status{
		Name: l.name, State: Dead, Dir: l.dir, Rootless: rec.Rootless, Memory: rec.Memory, Notes: rec.Notes,
		Nodes: []NodeStatus{}, Cables: []CableStatus{},
	}
	for i, n := range NodeNames(rec.Options.Nodes) {
		s.Nodes = append(s.Nodes, NodeStatus{
			Name: n, State: Off, Agent: Stopped, Address: lanAddress(i).String(), Socket: l.SocketPath(n),
			MachineID: machineID(rec.Seed, n), Memory: rec.Options.Memory, Disk: rec.Options.Disk,
		})
	}
	return s, nil
}

// Cut pulls cables between two nodes, or makes them silent.
func (l *Lab) Cut(ctx context.Context, a, b string, o CutOptions) error {
	_, err := l.ask(ctx, request{Op: opCut, Node: a, Other: b, Cable: o.Cable, Silent: o.Silent, Half: o.Half})
	return err
}

// Mend plugs cables in again, or ends their silence.
func (l *Lab) Mend(ctx context.Context, a, b string, o MendOptions) error {
	_, err := l.ask(ctx, request{Op: opMend, Node: a, Other: b, Cable: o.Cable, Rename: o.Rename, Move: o.Move})
	return err
}

// Kill takes the power from a node: every process dies, /run, /tmp and
// /dev/shm are gone, the cables go dead at their other ends, the data disk
// stays. With agentOnly it kills the two halves of the agent with SIGKILL, and
// nothing else.
func (l *Lab) Kill(ctx context.Context, node string, agentOnly bool) error {
	_, err := l.ask(ctx, request{Op: opKill, Node: node, Agent: agentOnly})
	return err
}

// Start boots a node that is off, or resumes one that is paused. With agentOnly
// it starts or resumes the agent.
func (l *Lab) Start(ctx context.Context, node string, agentOnly bool) error {
	_, err := l.ask(ctx, request{Op: opStart, Node: node, Agent: agentOnly})
	return err
}

// Pause stops (SIGSTOP) every process of a node, or its agent.
func (l *Lab) Pause(ctx context.Context, node string, agentOnly bool) error {
	_, err := l.ask(ctx, request{Op: opPause, Node: node, Agent: agentOnly})
	return err
}

// Resume undoes Pause.
func (l *Lab) Resume(ctx context.Context, node string, agentOnly bool) error {
	_, err := l.ask(ctx, request{Op: opResume, Node: node, Agent: agentOnly})
	return err
}

// CutLAN takes the carrier from a node's LAN interface.
func (l *Lab) CutLAN(ctx context.Context, node string) error {
	_, err := l.ask(ctx, request{Op: opCutLAN, Node: node})
	return err
}

// MendLAN undoes CutLAN.
func (l *Lab) MendLAN(ctx context.Context, node string) error {
	_, err := l.ask(ctx, request{Op: opMendLAN, Node: node})
	return err
}

// SetMulticast blocks multicast on a node, on all of its interfaces; "" lets it
// through again.
func (l *Lab) SetMulticast(ctx context.Context, node string, how Multicast) error {
	_, err := l.ask(ctx, request{Op: opMulti, Node: node, How: string(how)})
	return err
}

// Part lets the LAN fall into parts: nodes of different groups do not reach each
// other by it, whoever is in no group is with the LAN's host. Without groups it
// is one LAN again. Cables are left as they are.
func (l *Lab) Part(ctx context.Context, groups ...[]string) error {
	s, err := l.Status(ctx)
	if err != nil {
		return err
	}
	side := map[string]int{}
	for i, g := range groups {
		for _, n := range g {
			if !slices.ContainsFunc(s.Nodes, func(x NodeStatus) bool { return x.Name == n }) {
				return fault.Newf(fault.NodeUnknown, Command(l.name, "status")+" lists the nodes", "the lab %s has no node %q", l.name, n)
			}
			if _, twice := side[n]; twice {
				return fault.Newf(fault.Usage, "name each node once", "%s cannot be in two parts of the LAN", n)
			}
			side[n] = i + 1
		}
	}
	for _, n := range s.Nodes {
		if n.LANSide == side[n.Name] {
			continue
		}
		if _, err := l.ask(ctx, request{Op: opSide, Node: n.Name, Side: side[n.Name]}); err != nil {
			return err
		}
	}
	return nil
}

// machineID is the machine ID of a node: 32 hexadecimal digits.
func machineID(seed, node string) string {
	id := deriveUUID(seed, "machine", node)
	return string(slices.DeleteFunc([]byte(id), func(b byte) bool { return b == '-' }))
}
