package root

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// Kind is a kind of request. The list is closed.
type Kind string

// The kinds of request.
const (
	KindApply     Kind = "apply"      // Change
	KindRevert    Kind = "revert"     // Change
	KindApplied   Kind = "applied"    // → Changes; with Change: that one, looked at → Changes, Lacks
	KindWho       Kind = "who"        // Asker → User
	KindWorker    Kind = "worker"     // Asker → descriptor, PID
	KindRankStart Kind = "rank-start" // Asker, Instance, Index, Process → PID
	KindRankEnd   Kind = "rank-end"   // Instance, Index, Kill
	KindRankClean Kind = "rank-clean" // Instance, Index: remove its directory once it has ended
	KindRanks     Kind = "ranks"      // → Ranks
	KindMap       Kind = "map"        // Asker (local), Node, Remote, Local
	KindMappings  Kind = "mappings"   // → Mappings
	KindOwner     Kind = "owner"      // Asker → Owner
	KindListen    Kind = "listen"     // Name: of a socket → descriptor
	KindVouch     Kind = "vouch"      // Local: only on root's own socket, see vouch.go
	KindFirewalls Kind = "firewalls"  // → Firewalls
	KindLeave     Kind = "leave"      // end the root half after this
)

// Request is one request from the agent. A local asker's client socket travels
// beside it as a descriptor.
type Request struct {
	ID       uint64          `json:"id"`
	Kind     Kind            `json:"kind"`
	Change   *host.Change    `json:"change,omitempty"`
	Remote   *Remote         `json:"remote,omitempty"` // asker on another node
	Again    bool            `json:"again,omitempty"`  // asker of an earlier rank-start of the same rank
	Instance string          `json:"instance,omitempty"`
	Index    int             `json:"index,omitempty"`
	Kill     bool            `json:"kill,omitempty"`
	Process  json.RawMessage `json:"process,omitempty"` // rank.json, checked in engines.check
	Node     string          `json:"node,omitempty"`
	Name     string          `json:"name,omitempty"` // of the remote user to map; of a socket
	Local    string          `json:"local,omitempty"`
	// Default makes Local the user of everybody who paired on another node.
	Default bool `json:"default,omitempty"`
}

// Remote is a person of another node as that node's agent tells it.
type Remote struct {
	Node string `json:"node"`
	UID  uint32 `json:"uid"`
	Name string `json:"name"`
	// Paired says that the person is the one who paired on that node.
	Paired bool `json:"paired"`
}

// User is a local user, as the system's own resolver gives it.
type User struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups"`
	Name   string   `json:"name"`
	Home   string   `json:"home"`
	Shell  string   `json:"shell"`
}

// Rank is a rank that the root half started and that may still run.
type Rank struct {
	Instance string `json:"instance"`
	Index    int    `json:"index"`
	PID      int    `json:"pid"` // of the shim
	User     string `json:"user"`
	Alive    bool   `json:"alive"`
}

// Mapping says as whom a person of another node acts here.
type Mapping struct {
	Node   string `json:"node"`   // node ID; "*" for every node's paired user
	Remote string `json:"remote"` // user name there; "" for "*"
	Local  string `json:"local"`
}

// Response is one answer. A descriptor may travel beside it.
type Response struct {
	ID      uint64        `json:"id"`
	Fault   *Failure      `json:"fault,omitempty"`
	PID     int           `json:"pid,omitempty"`
	Dir     string        `json:"dir,omitempty"`
	User    *User         `json:"user,omitempty"`
	Owner   bool          `json:"owner,omitempty"`
	Changes []host.Change `json:"changes,omitempty"`
	// Lacks is what is not there any more of the change that was asked for.
	Lacks    string    `json:"lacks,omitempty"`
	Ranks    []Rank    `json:"ranks,omitempty"`
	Mappings []Mapping `json:"mappings,omitempty"`
	// Firewalls are what may drop packets of other machines.
	Firewalls []host.Firewall `json:"firewalls,omitempty"`
}

