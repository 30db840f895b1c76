package rig_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tbcluster/rig"
)

func TestMyService(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	r := rig.Start(t, rig.Pair()) // 10 to 20 seconds
	r.Settled(t)                  // both kernels show each other
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	a, b, cable := r.Host("a"), r.Host("b"), r.Cable("a.0")

	mine := filepath.Join(t.TempDir(), "mine")
	must(os.WriteFile(mine, []byte("#!/bin/sh\ncat /sys/bus/thunderbolt/devices/0-1/device_name\n"), 0o755))
	must(a.CopyIn(ctx, mine, "/tmp/mine"))
	out, err := a.Sh(ctx, "/tmp/mine")
	must(err)
	if out != b.Name()+"\n" {
		t.Errorf("host a shows %q", out)
	}

	cable.Unplug()
	r.Settled(t) // both kernels show nobody
	cable.Plug()
	r.Settled(t)
	sent, err := cable.Traffic(ctx, 1, 1<<20) // by TCP, from a seed, each byte compared
	must(err)
	t.Logf("%.3f Gb/s; %d frames", sent.Gbps(), cable.Counters().AtoB.Delivered)
}
