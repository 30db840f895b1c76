//go:build linux

package usb4

import (
	"encoding/binary"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// SystemClock is the clock of the machine. Its alarms are timers of the kernel
// (timerfd), which go off within some tens of microseconds where those of the
// Go runtime may take a millisecond.
type SystemClock struct{}

// epoch is where the clock begins.
var epoch = time.Now()

// Now returns the time since the program began.
func (SystemClock) Now() time.Duration { return time.Since(epoch) }

// NewAlarm returns an alarm.
func (SystemClock) NewAlarm(f func()) (Alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fault.New(fault.Internal, "make a timer", err, "")
	}
	a := &systemAlarm{file: os.NewFile(uintptr(fd), "timerfd")}
	raw, err := a.file.SyscallConn()
	if err != nil {
		return nil, fault.New(fault.Internal, "make a timer", err, "")
	}
	a.set = func(at time.Duration) {
		spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(int64(at-SystemClock{}.Now()), 1))}
		// An alarm that was closed meanwhile has nothing to wake.
		_ = raw.Control(func(fd uintptr) { _ = unix.TimerfdSettime(int(fd), 0, &spec, nil) })
	}
	go func() {
		var b [8]byte
		for {
			if _, err := a.file.Read(b[:]); err != nil {
				return // closed
			}
			if binary.NativeEndian.Uint64(b[:]) > 0 {
				f()
			}
		}
	}()
	return a, nil
}

type systemAlarm struct {
	file *os.File
	set  func(time.Duration)
}

func (a *systemAlarm) Set(at time.Duration) { a.set(at) }
func (a *systemAlarm) Close() error         { return a.file.Close() }