// Failure is a fault on the socketpair.
type Failure struct {
	Reason     fault.Reason      `json:"reason"`
	What       string            `json:"what"`
	Where      string            `json:"where,omitempty"`
	Why        string            `json:"why,omitempty"`
	Fix        string            `json:"fix,omitempty"`
	Meta       map[string]string `json:"meta,omitempty"`
	Permission bool              `json:"permission,omitempty"` // wraps host.ErrPermission
	Interface  bool              `json:"interface,omitempty"`  // wraps host.ErrNoInterface
}

func failure(err error) *Failure {
	f := fault.As(err)
	if f == nil {
		f = fault.New(fault.Internal, "the root half failed", err, "this is a bug: `tbcluster bugreport` collects what we need")
	}
	return &Failure{f.Reason, f.What, f.Where, f.Why, f.Fix, f.Meta,
		errors.Is(err, host.ErrPermission), errors.Is(err, host.ErrNoInterface)}
}

// Err returns the failure as an error again; nil for none.
func (f *Failure) Err() error {
	if f == nil {
		return nil
	}
	e := &fault.Fault{Reason: f.Reason, What: f.What, Where: f.Where, Why: f.Why, Fix: f.Fix, Meta: f.Meta}
	switch {
	case f.Permission:
		e.Err = host.ErrPermission
	case f.Interface:
		e.Err = host.ErrNoInterface
	}
	return e
}

// maxMessage bounds one message on the socketpair: a rank's arguments and
// environment are far below it.
const maxMessage = 1 << 20

// send writes one message with at most one descriptor beside it. Several
// senders must take turns.
func send(c *net.UnixConn, v any, fd *os.File) error {
	body, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if len(body) > maxMessage {
		return fmt.Errorf("message of %d bytes is too long", len(body))
	}
	buf := make([]byte, 4, 4+len(body))
	binary.BigEndian.PutUint32(buf, uint32(len(body)))
	buf = append(buf, body...)
	var oob []byte
	if fd != nil {
		// Not by Fd: it makes reads block of everybody who has the same open
		// file, and a connection that blocks in a read is closed by its peer alone.
		raw, err := fd.SyscallConn()
		if err == nil {
			err = raw.Control(func(n uintptr) { oob = syscall.UnixRights(int(n)) })
		}
		if err != nil {
			return fmt.Errorf("send a descriptor: %w", err)
		}
		defer runtime.KeepAlive(fd)
	}
	// The descriptor rides on the first byte, alone, so that a short write of
	// the rest cannot send it twice.
	n, _, err := c.WriteMsgUnix(buf[:4], oob, nil)
	if err == nil && n != 4 {
		err = io.ErrShortWrite
	}
	if err == nil {
		_, err = c.Write(buf[4:])
	}
	return err
}

// receive reads one message. The descriptor, if any, is the caller's to close.
func receive(c *net.UnixConn, v any) (*os.File, error) {
	head := make([]byte, 4)
	oob := make([]byte, syscall.CmsgSpace(4*8))
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err != nil {
		return nil, err
	}
	fd, err := oneDescriptor(oob[:oobn])
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*os.File, error) {
		if fd != nil {
			err = errors.Join(err, fd.Close())
		}
		return nil, err
	}
	if n == 0 {
		return fail(io.EOF)
	}
	if _, err := io.ReadFull(c, head[n:]); err != nil {
		return fail(err)
	}
	size := binary.BigEndian.Uint32(head)
	if size > maxMessage {
		return fail(fmt.Errorf("message of %d bytes is too long", size))
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(c, body); err != nil {
		return fail(err)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fail(fmt.Errorf("decode: %w", err))
	}
	return fd, nil
}

// oneDescriptor takes the first descriptor out of a control message and closes
// any further ones, which nobody of ours sends.
func oneDescriptor(oob []byte) (*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("control message: %w", err)
	}
	var first *os.File
	for i := range msgs {
		fds, err := syscall.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			syscall.CloseOnExec(fd)
			f := os.NewFile(uintptr(fd), "passed")
			if first == nil {
				first = f
				continue
			}
			if err := f.Close(); err != nil {
				return first, err
			}
		}
	}
	return first, nil
}
