package transfer

import (
	"bytes"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tbcluster/api/fault"
)

func TestAFileIsCopiedUnderItsName(t *testing.T) {
	c := newCluster(t)
	data := random(t, 17<<20+123)
	write(t, c.home("alpha", "models/x.gguf"), data)
	c.home("beta")
	r := c.mustCp(Options{}, "alpha:models/x.gguf", "beta:")
	sameFile(t, c.home("beta", "x.gguf"), data)
	if want := "beta:" + c.home("beta", "x.gguf"); r.Destination != want {
		t.Errorf("resolved %q, want %q", r.Destination, want)
	}
	if r.DoneBytes != uint64(len(data)) || r.DoneFiles != 1 || r.TotalFiles != 1 {
		t.Errorf("counted %+v", r.Progress)
	}
	if len(r.Links) != 1 || r.Links[0].LinkID != "cable-1" || r.Links[0].Bytes < uint64(len(data)) {
		t.Errorf("links %+v", r.Links)
	}
	r = c.mustCp(Options{}, "alpha:models/x.gguf", "beta:")
	if r.TotalFiles != 0 || r.SkippedFiles != 1 || r.SkippedBytes != uint64(len(data)) || len(r.Links) != 0 {
		t.Errorf("the second run copied: %+v", r.Progress)
	}
}

// TestWhereThingsGo is the table of destinations. The source node always has
// f, g, d/a and d/s/b; "have" is made on the destination before.
func TestWhereThingsGo(t *testing.T) {
	for _, x := range []struct {
		name string
		have string // names; with a slash at the end a directory
		args string
		want string // names that must be new
		opts Options
		exit fault.Reason
	}{
		{name: "file into home", args: "alpha:f beta:", want: "f"},
		{name: "file into a directory that is there", have: "in/", args: "alpha:f beta:in", want: "in/f"},
		{name: "file under a new name", args: "alpha:f beta:new", want: "new"},
		{name: "file into a directory to be made", args: "alpha:f beta:new/", want: "new/ new/f"},
		{name: "file over a file", have: "old", args: "alpha:f beta:old", want: ""},
		{name: "file below what is not there", args: "alpha:f beta:no/such", exit: fault.FileMissing},
		{name: "file below what is not there, made", args: "alpha:f beta:no/such/f", opts: Options{MakePath: true}, want: "no/ no/such/ no/such/f"},
		{name: "directory", args: "alpha:d beta:", want: "d/ d/a d/s/ d/s/b"},
		{name: "contents of a directory", args: "alpha:d/ beta:", want: "a s/ s/b"},
		{name: "contents with a dot", args: "alpha:d/. beta:", want: "a s/ s/b"},
		{name: "directory to a new name", args: "alpha:d beta:new", want: "new/ new/d/ new/d/a new/d/s/ new/d/s/b"},
		{name: "contents to a new name", args: "alpha:d/ beta:new", want: "new/ new/a new/s/ new/s/b"},
		{name: "several", args: "alpha:f alpha:g alpha:d/s beta:new", want: "new/ new/f new/g new/s/ new/s/b"},
		{name: "several onto a file", have: "old", args: "alpha:f alpha:g beta:old", exit: fault.Usage},
		{name: "directory onto a file", have: "old", args: "alpha:d beta:old", exit: fault.Usage},
		{name: "two that would be one", args: "alpha:d/a alpha:d/s/../a beta:new", exit: fault.Usage},
		{name: "directories merge", have: "d/ d/z", args: "alpha:d beta:", want: "d/a d/s/ d/s/b"},
		{name: "no such source", args: "alpha:nope beta:", exit: fault.FileMissing},
		{name: "file with a slash", args: "alpha:f/ beta:", exit: fault.Usage},
		{name: "tilde", args: "alpha:~/f beta:~/g", want: "g"},
		{name: "a directory is in the way", have: "in/ in/f/", args: "alpha:f beta:in", exit: fault.FileIO},
		{name: "a file is in the way", have: "d", args: "alpha:d beta:", exit: fault.FileIO},
		{name: "another user's home", args: "alpha:~x/f beta:", exit: fault.Usage},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := newCluster(t)
			for _, n := range []string{"f", "g", "d/a", "d/s/b"} {
				write(t, c.home("alpha", n), []byte("contents of "+n))
			}
			home := c.home("beta")
			for _, n := range strings.Fields(x.have) {
				if strings.HasSuffix(n, "/") {
					if err := os.MkdirAll(filepath.Join(home, n), 0o755); err != nil {
						t.Fatal(err)
					}
					continue
				}
				write(t, filepath.Join(home, n), []byte("old"))
			}
			before := names(t, home)
			_, err := c.cp(x.opts, strings.Fields(x.args)...)
			if x.exit != "" {
				wantFault(t, err, x.exit)
			} else if err != nil {
				t.Fatal(err)
			}
			var fresh []string
			for _, n := range names(t, home) {
				if !slices.Contains(before, n) {
					fresh = append(fresh, n)
				}
			}
			want := strings.Fields(x.want)
			slices.Sort(want)
			slices.Sort(fresh)
			if !slices.Equal(fresh, want) {
				t.Errorf("new are %q, want %q", fresh, want)
			}
			for _, n := range fresh {
				b, err := os.ReadFile(filepath.Join(home, n))
				if !strings.HasSuffix(n, "/") && (err != nil || !strings.HasPrefix(string(b), "contents of ")) {
					t.Errorf("%s holds %q, %v", n, b, err)
				}
			}
		})
	}
}

