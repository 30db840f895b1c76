package lab

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func TestStatIsReadWhateverTheNameIs(t *testing.T) {
	line := "42 (a) R 1) ) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 1 1"
	st, err := parseStat(line)
	if err != nil || st != (stat{state: 'S', parent: 7, start: 123456}) {
		t.Errorf("got %+v, %v", st, err)
	}
	if st, err := readStat(os.Getpid()); err != nil || st.parent != os.Getppid() {
		t.Errorf("own: %+v, %v", st, err)
	}
}

func TestAProcessIsKnownByMoreThanItsNumber(t *testing.T) {
	me, err := identify(os.Getpid())
	if err != nil || !me.alive() {
		t.Fatalf("not alive: %+v, %v", me, err)
	}
	other := me
	other.Start++
	if other.alive() {
		t.Error("an earlier process of the same number is alive")
	}
	other = me
	other.BootID = "an earlier boot"
	if other.alive() {
		t.Error("a process of an earlier boot is alive")
	}
}

func TestMemoryPlacesAreFoundInBothVersions(t *testing.T) {
	v1 := "30 20 0:25 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n" +
		"31 20 0:26 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
	v2 := "32 20 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
	for _, c := range []struct {
		mounts, own string
		want        []memoryPlace
	}{
		{v1, "4:memory:/jobs/a\n1:cpu:/b\n0::/\n", []memoryPlace{{cgroupV1, "/sys/fs/cgroup/memory/jobs/a"}, {cgroupV1, "/sys/fs/cgroup/memory"}}},
		{v2, "0::/user.slice/x\n", []memoryPlace{{cgroupV2, "/sys/fs/cgroup/user.slice/x"}, {cgroupV2, "/sys/fs/cgroup"}}},
		{v2, "0::/../outside\n", []memoryPlace{{cgroupV2, "/sys/fs/cgroup"}}},
		{"", "", nil},
	} {
		if got := memoryPlaces(c.mounts, c.own); !slices.Equal(got, c.want) {
			t.Errorf("%q %q: %v, want %v", c.mounts, c.own, got, c.want)
		}
	}
}

func TestUsersAreFoundByNameAndNumber(t *testing.T) {
	users := parseAccounts("root:x:0:0:root:/root:/bin/bash\n#no:x:1:1::/:\nbroken\nada:x:1000:1001:Ada:/home/ada:/bin/sh\n")
	if len(users) != 2 {
		t.Fatalf("accounts: %+v", users)
	}
	for user, want := range map[string]account{
		"ada": users[1], "1000": users[1], "0": users[0],
		"1000:5": {name: "ada", home: "/home/ada", shell: "/bin/sh", uid: 1000, gid: 5},
		"77":     {name: "77", home: "/", uid: 77, gid: 77},
	} {
		if got, err := lookupUser(user, users); err != nil || got.account != want {
			t.Errorf("%s: %+v, %v", user, got, err)
		}
	}
	for _, user := range []string{"eve", "-1", "99999999999", "ada:wheel", "1000:"} {
		if got, err := lookupUser(user, users); err == nil {
			t.Errorf("%q is %+v", user, got)
		}
	}
	if got := parseGroups("a:x:5:ada,bob\nb:x:6:bob\nc:x:7:ada\nbad:x:y:ada\n", "ada"); !slices.Equal(got, []uint32{5, 7}) {
		t.Errorf("groups: %v", got)
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("42 (a) R 1) ) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 1 1")
	f.Add("1 (init) S")
	f.Add(")")
	f.Fuzz(func(t *testing.T, s string) {
		if st, err := parseStat(s); err == nil && st.state == 0 {
			t.Errorf("%q: %+v", s, st)
		}
	})
}

func FuzzAccounts(f *testing.F) {
	f.Add("root:x:0:0:root:/root:/bin/bash\n", "root")
	f.Add("a:x:99999999999:0:::\n\n::::::\n", "0:0")
	f.Fuzz(func(t *testing.T, s, user string) {
		users := parseAccounts(s)
		for _, u := range users {
			if u.name == "" {
				t.Errorf("an account without a name in %q", s)
			}
		}
		if id, err := lookupUser(user, users); err == nil && id.name == "" {
			t.Errorf("%q is %+v", user, id)
		}
		parseGroups(s, user)
	})
}

func FuzzMemoryPlaces(f *testing.F) {
	f.Add("30 20 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", "4:memory:/jobs\n0::/\n")
	f.Add("32 20 0:27 /../.. /c rw - cgroup2 cgroup2 rw\n", "0::/../../etc\n")
	f.Fuzz(func(t *testing.T, mounts, own string) {
		for _, p := range memoryPlaces(mounts, own) {
			if strings.HasPrefix(p.dir, "/c/") && strings.Contains(p.dir, "..") {
				t.Errorf("%v leads out", p)
			}
		}
	})
}
