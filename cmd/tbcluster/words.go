package main

import (
	"fmt"
	"strings"
	"time"
	"unicode"

	tbv1 "tbcluster/api/tbcluster/v1"
)

// plain makes text that came from a network safe to print: control characters
// and the like are shown as escapes instead of being obeyed by the terminal.
func plain(s string) string {
	if !strings.ContainsFunc(s, unsafeRune) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		switch {
		case !unsafeRune(r):
			b.WriteRune(r)
		case r < 0x80:
			fmt.Fprintf(&b, `\x%02x`, r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// unsafeRune reports whether r is a control, a direction override or a byte
// that is no UTF-8. Tabs stay.
func unsafeRune(r rune) bool {
	return r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == unicode.ReplacementChar)
}

// bytesText returns a size for people in decimal units ("98.4 MB"), as disks
// and cables are sold.
func bytesText(n uint64) string {
	units := []string{"B", "kB", "MB", "GB", "TB", "PB", "EB"}
	v, i := float64(n), 0
	for v >= 999.5 && i < len(units)-1 {
		v /= 1000
		i++
	}
	switch {
	case i == 0:
		return fmt.Sprintf("%d B", n)
	case v < 9.995:
		return fmt.Sprintf("%.2f %s", v, units[i])
	case v < 99.95:
		return fmt.Sprintf("%.1f %s", v, units[i])
	}
	return fmt.Sprintf("%.0f %s", v, units[i])
}

// memoryText returns a memory size for people in binary units, as memory is
// sold ("128 GiB").
func memoryText(n uint64) string {
	const gib = 1 << 30
	if n < gib {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	v := float64(n) / gib
	if v < 10 {
		return fmt.Sprintf("%.1f GiB", v)
	}
	return fmt.Sprintf("%.0f GiB", v)
}

// rateText returns a rate for people ("3.10 GB/s"); "-" when there is none.
func rateText(n uint64) string {
	if n == 0 {
		return "-"
	}
	return bytesText(n) + "/s"
}

// rttText returns a round trip given in microseconds; "-" when unknown.
func rttText(us uint64) string {
	switch {
	case us == 0:
		return "-"
	case us < 10_000:
		return fmt.Sprintf("%.2f ms", float64(us)/1000)
	}
	return fmt.Sprintf("%.0f ms", float64(us)/1000)
}

// gbpsText returns a link's rate; "?" when unknown.
func gbpsText(v float64) string {
	if v == 0 {
		return "?"
	}
	return fmt.Sprintf("%g", v)
}

// clockText returns a span as m:ss or h:mm:ss.
func clockText(d time.Duration) string {
	s := int(d.Round(time.Second).Seconds())
	if s >= 3600 {
		return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
	}
	return fmt.Sprintf("%d:%02d", s/60, s%60)
}

// agoText returns a span since t in one unit ("3 min").
func agoText(now, t time.Time) string {
	if t.IsZero() || t.Unix() == 0 {
		return "-"
	}
	d := now.Sub(t)
	switch {
	case d < 0:
		return "0 s"
	case d < 100*time.Second:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 100*time.Minute:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// count returns "1 node", "3 nodes".
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// orDash returns "-" for nothing.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return plain(s)
}

// enumWord returns the word for a value of an enum: its name without the
// common prefix, in lower case ("LINK_STATE_PROVEN" is "proven"). A value that
// this version does not know is its number, one that was not said "unknown".
func enumWord(name, prefix string) string {
	w := strings.ToLower(strings.TrimPrefix(name, prefix))
	if w == "unspecified" {
		return "unknown"
	}
	return w
}

func nodeStateWord(s tbv1.NodeState) string { return enumWord(s.String(), "NODE_STATE_") }
func linkStateWord(s tbv1.LinkState) string { return enumWord(s.String(), "LINK_STATE_") }

// obstacleWord is empty where nothing is known to be in the way.
func obstacleWord(o tbv1.LinkObstacle) string {
	if o == tbv1.LinkObstacle_LINK_OBSTACLE_UNSPECIFIED {
		return ""
	}
	return enumWord(o.String(), "LINK_OBSTACLE_")
}

func rankStateWord(s tbv1.RankState) string { return enumWord(s.String(), "RANK_STATE_") }
func instanceStateWord(s tbv1.InstanceState) string {
	return enumWord(s.String(), "INSTANCE_STATE_")
}
func transferStateWord(s tbv1.TransferState) string {
	return enumWord(s.String(), "TRANSFER_STATE_")
}
func severityWord(s tbv1.Severity) string { return enumWord(s.String(), "SEVERITY_") }
func roleWord(r tbv1.Role) string         { return enumWord(r.String(), "ROLE_") }