func TestWhatIsPreserved(t *testing.T) {
	c := newCluster(t)
	src := c.home("alpha", "d")
	old := time.Date(2019, 3, 4, 5, 6, 7, 891011121, time.UTC)
	write(t, filepath.Join(src, "run.sh"), []byte("#!/bin/sh\n"))
	write(t, filepath.Join(src, "zero"), nil)
	write(t, filepath.Join(src, "weird \xff\n:name"), []byte("w"))
	write(t, filepath.Join(src, strings.Repeat("é", 127)), []byte("the longest name"))
	write(t, filepath.Join(src, "sub/"+strings.Repeat("n", 255)), random(t, 2<<20))
	write(t, filepath.Join(src, "sub/big"), random(t, 5<<20))
	must(t, os.Mkdir(filepath.Join(src, "empty"), 0o755))
	must(t, os.Mkdir(filepath.Join(src, "closed"), 0o755))
	write(t, filepath.Join(src, "closed/in"), []byte("in"))
	must(t, os.Symlink("../run.sh", filepath.Join(src, "sub/link")))
	must(t, os.Symlink("not there", filepath.Join(src, "dangling")))
	must(t, os.Link(filepath.Join(src, "sub/big"), filepath.Join(src, "second")))
	must(t, os.Chmod(filepath.Join(src, "run.sh"), 0o751))
	must(t, os.Chmod(filepath.Join(src, "zero"), 0o400))
	must(t, os.Chmod(filepath.Join(src, "closed"), 0o550))
	t.Cleanup(func() {
		_ = os.Chmod(c.home("beta", "d/closed"), 0o755)
		_ = os.Chmod(filepath.Join(src, "closed"), 0o755)
	})
	for _, n := range []string{"run.sh", "zero", "sub/big", "empty", "closed", "sub", ""} {
		must(t, os.Chtimes(filepath.Join(src, n), old, old))
	}
	c.home("beta")
	r := c.mustCp(Options{}, "alpha:d", "beta:")
	compareTrees(t, src, c.home("beta", "d"))
	a, err := os.Stat(c.home("beta", "d/second"))
	must(t, err)
	b, err := os.Stat(c.home("beta", "d/sub/big"))
	must(t, err)
	if !os.SameFile(a, b) {
		t.Error("two names of one file became two files")
	}
	if r.DoneFiles != r.TotalFiles || r.DoneBytes != r.TotalBytes {
		t.Errorf("%d of %d files, %d of %d bytes", r.DoneFiles, r.TotalFiles, r.DoneBytes, r.TotalBytes)
	}
	r = c.mustCp(Options{}, "alpha:d", "beta:")
	if r.TotalFiles != 0 || r.TotalBytes != 0 || r.SkippedFiles == 0 {
		t.Errorf("the second run: %+v", r.Progress)
	}
	must(t, os.Chmod(filepath.Join(src, "run.sh"), 0o700))
	if r = c.mustCp(Options{}, "alpha:d", "beta:"); r.TotalFiles != 0 {
		t.Errorf("a new mode alone had the file sent: %+v", r.Progress)
	}
	compareTrees(t, src, c.home("beta", "d"))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// compareTrees compares names, kinds, modes, times, targets and contents.
func compareTrees(t *testing.T, a, b string) {
	t.Helper()
	na, nb := names(t, a), names(t, b)
	if !slices.Equal(na, nb) {
		t.Fatalf("names %q, want %q", nb, na)
	}
	for _, n := range append(na, ".") {
		fa, err := os.Lstat(filepath.Join(a, n))
		must(t, err)
		fb, err := os.Lstat(filepath.Join(b, n))
		must(t, err)
		if fa.Mode() != fb.Mode() || fa.Mode()&fs.ModeSymlink == 0 && !fa.ModTime().Equal(fb.ModTime()) {
			t.Errorf("%q is %v of %v, want %v of %v", n, fb.Mode(), fb.ModTime(), fa.Mode(), fa.ModTime())
		}
		switch {
		case fa.Mode().IsRegular():
			want, err := os.ReadFile(filepath.Join(a, n))
			must(t, err)
			sameFile(t, filepath.Join(b, n), want)
		case fa.Mode()&fs.ModeSymlink != 0:
			la, _ := os.Readlink(filepath.Join(a, n))
			lb, _ := os.Readlink(filepath.Join(b, n))
			if la != lb {
				t.Errorf("%q points to %q, want %q", n, lb, la)
			}
		}
	}
}

func TestHolesStayHoles(t *testing.T) {
	c := newCluster(t)
	name := c.home("alpha", "sparse")
	f, err := os.Create(name)
	must(t, err)
	for _, off := range []int64{0, 9<<20 + 4096, 30 << 20} {
		_, err = f.WriteAt(random(t, 8192), off)
		must(t, err)
	}
	must(t, f.Truncate(64<<20))
	must(t, f.Close())
	c.home("beta")
	c.mustCp(Options{}, "alpha:sparse", "beta:")
	want, err := os.ReadFile(name)
	must(t, err)
	sameFile(t, c.home("beta", "sparse"), want)
	fi, err := os.Stat(c.home("beta", "sparse"))
	must(t, err)
	if blocks := fi.Sys().(*syscall.Stat_t).Blocks * 512; blocks > 1<<20 {
		t.Errorf("24 kB of data take %d bytes on disk", blocks)
	}
}

func TestManySmallFiles(t *testing.T) {
	c := newCluster(t)
	for i := range 1500 {
		write(t, c.home("alpha", fmt.Sprintf("d/%d/%d", i%7, i)), bytes.Repeat([]byte{byte(i)}, i*7%9000))
	}
	c.home("beta")
	r := c.mustCp(Options{}, "alpha:d", "beta:")
	compareTrees(t, c.home("alpha", "d"), c.home("beta", "d"))
	if r.DoneFiles != 1500 || r.TotalFiles != 1500 {
		t.Errorf("%d of %d files", r.DoneFiles, r.TotalFiles)
	}
}

func TestSymlinksThatLeadOutAreRefusedAndTheRestCopied(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "out"), []byte("outside"))
	write(t, c.home("alpha", "d/in"), []byte("inside"))
	must(t, os.Symlink("../out", c.home("alpha", "d/rel")))
	must(t, os.Symlink("/etc/passwd", c.home("alpha", "d/abs")))
	c.home("beta")
	r, err := c.cp(Options{}, "alpha:d", "beta:")
	if f := wantFault(t, err, fault.FileEscapes); f.Exit() != fault.ExitPartial || len(r.Problems) != 2 {
		t.Errorf("exit %d, %d problems", f.Exit(), len(r.Problems))
	}
	if got := names(t, c.home("beta")); !slices.Equal(got, []string{"d/", "d/in"}) {
		t.Errorf("copied %q", got)
	}
	// With --copy-links there are no links left.
	must(t, os.Remove(c.home("alpha", "d/abs")))
	c.mustCp(Options{CopyLinks: true}, "alpha:d", "beta:plain/")
	sameFile(t, c.home("beta", "plain/d/rel"), []byte("outside"))
	// A source that is itself a symlink is followed.
	c.mustCp(Options{}, "alpha:d/rel", "beta:")
	sameFile(t, c.home("beta", "rel"), []byte("outside"))
	// A loop is seen.
	must(t, os.Symlink(".", c.home("alpha", "d/loop")))
	_, err = c.cp(Options{CopyLinks: true}, "alpha:d", "beta:loop/")
	wantFault(t, err, fault.FileEscapes)
}

