package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"tbcluster/api/fault"
)

// Dmesg returns the kernel's log of this boot, as far as it has come.
func (g *Guest) Dmesg() []Record {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.log)
}

// WaitLog waits for a record of the kernel's log of this boot whose text matches,
// and returns it. Records before number from (Record.Sequence) do not count.
func (g *Guest) WaitLog(ctx context.Context, from uint64, pattern *regexp.Regexp) (Record, error) {
	var found Record
	err := g.wait(ctx, fmt.Sprintf("wait for %q in the kernel's log of", pattern), func() (bool, error) {
		for _, r := range g.log {
			if r.Sequence >= from && pattern.MatchString(r.Text) {
				found = r
				return true, nil
			}
		}
		if g.machine == nil {
			return false, errors.New("it went off")
		}
		return false, nil
	})
	return found, err
}

// Reports returns what the kernel has reported of itself since Start, over all
// boots, without what Options.Allow lets pass. Verify asks for all that has
// happened until now.
//
// One that is still coming out of the console is not among them where some are
// let pass: which it is shows when it is complete.
func (g *Guest) Reports() []Report { return g.reported(false, false) }

// Allowed returns what Reports leaves out because of Options.Allow.
func (g *Guest) Allowed() []Report { return g.reported(true, false) }

// reportTime is how long after its last line a report counts as complete, though
// nothing marks its end.
const reportTime = 2 * time.Second

func (g *Guest) reported(allowed, incomplete bool) []Report {
	g.mu.Lock()
	defer g.mu.Unlock()
	var list []Report
	for i, r := range g.reports.list {
		comes := i == len(g.reports.list)-1 && g.reports.open && time.Since(g.reports.at) < reportTime
		if comes && !incomplete && len(g.o.Allow) > 0 {
			continue
		}
		if slices.ContainsFunc(g.o.Allow, func(a Allowance) bool { return a.Pattern.MatchString(r.Text) }) == allowed {
			list = append(list, r)
		}
	}
	return list
}

// Verify waits until everything that the kernel has said by now has arrived, and
// returns an error with the reports in full when there are any. It is what a
// test ends with.
func (g *Guest) Verify(ctx context.Context) error {
	g.mu.Lock()
	up := g.session != nil
	g.mu.Unlock()
	if up {
		if err := g.drain(ctx); err != nil && len(g.Reports()) == 0 {
			return err
		}
	}
	list := g.reported(false, true)
	if len(list) == 0 {
		return nil
	}
	var b strings.Builder
	for i, r := range list {
		if i > 0 {
			b.WriteString("\n\n")
		}
		fmt.Fprintf(&b, "%s: %s\n%s", r.Kind, r.Title, r.Text)
	}
	return &fault.Fault{
		Reason: fault.LabFailed, What: fmt.Sprintf("the kernel of guest %s reported %d faults of its own", g.o.Name, len(list)),
		Where: g.dir + "/console.log", Why: b.String(),
	}
}

// drain writes a mark into the kernel's log and waits for it to come out of the
// console: the console prints in order.
func (g *Guest) drain(ctx context.Context) error {
	var mark [8]byte
	if _, err := rand.Read(mark[:]); err != nil {
		return err
	}
	text := "rig: mark " + hex.EncodeToString(mark[:])
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	// <4>: a warning, so that it comes out whatever the console's level is.
	if _, err := g.Run(ctx, "sh", "-c", "echo '<4>"+text+"' >/dev/kmsg"); err != nil {
		return err
	}
	return g.wait(ctx, "wait for the console of", func() (bool, error) {
		if g.machine == nil {
			return false, errors.New("it went off")
		}
		return strings.Contains(g.console.String(), text), nil
	})
}

// unusedFor is after how long an agent that was built earlier is removed: long
// after a guest with it has booted.
const unusedFor = 24 * time.Hour

func removeStale(names []string) error {
	for _, n := range names {
		st, err := os.Stat(n)
		if err != nil || time.Since(st.ModTime()) < unusedFor {
			continue
		}
		if err := os.Remove(n); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}
