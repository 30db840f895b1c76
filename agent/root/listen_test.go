package root

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/host/sock"
)

// TestOnlyTheAPISocketsConnectionsAreBelieved: an agent that was taken over can
// make sockets at whose other end root is. None of them makes it root.
func TestOnlyTheAPISocketsConnectionsAreBelieved(t *testing.T) {
	run := filepath.Join(t.TempDir(), "run")
	f := serveIn(t, t.TempDir(), run, newMachine())
	l, err := f.Listen(t.Context(), SocketAPI)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	path := filepath.Join(run, string(SocketAPI))
	person, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = person.Close() }()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	file := func(c net.Conn) *os.File {
		f, err := c.(*net.UnixConn).File()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	if u, _, err := f.Who(t.Context(), host.Asker{Socket: file(c)}, false); err != nil || u.Name != "me" {
		t.Fatalf("a person at the socket: %v, %v", u, err)
	}
	// Another service of the same user as the root half.
	other, err := net.Listen("unix", filepath.Join(t.TempDir(), "other.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	reached, err := net.Dial("unix", other.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reached.Close() }()
	for what, s := range map[string]*os.File{
		"a connection to another service":      file(reached),
		"the other end of the person's":        file(person),
		"a pair that the same user made":       client(t),
		"the stream on which connections come": file(l.(*guestListener).conn),
		"something that is no socket":          os.Stdin,
	} {
		if cred, err := sock.FileCred(s); err == nil {
			t.Logf("%s: its other end is uid %d", what, cred.UID)
		}
		if _, _, err := f.Worker(t.Context(), host.Asker{Socket: s}, false); !fault.Is(err, fault.Denied) {
			t.Errorf("%s was taken for a person: %v", what, err)
		}
	}
}

// TestWhoAskedBeforeIsForRanksAlone: that somebody once had a rank started lets
// nobody have a worker or a mapping in his name.
func TestWhoAskedBeforeIsForRanksAlone(t *testing.T) {
	f := serve(t, t.TempDir(), newMachine())
	if !f.server.people.canBeAny {
		t.Skip("this process can be nobody else, so whoever asks it is itself")
	}
	me := host.Asker{Socket: client(t)}
	if _, err := f.StartRank(t.Context(), me, false, "mine", 0, map[string]any{"program": program(t), "instance_id": "mine", "index": 0}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := f.EndRank(context.Background(), "mine", 0, true); err != nil {
			t.Error(err)
		}
	}()
	for _, kind := range []Kind{KindWho, KindWorker, KindMap} {
		_, fd, err := f.do(t.Context(), Request{Kind: kind, Again: true, Instance: "mine", Default: true, Local: "me"}, nil)
		if !fault.Is(err, fault.Denied) {
			t.Errorf("%s: %v", kind, err)
		}
		if fd != nil {
			_ = fd.Close()
		}
	}
}

func TestSocketsEndWithTheAgent(t *testing.T) {
	run, dir, m := filepath.Join(t.TempDir(), "run"), t.TempDir(), newMachine()
	f := serveIn(t, dir, run, m)
	var all []net.Listener
	for _, name := range []SocketName{SocketAPI, SocketGateway} {
		l, err := f.Listen(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, l)
		if _, err := f.Listen(t.Context(), name); err == nil {
			t.Errorf("%s was made twice", name)
		}
		if i, err := os.Stat(filepath.Join(run, string(name))); err != nil || i.Mode().Perm() != 0o666 {
			t.Errorf("%s: %v, %v", name, i, err)
		}
	}
	if _, err := f.Listen(t.Context(), "../x"); !fault.Is(err, fault.Protocol) {
		t.Errorf("another name: %v", err)
	}
	if err := f.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := all[0].Accept(); !errors.Is(err, errGone) {
		t.Errorf("the listener does not end: %v", err)
	}
	if _, err := os.Stat(filepath.Join(run, string(SocketAPI))); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	for _, l := range all {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestADirectoryThatOthersWriteToIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if l, err := ListenUnix(filepath.Join(dir, "agent.sock")); !fault.Is(err, fault.NoPermission) {
		t.Errorf("%v, %v", l, err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if l, err := ListenUnix(filepath.Join(link, "agent.sock")); !fault.Is(err, fault.NoPermission) {
		t.Errorf("through a link: %v, %v", l, err)
	}
}

func TestOldConnectionsAreForgottenLast(t *testing.T) {
	var g guests
	for i := range uint64(maxGuests + 10) {
		g.add(i)
	}
	if g.has(9) || !g.has(10) || !g.has(maxGuests+9) || len(g.in) != maxGuests {
		t.Errorf("%d are known", len(g.in))
	}
}