func TestSpecialFilesAreReportedAndTheRestCopied(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "d/f"), []byte("f"))
	must(t, syscall.Mkfifo(c.home("alpha", "d/pipe"), 0o644))
	l, err := net.Listen("unix", filepath.Join(c.home("alpha"), "d/s"))
	must(t, err)
	defer l.Close()
	c.home("beta")
	r, err := c.cp(Options{}, "alpha:d", "beta:")
	if f := wantFault(t, err, fault.FileUnsupported); f.Exit() != 23 || len(r.Problems) != 2 {
		t.Errorf("exit %d, problems %v", f.Exit(), r.Problems)
	}
	sameFile(t, c.home("beta", "d/f"), []byte("f"))
}

// Whoever may replace /dev/null does not do it by a copy.
func TestWhatIsNoFileIsNotReplaced(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "d/pipe"), []byte("f"))
	c.home("beta")
	must(t, os.MkdirAll(c.home("beta", "d"), 0o755))
	must(t, syscall.Mkfifo(c.home("beta", "d/pipe"), 0o644))
	for _, to := range []string{"beta:", "beta:d/pipe"} {
		from := "alpha:d"
		if to != "beta:" {
			from = "alpha:d/pipe"
		}
		_, err := c.cp(Options{}, from, to)
		wantFault(t, err, fault.FileUnsupported)
		if i, err := os.Lstat(c.home("beta", "d/pipe")); err != nil || i.Mode()&os.ModeNamedPipe == 0 {
			t.Fatalf("%s to %s: now it is %v, %v", from, to, i, err)
		}
	}
}

