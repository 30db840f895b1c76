package proc

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Trim gives back the pages of this program's own file that are in memory: those
// that are used again come from the page cache, and most were for the start
// alone. Pages that were written to are left.
func Trim() error {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		m, ok := parseMapping(lines.Text())
		if !ok || m.file != exe || strings.Contains(m.may, "w") || !strings.HasSuffix(m.may, "p") {
			continue
		}
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, m.from, m.to-m.from, unix.MADV_DONTNEED)
		if errno != 0 {
			return fmt.Errorf("give back %x-%x: %w", m.from, m.to, errno)
		}
	}
	return nil
}

// mapping is a line of /proc/PID/maps (proc_pid_maps(5)).
type mapping struct {
	from, to uintptr
	may      string // "r-xp"
	file     string
}

// parseMapping reads a line; it is no mapping of a file where ok is false.
func parseMapping(line string) (m mapping, ok bool) {
	f := strings.Fields(line)
	if len(f) < 6 || !strings.HasPrefix(f[5], "/") {
		return mapping{}, false
	}
	var from, to uintptr
	if n, err := fmt.Sscanf(f[0], "%x-%x", &from, &to); n != 2 || err != nil || from >= to {
		return mapping{}, false
	}
	// A name may hold spaces; a file that was replaced ends in " (deleted)", as
	// the link of /proc/PID/exe does.
	at := strings.Index(line, f[5])
	return mapping{from, to, f[1], line[at:]}, true
}
