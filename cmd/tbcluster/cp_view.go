package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// copyView shows one transfer: repainted lines on a terminal, plain lines
// elsewhere, events as JSON, or nothing.
type copyView struct {
	o    *cpOptions
	out  io.Writer // progress; standard error, so that output stays clean
	mode string    // "live", "plain", "json" or "none"

	mu    sync.Mutex
	seen  []string // lines of a dry run, all of them
	taken int      // how many of seen are printed

	painted int // lines on the terminal that the next paint goes over
	// Of plain mode: what the last line said, and when.
	lastState tbv1.TransferState
	lastLine  time.Time
	named     bool
	now       func() time.Time
}

// plainGap is the least time between two lines about the same phase in plain
// mode: enough to see that it lives, not so many that a log fills.
const plainGap = 2 * time.Second

func newCopyView(o *cpOptions) *copyView {
	v := &copyView{o: o, out: o.g.errOut, now: time.Now}
	switch {
	case o.g.json():
		v.mode = "json"
	case o.quiet || o.progress == "none":
		v.mode = "none"
	case o.progress == "plain" || !isTerminal(o.g.errOut):
		v.mode = "plain"
	default:
		v.mode = "live"
	}
	return v
}

// keep stores lines of a dry run until they are printed. The agent may send
// only new ones or all of them again.
func (v *copyView) keep(lines []string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if n := len(v.seen); n > 0 && len(lines) >= n && slices.Equal(lines[:n], v.seen) {
		lines = lines[n:]
	}
	v.seen = append(v.seen, lines...)
}

// take returns the lines that have not been printed yet.
func (v *copyView) take() []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	lines := v.seen[v.taken:]
	v.taken = len(v.seen)
	return slices.Clone(lines)
}

// copyEventJSON is one line of `tbcluster cp -o json`.
type copyEventJSON struct {
	Transfer transferJSON `json:"transfer"`
	DryRun   []string     `json:"dry_run"`
}

// paint shows t as it is now.
func (v *copyView) paint(t *tbv1.Transfer) {
	lines := v.take()
	if v.mode == "json" {
		v.o.g.printf("%s\n", compactJSON(copyEventJSON{toTransferJSON(t), texts(lines)}))
		return
	}
	if v.mode == "plain" || v.mode == "live" && v.o.dryRun {
		v.name(t)
	}
	if !v.o.quiet && len(lines) > 0 {
		v.erase()
		for _, l := range lines {
			v.o.g.printf("%s\n", plain(l))
		}
	}
	switch v.mode {
	case "live":
		text := progressLines(t)
		v.erase()
		width := terminalWidth(v.out)
		for _, l := range text {
			fmt.Fprintln(v.out, clip(l, width-1))
		}
		v.painted = len(text)
	case "plain":
		state := t.GetState()
		if transferEnded(t) || state == v.lastState && v.now().Sub(v.lastLine) < plainGap {
			return
		}
		v.lastState, v.lastLine = state, v.now()
		fmt.Fprintln(v.out, strings.TrimSpace(strings.Join(progressLines(t)[1:], "; ")))
	}
}

// name says once where it goes, as soon as that is known: until both sides were
// looked at the destination is what was asked for.
func (v *copyView) name(t *tbv1.Transfer) {
	switch t.GetState() {
	case tbv1.TransferState_TRANSFER_STATE_SCANNING, tbv1.TransferState_TRANSFER_STATE_FAILED, tbv1.TransferState_TRANSFER_STATE_CANCELLED:
		return
	}
	if !v.named {
		v.named = true
		v.erase()
		fmt.Fprintln(v.out, copyTitle(t))
	}
}

// finish leaves the terminal as the summary wants it.
func (v *copyView) finish() {
	if v.mode == "live" {
		v.erase()
	}
	for _, l := range v.take() {
		if v.mode != "json" && !v.o.quiet {
			v.o.g.printf("%s\n", plain(l))
		}
	}
}

// erase removes what the last paint left.
func (v *copyView) erase() {
	if v.painted > 0 {
		fmt.Fprintf(v.out, "\x1b[%dA\x1b[J", v.painted)
		v.painted = 0
	}
}

// summary prints how the transfer ended, and returns what went wrong.
func (v *copyView) summary(t *tbv1.Transfer) error {
	for _, w := range t.GetWarnings() {
		if v.mode != "json" {
			v.o.g.notef("%s", plain(w))
		}
	}
	switch t.GetState() {
	case tbv1.TransferState_TRANSFER_STATE_DONE:
		if v.mode != "json" && !v.o.quiet {
			for _, l := range copySummary(t, v.o.dryRun) {
				v.o.g.printf("%s\n", l)
			}
		}
		return nil
	case tbv1.TransferState_TRANSFER_STATE_CANCELLED:
		return fault.New(fault.Interrupted, "the copy was cancelled by somebody else", nil, "what arrived is kept: run the same command again to go on")
	}
	if f := t.GetError(); f != nil {
		return failureFault(f)
	}
	return fault.New(fault.Internal, "the copy ended without saying how", fmt.Errorf("it is %s", transferStateWord(t.GetState())), "this is a bug: `tbcluster bugreport` collects what we need")
}

