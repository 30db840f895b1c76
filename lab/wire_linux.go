package lab

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// wireFault carries a Fault between the processes of a lab.
type wireFault struct {
	Reason           fault.Reason `json:"reason"`
	What, Where, Why string       `json:",omitempty"`
	Fix              string       `json:"fix,omitempty"`
}

func toWire(err error) *wireFault {
	if err == nil {
		return nil
	}
	f := fault.As(err)
	if f == nil {
		f = fault.New(fault.Internal, "the lab failed in a way it does not know", err, "this is a bug: please report it")
	}
	return &wireFault{Reason: f.Reason, What: f.What, Where: f.Where, Why: f.Why, Fix: f.Fix}
}

func (w *wireFault) err() error {
	if w == nil {
		return nil
	}
	return &fault.Fault{Reason: w.Reason, What: w.What, Where: w.Where, Why: w.Why, Fix: w.Fix}
}

func failed(what string, err error, fix string) *fault.Fault {
	return fault.New(fault.LabFailed, what, err, fix)
}

// The operations of the keeper.
const (
	opStatus   = "status"
	opCheck    = "check" // a node can run something
	opCut      = "cut"
	opMend     = "mend"
	opKill     = "kill"
	opStart    = "start"
	opPause    = "pause"
	opResume   = "resume"
	opCutLAN   = "cut-lan"
	opMulti    = "multicast"
	opMendLAN  = "mend-lan"
	opSide     = "lan-side"
	opShutdown = "shutdown"
)

// request is what a client asks of the keeper: one for each connection.
type request struct {
	Op     string `json:"op"`
	Node   string `json:"node,omitempty"`
	Other  string `json:"other,omitempty"` // the second node of a cable
	Cable  int    `json:"cable,omitempty"`
	Silent bool   `json:"silent,omitempty"`
	Half   bool   `json:"half,omitempty"` // the second node sees it no more
	Move   bool   `json:"move,omitempty"`
	How    string `json:"how,omitempty"` // of multicast
	Rename bool   `json:"rename,omitempty"`
	Agent  bool   `json:"agent,omitempty"` // the agent alone, not the node
	Side   int    `json:"side,omitempty"`  // of the LAN
}

// reply is the keeper's answer; on the pipe to Up too.
type reply struct {
	Fault  *wireFault `json:"fault,omitempty"`
	Status *Status    `json:"status,omitempty"`
}

// order is what the keeper tells an init.
type order struct {
	Setup *setup `json:"setup,omitempty"`
	Boot  bool   `json:"boot,omitempty"`
}

// news is what an init tells its keeper.
type news struct {
	// Answer is set on the answer to an order.
	Answer bool       `json:"answer,omitempty"`
	Fault  *wireFault `json:"fault,omitempty"`
	// Pid is that of the boot command in the node's PID namespace.
	Pid int `json:"pid,omitempty"`
	// Exit says that the boot command has ended, and how. One that dies at once may
	// be told to have ended before the answer that it was started.
	Exit string `json:"exit,omitempty"`
}

// setup is all that an init needs to know to make a node.
type setup struct {
	Lab       string   `json:"lab"`
	Name      string   `json:"name"`
	BootID    string   `json:"boot_id"`
	MachineID string   `json:"machine_id"`
	Hosts     string   `json:"hosts"`  // content of /etc/hosts
	Config    []byte   `json:"config"` // content of config.toml; none for the LAN's host
	Dir       string   `json:"dir"`    // of the node, on the host
	Program   string   `json:"program"`
	Engines   string   `json:"engines,omitempty"`
	Binds     []Bind   `json:"binds,omitempty"`
	Boot      []string `json:"boot,omitempty"`
	Rootless  bool     `json:"rootless,omitempty"`
}

// execRequest is what a client asks of an init.
type execRequest struct {
	Argv []string `json:"argv"`
	Env  []string `json:"env,omitempty"`
	Dir  string   `json:"dir,omitempty"`
	User string   `json:"user,omitempty"`
	TTY  bool     `json:"tty,omitempty"`
	Rows uint16   `json:"rows,omitempty"`
	Cols uint16   `json:"cols,omitempty"`
}

// execReply is an init's answer: first Started or Fault, then Exit.
type execReply struct {
	Fault   *wireFault `json:"fault,omitempty"`
	Started bool       `json:"started,omitempty"`
	Exited  bool       `json:"exited,omitempty"`
	Code    int        `json:"code,omitempty"`
}

// maxPassed is the most descriptors that one message carries.
const maxPassed = 3

// sendFiles sends one byte and descriptors along with it.
func sendFiles(c *net.UnixConn, files []*os.File) error {
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix([]byte{0}, oob, nil)
	return err
}

// receiveFiles is the other end of sendFiles.
func receiveFiles(c *net.UnixConn) ([]*os.File, error) {
	buf := make([]byte, 1)
	oob := make([]byte, unix.CmsgSpace(4*maxPassed))
	n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return nil, fmt.Errorf("read descriptors: %w", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // a kind of message that we did not ask for
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	if n != 1 || flags&unix.MSG_CTRUNC != 0 {
		closeAll(files)
		return nil, errors.New("descriptors did not arrive whole")
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// askedBy returns the user at the other end of a connection.
func askedBy(c *net.UnixConn) (uid uint32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return cred.Uid, nil
}
