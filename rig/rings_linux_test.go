package rig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// rings loads the raw ring module on all hosts, with the parameters that are
// given, until the test ends. Network interfaces are taken down: what crosses the
// cables is then the frames of the rings and nothing else.
func rings(t *testing.T, r *Rig, parameters string) {
	t.Helper()
	store, err := image.Open(image.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range r.Cables() {
		quiet(t, c)
	}
	for _, h := range r.Hosts() {
		dir, err := store.Modules(t.Context(), h.Spec().Kernel)
		if err != nil {
			t.Fatal(err)
		}
		if release, err := driverRelease(filepath.Join(dir, "tbring.ko")); err != nil || release != run(t, h, "uname -r") {
			t.Errorf("tbring.ko is for %q: %v", release, err)
		}
		if err := h.CopyIn(t.Context(), filepath.Join(dir, "tbring.ko"), "/tmp/tbring.ko"); err != nil {
			t.Fatal(err)
		}
		run(t, h, "insmod /tmp/tbring.ko "+parameters)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for _, h := range r.Hosts() {
			if _, err := h.Sh(ctx, "rmmod tbring"); err != nil {
				t.Errorf("unload tbring: %v", err)
			}
		}
	})
}

// quiet takes down the network interfaces at both ends of a cable, while they can
// still log out from each other: from a host that is gone that takes ten seconds.
func quiet(t *testing.T, c *Cable) {
	t.Helper()
	if c.link == nil {
		return
	}
	err := c.rig.silently(t.Context(), c.link.cables, func() error {
		for i, e := range c.ends() {
			if name := c.Interface(i); name != "" {
				if _, err := e.host.Sh(t.Context(), "ip link set "+name+" down"); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// rawRing is a raw ring from the first end of a cable to the second.
type rawRing struct {
	cable    *Cable
	from, to string // directories
}

// rawRing waits until the ring over a cable is there.
func (c *Cable) rawRing(t *testing.T) rawRing {
	t.Helper()
	var dirs [2]string
	for i, e := range c.ends() {
		err := c.rig.Await(t.Context(), "wait for the raw ring of host "+e.host.Name(), func() string {
			p := e.host.State().Peer(e.device)
			if p == nil {
				return "there is no peer"
			}
			for _, s := range p.Services {
				if s.Key == "tbring" && s.Driver == "tbring" {
					dirs[i] = "/sys/kernel/debug/tbring/" + s.Device
					return ""
				}
			}
			return "there is no such service"
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return rawRing{cable: c, from: dirs[0], to: dirs[1]}
}

func (x rawRing) sender() *Host   { return x.cable.ends()[0].host }
func (x rawRing) receiver() *Host { return x.cable.ends()[1].host }

// verify has every byte of every frame filled in and checked, or only headers.
func (x rawRing) verify(t *testing.T, on bool) {
	t.Helper()
	value := map[bool]string{false: "0", true: "1"}[on]
	run(t, x.sender(), "echo "+value+" >"+x.from+"/verify")
	run(t, x.receiver(), "echo "+value+" >"+x.to+"/verify")
}

// stats reads the counters of the receiver.
func (x rawRing) stats(t *testing.T) map[string]uint64 {
	t.Helper()
	stats := map[string]uint64{}
	for line := range strings.Lines(run(t, x.receiver(), "cat "+x.to+"/stats")) {
		var name string
		var n uint64
		if _, err := fmt.Sscan(line, &name, &n); err != nil {
			t.Fatalf("statistics of a raw ring: %q: %v", line, err)
		}
		stats[name] = n
	}
	return stats
}

// traversed is what came of frames that were sent over a raw ring.
type traversed struct {
	receiver map[string]uint64 // what the receiving module counts
	missing  uint64            // frames that it lacks: between others, and after the last
	wire     usb4.WireCounters // differences, from before the first frame to after the last
	tx, rx   usb4.RingCounters // the same, of all rings of sender and receiver but those for control
	took     time.Duration
}

// send sends frames and waits until the receiver has handled all that arrived.
func (x rawRing) send(t *testing.T, frames uint64, size int) traversed {
	t.Helper()
	run(t, x.receiver(), "echo 1 >"+x.to+"/reset")
	before := x.cable.rig.Counters()
	begun := time.Now()
	run(t, x.sender(), fmt.Sprintf("echo %d %d >%s/send", frames, size, x.from))
	return x.received(t, frames, before, begun)
}

// received waits for what was sent since before.
func (x rawRing) received(t *testing.T, frames uint64, before usb4.Counters, begun time.Time) traversed {
	t.Helper()
	out := traversed{took: time.Since(begun)}
	ends := x.cable.ends()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := x.cable.rig.Await(ctx, "wait for the frames of a raw ring", func() string {
		after := x.cable.rig.Counters()
		i := x.cable.index
		out.wire = minusWire(after.Cables[i].AtoB, before.Cables[i].AtoB)
		out.tx = sum(after.Hosts[ends[0].host.index].TX, before.Hosts[ends[0].host.index].TX)
		out.rx = sum(after.Hosts[ends[1].host.index].RX, before.Hosts[ends[1].host.index].RX)
		out.receiver = x.stats(t)
		// Several cables may lead to that host: the frames of this one alone.
		if came := out.wire.Delivered - out.rx.Dropped.Total(); out.receiver["rx_frames"] < came {
			return fmt.Sprintf("%d of %d are there: %v", out.receiver["rx_frames"], came, out.receiver)
		}
		return ""
	})
	if err != nil {
		t.Fatal(err)
	}
	out.missing = out.receiver["rx_lost"] + frames - out.receiver["rx_next"]
	return out
}

func minusWire(a, b usb4.WireCounters) usb4.WireCounters {
	a.Sent -= b.Sent
	a.Delivered -= b.Delivered
	a.Lost -= b.Lost
	a.Corrupted -= b.Corrupted
	a.CorruptedFlagged -= b.CorruptedFlagged
	a.Overrun -= b.Overrun
	a.Judged.Loss -= b.Judged.Loss
	a.Judged.Corrupt -= b.Judged.Corrupt
	a.Judged.CorruptFlagged -= b.Judged.CorruptFlagged
	a.Judged.Overrun -= b.Judged.Overrun
	a.Idle -= b.Idle
	a.Missed -= b.Missed
	return a
}

// sum adds up what rings have counted since before, without those for control.
func sum(after, before []usb4.RingCounters) usb4.RingCounters {
	var n usb4.RingCounters
	for i := 1; i < len(after); i++ {
		a, b := after[i], before[i]
		n.Frames += a.Frames - b.Frames
		n.Held += a.Held - b.Held
		n.CRCErrors += a.CRCErrors - b.CRCErrors
		n.Overruns += a.Overruns - b.Overruns
		n.Corrupted += a.Corrupted - b.Corrupted
		n.Dropped.NoPath += a.Dropped.NoPath - b.Dropped.NoPath
		n.Dropped.LinkDown += a.Dropped.LinkDown - b.Dropped.LinkDown
		n.Dropped.RingOff += a.Dropped.RingOff - b.Dropped.RingOff
		n.Dropped.NoBuffer += a.Dropped.NoBuffer - b.Dropped.NoBuffer
		n.Dropped.PDF += a.Dropped.PDF - b.Dropped.PDF
		n.Dropped.DMA += a.Dropped.DMA - b.Dropped.DMA
		n.Dropped.Injected += a.Dropped.Injected - b.Dropped.Injected
	}
	return n
}

func testRings(t *testing.T, r *Rig) {
	rings(t, r, "")
	for _, c := range r.Cables() {
		const frames = 20000
		got := c.rawRing(t).send(t, frames, 4096)
		if n := got.receiver; n["rx_frames"] != frames || got.missing != 0 || n["rx_bad"] != 0 || n["rx_stale"] != 0 || n["rx_crc"] != 0 {
			t.Errorf("%s: the receiver counts %v", c, n)
		}
		if got.wire.Sent != frames {
			t.Errorf("%s: %d frames were sent over it", c, got.wire.Sent)
		}
		t.Logf("%s: %d frames of 4096 bytes in %v: %.2f Gb/s", c, frames, got.took, frames*4096*8/got.took.Seconds()/1e9)
	}
	t.Run("injected", func(t *testing.T) { testRingsInjected(t, r.Cables()[0]) })
	t.Run("scenario replayed", func(t *testing.T) { testRingsReplayed(t, r, r.Cables()[0]) })
	t.Run("rates", func(t *testing.T) { testRates(t, r) })
}

// testRingsInjected compares what the cable says it has done to frames with what
// the module that receives them finds, to the frame.
func testRingsInjected(t *testing.T, c *Cable) {
	x := c.rawRing(t)
	x.verify(t, true)
	defer x.verify(t, false)
	const frames = 3000
	end, _ := c.Ends()
	for _, o := range []usb4.Injection{{Every: 37}, {Probability: 0.02}, {Every: 300, Probability: 0.01}, {Every: 1}} {
		for _, inject := range []struct {
			name   string
			wire   usb4.WireOptions
			struck func(usb4.WireCounters) (struck, judged uint64)
			ring   func(traversed) uint64 // what the rings of the host routers say of it
			driver func(traversed) uint64 // what the driver finds
		}{
			{"loss", usb4.WireOptions{Loss: o},
				func(w usb4.WireCounters) (uint64, uint64) { return w.Lost, w.Judged.Loss },
				func(g traversed) uint64 { return g.tx.Dropped.Injected },
				func(g traversed) uint64 { return g.missing }},
			{"silent corruption", usb4.WireOptions{Corrupt: o},
				func(w usb4.WireCounters) (uint64, uint64) { return w.Corrupted, w.Judged.Corrupt },
				func(g traversed) uint64 { return g.rx.Corrupted },
				func(g traversed) uint64 { return g.receiver["rx_bad"] }},
			{"corruption with the flag", usb4.WireOptions{CorruptFlagged: o},
				func(w usb4.WireCounters) (uint64, uint64) { return w.CorruptedFlagged, w.Judged.CorruptFlagged },
				func(g traversed) uint64 { return g.rx.CRCErrors },
				func(g traversed) uint64 { return g.receiver["rx_crc"] }},
			{"overrun", usb4.WireOptions{Overrun: o},
				func(w usb4.WireCounters) (uint64, uint64) { return w.Overrun, w.Judged.Overrun },
				func(g traversed) uint64 { return g.rx.Overruns },
				func(g traversed) uint64 { return g.receiver["rx_overrun"] }},
		} {
			if o.Every == 1 && inject.name == "loss" {
				continue // nothing would arrive, and the receiver know of nothing
			}
			if err := c.SetWire(end, inject.wire); err != nil {
				t.Fatal(err)
			}
			got := x.send(t, frames, 4096)
			if err := c.SetWire(end, usb4.WireOptions{}); err != nil {
				t.Fatal(err)
			}
			struck, judged := inject.struck(got.wire)
			if judged != frames || struck == 0 || o.Probability == 0 && struck != frames/o.Every || struck != inject.ring(got) || struck != inject.driver(got) {
				t.Errorf("%s %+v: the cable has done it to %d of %d frames, the rings say %d, the driver %d: %+v", inject.name, o, struck, judged, inject.ring(got), inject.driver(got), got)
			}
			// And nothing else came of it.
			n := got.receiver
			if sum := n["rx_bad"] + n["rx_crc"] + n["rx_overrun"] + got.missing; sum != struck || n["rx_stale"] != 0 || n["rx_frames"] != frames-got.wire.Lost {
				t.Errorf("%s %+v: %+v", inject.name, o, got)
			}
			t.Logf("%s %+v: %d of %d frames, and the driver counts %d", inject.name, o, struck, judged, inject.driver(got))
		}
	}
}

// testRingsReplayed plays a scenario that loses and corrupts by probability, and
// then what came of it: the same happens to the same frames.
func testRingsReplayed(t *testing.T, r *Rig, c *Cable) {
	x := c.rawRing(t)
	spec := c.Spec()
	s, err := ParseScenario("scenario", fmt.Appendf(nil, `
seed = 5

[[step]]
do = "wire"
cable = %[1]q
from = %[1]q
wire = { loss = { probability = 0.02 }, corrupt = { probability = 0.01 }, corrupt_flagged = { probability = 0.01 }, overrun = { every = 111 } }

[[step]]
do = "run"
host = %[2]q
run = ["sh", "-c", "echo 2000 512 >%[3]s/send"]

[[step]]
do = "wire"
cable = %[1]q
wire = {}
`, spec.A, x.sender().Name(), x.from))
	if err != nil {
		t.Fatal(err)
	}
	play := func() (fates []string) {
		t.Helper()
		var text bytes.Buffer
		trace := r.Fabric().Trace(&text, usb4.TraceFilter{NoControl: true})
		played, err := r.Play(t.Context(), s)
		if err := errors.Join(err, trace.Close()); err != nil {
			t.Fatal(err)
		}
		b, err := played.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if s, err = ParseScenario("played", b); err != nil {
			t.Fatal(err)
		}
		number := 0
		for line := range strings.Lines(text.String()) {
			if !strings.Contains(line, "512 bytes") {
				continue
			}
			number++
			if _, fate, ok := strings.Cut(strings.TrimSpace(line), ", "); ok {
				fates = append(fates, fmt.Sprint(number, " ", fate))
			}
		}
		if number != 2000 {
			t.Errorf("%d frames are in the trace", number)
		}
		return fates
	}
	first := play()
	again := play()
	if !slices.Equal(first, again) {
		t.Errorf("at first: %s\nthen: %s", strings.Join(first, "; "), strings.Join(again, "; "))
	}
	kinds := map[string]int{}
	for _, f := range first {
		_, fate, _ := strings.Cut(f, " ")
		kinds[fate]++
	}
	for _, want := range []string{"dropped: injected loss", "a bit flipped", "CRC error", "overrun"} {
		if kinds[want] == 0 {
			t.Errorf("nothing came to %q: %v", want, kinds)
		}
	}
	t.Logf("twice the same: %v", kinds)
}

// testRates sends over all cables at once, each limited, and looks how long the
// frames took on the wire, by the clock of the receiver.
func testRates(t *testing.T, r *Rig) {
	const seconds, attempts = 3, 3
	limits := []int64{50_000_000, 100_000_000}
	a, b := r.Host("a"), r.Host("b")
	var all []rawRing
	for i, rate := range limits {
		c := r.Cables()[i]
		if err := c.SetOptions(usb4.CableOptions{WireOptions: usb4.WireOptions{Rate: rate}}); err != nil {
			t.Fatal(err)
		}
		all = append(all, c.rawRing(t))
	}
	frames := func(i int) uint64 { return uint64(limits[i]) * seconds / 8 / 4096 }
	for attempt := 1; ; attempt++ {
		before := r.Counters()
		var sends, reset []string
		for i, x := range all {
			reset = append(reset, "echo 1 >"+x.to+"/reset")
			sends = append(sends, fmt.Sprintf("echo %d 4096 >%s/send & p%d=$!", frames(i), x.from, i))
		}
		run(t, b, strings.Join(reset, "\n"))
		begun := time.Now()
		run(t, a, strings.Join(sends, "\n")+"\nwait $p0; wait $p1")
		disturbed := false
		for i, x := range all {
			got := x.received(t, frames(i), before, begun)
			if got.receiver["rx_frames"] != frames(i) || got.missing != 0 || got.receiver["rx_bad"] != 0 {
				t.Errorf("%s: %+v", x.cable, got)
			}
			// From the first frame to the last there is one frame less than there
			// are.
			took := time.Duration(got.receiver["rx_ns"])
			bits := float64(got.receiver["rx_frames"]-1) * 4096 * 8
			off := bits/took.Seconds()/float64(limits[i]) - 1
			// What the wire could do nothing about: that it had nothing to send, or
			// no buffer to send it to, or was not let run for longer than it makes
			// up for.
			idle := got.wire.Idle + got.wire.Missed
			own := bits/(took-idle).Seconds()/float64(limits[i]) - 1
			t.Logf("%s limited to %d Mb/s: %.2f Mb/s (%+.2f %%); nothing to send for %v, %v not made up for, at most %v late (%+.2f %% without that)",
				x.cable, limits[i]/1_000_000, bits/took.Seconds()/1e6, off*100, got.wire.Idle, got.wire.Missed, got.wire.Late, own*100)
			switch {
			case off >= -0.03 && off <= 0.03:
				// Whatever happened meanwhile was made up for.
			case own >= -0.03 && own <= 0.03:
				disturbed = true
			default:
				t.Errorf("%s does not hold its rate", x.cable)
			}
		}
		if !disturbed || t.Failed() {
			return
		}
		t.Logf("attempt %d: the machine did not let the hosts keep the cables busy, and the cables made up for what they may", attempt)
		if attempt == attempts {
			t.Fatalf("the machine is too busy to measure rates: disturbed %d times", attempts)
		}
	}
}

// testSlowReceiver has a receiver with few buffers: without end-to-end flow
// control frames are lost and all of them counted, with it none is.
func testSlowReceiver(t *testing.T, r *Rig) {
	const frames = 5000
	c := r.Cables()[0]
	for _, e2e := range []bool{true, false} {
		t.Run(fmt.Sprintf("flow control %v", e2e), func(t *testing.T) {
			rings(t, r, fmt.Sprintf("rx_buffers=8 e2e=%d", map[bool]int{true: 1}[e2e]))
			got := c.rawRing(t).send(t, frames, 4096)
			n, dropped := got.receiver, got.rx.Dropped.NoBuffer
			if n["rx_bad"]+n["rx_crc"]+n["rx_overrun"]+n["rx_stale"] != 0 || got.wire.Sent != frames || got.wire.Delivered != frames {
				t.Errorf("%+v", got)
			}
			if n["rx_frames"] != frames-dropped || got.missing != dropped || got.rx.Dropped.Total() != dropped || got.tx.Dropped.Total() != 0 {
				t.Errorf("%d frames found no buffer, the driver lacks %d: %+v", dropped, got.missing, got)
			}
			if e2e && (dropped != 0 || got.tx.Held == 0) || !e2e && (dropped == 0 || got.tx.Held != 0) {
				t.Errorf("flow control %v: %d frames found no buffer, the sender was held %d times", e2e, dropped, got.tx.Held)
			}
			t.Logf("flow control %v: %d of %d frames found no buffer, the driver lacks %d; the sender was held %d times", e2e, dropped, frames, got.missing, got.tx.Held)
		})
	}
}