func TestFiltersLeaveOut(t *testing.T) {
	c := newCluster(t)
	for _, n := range []string{"d/a.bin", "d/a.safetensors", "d/s/b.safetensors", "d/cache/x.safetensors"} {
		write(t, c.home("alpha", n), []byte(n))
	}
	c.home("beta")
	c.mustCp(Options{Filters: []string{"-cache/", "+*/", "+*.safetensors", "-*"}}, "alpha:d/", "beta:")
	if got, want := names(t, c.home("beta")), []string{"a.safetensors", "s/", "s/b.safetensors"}; !slices.Equal(got, want) {
		t.Errorf("copied %q, want %q", got, want)
	}
	_, err := c.cp(Options{Filters: []string{"nonsense"}}, "alpha:d/", "beta:")
	wantFault(t, err, fault.Usage)
}

func TestADryRunSaysAndDoesNothing(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "d/new"), make([]byte, 12))
	write(t, c.home("alpha", "d/old"), make([]byte, 3))
	must(t, os.Symlink("new", c.home("alpha", "d/link")))
	c.home("beta")
	c.mustCp(Options{Filters: []string{"+old", "-*"}}, "alpha:d/", "beta:d")
	before := names(t, c.home("beta"))
	r := c.mustCp(Options{DryRun: true}, "alpha:d", "beta:")
	if want := []string{"link d/link -> new", "copy 12 bytes d/new", "have 3 bytes d/old"}; !slices.Equal(r.Lines, want) {
		t.Errorf("said %q, want %q", r.Lines, want)
	}
	if got := names(t, c.home("beta")); !slices.Equal(got, before) {
		t.Errorf("a dry run made %q", got)
	}
	if r.TotalBytes != 12 || r.DoneBytes != 0 || r.SkippedBytes != 3 {
		t.Errorf("counted %+v", r.Progress)
	}
}

