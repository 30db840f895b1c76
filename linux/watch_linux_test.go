package linux

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/host/nstest"
)

// soon is when a change must have been seen, on a machine with much to do too:
// before a value comes in any case.
const soon = always / 2

// within waits for a value of c and says how long it took.
func within(t *testing.T, what string, c <-chan struct{}, limit time.Duration) {
	t.Helper()
	start := time.Now()
	select {
	case _, ok := <-c:
		if !ok {
			t.Fatalf("%s: the channel is closed", what)
		}
		t.Logf("%s: seen after %v", what, time.Since(start))
	case <-time.After(limit):
		t.Fatalf("%s: not seen after %v", what, limit)
	}
}

// quiet waits until c has had nothing to say for longer than it holds back.
func quiet(t *testing.T, c <-chan struct{}) {
	t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case <-c:
		case <-time.After(3 * gap):
			return
		case <-deadline:
			t.Fatal("never quiet")
		}
	}
}

func TestACutCableIsSeenAtOnce(t *testing.T) {
	own, _ := cabled(t, "cable")
	c := New(Options{SysfsRoot: t.TempDir()}).Watch(t.Context())
	quiet(t, c)
	own.Cut("cable")
	within(t, "cable cut", c, soon)
	quiet(t, c)
	other := nstest.New(t)
	nstest.Cable(t, own, "cable", other, "cable0")
	within(t, "cable mended", c, soon)
	quiet(t, c)
	own.Address("cable", "10.77.0.1/30")
	within(t, "address", c, soon)
	quiet(t, c)
	own.Run("ip", "route", "add", "192.0.2.0/24", "dev", "cable")
	within(t, "route", c, soon)
	quiet(t, c)
	other.Run("ip", "link", "set", "cable0", "down")
	within(t, "carrier lost", c, soon)
	own.Cut("cable")
}

// Sysfs says nothing by itself.
func TestAPeerThatAppearsWithoutAnInterfaceIsSeen(t *testing.T) {
	s := newSysfs(t)
	c := New(Options{SysfsRoot: s.root}).Watch(t.Context())
	quiet(t, c)
	s.peer("0-2", "peer")
	within(t, "peer", c, soon)
	quiet(t, c)
	s.remove("bus/thunderbolt/devices/0-2")
	within(t, "peer gone", c, soon)
	quiet(t, c)
	s.netdev("thunderbolt0", "0-2.0")
	within(t, "interface in sysfs", c, soon)
}

func TestWatchEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := New(Options{SysfsRoot: t.TempDir()}).Watch(ctx)
	cancel()
	for range c {
	}
}

// A storm of messages is few values.
func TestAStormIsCoalesced(t *testing.T) {
	own, _ := cabled(t, "cable")
	c := New(Options{SysfsRoot: t.TempDir()}).Watch(t.Context())
	quiet(t, c)
	storm := make(chan time.Duration, 1)
	go func() {
		start := time.Now()
		for range 40 {
			own.Run("ip", "address", "add", "10.77.0.1/30", "dev", "cable")
			own.Run("ip", "address", "del", "10.77.0.1/30", "dev", "cable")
		}
		storm <- time.Since(start)
	}()
	values := 0
	for {
		select {
		case <-c:
			values++
			continue
		case took := <-storm:
			if most := int(took/gap) + 2; values == 0 || values > most {
				t.Errorf("%d values in %v, want 1 to %d", values, took, most)
			}
			return
		}
	}
}

// A value comes in any case, and waiting for it costs next to nothing.
func TestIdleWatching(t *testing.T) {
	s := newSysfs(t)
	for _, name := range []string{"0-1", "0-2", "0-3", "0-4"} {
		s.peer(name, name)
	}
	c := New(Options{SysfsRoot: s.root}).Watch(t.Context())
	within(t, "first round", c, time.Minute)
	spent := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	start, before := time.Now(), spent()
	within(t, "second round", c, time.Minute)
	took, used := time.Since(start), spent()-before
	t.Logf("%v of CPU in %v", used, took)
	if share := float64(used) / float64(always); share > 0.005 {
		t.Errorf("idle watching takes %.2f %% of a core", 100*share)
	}
}

func FuzzUevent(f *testing.F) {
	f.Add([]byte("remove@/devices/x\x00ACTION=remove\x00SUBSYSTEM=thunderbolt\x00"))
	f.Add([]byte("SUBSYSTEM="))
	f.Add([]byte{0, 0, 0})
	f.Fuzz(func(_ *testing.T, b []byte) { wantedUevent(b) })
}

func TestWhichUeventsMatter(t *testing.T) {
	for message, want := range map[string]bool{
		"add@/devices/pci/domain0/0-0/0-2\x00ACTION=add\x00SUBSYSTEM=thunderbolt\x00DEVTYPE=thunderbolt_xdomain\x00": true,
		"add@/devices/virtual/net/x\x00SUBSYSTEM=net\x00":                                                            true,
		"change@/devices/disk\x00SUBSYSTEM=block\x00":                                                                false,
		"libudev\x00garbage": false,
	} {
		if got := wantedUevent([]byte(message)); got != want {
			t.Errorf("%q: got %v", message, got)
		}
	}
}
