package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/google/renameio/v2"

	"tbcluster/host"
)

// letGoPoll is how often the state of a manager is looked at while it has been
// told to leave an interface: files below /run tell nobody.
const letGoPoll = 10 * time.Millisecond

// reloadTimeout is how long a manager may take to read its files again.
const reloadTimeout = 15 * time.Second

// unmanage writes a file of ours below /run, where the managers look for what
// holds until the next boot, and makes the manager read it. (Below /etc it
// would outlive an uninstalled tbcluster.)
func (m *machine) unmanage(ctx context.Context, c host.Change) error {
	mgr, _ := managerNamed(c.Manager)
	path := mgr.path(m.run, c.Interface)
	before, err := readText(path)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := renameio.WriteFile(path, []byte(mgr.text(c.Interface)), 0o644); err != nil {
		return err
	}
	err = m.reload(ctx, mgr)
	if err == nil {
		err = m.letGo(ctx, mgr, c.Interface)
	}
	if err != nil {
		if before == "" {
			err = errors.Join(err, os.Remove(path))
		}
		return fmt.Errorf("%s written, but: %w", path, err)
	}
	return nil
}

// letGo waits until a manager has left an interface. It takes its addresses
// away, and NetworkManager sets the interface down: what is set up before would
// be lost.
func (m *machine) letGo(ctx context.Context, mgr manager, iface string) error {
	ctx, cancel := context.WithTimeout(ctx, reloadTimeout)
	defer cancel()
	for {
		running, err := m.seeker.running()
		if err != nil || running[mgr.name] == 0 {
			return err
		}
		l, err := find(iface)
		if err != nil {
			return err
		}
		state, err := readText(m.run, fmt.Sprintf(mgr.state, l.Attrs().Index))
		if err != nil || !mgr.fights(state) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s still manages %s: %w", mgr.name, iface, ctx.Err())
		case <-time.After(letGoPoll):
		}
	}
}

func (m *machine) manage(ctx context.Context, c host.Change) error {
	mgr, _ := managerNamed(c.Manager)
	path := mgr.path(m.run, c.Interface)
	if err := os.Remove(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	if err := m.reload(ctx, mgr); err != nil {
		return fmt.Errorf("%s removed, but: %w", path, err)
	}
	return nil
}

// reload makes a manager that runs read its files again.
func (m *machine) reload(ctx context.Context, mgr manager) error {
	running, err := m.seeker.running()
	if err != nil {
		return err
	}
	pid := running[mgr.name]
	if pid == 0 {
		return nil // it reads them when it starts
	}
	if mgr.hangup {
		if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
			return fmt.Errorf("tell %s (pid %d) to reload: %w", mgr.name, pid, err)
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, reloadTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, mgr.reload[0], mgr.reload[1:]...)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(mgr.reload, " "), err, bytes.TrimSpace(complaint.Bytes()))
	}
	return nil
}
