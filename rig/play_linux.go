package rig

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/usb4"
)

// stepPatience is how long one step may take, with the waiting for it: a crash
// and a boot of a debug kernel on a busy machine.
const stepPatience = 5 * time.Minute

// Run brings up the rig of a scenario, plays it, and takes everything down. It
// returns the scenario as it was played: what came when, how long it took, and
// what it came to. That is a scenario again: played once more, it keeps to the
// times of the first.
func Run(ctx context.Context, s Scenario, o Options) (played Scenario, err error) {
	topology, err := s.Topology()
	if err != nil {
		return s, err
	}
	r, err := Up(ctx, topology, o)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := r.Settle(ctx); err != nil {
		return s, err
	}
	return r.Play(ctx, s)
}

// Play plays the steps of a scenario on a rig. It ends at the first that fails.
func (r *Rig) Play(ctx context.Context, s Scenario) (played Scenario, err error) {
	p := player{rig: r, seed: s.Seed, begun: time.Now(), tell: r.options.Log}
	played = s
	played.Steps = nil
	for i, step := range s.Steps {
		done, err := p.play(ctx, i, step)
		played.Steps = append(played.Steps, done)
		if err != nil {
			return played, fmt.Errorf("step %d (%s): %w", i+1, step, err)
		}
	}
	return played, r.Verify(ctx)
}

// player plays steps.
type player struct {
	rig   *Rig
	seed  uint64
	begun time.Time
	last  time.Time // when the step before ended
	tell  func(string)
}

// play plays one step, and checks what has to hold after each.
func (p *player) play(ctx context.Context, i int, s Step) (done Step, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, stepPatience, fmt.Errorf("it was not over within %v", stepPatience))
	defer cancel()
	done = s
	if err := p.wait(ctx, s); err != nil {
		return done, err
	}
	begun := time.Now()
	done.At, done.After = Duration(begun.Sub(p.begun).Round(time.Millisecond)), 0
	done.Result, err = p.do(ctx, i, s)
	if err == nil && needs[s.Do].settles && !s.Unsettled {
		err = p.rig.Settle(ctx)
	}
	if err == nil {
		err = p.rig.reported()
	}
	if err != nil {
		done.Result = firstLine(err)
	}
	p.last = time.Now()
	done.Took = Duration(p.last.Sub(begun).Round(time.Millisecond))
	p.tell(fmt.Sprintf("%4d  %8.3f s  %s: %s (%v)", i+1, time.Duration(done.At).Seconds(), s, done.Result, time.Duration(done.Took)))
	return done, err
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// wait waits for the time of a step.
func (p *player) wait(ctx context.Context, s Step) error {
	due := p.begun.Add(time.Duration(s.At))
	if after := p.last.Add(time.Duration(s.After)); s.After > 0 && after.After(due) {
		due = after
	}
	if d := time.Until(due); d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return fault.New(fault.Interrupted, "wait for the time of a step", context.Cause(ctx), "")
		}
	}
	if s.When == "" {
		return nil
	}
	kind, port, err := s.when()
	if err != nil {
		return err
	}
	if kind == whenSettled {
		return p.rig.Settle(ctx)
	}
	name, number, err := parsePort(port)
	if err != nil {
		return err
	}
	h, err := p.rig.FindHost(name)
	if err != nil {
		return err
	}
	switch kind {
	case whenPeer:
		_, err = h.WaitXDomain(ctx, number, "")
	case whenCarrier:
		// The hosts of a scenario do nothing of themselves: without this it would
		// wait for ever.
		var c *Cable
		if c, err = p.rig.FindCable(port); err == nil {
			err = c.TakeUp(ctx)
		}
		if err == nil {
			_, err = h.WaitCarrier(ctx, number)
		}
	case whenNoPeer:
		err = p.rig.Await(ctx, "wait until nothing is behind port "+port, func() string {
			if h.State().Peer(h.Device(number)) != nil {
				return "it is there"
			}
			return ""
		})
	}
	return err
}

// do does what a step says.
func (p *player) do(ctx context.Context, i int, s Step) (result string, err error) {
	var h *Host
	var c *Cable
	if s.Host != "" {
		if h, err = p.rig.FindHost(s.Host); err != nil {
			return "", err
		}
	}
	if s.Cable != "" {
		if c, err = p.rig.FindCable(s.Cable); err != nil {
			return "", err
		}
	}
	switch s.Do {
	case DoNothing:
	case DoPlug:
		c.Plug()
	case DoUnplug:
		c.Unplug()
	case DoFlap:
		err = c.Flap(ctx, s.out())
	case DoWire:
		err = c.setWire(s.From, *s.Wire)
	case DoReload:
		err = h.ReloadDriver(ctx)
	case DoCrash:
		err = h.Cut()
	case DoBoot:
		err = h.Boot(ctx)
	case DoReboot:
		err = h.Reboot(ctx)
	case DoRun:
		return p.run(ctx, h, s)
	case DoTraffic:
		t, err := c.Traffic(ctx, p.seed+uint64(i), s.bytes())
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("intact, %.3f Gb/s", t.Gbps()), nil
	default:
		err = fmt.Errorf("there is no action %q", s.Do)
	}
	if err != nil {
		return "", err
	}
	return "ok", nil
}

// maxResult is how much of a command's output is kept.
const maxResult = 200

func (p *player) run(ctx context.Context, h *Host, s Step) (string, error) {
	out, err := h.Run(ctx, s.Run...)
	if err != nil {
		return "", err
	}
	if s.Expect != "" {
		re, err := regexp.Compile(s.Expect)
		if err != nil {
			return "", err
		}
		if !re.MatchString(out) {
			return "", fault.Newf(fault.LabFailed, "", "%s on host %s printed %q, which does not match %s", strings.Join(s.Run, " "), h.Name(), out, s.Expect)
		}
	}
	out = strings.TrimSpace(strings.ToValidUTF8(out, "\uFFFD"))
	if len(out) > maxResult {
		out = strings.ToValidUTF8(out[:maxResult], "") + "…"
	}
	return out, nil
}

// setWire sets the options of a cable, or only what one port sends.
func (c *Cable) setWire(from string, o CableOptions) error {
	options := o.options(false)
	if from == "" {
		return c.SetOptions(options)
	}
	port, err := c.rig.port(from)
	if err != nil {
		return err
	}
	return c.Cable.SetWire(port, options.WireOptions)
}

// SetOptions changes how the cable behaves, from the next training on where it
// concerns the lanes.
func (c *Cable) SetOptions(o usb4.CableOptions) error { return c.Cable.SetOptions(o) }
