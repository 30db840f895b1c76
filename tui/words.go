package tui

import (
	"fmt"
	"math"
	"strings"
	"time"

	pb "tbcluster/api/tbcluster/v1"
)

// word is how a state is shown: never by colour alone.
type word struct {
	symbol string
	text   string
	ink    ink
}

var nodeWords = map[pb.NodeState]word{
	pb.NodeState_NODE_STATE_UP:      {"●", "up", plainInk},
	pb.NodeState_NODE_STATE_SUSPECT: {"◐", "suspect", lookInk},
	pb.NodeState_NODE_STATE_DOWN:    {"✕", "down", badInk},
	pb.NodeState_NODE_STATE_UNKNOWN: {"○", "not heard yet", lookInk},
}

var linkWords = map[pb.LinkState]word{
	pb.LinkState_LINK_STATE_CABLED:    {"○", "cabled", lookInk},
	pb.LinkState_LINK_STATE_ADDRESSED: {"◐", "addressed", lookInk},
	pb.LinkState_LINK_STATE_PROVEN:    {"●", "proven", plainInk},
	pb.LinkState_LINK_STATE_DOWN:      {"✕", "down", badInk},
}

var instanceWords = map[pb.InstanceState]word{
	pb.InstanceState_INSTANCE_STATE_PLANNED:  {"○", "planned", moveInk},
	pb.InstanceState_INSTANCE_STATE_COPYING:  {"◐", "copying", moveInk},
	pb.InstanceState_INSTANCE_STATE_STARTING: {"◐", "starting", moveInk},
	pb.InstanceState_INSTANCE_STATE_LOADING:  {"◐", "loading", moveInk},
	pb.InstanceState_INSTANCE_STATE_WARMING:  {"◐", "warming", moveInk},
	pb.InstanceState_INSTANCE_STATE_READY:    {"●", "ready", plainInk},
	pb.InstanceState_INSTANCE_STATE_DEGRADED: {"▲", "degraded", lookInk},
	pb.InstanceState_INSTANCE_STATE_STOPPING: {"◐", "stopping", moveInk},
	pb.InstanceState_INSTANCE_STATE_STOPPED:  {"○", "stopped", dimInk},
	pb.InstanceState_INSTANCE_STATE_FAILED:   {"✕", "failed", badInk},
}

var rankWords = map[pb.RankState]word{
	pb.RankState_RANK_STATE_WAITING:  {"○", "waiting", dimInk},
	pb.RankState_RANK_STATE_STARTING: {"◐", "starting", moveInk},
	pb.RankState_RANK_STATE_READY:    {"●", "ready", plainInk},
	pb.RankState_RANK_STATE_STOPPING: {"◐", "stopping", moveInk},
	pb.RankState_RANK_STATE_EXITED:   {"✕", "ended", badInk},
	pb.RankState_RANK_STATE_UNKNOWN:  {"○", "cannot be asked", lookInk},
}

var transferWords = map[pb.TransferState]word{
	pb.TransferState_TRANSFER_STATE_SCANNING:   {"◐", "reading the list of files", moveInk},
	pb.TransferState_TRANSFER_STATE_CONNECTING: {"◐", "connecting", moveInk},
	pb.TransferState_TRANSFER_STATE_COPYING:    {"▶", "copying", moveInk},
	pb.TransferState_TRANSFER_STATE_SYNCING:    {"◐", "making it durable", moveInk},
	pb.TransferState_TRANSFER_STATE_DONE:       {"●", "done", plainInk},
	pb.TransferState_TRANSFER_STATE_FAILED:     {"✕", "failed", badInk},
	pb.TransferState_TRANSFER_STATE_CANCELLED:  {"○", "cancelled", dimInk},
	pb.TransferState_TRANSFER_STATE_PAUSED:     {"‖", "paused", lookInk},
}

var severityWords = map[pb.Severity]word{
	pb.Severity_SEVERITY_INFO:    {"i", "worth knowing", plainInk},
	pb.Severity_SEVERITY_WARNING: {"▲", "to look at", lookInk},
	pb.Severity_SEVERITY_ERROR:   {"✕", "broken", badInk},
}

// say looks a state up; a value of a newer agent is shown as what it is.
func say[S interface {
	comparable
	String() string
}](table map[S]word, s S) word {
	if w, ok := table[s]; ok {
		return w
	}
	return word{"?", strings.ToLower(s.String()), lookInk}
}

