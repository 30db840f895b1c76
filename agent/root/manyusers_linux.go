package root

import (
	"os"
	"strings"
)

// ManyUsers reports whether this process can become other users: in a user
// namespace with a single mapped uid it cannot, root or not.
func ManyUsers() bool {
	data, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return true
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	f := strings.Fields(lines[0])
	return len(lines) > 1 || len(f) < 3 || f[2] != "1"
}
