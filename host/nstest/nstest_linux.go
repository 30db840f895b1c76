package nstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// inside marks the test binary that already runs in its own namespace.
const inside = "TBCLUSTER_TEST_NAMESPACE"

// Main runs the tests of a package in a new network namespace in which the
// loopback is up: call it from TestMain. Without root it makes a user namespace
// too, in which the tests are root with the one user there is.
func Main(m *testing.M) {
	if os.Getenv(inside) != "" {
		os.Exit(m.Run())
	}
	code, err := again(os.Args[1:], true)
	if err != nil {
		fmt.Fprintln(os.Stderr, "run the tests in a network namespace of their own (this needs root, or user namespaces):", err)
		os.Exit(1)
	}
	os.Exit(code)
}

// Alone runs the calling test, and no other, in a new network namespace, for
// packages whose other tests have no use for one. It is false in the process that
// has waited for that: the test then returns.
func Alone(t *testing.T) bool {
	t.Helper()
	if os.Getenv(inside) != "" {
		return true
	}
	code, err := again([]string{"-test.run=^" + t.Name() + "$", "-test.v", "-test.count=1"}, false)
	if err != nil {
		t.Fatal("run it in a network namespace of its own (this needs root, or user namespaces):", err)
	}
	if code != 0 {
		t.Errorf("in its namespace it ended with %d", code)
	}
	return false
}

// again runs this test binary in a namespace. inherit hands on the descriptors by
// which go test and its fuzzing talk.
func again(args []string, inherit bool) (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(self, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inside+"=1")
	for fd := uintptr(3); inherit && fd < 6; fd++ {
		if _, err := unix.FcntlInt(fd, unix.F_GETFD, 0); err != nil {
			break
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(fd, "inherited"))
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	// The parent's death ends the child; the thread must live as long.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer signal.Stop(stop)
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case s := <-stop:
				_ = cmd.Process.Signal(s) // it may have ended
			case <-done:
				return
			}
		}
	}()
	err = cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if exit.ExitCode() < 0 {
			return 0, err
		}
		return exit.ExitCode(), nil
	}
	return 0, err
}

// Namespace is a network namespace.
type Namespace struct {
	t      testing.TB
	handle netns.NsHandle
	file   *os.File // the same, for programs
}

// Own returns the namespace that the tests run in, with the loopback up.
func Own(t testing.TB) *Namespace {
	t.Helper()
	h, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	return hold(t, h)
}

// New returns a new, empty one, with the loopback up. It ends with the test.
func New(t testing.TB) *Namespace {
	t.Helper()
	runtime.LockOSThread()
	before, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	h, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	if err := netns.Set(before); err != nil {
		t.Fatal(err) // the thread stays locked and ends with the test
	}
	runtime.UnlockOSThread()
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	return hold(t, h)
}

func hold(t testing.TB, h netns.NsHandle) *Namespace {
	t.Helper()
	n := &Namespace{t: t, handle: h, file: os.NewFile(uintptr(h), "network namespace")}
	t.Cleanup(func() {
		if err := n.file.Close(); err != nil {
			t.Error(err)
		}
	})
	n.Do(func() {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			t.Error(err)
		}
	})
	return n
}

// Do calls f on a thread in the namespace. What f starts in other goroutines is
// not in it; sockets stay where they were opened.
func (n *Namespace) Do(f func()) {
	n.t.Helper()
	done := make(chan error, 1)
	go func() {
		// A failing test in f ends this goroutine, and its thread with it.
		err := errors.New("it did not come back from the namespace")
		defer func() { done <- err }()
		runtime.LockOSThread()
		var before netns.NsHandle
		if before, err = netns.Get(); err != nil {
			return
		}
		defer before.Close()
		if err = netns.Set(n.handle); err != nil {
			return
		}
		err = errors.New("it did not come back from the namespace")
		f()
		if err = netns.Set(before); err == nil {
			runtime.UnlockOSThread()
		}
	}()
	if err := <-done; err != nil {
		n.t.Fatal(err)
	}
}

// Run runs a program in the namespace and returns its output; a failure ends
// the test.
func (n *Namespace) Run(name string, args ...string) string {
	n.t.Helper()
	var out []byte
	var err error
	n.Do(func() { out, err = exec.Command(name, args...).CombinedOutput() })
	if err != nil {
		n.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Cable joins two namespaces by a pair of virtual interfaces, both up.
func Cable(t testing.TB, a *Namespace, nameA string, b *Namespace, nameB string) {
	t.Helper()
	a.Do(func() {
		err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: nameA}, PeerName: nameB, PeerNamespace: netlink.NsFd(int(b.handle)),
		})
		if err != nil {
			t.Errorf("make cable %s-%s: %v", nameA, nameB, err)
		}
	})
	for _, end := range []struct {
		ns   *Namespace
		name string
	}{{a, nameA}, {b, nameB}} {
		end.ns.Do(func() {
			l, err := netlink.LinkByName(end.name)
			if err == nil {
				err = netlink.LinkSetUp(l)
			}
			if err != nil {
				t.Errorf("set %s up: %v", end.name, err)
			}
		})
	}
	if t.Failed() {
		t.FailNow()
	}
}

// Cut destroys an interface of the namespace, and the other end with it.
func (n *Namespace) Cut(name string) {
	n.t.Helper()
	n.Do(func() {
		l, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkDel(l)
		}
		if err != nil {
			n.t.Errorf("cut %s: %v", name, err)
		}
	})
}

// Address adds an address ("10.0.0.1/24") to an interface of the namespace.
func (n *Namespace) Address(name, prefix string) {
	n.t.Helper()
	n.Do(func() {
		l, err := netlink.LinkByName(name)
		if err != nil {
			n.t.Error(err)
			return
		}
		a, err := netlink.ParseAddr(prefix)
		if err != nil {
			n.t.Error(err)
			return
		}
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(l, a); err != nil {
			n.t.Errorf("address %s on %s: %v", prefix, name, err)
		}
	})
}
