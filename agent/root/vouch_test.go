package root

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
)

// An agent that holds root's connection cannot have root say that somebody may
// act as somebody else: root says so itself.
func TestRootItselfSaysWhoMayStandForOthers(t *testing.T) {
	dir, run := t.TempDir(), t.TempDir()
	f := serveIn(t, dir, run, newMachine())
	if !f.server.people.canBeAny {
		t.Skip("this process can be nobody but itself")
	}
	l, err := f.Listen(t.Context(), SocketAPI)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	me, err := net.Dial("unix", filepath.Join(run, string(SocketAPI)))
	if err != nil {
		t.Fatal(err)
	}
	defer me.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	held, err := c.(*net.UnixConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	root := host.Asker{Socket: held}
	if err := Vouch(t.Context(), run, "ada"); err != nil {
		t.Fatalf("where no root half listens there is nothing to say: %v", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- f.server.ServeVouch(ctx) }()
	defer func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(filepath.Join(run, vouchSocket)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
	}()
	for late := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if i, err := os.Lstat(filepath.Join(run, vouchSocket)); err == nil && i.Mode().Perm() == 0o600 {
			break
		} else if time.Now().After(late) {
			t.Fatal("no socket, or not for root alone")
		}
	}
	if _, err := f.Map(t.Context(), root, "NODE", "evil", "ada"); !fault.Is(err, fault.Denied) {
		t.Fatalf("by root's connection alone: %v", err)
	}
	if err := f.MapDefault(t.Context(), root, "ada"); !fault.Is(err, fault.Denied) {
		t.Fatalf("the default by root's connection alone: %v", err)
	}
	if _, _, err := f.call(t.Context(), Request{Kind: KindVouch, Local: "ada"}, held); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Map(t.Context(), root, "NODE", "evil", "ada"); !fault.Is(err, fault.Denied) {
		t.Fatalf("after the agent itself has spoken for her: %v", err)
	}
	if err := Vouch(t.Context(), run, "nobody-here"); !fault.Is(err, fault.Usage) {
		t.Fatalf("a user that does not exist: %v", err)
	}
	if err := Vouch(t.Context(), run, "ada"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Map(t.Context(), root, "NODE", "friend", "ada"); err != nil {
		t.Fatalf("after root has spoken: %v", err)
	}
	if _, err := f.Map(t.Context(), root, "NODE", "evil", "bob"); !fault.Is(err, fault.Denied) {
		t.Fatalf("another one: %v", err)
	}
	// What was said is on disk.
	again := serveIn(t, dir, t.TempDir(), newMachine())
	if u := (User{UID: 1234, Name: "ada"}); !again.server.people.rootMayMap(u) {
		t.Error("forgotten by the next start")
	}
	// Nothing else is asked on that socket.
	conn, err := net.Dial("unix", filepath.Join(run, vouchSocket))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var r Response
	if err := send(conn.(*net.UnixConn), Request{Kind: KindWorker}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := receive(conn.(*net.UnixConn), &r); err != nil || !fault.Is(r.Fault.Err(), fault.Protocol) {
		t.Errorf("a worker was asked for: %+v, %v", r, err)
	}
}
