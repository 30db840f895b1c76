package rig

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tbcluster/rig/image"
)

// TB is what Start needs of a test; *testing.T and *testing.B have it.
type TB interface {
	Helper()
	Name() string
	Context() context.Context
	Cleanup(func())
	Failed() bool
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
}

// bootPatience is how long a rig may take to come up, without the building of
// images: a debug kernel takes a minute on an idle machine.
const bootPatience = 20 * time.Minute

// patience is how long hosts may take to find each other.
const patience = 2 * time.Minute

// Start brings up a rig for a test; the test is skipped where there can be none
// (image.Unavailable). When the test ends, everything does; a
// kernel report of any guest fails it, and a test that has failed shows the end
// of each guest's kernel log. TBCLUSTER_RIG_LOGS names a directory in which the
// logs of tests that failed are kept.
func Start(t TB, topology Topology) *Rig { return StartWith(t, topology, Options{}) }

// StartWith is Start with options. A Dir that is given stays.
func StartWith(t TB, topology Topology, o Options) *Rig {
	t.Helper()
	if o.Log == nil {
		o.Log = func(line string) { t.Logf("rig: %s", line) }
	}
	if o.Dir == "" {
		if keep := os.Getenv("TBCLUSTER_RIG_LOGS"); keep != "" {
			if err := os.MkdirAll(keep, 0o755); err != nil {
				t.Fatalf("make the directory of TBCLUSTER_RIG_LOGS: %v", err)
			}
			o.Dir = filepath.Join(keep, strings.NewReplacer("/", "_", " ", "_").Replace(t.Name()))
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), bootPatience)
	defer cancel()
	store, err := image.Open(o.Images)
	if err == nil {
		_, err = store.Tools(ctx)
	}
	if image.Unavailable(err) {
		t.Skipf("no virtual machines here: %v", err)
	}
	r, err := Up(ctx, topology, o)
	if err != nil {
		t.Fatalf("bring up the rig: %v", err)
	}
	t.Cleanup(func() {
		r.finish(t)
		if err := r.Close(); err != nil {
			t.Errorf("take down the rig: %v", err)
		}
	})
	return r
}

// finish asks for kernel reports and, if the test has failed, shows what there
// is to see.
func (r *Rig) finish(t TB) {
	t.Helper()
	// The context of a test has ended when its clean-up begins.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.Verify(ctx); err != nil {
		t.Errorf("%v", err)
	}
	if t.Failed() {
		t.Logf("%s", r.Describe())
	}
}

// logLines is how much of a kernel's log is shown.
const logLines = 60

// Describe says for people how everything stands: what hosts show, the counters
// of the cables, and the end of the kernels' logs.
func (r *Rig) Describe() string {
	var b strings.Builder
	for _, c := range r.cables {
		n := c.Counters()
		fmt.Fprintf(&b, "cable %s plugged %v up %v flaps %d\n  out %+v\n  back %+v\n", c, c.Plugged(), n.Up, n.Flaps, n.AtoB, n.BtoA)
	}
	for _, h := range r.hosts {
		fmt.Fprintf(&b, "host %s: on %v\n%s", h.Name(), h.On(), indent(h.State().String()))
		if h.guest == nil {
			continue
		}
		lines := strings.Split(strings.TrimRight(h.Dmesg(), "\n"), "\n")
		if over := len(lines) - logLines; over > 0 {
			lines = lines[over:]
		}
		fmt.Fprintf(&b, "  end of its kernel's log (%s):\n%s", h.Console(), indent(strings.Join(lines, "\n")))
	}
	for _, d := range r.Differences() {
		fmt.Fprintf(&b, "not as it should be: %s\n", d)
	}
	return b.String()
}

func indent(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		b.WriteString("  " + strings.TrimRight(line, "\n") + "\n")
	}
	return b.String()
}

// Settled is Settle for tests: it fails the test where hosts do not show the
// truth in time.
func (r *Rig) Settled(t TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := r.Settle(ctx); err != nil {
		t.Fatalf("%v", err)
	}
}

// Renew brings a rig that another test has used to where it began: Heal, and
// all drivers loaded anew. Kernel reports fail the test that calls it, when that
// ends. Files and processes that the other test has left in the guests stay, so a
// test that leaves such things takes a rig of its own.
func (r *Rig) Renew(t TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bootPatience)
	defer cancel()
	err := r.Heal(ctx)
	// One after the other: see UnloadDriver.
	for _, h := range r.hosts {
		if err == nil {
			err = h.renew(ctx)
		}
	}
	if err == nil {
		err = r.Settle(ctx)
	}
	if err != nil {
		t.Fatalf("bring the rig back to where it began: %v", err)
	}
	t.Cleanup(func() { r.finish(t) })
}

// renew loads the driver anew, or unloads it where it is not loaded at boot.
func (h *Host) renew(ctx context.Context) error {
	h.rig.mu.Lock()
	loaded := h.driver
	h.rig.mu.Unlock()
	if loaded {
		if err := h.UnloadDriver(ctx); err != nil {
			return err
		}
	}
	if h.spec.Bare {
		return nil
	}
	return h.LoadDriver(ctx)
}

// Heal switches all hosts on and plugs or pulls the cables as the topology has
// it, with the options that they began with, and waits until all hosts show it.
func (r *Rig) Heal(ctx context.Context) error {
	for _, c := range r.cables {
		if err := c.heal(ctx); err != nil {
			return err
		}
	}
	err := r.each(func(h *Host) error {
		if h.On() {
			return nil
		}
		return h.Boot(ctx)
	})
	if err != nil {
		return err
	}
	return r.Settle(ctx)
}

// heal gives a cable its first options.
func (c *Cable) heal(ctx context.Context) error {
	lanes, speed := c.up()
	if err := c.SetOptions(c.spec.Options); err != nil {
		return err
	}
	if !c.Plugged() {
		if !c.spec.Options.Unplugged {
			c.Plug()
		}
		return nil
	}
	if c.spec.Options.Unplugged {
		c.Unplug()
		return nil
	}
	if l, s := c.Trains(); l != lanes || s != speed { // it has to train again
		return c.Flap(ctx, 0)
	}
	return nil
}
