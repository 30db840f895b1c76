package tui

import (
	"fmt"
	"slices"
	"strings"

	pb "tbcluster/api/tbcluster/v1"
)

var transferColumns = []column{{flex: true, min: 12}, {right: true}, {right: true, drop: 2}, {right: true, drop: 3}}

func drawTransfers(f frame) ([]string, string) {
	if len(f.items) == 0 {
		return f.empty("nothing is being copied", "C copies a model to another node"), ""
	}
	var cells [][]cell
	for _, it := range f.items {
		t := f.s.transfer(it.id)
		w := say(transferWords, t.GetState())
		name := cell{w.symbol + " " + transferName(f.s, t), w.ink}
		if w.ink == plainInk || w.ink == moveInk {
			name.ink = boldInk
		}
		status, rate, eta := cell{w.text, w.ink}, cell{}, cell{}
		switch t.GetState() {
		case pb.TransferState_TRANSFER_STATE_COPYING:
			status = cell{fmt.Sprintf("%d %%", percent(t.GetDoneBytes(), t.GetTotalBytes())), plainInk}
			rate = cell{rateText(t.GetBytesPerSecond()), moveInk}
			eta = cell{etaText(t), plainInk}
		case pb.TransferState_TRANSFER_STATE_PAUSED:
			status.text = fmt.Sprintf("paused %d %%", percent(t.GetDoneBytes(), t.GetTotalBytes()))
		case pb.TransferState_TRANSFER_STATE_SCANNING:
			status.text = "reading files"
		case pb.TransferState_TRANSFER_STATE_SYNCING:
			status.text = "syncing disk"
		}
		cells = append(cells, []cell{name, status, rate, eta})
	}
	var moving [][]cell
	for _, c := range cells {
		// Those that do not move are no part of the columns of numbers.
		if c[2].text != "" {
			moving = append(moving, c)
		}
	}
	widths, gap := layout(transferColumns, moving, f.w-2)
	var rows []row
	for n, it := range f.items {
		t := f.s.transfer(it.id)
		r := row{it.id, []string{f.tableLine(transferColumns, widths, gap, cells[n])}}
		if c := cells[n]; c[2].text == "" {
			r.lines[0] = spread(f.put(c[0].ink, cut(c[0].text, f.w-3-width(c[1].text))), f.put(c[1].ink, c[1].text), f.w-2)
		}
		if l := f.transferSecond(t); l != "" {
			r.lines = append(r.lines, l)
		}
		rows = append(rows, r)
	}
	return f.list(nil, rows)
}

func etaText(t *pb.Transfer) string {
	if t.GetEta() == nil {
		return "–:––"
	}
	return clockText(t.GetEta().AsDuration())
}

// transferSecond is the line below: how it goes, or how it went.
func (f frame) transferSecond(t *pb.Transfer) string {
	room := f.w - 4
	switch t.GetState() {
	case pb.TransferState_TRANSFER_STATE_COPYING, pb.TransferState_TRANSFER_STATE_SYNCING, pb.TransferState_TRANSFER_STATE_PAUSED:
		by := f.overText(t)
		left := room
		if by != "" {
			left -= width(by) + 1
		}
		var parts []string
		if t.GetState() == pb.TransferState_TRANSFER_STATE_COPYING {
			// The percentage stands above, so where there is room for one only
			// the rate's last half minute says more than a bar.
			n := min(max(left, 8), rateSeconds)
			if left >= 2*rateSeconds {
				parts = append(parts, f.put(moveInk, bar(t.GetDoneBytes(), t.GetTotalBytes(), min(left-n-1, 40))))
			}
			parts = append(parts, f.put(moveInk, spark(f.s.rates.transfer[t.GetId()], n)))
		} else {
			parts = append(parts, f.put(moveInk, bar(t.GetDoneBytes(), t.GetTotalBytes(), min(max(left, 8), 40))))
		}
		if by != "" {
			parts = append(parts, by)
		}
		return "  " + cut(strings.Join(parts, " "), room)
	case pb.TransferState_TRANSFER_STATE_DONE:
		return "  " + f.put(dimInk, cut(strings.TrimPrefix(doneText(t), ", "), room))
	case pb.TransferState_TRANSFER_STATE_FAILED:
		return "  " + f.put(badInk, cut(cmpOr(cmpOr(t.GetError().GetWhy(), t.GetError().GetWhat()), "no reason was given"), room))
	case pb.TransferState_TRANSFER_STATE_CANCELLED:
		return "  " + f.put(dimInk, cut("what arrived is kept for a later copy", room))
	}
	return ""
}

// overText is what carries the bytes: cables with the rate of each in GB/s, or
// a warning that it is none.
func (f frame) overText(t *pb.Transfer) string {
	// A way that carries nothing any more is no news, unless none carries.
	now := slices.DeleteFunc(slices.Clone(t.GetLinks()), func(l *pb.LinkProgress) bool { return l.GetBytesPerSecond() == 0 })
	if len(now) == 0 {
		now = t.GetLinks()
	}
	var each []string
	var lan *pb.LinkProgress
	cables := 0
	for _, l := range now {
		switch {
		case withinOne(t, l):
			continue
		case l.GetLinkId() == "":
			lan = l
		default:
			cables++
		}
		each = append(each, fmt.Sprintf("%.1f", float64(l.GetBytesPerSecond())/1e9))
	}
	switch {
	case cables == 0 && lan != nil:
		return f.put(lookInk, "▲ "+lanText(lan)+", no cable")
	case cables == 0:
		return ""
	case lan != nil:
		return f.put(lookInk, "▲ partly "+lanText(lan)+": "+strings.Join(each, " + "))
	case cables == 1:
		return "1 cable"
	}
	return count(cables, "cable", "cables") + ": " + strings.Join(each, " + ")
}

// lanText is a way of bytes that is no cable.
func lanText(l *pb.LinkProgress) string {
	return strings.TrimSpace("LAN " + l.GetInterface())
}

// withinOne reports whether bytes stay on their node, also where the agent is of
// a version that does not say.
func withinOne(t *pb.Transfer, l *pb.LinkProgress) bool {
	if l.GetKind() != "" {
		return l.GetKind() == "loopback"
	}
	return l.GetLinkId() == "" && t.GetSourceNodeId() == t.GetDestinationNodeId()
}