func TestDigestsDecideWhenAsked(t *testing.T) {
	c := newCluster(t)
	data := random(t, 2<<20)
	write(t, c.home("alpha", "same"), data)
	write(t, c.home("alpha", "other"), data)
	write(t, c.home("beta", "same"), data)
	wrong := slices.Clone(data)
	wrong[1000] ^= 1
	write(t, c.home("beta", "other"), wrong)
	// Times that would mislead: equal where contents differ and the reverse.
	when := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(c.home("alpha", "other"), when, when))
	must(t, os.Chtimes(c.home("beta", "other"), when, when))
	r := c.mustCp(Options{Checksum: true}, "alpha:same", "alpha:other", "beta:")
	if r.SkippedFiles != 1 || r.DoneFiles != 1 || r.DoneBytes != uint64(len(data)) {
		t.Errorf("counted %+v", r.Progress)
	}
	sameFile(t, c.home("beta", "other"), data)
	if r := c.mustCp(Options{}, "alpha:same", "beta:"); r.TotalFiles != 0 {
		t.Error("the time of a file that was the same was not taken over")
	}
}

func TestOnOneNode(t *testing.T) {
	c := newCluster(t)
	data := random(t, 9<<20)
	write(t, c.home("alpha", "d/x"), data)
	r := c.mustCp(Options{}, "alpha:d/x", "alpha:y")
	sameFile(t, c.home("alpha", "y"), data)
	if len(r.Links) != 1 || r.Links[0].Kind != Loopback {
		t.Errorf("links %+v", r.Links)
	}
	must(t, os.Mkdir(c.home("alpha", "d/in"), 0o755))
	must(t, os.Symlink("d/in", c.home("alpha", "lin")))
	for _, args := range [][]string{{"alpha:d", "alpha:d/in"}, {"alpha:d", "alpha:lin"}, {"alpha:d/", "alpha:d"}, {"alpha:d", "alpha:"},
		{"alpha:y", "alpha:y"}, {"alpha:y", "alpha:d/../y"}, {"alpha:d", "alpha:d/new"}} {
		_, err := c.cp(Options{}, args...)
		wantFault(t, err, fault.Usage)
	}
	sameFile(t, c.home("alpha", "d/x"), data)
}

func TestFromTwoNodesAtOnce(t *testing.T) {
	c := newCluster(t)
	a, b := random(t, 3<<20), random(t, 6<<20)
	write(t, c.home("alpha", "a"), a)
	write(t, c.home("gamma", "m/b"), b)
	write(t, c.home("gamma", "m/small"), []byte("s"))
	c.home("beta")
	c.paths = func(src, _ string) []Path {
		return []Path{tcpPath("cable-"+src, map[string]string{"alpha": "127.0.0.2", "gamma": "127.0.0.4"}[src], "127.0.0.3")}
	}
	r := c.mustCp(Options{}, "alpha:a", "gamma:m", "beta:")
	sameFile(t, c.home("beta", "a"), a)
	sameFile(t, c.home("beta", "m/b"), b)
	sameFile(t, c.home("beta", "m/small"), []byte("s"))
	if len(r.Links) != 2 || r.DoneFiles != 3 {
		t.Errorf("%+v", r.Progress)
	}
	_, err := c.cp(Options{}, "alpha:a", "gamma:m/../m/b", "alpha:a", "beta:")
	wantFault(t, err, fault.Usage)
}

func TestTheLANIsUsedWithoutACableAndSaidSo(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "x"), random(t, 1<<20))
	c.home("beta")
	lan := tcpPath("", "127.0.0.5", "127.0.0.6")
	lan.Kind = LAN
	cable := tcpPath("cable-1", "127.0.0.2", "127.0.0.3")
	c.paths = func(string, string) []Path { return []Path{lan} }
	if r := c.mustCp(Options{}, "alpha:x", "beta:"); len(r.Warnings) != 1 || len(r.Links) != 1 || r.Links[0].Kind != LAN {
		t.Errorf("%+v", r.Progress)
	}
	c.paths = func(string, string) []Path { return []Path{lan, cable} }
	if r := c.mustCp(Options{}, "alpha:x", "beta:y"); len(r.Warnings) != 0 || len(r.Links) != 1 || r.Links[0].Kind != Cable {
		t.Errorf("with a cable: %+v", r.Progress)
	}
}

