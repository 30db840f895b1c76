package linux

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"tbcluster/host"
)

// manager is a program that configures interfaces by itself, and how it is told
// to leave one alone.
type manager struct {
	name string
	comm string // as the kernel has it: 15 bytes
	// dir below /run exists when the manager has run since boot.
	dir string
	// state below /run is what it writes for an interface index.
	state string
	// fights tells from that file whether it manages the interface.
	fights func(state string) bool
	// file below /run tells it to leave an interface alone, content is its text.
	file    string
	content string
	// reload are the words of the command that makes it read the file.
	reload []string
	// hangup is set where SIGHUP does the same.
	hangup bool
}

// managers are those that we know.
var managers = []manager{
	{
		name: "NetworkManager", comm: "NetworkManager",
		dir:   "NetworkManager",
		state: "NetworkManager/devices/%d",
		// NetworkManager.conf(5): the device's file has managed=true or false.
		fights:  func(s string) bool { return value(s, "managed") == "true" },
		file:    "NetworkManager/conf.d/90-tbcluster-%s.conf",
		content: "[keyfile]\nunmanaged-devices+=interface-name:%s\n",
		reload:  []string{"nmcli", "general", "reload", "conf"},
		hangup:  true,
	},
	{
		name: "systemd-networkd", comm: "systemd-network",
		dir:   "systemd/netif",
		state: "systemd/netif/links/%d",
		// ADMIN_STATE, as networkctl(1) shows it under SETUP.
		fights: func(s string) bool {
			switch value(s, "ADMIN_STATE") {
			case "configuring", "configured", "failed", "linger":
				return true
			}
			return false
		},
		file:    "systemd/network/10-tbcluster-%s.network",
		content: "[Match]\nName=%s\n\n[Link]\nUnmanaged=yes\n",
		reload:  []string{"networkctl", "reload"},
	},
}

// managerNamed returns the manager of that name.
func managerNamed(name string) (manager, bool) {
	for _, m := range managers {
		if m.name == name {
			return m, true
		}
	}
	return manager{}, false
}

// path returns the file that tells m to leave iface alone.
func (m manager) path(run, iface string) string {
	return filepath.Join(run, fmt.Sprintf(m.file, iface))
}

// text returns what that file says.
func (m manager) text(iface string) string { return fmt.Sprintf(m.content, iface) }

// value returns the value of key in lines of key=value.
func value(text, key string) string {
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok && k == key {
			return v
		}
	}
	return ""
}

// rescan is how long a look for running managers holds.
const rescan = 30 * time.Second

// seeker finds which managers run.
type seeker struct {
	proc  string
	run   string
	clock host.Clock

	mu     sync.Mutex
	looked time.Time
	pids   map[string]int // by manager name
}

// running returns the process IDs of running managers by name. It looks
// through all processes at most every rescan, and only on a machine that a
// manager has run on; that a known one still runs is looked at each time.
func (s *seeker) running() (map[string]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock.Now()
	fresh := !s.looked.IsZero() && now.Sub(s.looked) < rescan && !now.Before(s.looked)
	for name, pid := range s.pids {
		m, _ := managerNamed(name)
		comm, err := readText(s.proc, fmt.Sprint(pid), "comm")
		if err != nil {
			return nil, err
		}
		if comm != m.comm {
			fresh = false
		}
	}
	if !fresh {
		pids, err := s.look()
		if err != nil {
			return nil, err
		}
		s.pids, s.looked = pids, now
	}
	return s.pids, nil
}

func (s *seeker) look() (map[string]int, error) {
	comms := map[string]string{}
	for _, m := range managers {
		if _, err := os.Stat(filepath.Join(s.run, m.dir)); err == nil {
			comms[m.comm] = m.name
		}
	}
	found := map[string]int{}
	if len(comms) == 0 {
		return found, nil
	}
	list, err := names(s.proc)
	if err != nil {
		return nil, fmt.Errorf("look for network managers: %w", err)
	}
	for _, name := range list {
		pid, err := parseIndex(name)
		if err != nil {
			continue
		}
		comm, err := readText(s.proc, name, "comm")
		if err != nil {
			return nil, fmt.Errorf("look for network managers: %w", err)
		}
		if m, ok := comms[comm]; ok {
			found[m] = pid
		}
	}
	return found, nil
}

// managedBy returns which running manager would fight over an interface.
func (s *seeker) managedBy(iface string, index int) (string, error) {
	running, err := s.running()
	if err != nil {
		return "", err
	}
	for _, m := range managers {
		if running[m.name] == 0 {
			continue
		}
		state, err := readText(s.run, fmt.Sprintf(m.state, index))
		if err != nil {
			return "", err
		}
		told, err := readText(m.path(s.run, iface))
		if err != nil {
			return "", err
		}
		if m.fights(state) && told == "" {
			return m.name, nil
		}
	}
	return "", nil
}
