//go:build linux

package usb4

import (
	"encoding/binary"
	"fmt"
	"testing"
)

func TestInjectionsAreCountedExactly(t *testing.T) {
	const n = 3000
	f := fabric(t, Options{Seed: 7})
	a, b, c := two(t, f, HostOptions{}, CableOptions{WireOptions: WireOptions{
		Loss: Injection{Every: 10, Probability: 0.02}, Corrupt: Injection{Every: 7}, CorruptFlagged: Injection{Probability: 0.1}, Overrun: Injection{Every: 100},
	}})
	s := streamOver(c, a, b, 1, 64, optionE2E)
	var lost, corrupted, flagged, overrun, arrived uint64
	s.rx.fill()
	expect := 0
	want := make([]byte, 64)
	for sent := 0; ; {
		for s.tx.room() > 0 && sent < n {
			s.post(sent, 64)
			sent++
		}
		s.tx.doorbell()
		a.settled()
		for fr, ok := s.rx.completed(); ok; fr, ok = s.rx.completed() {
			arrived++
			// The number of a frame may be what was corrupted: find it among the next.
			best, bits := -1, 99
			for i := range 40 {
				pattern(want, expect+i)
				if d := differ(want, fr.bytes); d < bits {
					best, bits = i, d
				}
			}
			lost += uint64(best)
			expect += best + 1
			if fr.flags&descOverrun != 0 {
				overrun++
			}
			// One bit for each injection, unless both hit the same bit.
			if fr.flags&descCRCError != 0 {
				flagged++
				bits--
			}
			switch bits {
			case 0:
			case 1:
				corrupted++
			default:
				t.Fatalf("frame %d differs in %d bits", expect-1, bits)
			}
		}
		s.rx.fill()
		for _, ok := s.tx.completed(); ok; _, ok = s.tx.completed() {
		}
		if sent == n && s.tx.head == s.tx.tail {
			break
		}
	}
	lost += uint64(n - expect)
	k := f.Counters()
	w := k.Cables[0].AtoB
	if got := (WireCounters{Sent: n, SentBytes: n * 64, Delivered: arrived, DeliveredBytes: arrived * 64, Lost: lost, Corrupted: corrupted, CorruptedFlagged: flagged, Overrun: overrun, Judged: Judged{n, arrived, arrived, arrived}}); w != got {
		t.Errorf("counted  %+v\nobserved %+v", w, got)
	}
	if lost <= n/10 || lost > n/10+n/10 || corrupted != (n-lost)/7 || overrun != (n-lost)/100 || flagged < n/20 || flagged > n/6 {
		t.Errorf("lost %d, corrupted %d, flagged %d, overrun %d of %d", lost, corrupted, flagged, overrun, n)
	}
	if r := k.Hosts[1].RX[1]; r.Frames != arrived || r.CRCErrors != flagged || r.Overruns != overrun || r.Corrupted != corrupted || k.Hosts[0].TX[1].Dropped.Injected != lost {
		t.Errorf("rings: %+v, %+v", r, k.Hosts[0].TX[1])
	}
}

// differ counts the bits in which two frames differ.
func differ(a, b []byte) (n int) {
	for i := range a {
		for d := a[i] ^ b[i]; d != 0; d &= d - 1 {
			n++
		}
	}
	return n
}

func TestTheSameSeedLosesTheSame(t *testing.T) {
	run := func(seed uint64) string {
		f := fabric(t, Options{Seed: seed})
		a, b, c := two(t, f, HostOptions{}, CableOptions{WireOptions: WireOptions{Loss: Injection{Probability: 0.3}}})
		s := streamOver(c, a, b, 1, 128, 0)
		s.rx.fill()
		b.settled()
		for i := range 100 {
			s.post(i, 16)
		}
		s.tx.doorbell()
		a.settled()
		got := ""
		for fr, ok := s.rx.completed(); ok; fr, ok = s.rx.completed() {
			got += fmt.Sprint(binary.LittleEndian.Uint32(fr.bytes), " ")
		}
		return got
	}
	one, again, other := run(1), run(1), run(2)
	if one != again || one == other || len(one) < 100 {
		t.Errorf("seed 1: %s\nseed 1: %s\nseed 2: %s", one, again, other)
	}
}

// Which frames are struck depends on nothing that went before the injection was
// set, nor on other injections.
func TestAnInjectionThatIsSetAnewStrikesTheSameFrames(t *testing.T) {
	f := fabric(t, Options{Seed: 3})
	a, b, c := two(t, f, HostOptions{}, CableOptions{})
	s := streamOver(c, a, b, 1, 128, 0)
	const n = 100
	run := func(o WireOptions) (lost, flagged, silent string) {
		t.Helper()
		before := c.Counters().AtoB.Judged
		if err := c.SetWire(a.host.Port(0), o); err != nil {
			t.Fatal(err)
		}
		s.postAll(n, 16)
		if err := c.SetWire(a.host.Port(0), WireOptions{}); err != nil {
			t.Fatal(err)
		}
		s.postAll(7, 16) // not judged
		for _, ok := s.tx.completed(); ok; _, ok = s.tx.completed() {
		}
		next := 0
		want := make([]byte, 16)
		for fr, ok := s.rx.completed(); ok; fr, ok = s.rx.completed() {
			for ; ; next++ {
				if pattern(want, next%n); differ(want, fr.bytes) <= 2 {
					break
				}
				lost += fmt.Sprint(next, " ")
			}
			if fr.flags&descCRCError != 0 {
				flagged += fmt.Sprint(next, " ")
			} else if differ(want, fr.bytes) != 0 {
				silent += fmt.Sprint(next, " ")
			}
			next++
		}
		after := c.Counters().AtoB.Judged
		if o.Loss.on() && after.Loss-before.Loss != n || !o.Loss.on() && after.Loss != before.Loss {
			t.Errorf("%d frames were judged, not %d", after.Loss-before.Loss, n)
		}
		return lost, flagged, silent
	}
	half := Injection{Probability: 0.3}
	lost, _, _ := run(WireOptions{Loss: half})
	_, flagged, _ := run(WireOptions{CorruptFlagged: half})
	_, _, silent := run(WireOptions{Corrupt: half})
	if len(lost) < 50 || len(flagged) < 50 || len(silent) < 50 || lost == flagged || flagged == silent {
		t.Fatalf("lost %s\nflagged %s\nsilent %s", lost, flagged, silent)
	}
	again, _, _ := run(WireOptions{Loss: half, Overrun: half})
	_, flaggedAgain, _ := run(WireOptions{CorruptFlagged: half, Overrun: Injection{Every: 2}})
	_, _, silentAgain := run(WireOptions{Corrupt: half})
	if again != lost || flaggedAgain != flagged || silentAgain != silent {
		t.Errorf("lost %s\n then %s\nflagged %s\n then %s\nsilent %s\n then %s", lost, again, flagged, flaggedAgain, silent, silentAgain)
	}
}
