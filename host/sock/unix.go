package sock

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Cred is who is at the other end of a Unix socket, as the kernel recorded it
// when the connection was made.
type Cred struct {
	PID      int // 0 where the peer is in a PID namespace that we do not see
	UID, GID uint32
}

// MaxFiles is the most descriptors that one message carries.
const MaxFiles = 16

// ErrNoPeer is returned for a socket that has no peer with credentials.
var ErrNoPeer = errors.New("not a connected Unix socket")

// PeerCred returns the credentials of c's other end.
func PeerCred(c *net.UnixConn) (Cred, error) { return credOf(c) }

// FileCred returns the credentials of the other end of the connected Unix
// socket f: of a client's socket that another process passed to this one.
func FileCred(f *os.File) (Cred, error) { return credOf(f) }

// ID returns the number by which the system tells one socket from all others,
// whatever descriptor it is reached by.
func ID(sc syscall.Conn) (uint64, error) {
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, err
	}
	var id uint64
	var idErr error
	if err := raw.Control(func(fd uintptr) { id, idErr = socketID(int(fd)) }); err != nil {
		return 0, err
	}
	if idErr != nil {
		return 0, fmt.Errorf("number of a socket: %w", idErr)
	}
	return id, nil
}

func credOf(sc syscall.Conn) (Cred, error) {
	raw, err := sc.SyscallConn()
	if err != nil {
		return Cred{}, err
	}
	var (
		cred    Cred
		credErr error
	)
	if err := raw.Control(func(fd uintptr) { cred, credErr = peerCred(int(fd)) }); err != nil {
		return Cred{}, err
	}
	if credErr != nil {
		return Cred{}, fmt.Errorf("peer credentials: %w", credErr)
	}
	return cred, nil
}

// Pair makes two connected Unix stream sockets: one for this process, one as a
// file to hand to a child. Both are closed on exec unless handed on.
func Pair() (*net.UnixConn, *os.File, error) {
	fds, err := socketpair()
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "socketpair")
	ours, err := FromFile(os.NewFile(uintptr(fds[0]), "socketpair"))
	if err != nil {
		return nil, nil, closeAfter(theirs, err)
	}
	return ours, theirs, nil
}

// FromFile makes a connection of the connected Unix socket f, and closes f. A
// child makes one of the descriptor that it got from Pair.
func FromFile(f *os.File) (*net.UnixConn, error) {
	c, err := net.FileConn(f)
	if closeErr := f.Close(); err == nil && closeErr != nil {
		return nil, closeAfter(c, closeErr)
	}
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, closeAfter(c, fmt.Errorf("%s: %w", f.Name(), ErrNoPeer))
	}
	return u, nil
}

// SendFile sends data, which must not be empty, and with its first byte copies
// of up to MaxFiles descriptors. The files stay the caller's. Concurrent calls
// must be serialised, as those of any stream.
func SendFile(c *net.UnixConn, data []byte, files ...*os.File) error {
	if len(data) == 0 {
		return errors.New("send descriptors: no data to send them with")
	}
	if len(files) > MaxFiles {
		return fmt.Errorf("send %d descriptors: more than %d", len(files), MaxFiles)
	}
	oob, keep, err := rights(files)
	if err != nil {
		return err
	}
	defer keep()
	for first := true; len(data) > 0; first = false {
		if !first {
			oob = nil
		}
		n, oobn, err := c.WriteMsgUnix(data, oob, nil)
		if err != nil {
			return fmt.Errorf("send descriptors: %w", err)
		}
		if first && oobn != len(oob) {
			return fmt.Errorf("send descriptors: %d of %d bytes of control data sent", oobn, len(oob))
		}
		data = data[n:]
	}
	return nil
}

// RecvFile reads once into buf and returns the descriptors that came with what
// it read, closed on exec; the caller closes them. What was read and does not
// fit RecvFile's promises (too many descriptors, other control data) is an
// error, and none of its descriptors stay open. At the end of the stream it
// returns io.EOF. The descriptors come with the first byte that was sent with
// them or, on a stream, with bytes before it, never after it.
func RecvFile(c *net.UnixConn, buf []byte) (n int, files []*os.File, err error) {
	if len(buf) == 0 {
		return 0, nil, errors.New("receive descriptors: no room for data")
	}
	// Room for more than MaxFiles, so that too many is told from truncated.
	oob := make([]byte, unix.CmsgSpace(4*(MaxFiles+1)))
	n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
	files, parseErr := parseRights(oob[:oobn])
	switch {
	case errors.Is(err, io.EOF), err == nil && n == 0 && oobn == 0:
		err = io.EOF
	case err != nil:
	case parseErr != nil:
		err = fmt.Errorf("receive descriptors: %w", parseErr)
	case flags&unix.MSG_CTRUNC != 0 || len(files) > MaxFiles:
		err = fmt.Errorf("receive descriptors: more than %d", MaxFiles)
	}
	if err != nil {
		for _, f := range files {
			err = closeAfter(f, err)
		}
		return n, nil, err
	}
	return n, files, nil
}
