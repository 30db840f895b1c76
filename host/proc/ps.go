package proc

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// parsePS parses a line of `ps -o rss=,time=`: KiB, and [[dd-]hh:]mm:ss[.cc].
func parsePS(line string) (Usage, error) {
	fields := strings.Fields(line)
	if len(fields) != 2 {
		return Usage{}, fmt.Errorf("output of ps: %q", line)
	}
	kib, err := strconv.ParseUint(fields[0], 10, 54)
	if err != nil {
		return Usage{}, fmt.Errorf("output of ps: memory: %w", err)
	}
	var total float64
	units := fields[1]
	if days, rest, ok := strings.Cut(units, "-"); ok {
		d, err := strconv.ParseUint(days, 10, 16)
		if err != nil {
			return Usage{}, fmt.Errorf("output of ps: days: %w", err)
		}
		total, units = float64(d)*24, rest
		if strings.Count(units, ":") != 2 {
			return Usage{}, fmt.Errorf("output of ps: time %q", fields[1])
		}
	}
	parts := strings.Split(units, ":")
	if len(parts) < 2 || len(parts) > 3 {
		return Usage{}, fmt.Errorf("output of ps: time %q", fields[1])
	}
	for i, part := range parts {
		n, err := strconv.ParseFloat(part, 64)
		if err != nil || !(n >= 0 && n < 1e6) {
			return Usage{}, fmt.Errorf("output of ps: time %q", fields[1])
		}
		if i > 0 || total == 0 {
			total = total*60 + n
		} else {
			total += n // hours after days
		}
	}
	return Usage{RSS: kib << 10, CPU: time.Duration(total * float64(time.Second))}, nil
}
