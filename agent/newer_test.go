package agent

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tbcluster/agent/root"
	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/linux"
	"tbcluster/mesh/address"
	"tbcluster/mesh/discover"
	"tbcluster/mesh/identity"
	"tbcluster/mesh/link"
	"tbcluster/mesh/member"
)

// TestStateOfANewerVersionIsRefused: an older program says so, and neither uses
// nor overwrites what it cannot understand, be it JSON of another shape. (The
// records of instances are tested where they are kept, in instance/supervise.)
func TestStateOfANewerVersionIsRefused(t *testing.T) {
	for _, f := range []struct {
		name string // below the state directory
		open func(t *testing.T, dir string, key *identity.Key) error
	}{
		{"agent/" + identity.TrustFile, func(_ *testing.T, dir string, key *identity.Key) error {
			_, err := identity.OpenStore(filepath.Join(dir, "agent"), key, identity.StoreOptions{Name: "a"})
			return err
		}},
		{"agent/" + member.StateFile, func(t *testing.T, dir string, key *identity.Key) error {
			store, err := identity.OpenStore(t.TempDir(), key, identity.StoreOptions{Name: "a"})
			if err != nil {
				t.Fatal(err)
			}
			_, err = member.New(member.Options{Self: key.ID(), Store: store, Dir: filepath.Join(dir, "agent")})
			return err
		}},
		{"agent/" + discover.MemoryFile, func(_ *testing.T, dir string, key *identity.Key) error {
			_, err := discover.New(discover.Options{Self: key.ID(), Dir: filepath.Join(dir, "agent")})
			return err
		}},
		{"agent/" + linkMemory, func(_ *testing.T, dir string, _ *identity.Key) error {
			_, err := address.New(address.Config{Self: "a", StateFile: filepath.Join(dir, "agent", linkMemory)})
			return err
		}},
		{"agent/" + linkHistory, func(_ *testing.T, dir string, _ *identity.Key) error {
			_, err := link.OpenHistory(filepath.Join(dir, "agent", linkHistory), slog.New(slog.DiscardHandler))
			return err
		}},
		{"agent/" + transfersMemory, func(_ *testing.T, dir string, _ *identity.Key) error {
			_, err := openTransfers(filepath.Join(dir, "agent", transfersMemory), time.Now, func() {})
			return err
		}},
		{"agent/" + modelsMemory, func(_ *testing.T, dir string, _ *identity.Key) error {
			_, err := readAdded(filepath.Join(dir, "agent", modelsMemory))
			return err
		}},
		{"root/changes.json", rootHalf},
		{"root/ranks.json", rootHalf},
		{"root/people.json", rootHalf},
	} {
		for _, content := range []string{`{"schema":99}`, `{"schema":98,"records":7,"nodes":[1],"agreements":"x","ends":1,"transfers":{},"added":0,"changes":{},"ranks":"","owners":1}`} {
			dir := t.TempDir()
			if err := os.MkdirAll(filepath.Join(dir, "agent"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(dir, "root"), 0o700); err != nil {
				t.Fatal(err)
			}
			key, _, err := identity.OpenKey(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, f.name)
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			err = f.open(t, dir, key)
			if !fault.Is(err, fault.StateTooNew) || fault.As(err).Where != path || fault.As(err).Fix == "" {
				t.Errorf("%s with %s: %v", f.name, content, err)
			}
			if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, []byte(content)) {
				t.Errorf("%s is now %s, %v", f.name, now, err)
			}
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "schema"), []byte("99\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := CheckSchema(dir); !fault.Is(err, fault.StateTooNew) {
		t.Errorf("the whole directory: %v", err)
	}
}

func rootHalf(_ *testing.T, dir string, _ *identity.Key) error {
	_, err := root.NewServer(context.Background(), root.Options{Host: still{linux.New(linux.Options{SysfsRoot: dir})}, StateDir: dir,
		Blocks: []netip.Prefix{address.DefaultBlock}, Log: slog.New(slog.DiscardHandler)})
	return err
}

// still is a machine that nothing is changed on.
type still struct{ host.Host }

func (still) Apply(context.Context, host.Change) error  { return host.ErrPermission }
func (still) Revert(context.Context, host.Change) error { return host.ErrPermission }
