package transfer

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tbcluster/api/fault"
)

// isolated runs the test again in mount and network namespaces of its own,
// which ordinary users may make too, and returns true there.
func isolated(t *testing.T) bool {
	if os.Getenv("TRANSFER_TEST_INSIDE") == t.Name() {
		return true
	}
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1")
	cmd.Env = append(os.Environ(), "TRANSFER_TEST_INSIDE="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) {
		t.Skipf("this system lets nobody make namespaces: %v", err)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return false
}

// loopbackUp brings the loopback of a new network namespace up.
func loopbackUp(t *testing.T) netlink.Link {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.LinkSetUp(lo))
	return lo
}

// smallDisk mounts a file system of some size.
func smallDisk(t *testing.T, dir string, bytes int) {
	t.Helper()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+strconv.Itoa(bytes)))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
}

func TestAFullDiskIsSaidBeforeAnythingIsSent(t *testing.T) {
	if !isolated(t) {
		return
	}
	c := newCluster(t)
	loopbackUp(t)
	smallDisk(t, c.home("beta"), 8<<20)
	write(t, c.home("alpha", "d/a"), random(t, 5<<20))
	write(t, c.home("alpha", "d/b"), random(t, 6<<20))
	_, err := c.cp(Options{}, "alpha:d", "beta:")
	f := wantFault(t, err, fault.DiskFull)
	if f.Meta["missing_bytes"] != strconv.Itoa(3<<20) || !strings.Contains(f.Error(), "beta") || !strings.Contains(f.Error(), "d/b") || f.Exit() != 11 {
		t.Errorf("%v %v", f, f.Meta)
	}
	if want := "11.5 MB needed and 8.4 MB free there"; f.Why != want || !strings.Contains(f.Fix, "free 3.1 MB") {
		t.Errorf("why %q, fix %q; want %q and 3.1 MB", f.Why, f.Fix, want)
	}
	if got := names(t, c.home("beta")); len(got) != 0 {
		t.Errorf("left behind %q", got)
	}
	// What is there already counts.
	c.mustCp(Options{}, "alpha:d/a", "beta:d/")
	c.mustCp(Options{Filters: []string{"-b"}}, "alpha:d", "beta:")
}

func TestADiskThatFillsUpMidway(t *testing.T) {
	if !isolated(t) {
		return
	}
	c := newCluster(t)
	loopbackUp(t)
	smallDisk(t, c.home("beta"), 40<<20)
	write(t, c.home("alpha", "d/a"), random(t, 8<<20))
	write(t, c.home("alpha", "d/b"), random(t, 20<<20))
	b := c.begin(Options{LimitBytesPerSecond: 3 << 20}, c.deps(), "alpha:d", "beta:")
	b.until(t, "the first chunk was there", copied(4<<20))
	write(t, c.home("beta", "filler"), make([]byte, 16<<20))
	r, err := b.wait(c)
	f := wantFault(t, err, fault.DiskFull)
	if !strings.Contains(f.Error(), "d/b") || !strings.Contains(f.Error(), "beta") || f.Meta["missing_bytes"] == "" || !strings.Contains(f.Fix, "free ") || r.State != Failed {
		t.Errorf("%v, fix %q, %v", f, f.Fix, f.Meta)
	}
	if strings.Contains(f.Why, "bytes") {
		t.Errorf("sizes are said in two ways: %q, %q", f.Why, f.Fix)
	}
	got := names(t, c.home("beta"))
	got = slices.DeleteFunc(got, func(n string) bool { return n == "d/a" || n == "d/" || n == "filler" })
	if len(got) != 0 {
		t.Errorf("left behind %q", got)
	}
	must(t, os.Remove(c.home("beta", "filler")))
	c.mustCp(Options{}, "alpha:d", "beta:")
	compareTrees(t, c.home("alpha", "d"), c.home("beta", "d"))
}

