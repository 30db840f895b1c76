package proc

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// filePages is how much of files is in this process's memory, kB: RssShmem is
// what lies on a tmpfs.
func filePages(t *testing.T) (n int) {
	t.Helper()
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "RssFile:" && f[0] != "RssShmem:" {
			continue
		}
		kb, err := strconv.Atoi(f[1])
		if err != nil {
			t.Fatal(err)
		}
		n += kb
	}
	return n
}

func TestWhatOnlyTheStartNeededIsGivenBack(t *testing.T) {
	before := filePages(t)
	if err := Trim(); err != nil {
		t.Fatal(err)
	}
	if after := filePages(t); after >= before {
		t.Errorf("%d kB of files are in memory, %d before", after, before)
	}
}

func TestMappingsAreReadAsTheKernelWritesThem(t *testing.T) {
	for line, want := range map[string]mapping{
		"00400000-0047c000 r-xp 00000000 fd:00 1312 /usr/bin/a":                  {0x400000, 0x47c000, "r-xp", "/usr/bin/a"},
		"00400000-0047c000 r--p 00000000 fd:00 1312     /usr/my bin/a (deleted)": {0x400000, 0x47c000, "r--p", "/usr/my bin/a (deleted)"},
	} {
		if got, ok := parseMapping(line); !ok || got != want {
			t.Errorf("%q is %+v, %v", line, got, ok)
		}
	}
	for _, line := range []string{"", "7ffc0000-7ffd0000 rw-p 00000000 00:00 0 [stack]", "7ffc0000-7ffd0000 rw-p 00000000 00:00 0", "x-y r-xp 0 0 0 /a", "2-1 r-xp 0 0 0 /a"} {
		if got, ok := parseMapping(line); ok {
			t.Errorf("%q is %+v", line, got)
		}
	}
}

func FuzzParseMapping(f *testing.F) {
	f.Add("00400000-0047c000 r-xp 00000000 fd:00 1312 /usr/bin/a")
	f.Fuzz(func(t *testing.T, line string) {
		if m, ok := parseMapping(line); ok && (m.from >= m.to || !strings.HasPrefix(m.file, "/")) {
			t.Errorf("%q is %+v", line, m)
		}
	})
}
