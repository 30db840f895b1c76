package cluster

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/rig"
)

// program builds the program as people get it.
func program(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tbcluster")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", file, "tbcluster/cmd/tbcluster")
	cmd.Env = append(cmd.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the program: %v\n%s", err, out)
	}
	return file
}

const patience = 4 * time.Minute

// start brings up a rig with the program on all hosts, which have paired; every
// cable is proven.
func start(t *testing.T, topology rig.Topology) (*rig.Rig, *Cluster) {
	t.Helper()
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	topology.LAN = true
	r := rig.StartWith(t, topology, rig.Options{Files: Files(program(t))})
	c := New(r)
	t.Cleanup(c.Close)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	begun := time.Now()
	if err := c.Up(ctx); err != nil {
		t.Fatal(err)
	}
	t.Logf("paired and proven %.1f s after the boot", time.Since(begun).Seconds())
	return r, c
}

// wait waits for a state of the cluster, as every host sees it.
func wait(t *testing.T, c *Cluster, what string, fits func(Status) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var all sync.WaitGroup
	for _, h := range c.rig.Hosts() {
		all.Go(func() {
			if _, err := c.Wait(ctx, h, what, fits); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// copies sends a file from one host to another, and looks that it went over the
// cables.
func copies(t *testing.T, r *rig.Rig, from, to *rig.Host, size int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	sent := func() (n uint64) {
		for _, c := range r.Cables() {
			x := c.Counters()
			n += x.AtoB.SentBytes + x.BtoA.SentBytes
		}
		return n
	}
	name := fmt.Sprintf("/tmp/from-%s-%d", from.Name(), size)
	before := sent()
	want, err := from.Sh(ctx, fmt.Sprintf("head -c %d /dev/urandom >%s; sha256sum <%s", size, name, name))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := from.Run(ctx, Path, "cp", name, to.Name()+":"+name); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	got, err := to.Sh(ctx, "sha256sum <"+name)
	if err != nil || got != want {
		t.Errorf("host %s has %s (%v), host %s has sent %s", to.Name(), got, err, from.Name(), want)
	}
	if n := sent() - before; n < uint64(size) {
		t.Errorf("%d bytes went over the cables of %d that were copied", n, size)
	}
}

// TestTwoHosts is the program on the real driver: it finds the cable in the real
// sysfs, addresses the real interface, and does as in the lab.
func TestTwoHosts(t *testing.T) {
	r, c := start(t, rig.Pair())
	a, b := r.Host("a"), r.Host("b")
	r.Settled(t)
	s, err := c.Status(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Links) != 1 || s.Links[0].A == nil || s.Links[0].B == nil {
		t.Fatalf("host a sees %s", s)
	}
	l := s.Links[0]
	if l.Lanes != 2 || l.NegotiatedGbps != 40 || l.CapableGbps < 40 {
		t.Errorf("the cable has %d lanes, %g of %g Gb/s", l.Lanes, l.NegotiatedGbps, l.CapableGbps)
	}
	for _, e := range []*LinkEnd{l.A, l.B} {
		h := r.Host(e.Node)
		if e.Port != h.Device(0) || e.Interface != h.State().Peer(h.Device(0)).Interface().Name {
			t.Errorf("host %s: end %+v, and it shows\n%s", h.Name(), e, h.State())
		}
		out, err := h.Run(t.Context(), "ip", "-o", "-4", "addr", "show", "dev", e.Interface)
		if err != nil || !strings.Contains(out, " "+e.Address+" ") {
			t.Errorf("host %s has not the address %s: %v\n%s", h.Name(), e.Address, err, out)
		}
	}
	copies(t, r, a, b, 4<<20)
	copies(t, r, b, a, 1<<20)
	cable := r.Cable("a.0")
	cable.Unplug()
	r.Settled(t)
	wait(t, c, "wait until no cable is proven", func(s Status) bool { return s.Proven() == 0 && s.Up() == 2 })
	cable.Plug()
	r.Settled(t)
	wait(t, c, "wait until the cable is proven again", func(s Status) bool { return s.Proven() == 1 && s.Up() == 2 })
	copies(t, r, a, b, 1<<20)
	out, err := a.Run(t.Context(), Path, "status")
	t.Logf("%v\n%s", err, out)
}

func TestThreeHosts(t *testing.T) {
	r, c := start(t, rig.Ring(3))
	wait(t, c, "wait until all see three cables", func(s Status) bool { return s.Proven() == 3 && s.Up() == 3 })
	copies(t, r, r.Host("c"), r.Host("b"), 1<<20)
	r.Cable("a.0").Unplug()
	r.Settled(t)
	wait(t, c, "wait until two are left", func(s Status) bool { return s.Proven() == 2 && s.Up() == 3 })
	r.Cable("a.0").Plug()
	r.Settled(t)
	wait(t, c, "wait until three are there again", func(s Status) bool { return s.Proven() == 3 && s.Up() == 3 })
}
