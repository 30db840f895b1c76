package linux

import (
	"tbcluster/host"
)

// Options of New. The zero value is a real machine.
type Options struct {
	// SysfsRoot holds bus/thunderbolt and class/net; "/sys" if "".
	SysfsRoot string
	// MemoryBytes, if not 0, is the memory that this machine says it has.
	MemoryBytes uint64
	// ProcRoot, EtcRoot and RunRoot stand for /proc, /etc and /run in tests.
	ProcRoot, EtcRoot, RunRoot string
	// Clock is the time; the system's if nil.
	Clock host.Clock
}

// New returns the machine that this process runs on.
func New(o Options) host.Host { return newHost(o) }