func TestNotMoreCablesThanAllowed(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "x"), random(t, 40<<20))
	c.home("beta")
	c.paths = func(string, string) []Path {
		return []Path{tcpPath("one", "127.0.0.2", "127.0.0.3"), tcpPath("two", "127.0.1.2", "127.0.1.3")}
	}
	if r := c.mustCp(Options{MaxCables: 1}, "alpha:x", "beta:a"); len(r.Links) != 1 || r.Links[0].LinkID != "one" {
		t.Errorf("%+v", r.Links)
	}
	r := c.mustCp(Options{LimitBytesPerSecond: 16 << 20}, "alpha:x", "beta:b")
	if len(r.Links) != 2 || r.Links[0].Bytes == 0 || r.Links[1].Bytes == 0 {
		t.Errorf("both cables were to be used: %+v", r.Links)
	}
}

func TestTheLimitHolds(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "x"), random(t, 4<<20))
	c.home("beta")
	begun := time.Now()
	c.mustCp(Options{LimitBytesPerSecond: 4 << 20}, "alpha:x", "beta:")
	if took := time.Since(begun); took < 800*time.Millisecond {
		t.Errorf("4 MiB at 4 MiB/s took %v", took)
	}
}

func TestWhatIsNotBuiltIsRefused(t *testing.T) {
	c := newCluster(t)
	for _, o := range []Options{{Clear: true}, {Delete: true}, {Xattrs: true}, {Transport: "rdma"}} {
		_, err := c.cp(o, "alpha:x", "beta:")
		wantFault(t, err, fault.Unsupported)
	}
}

func TestADirectoryWithoutPermissionIsSaidBefore(t *testing.T) {
	c := newCluster(t)
	if os.Geteuid() == 0 { // who may write everywhere
		c.cred = &syscall.Credential{Uid: 65534, Gid: 65534}
		must(t, os.Chmod(c.root+"/..", 0o755))
	}
	write(t, c.home("alpha", "x"), []byte("x"))
	must(t, os.Mkdir(c.home("beta", "no"), 0o555))
	_, err := c.cp(Options{}, "alpha:x", "beta:no")
	if f := wantFault(t, err, fault.FileDenied); !strings.Contains(f.Where, "beta:") {
		t.Errorf("where %q", f.Where)
	}
}

func TestProgressComesAtMostFourTimesASecondAndOnceAtTheEnd(t *testing.T) {
	c := newCluster(t)
	write(t, c.home("alpha", "x"), random(t, 12<<20))
	c.home("beta")
	var got []Progress
	begun := time.Now()
	_, err := Run(t.Context(), c.job(Options{LimitBytesPerSecond: 8 << 20}, "alpha:x", "beta:"), c.deps(), func(p Progress) { got = append(got, p) })
	must(t, err)
	c.waitAll()
	if most := int(time.Since(begun)/publishEvery) + 1; len(got) > most || len(got) < 3 {
		t.Errorf("%d events, at most %d", len(got), most)
	}
	phases := map[string]bool{}
	for i, p := range got {
		phases[p.Phase] = true
		if i > 0 && (p.DoneBytes < got[i-1].DoneBytes || got[i-1].State.Ended()) {
			t.Errorf("event %d goes back: %+v after %+v", i, p, got[i-1])
		}
		if p.Phase == "copying" && p.BytesPerSecond > 0 && p.ETA < 0 {
			t.Errorf("no time left at a known rate: %+v", p)
		}
	}
	last := got[len(got)-1]
	if !phases["copying"] || last.State != Done || last.DoneBytes != 12<<20 || last.BytesPerSecond == 0 || last.FinishedAt.IsZero() {
		t.Errorf("phases %v, last %+v", phases, last)
	}
}