func TestSmallFilesOnADiskThatFillsUp(t *testing.T) {
	if !isolated(t) {
		return
	}
	c := newCluster(t)
	loopbackUp(t)
	smallDisk(t, c.home("beta"), 24<<20)
	for i := range 40 {
		write(t, c.home("alpha", fmt.Sprintf("d/%02d", i)), random(t, 400<<10))
	}
	b := c.begin(Options{LimitBytesPerSecond: 3 << 20}, c.deps(), "alpha:d", "beta:")
	b.until(t, "some were there", func(p Progress) bool { return p.DoneFiles > 0 })
	write(t, c.home("beta", "filler"), make([]byte, 12<<20))
	_, err := b.wait(c)
	wantFault(t, err, fault.DiskFull)
	if got := temporaries(t, c.home("beta")); len(got) != 0 {
		t.Errorf("left behind %q", got)
	}
	for _, n := range names(t, c.home("beta", "d")) {
		want, err := os.ReadFile(c.home("alpha", "d/"+n))
		must(t, err)
		sameFile(t, c.home("beta", "d/"+n), want)
	}
}

// TestASilentCableIsLeft takes an address away under running connections:
// nothing is closed and nothing answers.
func TestASilentCableIsLeft(t *testing.T) {
	if !isolated(t) {
		return
	}
	c := newCluster(t)
	lo := loopbackUp(t)
	addr := func(s string) *netlink.Addr {
		a, err := netlink.ParseAddr(s + "/32")
		must(t, err)
		return a
	}
	for _, a := range []string{"10.1.0.1", "10.1.0.2", "10.2.0.1", "10.2.0.2"} {
		must(t, netlink.AddrAdd(lo, addr(a)))
	}
	c.paths = func(string, string) []Path {
		return []Path{tcpPath("one", "10.1.0.1", "10.1.0.2"), tcpPath("two", "10.2.0.1", "10.2.0.2")}
	}
	data := random(t, 120<<20)
	write(t, c.home("alpha", "x"), data)
	c.home("beta")
	b := c.begin(Options{LimitBytesPerSecond: 20 << 20}, c.deps(), "alpha:x", "beta:")
	b.until(t, "both carried something", func(p Progress) bool {
		return len(p.Links) == 2 && p.Links[0].Bytes > 0 && p.Links[1].Bytes > 0
	})
	must(t, netlink.AddrDel(lo, addr("10.1.0.2")))
	silent := time.Now()
	b.until(t, "the silent one was left", func(p Progress) bool { return !linkOf(p, "one").Up })
	if took := time.Since(silent); took > 30*time.Second {
		t.Errorf("it took %v", took)
	}
	if _, err := b.wait(c); err != nil {
		t.Fatal(err)
	}
	sameFile(t, c.home("beta", "x"), data)
}

// TestAnotherUsersWorker runs the workers as nobody, as the root half does.
func TestAnotherUsersWorker(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can start processes of others")
	}
	c := newCluster(t)
	c.cred = &syscall.Credential{Uid: 65534, Gid: 65534}
	must(t, os.Chmod(c.root+"/..", 0o755))
	write(t, c.home("alpha", "d/x"), random(t, 3<<20))
	write(t, c.home("alpha", "d/secret"), []byte("s"))
	must(t, os.Chmod(c.home("alpha", "d/secret"), 0o600))
	must(t, os.Chown(c.home("beta"), 65534, 65534))
	must(t, os.Mkdir(c.home("beta", "roots"), 0o755))
	_, err := c.cp(Options{}, "alpha:d/x", "beta:roots")
	f := wantFault(t, err, fault.FileDenied)
	if !strings.Contains(f.Where, "beta:") || f.Exit() != 11 {
		t.Errorf("%v", f)
	}
	r, err := c.cp(Options{}, "alpha:d", "beta:")
	f = wantFault(t, err, fault.FileDenied)
	if !strings.Contains(f.Where, "alpha:") || !strings.HasSuffix(f.Where, "secret") || r.DoneFiles != 1 {
		t.Errorf("%v, %d files", f, r.DoneFiles)
	}
	if got := names(t, c.home("beta")); !slices.Equal(got, []string{"d/", "d/x", "roots/"}) {
		t.Errorf("there are %q", got)
	}
}