func isEnded(s pb.InstanceState) bool {
	return s == pb.InstanceState_INSTANCE_STATE_STOPPED || s == pb.InstanceState_INSTANCE_STATE_FAILED
}

func isOver(s pb.TransferState) bool {
	switch s {
	case pb.TransferState_TRANSFER_STATE_DONE, pb.TransferState_TRANSFER_STATE_FAILED, pb.TransferState_TRANSFER_STATE_CANCELLED:
		return true
	}
	return false
}

// memoryText is memory in binary units, as it is sold.
func memoryText(b uint64) string {
	const gib = 1 << 30
	switch {
	case b == 0:
		return "?"
	case b < gib:
		return fmt.Sprintf("%d MiB", b>>20)
	case b < 10*gib && b%gib != 0:
		return fmt.Sprintf("%.1f GiB", float64(b)/gib)
	}
	return fmt.Sprintf("%.0f GiB", float64(b)/gib)
}

// sizeText is bytes in powers of ten, three figures at most.
func sizeText(b uint64) string { return metric(float64(b), "B") }

// rateText is bytes a second.
func rateText(b uint64) string { return metric(float64(b), "B/s") }

func metric(v float64, unit string) string {
	prefixes := []string{"", "k", "M", "G", "T", "P", "E"}
	i := 0
	for v >= 999.5 && i < len(prefixes)-1 {
		v /= 1000
		i++
	}
	if i == 0 || v >= 9.95 {
		return fmt.Sprintf("%.0f %s%s", v, prefixes[i], unit)
	}
	return fmt.Sprintf("%.1f %s%s", v, prefixes[i], unit)
}

// gbpsText is a link's rate without its unit.
func gbpsText(g float64) string {
	if g <= 0 || math.IsNaN(g) || math.IsInf(g, 0) {
		return "?"
	}
	if g == math.Trunc(g) || g >= 100 {
		return fmt.Sprintf("%.0f", g)
	}
	return fmt.Sprintf("%.1f", g)
}

// clockText is a duration as 0:41 or 1:02:03.
func clockText(d time.Duration) string {
	if d < 0 {
		d = 0
	}
	s := int64(d.Round(time.Second) / time.Second)
	if s >= 3600 {
		return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
	}
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}

// agoText is how long something has lasted, roughly.
func agoText(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d/time.Second))
	case d < time.Hour:
		return fmt.Sprintf("%d min", int(d/time.Minute))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d/time.Hour))
	}
	return fmt.Sprintf("%d days", int(d/(24*time.Hour)))
}

func rttText(us uint64) string {
	switch {
	case us == 0:
		return "?"
	case us < 10_000:
		return fmt.Sprintf("%.2g ms", float64(us)/1000)
	}
	return fmt.Sprintf("%d ms", us/1000)
}

// percent is done of total, never 100 before all is done.
func percent(done, total uint64) int {
	if total == 0 {
		return 0
	}
	if done >= total {
		return 100
	}
	return int(float64(done) / float64(total) * 100)
}

// count is "1 node", "3 nodes".
func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// bar is a bar of w cells, filled to done of total in eighths.
func bar(done, total uint64, w int) string {
	if w < 1 {
		return ""
	}
	f := 0.0
	if total > 0 {
		f = math.Min(1, float64(done)/float64(total))
	}
	eighths := int(f * float64(w) * 8)
	full := eighths / 8
	s := strings.Repeat("█", full)
	if rest := eighths % 8; rest > 0 && full < w {
		s += string([]rune(" ▏▎▍▌▋▊▉")[rest])
		full++
	}
	return s + strings.Repeat("░", w-full)
}

// spark is the last w of the values as a small chart; all zero is flat.
func spark(values []uint64, w int) string {
	if w < 1 {
		return ""
	}
	if len(values) > w {
		values = values[len(values)-w:]
	}
	var most uint64
	for _, v := range values {
		most = max(most, v)
	}
	levels := []rune("▁▂▃▄▅▆▇█")
	var b strings.Builder
	for range w - len(values) {
		b.WriteRune(' ')
	}
	for _, v := range values {
		i := 0
		if most > 0 {
			i = int(float64(v) / float64(most) * float64(len(levels)-1))
		}
		b.WriteRune(levels[i])
	}
	return b.String()
}

func since(ts interface{ AsTime() time.Time }, now time.Time) time.Duration {
	return now.Sub(ts.AsTime())
}
