package main

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/rig/guest/wire"
)

// runAgent serves one session. It ends with an error when the port does, and is
// started again.
func runAgent() error {
	port, err := openPort("/sys/class/virtio-ports", "/dev")
	if err != nil {
		return err
	}
	defer port.Close()
	greeting, err := greet()
	if err != nil {
		return err
	}
	var id [4]byte
	if _, err := rand.Read(id[:]); err != nil {
		return err
	}
	session := binary.BigEndian.Uint32(id[:])
	w := wire.NewWriter(port)
	a := agent{system: greeting.System}
	mux := wire.NewMux(w, session, a.serve)
	payload, err := wire.Encode(greeting)
	if err != nil {
		return err
	}
	if err := w.WritePreamble(); err != nil {
		return fmt.Errorf("write to the port: %w", err)
	}
	if err := w.Write(wire.Frame{Session: session, Type: wire.Hello, Payload: payload}); err != nil {
		return fmt.Errorf("write to the port: %w", err)
	}
	r := wire.NewReader(port)
	for {
		f, err := r.Read()
		if err == nil {
			err = mux.Handle(f)
		}
		if err != nil {
			mux.Close(err)
			return fmt.Errorf("the port: %w", err)
		}
	}
}

// openPort finds the agent's virtio-serial port by its name.
func openPort(class, dev string) (*os.File, error) {
	for range 500 {
		names, err := filepath.Glob(filepath.Join(class, "*", "name"))
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			b, err := os.ReadFile(n)
			if err != nil || strings.TrimSpace(string(b)) != wire.Port {
				continue
			}
			f, err := os.OpenFile(filepath.Join(dev, filepath.Base(filepath.Dir(n))), os.O_RDWR, 0)
			if err == nil {
				return f, nil
			}
			if !os.IsNotExist(err) { // its node comes a little later
				return nil, err
			}
		}
		time.Sleep(20 * time.Millisecond) // drivers find their devices in their own time
	}
	return nil, fmt.Errorf("there is no virtio-serial port %s", wire.Port)
}

func greet() (wire.Greeting, error) {
	g := wire.Greeting{Version: wire.Version, System: "initramfs"}
	if st, err := os.Stat("/run/systemd/system"); err == nil && st.IsDir() {
		g.System = "systemd"
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return g, err
	}
	g.Release = unix.ByteSliceToString(u.Release[:])
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return g, err
	}
	g.BootID = strings.TrimSpace(string(boot))
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return g, err
	}
	g.Uptime = time.Duration(now.Nano())
	return g, nil
}

// agent serves streams.
type agent struct{ system string }

func (a agent) serve(s *wire.Stream, r wire.Request) {
	result := wire.Result{Code: -1}
	var err error
	switch r.Kind {
	case wire.Exec:
		result, err = execute(s, r)
	case wire.Push:
		result, err = receiveFile(s, r)
	case wire.Pull:
		result, err = sendFile(s, r)
	case wire.Log:
		err = sendLog(s)
	case wire.Reboot, wire.Off:
		err = a.power(s, r.Kind)
	}
	if err != nil {
		result = wire.Result{Code: -1, Error: err.Error()}
	}
	if err := s.Finish(result); err != nil {
		fmt.Fprintln(os.Stderr, "guestd: the end of a stream was not sent:", err)
	}
}

// power ends the machine. The answer is on its way before it is done.
func (a agent) power(s *wire.Stream, kind string) error {
	if a.system == "systemd" {
		verb := map[string]string{wire.Reboot: "reboot", wire.Off: "poweroff"}[kind]
		_, err := execute(s, wire.Request{Args: []string{"systemctl", "--no-block", verb}, NoInput: true})
		return err
	}
	if err := s.Finish(wire.Result{}); err != nil {
		return err
	}
	unix.Sync()
	return unix.Reboot(map[string]int{wire.Reboot: unix.LINUX_REBOOT_CMD_RESTART, wire.Off: unix.LINUX_REBOOT_CMD_POWER_OFF}[kind])
}
