package guest

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Record is one entry of the kernel's log.
type Record struct {
	Level    int           // 0 emergency … 7 debug
	Facility int           // 0 is the kernel, all else are programs that wrote to /dev/kmsg
	Sequence uint64        // counts up; a gap is what was lost
	Time     time.Duration // since the kernel started
	Text     string
}

// String is the record as dmesg prints it.
func (r Record) String() string {
	return fmt.Sprintf("[%5d.%06d] %s", r.Time/time.Second, r.Time%time.Second/time.Microsecond, r.Text)
}

// ParseRecord reads the first line of a record of /dev/kmsg
// (Documentation/ABI/testing/dev-kmsg): "level,sequence,microseconds,flags;text".
// Lines of a record that begin with a space are not for it.
func ParseRecord(line string) (Record, error) {
	head, text, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ";")
	if !ok {
		return Record{}, errors.New("a record of the kernel's log without a semicolon")
	}
	f := strings.Split(head, ",")
	if len(f) < 3 {
		return Record{}, errors.New("a record of the kernel's log with too few fields")
	}
	priority, err := strconv.ParseUint(f[0], 10, 31)
	if err != nil {
		return Record{}, fmt.Errorf("the level of a record of the kernel's log: %w", err)
	}
	sequence, err := strconv.ParseUint(f[1], 10, 64)
	if err != nil {
		return Record{}, fmt.Errorf("the number of a record of the kernel's log: %w", err)
	}
	us, err := strconv.ParseUint(f[2], 10, 53)
	if err != nil {
		return Record{}, fmt.Errorf("the time of a record of the kernel's log: %w", err)
	}
	return Record{
		Level: int(priority & 7), Facility: int(priority >> 3), Sequence: sequence,
		Time: time.Duration(us) * time.Microsecond, Text: text,
	}, nil
}
