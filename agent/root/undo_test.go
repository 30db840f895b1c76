package root

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"tbcluster/host"
	"tbcluster/host/proc"
)

func TestUndoEndsRanksAndTakesBackChanges(t *testing.T) {
	dir, m := t.TempDir(), newMachine()
	f := serve(t, dir, m)
	up := host.Change{Kind: host.ChangeLinkUp, Interface: "thunderbolt0"}
	for _, c := range []host.Change{up, cableAddress} {
		if err := f.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	rank, err := f.StartRank(t.Context(), host.Asker{Socket: client(t)}, false, "smol-1", 0, map[string]any{"program": program(t), "instance_id": "smol-1", "index": 0})
	if err != nil {
		t.Fatal(err)
	}
	list, err := f.Ranks(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	id, err := proc.Of(list[0].PID)
	if err != nil {
		t.Fatal(err)
	}

	// As the next process does, which knows what is on disk.
	again := serve(t, dir, m)
	undone, err := again.server.Undo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"ended rank 0 of instance smol-1", "undone: " + cableAddress.String(), "undone: " + up.String()}
	if !slices.Equal(undone, want) {
		t.Errorf("it says %q, want %q", undone, want)
	}
	if proc.Alive(id) {
		t.Error("the rank runs on")
	}
	if _, err := os.Stat(rank); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the rank's directory is left: %v", err)
	}
	if got := m.done[len(m.done)-2:]; !slices.Equal(got, []string{"revert " + cableAddress.String(), "revert " + up.String()}) {
		t.Errorf("the machine was asked %q", got)
	}
	if undone, err := again.server.Undo(t.Context()); err != nil || len(undone) != 0 {
		t.Errorf("a second time it undoes %q, %v", undone, err)
	}
}

func TestOnlyTheSocketsOfAnAgentThatIsGoneAreRemoved(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{string(SocketAPI), vouchSocket, "other.sock"} {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false) // as of a process that was killed
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, string(SocketGateway)), nil, 0o600); err != nil { // no socket
		t.Fatal(err)
	}
	for range 2 {
		if err := RemoveSockets(dir); err != nil {
			t.Fatal(err)
		}
	}
	var left []string
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if want := []string{string(SocketGateway), "other.sock"}; err != nil || !slices.Equal(left, want) {
		t.Errorf("left are %q, want %q: %v", left, want, err)
	}
}

func TestARankBeginsOnlyWhereItWasPut(t *testing.T) {
	for name, fails := range map[string]error{"put aside": nil, "left where it is": errors.New("there is no manager")} {
		t.Run(name, func(t *testing.T) {
			f := serve(t, t.TempDir(), newMachine())
			ran := filepath.Join(f.dir, "instances", "smol-1", "rank-0", "ran")
			var names []string
			f.server.ranks.place = func(_ context.Context, name, _ string, pid int) error {
				names = append(names, name)
				if _, err := proc.Of(pid); err != nil {
					t.Errorf("pid %d: %v", pid, err)
				}
				if _, err := os.Stat(ran); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("it has begun before it was put aside: %v", err)
				}
				return fails
			}
			if _, err := f.StartRank(t.Context(), host.Asker{Socket: client(t)}, false, "smol-1", 0, map[string]any{"program": program(t), "instance_id": "smol-1", "index": 0}); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if _, err := f.server.Undo(context.Background()); err != nil {
					t.Error(err)
				}
			})
			if len(names) != 1 {
				t.Errorf("it was put aside as %q", names)
			}
			for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
				if _, err := os.Stat(ran); err == nil {
					break
				}
				if time.Now().After(end) {
					t.Fatal("it has not begun after a minute")
				}
			}
		})
	}
}
