package lab

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
)

// grace is what an abandoned command gets between SIGTERM and SIGKILL.
const grace = 2 * time.Second

// serveExec runs what clients on the host ask for.
func (m *machine) serveExec(ln *net.UnixListener) {
	for {
		c, err := ln.AcceptUnix()
		if err != nil {
			fmt.Fprintln(os.Stderr, "lab-init: accept:", err)
			return
		}
		go m.serveOne(c)
	}
}

func (m *machine) serveOne(c *net.UnixConn) {
	defer c.Close()
	// The socket's rights keep others out; this is the second lock on the door.
	// A user whom the namespace does not know shows as the overflow user.
	if uid, err := askedBy(c); err != nil || uid != 0 {
		return
	}
	files, err := receiveFiles(c)
	if err != nil {
		return
	}
	defer func() { closeAll(files) }()
	conn := frame.New(c)
	var req execRequest
	if err := conn.Receive(&req); err != nil {
		return
	}
	var master *os.File
	if req.TTY {
		var slave *os.File
		if master, slave, err = openTerminal(req.Rows, req.Cols); err == nil {
			defer master.Close()
			closeAll(files)
			files = []*os.File{slave, slave, slave}
		}
	}
	if err != nil {
		m.refuse(c, failed("open a terminal on "+m.setup.Name, err, "try again"))
		return
	}
	pid, ended, err := m.run(req, files)
	if err != nil {
		m.refuse(c, err)
		return
	}
	closeAll(files)
	var pass []*os.File
	if master != nil {
		pass = []*os.File{master}
	}
	// A client that cannot be told is one that left: the read below finds out.
	if sendFiles(c, pass) == nil {
		_ = conn.Send(execReply{Started: true})
	}
	// The client says nothing more: what comes is the end of the connection.
	left := make(chan struct{})
	go func() {
		var nothing struct{}
		for conn.Receive(&nothing) == nil {
		}
		close(left)
	}()
	var status syscall.WaitStatus
	select {
	case status = <-ended:
	case <-left:
		abandon(pid, ended)
		return
	}
	code, _ := exitStatus(status)
	// A client that left meanwhile does not want to know.
	_ = conn.Send(execReply{Exited: true, Code: code})
}

func (m *machine) refuse(c *net.UnixConn, err error) {
	if sendFiles(c, nil) == nil {
		// A client that left meanwhile does not want to know.
		_ = frame.New(c).Send(execReply{Fault: toWire(err)})
	}
}

// abandon ends a command, and its group, whose client is gone.
func abandon(pid int, ended <-chan syscall.WaitStatus) {
	// Errors mean that the group is gone.
	_ = unix.Kill(-pid, unix.SIGTERM)
	_ = unix.Kill(-pid, unix.SIGCONT)
	select {
	case <-ended:
	case <-time.After(grace):
		_ = unix.Kill(-pid, unix.SIGKILL)
		<-ended
	}
}

// run starts a command of a client.
func (m *machine) run(req execRequest, files []*os.File) (int, <-chan syscall.WaitStatus, error) {
	if len(req.Argv) == 0 || len(files) != maxPassed {
		return 0, nil, fault.Newf(fault.Usage, "name a command", "there is nothing to run on %s", m.setup.Name)
	}
	who, err := m.resolve(req.User)
	if err != nil {
		return 0, nil, err
	}
	env := append(who.environment(), req.Env...)
	dir := req.Dir
	if dir == "" {
		dir = who.home
		if st, err := os.Stat(dir); err != nil || !st.IsDir() {
			dir = "/"
		}
	}
	path, err := lookPath(req.Argv[0], dir, lookup(env, "PATH"))
	if err != nil {
		return 0, nil, fault.New(fault.FileMissing, fmt.Sprintf("run %q", req.Argv[0]), err,
			"name a command that is there: nodes see /usr, /opt and what --bind shows").At(m.setup.Name)
	}
	sys := &syscall.SysProcAttr{Setsid: true, Setctty: req.TTY}
	if who.uid != 0 || !m.setup.Rootless {
		sys.Credential = &syscall.Credential{Uid: who.uid, Gid: who.gid, Groups: who.groups}
	}
	attr := &syscall.ProcAttr{Dir: dir, Env: env, Sys: sys}
	for _, f := range files {
		attr.Files = append(attr.Files, f.Fd())
	}
	pid, ended, err := m.reaper.start(path, req.Argv, attr)
	if err != nil {
		return 0, nil, fault.New(fault.FileDenied, fmt.Sprintf("run %q as %s", req.Argv[0], who.name), err,
			"check the rights of the command and of the directory "+dir).At(m.setup.Name)
	}
	return pid, ended, nil
}

