package rig

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Walk makes random steps that make sense: what is plugged is not plugged again,
// what is off is booted before long, traffic goes where a cable is up. The same
// seed and topology give the same steps.
type Walk struct {
	random  *rand.Rand
	hosts   []string
	cables  []CableSpec
	off     map[string]bool
	plugged map[string]bool // by first port
}

// NewWalk returns the walk of a seed, on a topology in which everything is on
// and plugged as it says.
func NewWalk(seed uint64, t Topology) (*Walk, error) {
	t, err := t.complete()
	if err != nil {
		return nil, err
	}
	if len(t.Hubs) > 0 {
		return nil, errors.New("a random walk goes over cables that join hosts, and does not know what goes with a hub")
	}
	w := &Walk{random: rand.New(rand.NewPCG(seed, 0x726967)), cables: t.Cables, off: map[string]bool{}, plugged: map[string]bool{}}
	for _, h := range t.Hosts {
		w.hosts = append(w.hosts, h.Name)
	}
	for _, c := range t.Cables {
		w.plugged[c.A] = !c.Options.Unplugged
	}
	if len(w.hosts) == 0 || len(w.cables) == 0 {
		return nil, errors.New("a random walk needs hosts and cables")
	}
	return w, nil
}

// weights say how often an action is chosen among those that make sense: fast
// ones more often than those that boot a host.
var weights = []struct {
	do     Action
	weight int
}{
	{DoTraffic, 8}, {DoFlap, 6}, {DoUnplug, 4}, {DoPlug, 12}, {DoReload, 3}, {DoCrash, 2}, {DoBoot, 12}, {DoWire, 3},
}

// Next returns the next step and takes it as done.
func (w *Walk) Next() Step {
	var list []Step
	var sum int
	var upto []int
	for _, x := range weights {
		candidates := w.candidates(x.do)
		if len(candidates) == 0 {
			continue
		}
		sum += x.weight
		list, upto = append(list, candidates[w.random.IntN(len(candidates))]), append(upto, sum)
	}
	pick := w.random.IntN(sum)
	for i := range list {
		if pick < upto[i] {
			s := w.detail(list[i])
			w.done(s)
			return s
		}
	}
	return Step{Do: DoNothing} // not reached: pick is less than the last sum
}

// candidates are the steps of one action that make sense now.
func (w *Walk) candidates(do Action) []Step {
	var list []Step
	switch do {
	case DoReload, DoCrash, DoBoot:
		on := 0
		for _, h := range w.hosts {
			if !w.off[h] {
				on++
			}
		}
		for _, h := range w.hosts {
			// One host stays on: there has to be somebody to see.
			if w.off[h] == (do == DoBoot) && (do != DoCrash || on > 1) {
				list = append(list, Step{Do: do, Host: h})
			}
		}
	default:
		for _, c := range w.cables {
			a, b := w.ends(c)
			up := w.plugged[c.A] && !w.off[a] && !w.off[b]
			ok := false
			switch do {
			case DoPlug:
				ok = !w.plugged[c.A]
			case DoUnplug:
				ok = w.plugged[c.A]
			case DoFlap, DoTraffic, DoWire:
				ok = up
			}
			if ok {
				list = append(list, Step{Do: do, Cable: c.A})
			}
		}
	}
	return list
}

// ends returns the hosts of a cable.
func (w *Walk) ends(c CableSpec) (a, b string) {
	host := func(port string) string { return port[:strings.LastIndexByte(port, '.')] }
	return host(c.A), host(c.B)
}

// detail fills in what an action leaves open.
func (w *Walk) detail(s Step) Step {
	switch s.Do {
	case DoFlap:
		// From much shorter than the driver notices to long enough for it to have
		// taken everything down.
		s.Out = Duration(time.Duration(1+w.random.IntN(1500)) * time.Millisecond)
	case DoTraffic:
		s.Bytes = Size(1 + w.random.IntN(1<<20))
	case DoWire:
		o := &CableOptions{}
		switch w.random.IntN(4) {
		case 0:
			o.Latency = Duration(time.Duration(w.random.IntN(3000)) * time.Microsecond)
		case 1:
			o.Rate = Rate(50_000_000 + w.random.Int64N(450_000_000))
		case 2: // TCP repeats what is lost and what the CRC flag says is wrong
			o.Loss.Every = uint64(100 + w.random.IntN(900))
		case 3:
			o.CorruptFlagged.Every = uint64(100 + w.random.IntN(900))
		}
		s.Wire = o
	}
	return s
}