// copyTitle says what is copied where.
func copyTitle(t *tbv1.Transfer) string {
	return plain(strings.Join(t.GetSources(), " ") + " -> " + t.GetDestination())
}

// phaseText names what a transfer waits for.
func phaseText(s tbv1.TransferState) string {
	switch s {
	case tbv1.TransferState_TRANSFER_STATE_SCANNING:
		return "scanning: reading the list of files"
	case tbv1.TransferState_TRANSFER_STATE_CONNECTING:
		return "connecting over the cables"
	case tbv1.TransferState_TRANSFER_STATE_SYNCING:
		return "syncing: waiting for the disk at the destination"
	case tbv1.TransferState_TRANSFER_STATE_PAUSED:
		return "paused"
	}
	return transferStateWord(s)
}

// progressLines returns the title, one line about the whole, and one for each
// link in use.
func progressLines(t *tbv1.Transfer) []string {
	lines := []string{copyTitle(t)}
	if t.GetState() != tbv1.TransferState_TRANSFER_STATE_COPYING {
		phase := t.GetPhase()
		if phase == "" {
			phase = phaseText(t.GetState())
		}
		return append(lines, "  "+plain(phase))
	}
	whole := fmt.Sprintf("  %5s  %s of %s  %s", percent(t), bytesText(t.GetDoneBytes()), bytesText(t.GetTotalBytes()), rateText(t.GetBytesPerSecond()))
	if t.GetEta() != nil {
		whole += "  " + etaText(t) + " left"
	}
	if left := int64(t.GetTotalFiles()) - int64(t.GetDoneFiles()); left > 0 {
		whole += "  " + count(int(left), "file") + " to go"
	}
	lines = append(lines, whole)
	for _, l := range t.GetLinks() {
		lines = append(lines, fmt.Sprintf("    %s  %s  %s", wayText(t, l), bytesText(l.GetBytes()), rateText(l.GetBytesPerSecond())))
	}
	return lines
}

// wayText names a way of bytes: "cable thunderbolt0 (tcp)" or "LAN eth0 (tcp)".
func wayText(t *tbv1.Transfer, l *tbv1.LinkProgress) string {
	name := wayKind(t, l)
	switch name {
	case "loopback":
		return "loopback (one node)"
	case "lan":
		name = "LAN"
	}
	if l.GetInterface() != "" {
		name += " " + l.GetInterface()
	}
	return plain(fmt.Sprintf("%s (%s)", name, l.GetTransport()))
}

// wayKind is "cable", "lan" or "loopback", also where the agent is of a version
// that does not say.
func wayKind(t *tbv1.Transfer, l *tbv1.LinkProgress) string {
	switch {
	case l.GetKind() != "":
		return l.GetKind()
	case l.GetLinkId() != "":
		return "cable"
	case t.GetSourceNodeId() == t.GetDestinationNodeId():
		return "loopback"
	}
	return "lan"
}

// copySummary says what was done, how fast, and over which ways.
func copySummary(t *tbv1.Transfer, dry bool) []string {
	files := count(int(t.GetDoneFiles()), "file")
	skipped := ""
	if t.GetSkippedFiles() > 0 {
		skipped = fmt.Sprintf("; %s (%s) already there", count(int(t.GetSkippedFiles()), "file"), bytesText(t.GetSkippedBytes()))
	}
	to := plain(t.GetDestination())
	switch {
	case dry:
		return []string{fmt.Sprintf("would copy %s in %s to %s%s", bytesText(t.GetTotalBytes()), count(int(t.GetTotalFiles()), "file"), to, skipped)}
	case t.GetTotalBytes() == 0 && t.GetDoneFiles() == 0:
		return []string{fmt.Sprintf("nothing to copy: %s has it all%s", to, skipped)}
	}
	took := t.GetFinishedAt().AsTime().Sub(t.GetStartedAt().AsTime())
	line := fmt.Sprintf("copied %s in %s to %s, verified", bytesText(t.GetDoneBytes()), files, to)
	if t.GetFinishedAt() != nil && took > 0 {
		line += fmt.Sprintf(", in %.1f s (%s)", took.Seconds(), rateText(uint64(float64(t.GetDoneBytes())/took.Seconds())))
	}
	lines := []string{line + skipped}
	for _, l := range t.GetLinks() {
		lines = append(lines, fmt.Sprintf("  %s over %s", bytesText(l.GetBytes()), wayText(t, l)))
	}
	return lines
}

// clip cuts s to width columns.
func clip(s string, width int) string {
	r := []rune(s)
	if width > 0 && len(r) > width {
		return string(r[:width])
	}
	return s
}