// identity is a user of the node.
type identity struct {
	account
	groups []uint32
}

func (i identity) environment() []string {
	env := environment(nil)
	for n, v := range env {
		switch name, _, _ := strings.Cut(v, "="); name {
		case "HOME":
			env[n] = "HOME=" + i.home
		case "USER", "LOGNAME":
			env[n] = name + "=" + i.name
		}
	}
	shell := i.shell
	if shell == "" {
		shell = "/bin/sh"
	}
	return append(env, "SHELL="+shell)
}

// resolve finds a user by name, uid, or uid:gid.
func (m *machine) resolve(user string) (identity, error) {
	if user == "" {
		user = "root"
	}
	users, err := readUsers("/etc/passwd")
	if err != nil {
		users = []account{{name: "root", home: "/root"}}
	}
	id, unknown := lookupUser(user, users)
	if unknown != nil {
		return identity{}, unknown.At(m.setup.Name)
	}
	if m.setup.Rootless && (id.uid != 0 || id.gid != 0) {
		return identity{}, fault.Newf(fault.NoPermission, "run it as root there, which is you; or make the lab as root",
			"nothing can run as %s in a lab that was made without root: it has one user", user).At(m.setup.Name)
	}
	if groups, err := os.ReadFile("/etc/group"); err == nil && !m.setup.Rootless {
		id.groups = parseGroups(string(groups), id.name)
	}
	return id, nil
}

// lookupUser finds a user by name, uid, or uid:gid. Numbers need no account.
func lookupUser(user string, users []account) (identity, *fault.Fault) {
	unknown := fault.Newf(fault.Usage, "use a name from the node's /etc/passwd, or numbers: 1000 or 1000:1000", "no user is called %q", user)
	u, g, hasGroup := strings.Cut(user, ":")
	uid, err := strconv.ParseUint(u, 10, 32)
	byName := err != nil
	i := slices.IndexFunc(users, func(a account) bool {
		return byName && a.name == u || !byName && uint64(a.uid) == uid
	})
	id := identity{account: account{name: u, home: "/", uid: uint32(uid), gid: uint32(uid)}}
	if i >= 0 {
		id.account = users[i]
	} else if byName {
		return id, unknown
	}
	if hasGroup {
		gid, err := strconv.ParseUint(g, 10, 32)
		if err != nil {
			return id, unknown
		}
		id.gid = uint32(gid)
	}
	return id, nil
}

// lookup returns the value of a variable; the last one counts.
func lookup(env []string, name string) string {
	for _, v := range slices.Backward(env) {
		if value, ok := strings.CutPrefix(v, name+"="); ok {
			return value
		}
	}
	return ""
}

// lookPath finds a command on a PATH; relative names with a slash start at dir.
func lookPath(name, dir, path string) (string, error) {
	if strings.Contains(name, "/") {
		if !strings.HasPrefix(name, "/") {
			name = dir + "/" + name
		}
		return exec.LookPath(name)
	}
	for d := range strings.SplitSeq(path, ":") {
		if found, err := exec.LookPath(d + "/" + name); err == nil && strings.HasPrefix(d, "/") {
			return found, nil
		}
	}
	return "", errors.New("it is not on the PATH: " + path)
}

// openTerminal makes a terminal in the node.
func openTerminal(rows, cols uint16) (master, slave *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, err
	}
	fd := int(master.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil && rows > 0 && cols > 0 {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
	}
	if err == nil {
		slave, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		master.Close()
		return nil, nil, err
	}
	return master, slave, nil
}