// done takes a step as done.
func (w *Walk) done(s Step) {
	switch s.Do {
	case DoPlug, DoUnplug:
		w.plugged[s.Cable] = s.Do == DoPlug
	case DoCrash, DoBoot:
		w.off[s.Host] = s.Do == DoCrash
	}
}

// Summary is what a walk came to.
type Summary struct {
	Seed    uint64
	Steps   int // that were done
	Took    time.Duration
	By      map[Action]int
	Bytes   int64  // that went over cables, each way
	Allowed int    // reports of kernels that were let pass
	Failure string // "" if there was none
}

// String is the summary in a line.
func (s Summary) String() string {
	var by []string
	for _, w := range weights {
		if n := s.By[w.do]; n > 0 {
			by = append(by, fmt.Sprintf("%s %d", w.do, n))
		}
	}
	result := "no difference, no kernel report, all bytes intact"
	if s.Failure != "" {
		result = "FAILED: " + s.Failure
	}
	if s.Allowed > 0 {
		result += fmt.Sprintf(" (but %d of a known fault of Linux)", s.Allowed)
	}
	return fmt.Sprintf("seed %d: %d steps in %v (%s), %d bytes each way: %s", s.Seed, s.Steps, s.Took.Round(time.Second), strings.Join(by, ", "), s.Bytes, result)
}

// Walk plays steps of a walk: after each, all hosts have to show the truth of
// the fabric, bytes have to arrive as they were sent, and no kernel may have
// reported anything. At the end everything is switched on and plugged in, and
// every cable has to carry bytes. It returns the scenario that was played, too,
// as far as it came.
func (r *Rig) Walk(ctx context.Context, seed uint64, steps int) (Scenario, Summary, error) {
	played := Scenario{Seed: seed}
	sum := Summary{Seed: seed, By: map[Action]int{}}
	begun := time.Now()
	err := r.walk(ctx, seed, steps, &played, &sum)
	sum.Took = time.Since(begun)
	if err != nil {
		sum.Failure = firstLine(err)
	}
	return played, sum, err
}

func (r *Rig) walk(ctx context.Context, seed uint64, steps int, played *Scenario, sum *Summary) error {
	w, err := NewWalk(seed, r.topology)
	if err != nil {
		return err
	}
	p := player{rig: r, seed: seed, begun: time.Now(), tell: r.options.Log}
	seen := map[string]int{}
	do := func(s Step) error {
		done, err := p.play(ctx, len(played.Steps), s)
		played.Steps = append(played.Steps, done)
		if err != nil {
			return fmt.Errorf("seed %d, step %d (%s): %w", seed, len(played.Steps), s, err)
		}
		if s.Do == DoTraffic {
			sum.Bytes += s.bytes()
		}
		patient, cancel := context.WithTimeout(ctx, stepPatience)
		defer cancel()
		reports, err := r.refresh(patient, w.off, seen)
		if sum.Allowed += reports; err != nil {
			return fmt.Errorf("seed %d, after step %d (%s): %w", seed, len(played.Steps), s, err)
		}
		return nil
	}
	for range steps {
		s := w.Next()
		if err := do(s); err != nil {
			return err
		}
		sum.Steps++
		sum.By[s.Do]++
	}
	for _, s := range w.heal() {
		if err := do(s); err != nil {
			return err
		}
	}
	return r.Verify(ctx)
}

// heal returns the steps after which everything is on, plugged, perfect and
// seen to carry bytes.
func (w *Walk) heal() []Step {
	var list []Step
	for _, h := range w.hosts {
		if w.off[h] {
			list = append(list, Step{Do: DoBoot, Host: h})
		}
	}
	for _, c := range w.cables {
		if !w.plugged[c.A] {
			list = append(list, Step{Do: DoPlug, Cable: c.A})
		}
		list = append(list, Step{Do: DoWire, Cable: c.A, Wire: &CableOptions{}}, Step{Do: DoTraffic, Cable: c.A})
	}
	for _, s := range list {
		w.done(s)
	}
	return list
}
