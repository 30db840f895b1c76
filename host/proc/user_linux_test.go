package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// system returns what the system's own programs say of this process's user.
func system(t *testing.T) User {
	t.Helper()
	run := func(args ...string) string {
		out, err := exec.Command("id", args...).Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	number := func(s string) uint32 {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		return uint32(n)
	}
	u := User{UID: number(run("-u")), Name: run("-un")}
	for _, g := range strings.Fields(run("-G", u.Name)) {
		u.Groups = append(u.Groups, number(g))
	}
	slices.Sort(u.Groups)
	return u
}

func TestThisUserIsResolved(t *testing.T) {
	want := system(t)
	got, err := ResolveUser(t.Context(), want.UID)
	if err != nil {
		t.Fatal(err)
	}
	if got.UID != want.UID || got.Name != want.Name || !slices.Equal(got.Groups, want.Groups) || !slices.Contains(got.Groups, got.GID) || got.Home == "" || got.Shell == "" {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestAUserWhoDoesNotExist(t *testing.T) {
	if u, err := ResolveUser(t.Context(), 4000000001); !errors.Is(err, ErrNoUser) {
		t.Errorf("got %+v, %v", u, err)
	}
}

// programs answers as programs would; those not in it do not exist.
type programs map[string]string

func (p programs) run(_ context.Context, name string, args ...string) ([]byte, error) {
	command := strings.Join(append([]string{name}, args...), " ")
	if out, ok := p[command]; ok {
		return []byte(out), nil
	}
	for known := range p {
		if strings.HasPrefix(known, name) {
			return nil, fmt.Errorf("%s: failed", command)
		}
	}
	return nil, fmt.Errorf("%s: %w", name, errNoProgram)
}

func TestUsersAreResolvedFullyOrNotAtAll(t *testing.T) {
	etc := t.TempDir()
	for name, text := range map[string]string{
		"passwd": "root:x:0:0::/root:/bin/bash\nbroken\nada:x:1000:1000:Ada,,,:/home/ada:\n",
		"group":  "root:x:0:\n# comment\nada:x:1000:\nvideo:x:44:bob,ada\nrender:x:105:adam\n",
	} {
		if err := os.WriteFile(filepath.Join(etc, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	ada := User{UID: 1000, GID: 1000, Name: "ada", Home: "/home/ada", Shell: "/bin/sh", Groups: []uint32{44, 1000}}
	const entry = "ada:x:1000:1000:Ada:/home/ada:\n"
	for name, c := range map[string]struct {
		programs programs
		want     User
	}{
		"by programs":                      {programs{"getent passwd 1000": entry, "id -G ada": "1000 44 44\n"}, ada},
		"by files, where no programs are":  {programs{}, ada},
		"entry by file, groups by program": {programs{"id -G ada": "1000 44\n"}, ada},
		// Each of these would run as fewer or other groups than the user has.
		"no program for groups":    {programs{"getent passwd 1000": entry}, User{}},
		"the groups fail":          {programs{"getent passwd 1000": entry, "id -G bob": ""}, User{}},
		"no groups":                {programs{"getent passwd 1000": entry, "id -G ada": "\n"}, User{}},
		"without his own group":    {programs{"getent passwd 1000": entry, "id -G ada": "44\n"}, User{}},
		"a group that is none":     {programs{"getent passwd 1000": entry, "id -G ada": "1000 video\n"}, User{}},
		"another user":             {programs{"getent passwd 1000": "bob:x:1001:1001::/home/bob:/bin/sh\n", "id -G bob": "1001"}, User{}},
		"two users":                {programs{"getent passwd 1000": entry + entry, "id -G ada": "1000 44\n"}, User{}},
		"a name that is an option": {programs{"getent passwd 1000": "-r:x:1000:1000::/home/ada:\n", "id -G -r": "1000\n"}, User{}},
		"no home":                  {programs{"getent passwd 1000": "ada:x:1000:1000:::\n", "id -G ada": "1000\n"}, User{}},
		"too few fields":           {programs{"getent passwd 1000": "ada:x:1000\n", "id -G ada": "1000\n"}, User{}},
		"a negative user ID":       {programs{"getent passwd 1000": "ada:x:-1:1000::/home/ada:\n", "id -G ada": "1000\n"}, User{}},
	} {
		got, err := resolver{run: c.programs.run, etc: etc}.resolve(t.Context(), 1000)
		if (err == nil) != (c.want.Name != "") || fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: got %+v, %v; want %+v", name, got, err, c.want)
		}
	}
	if u, err := (resolver{run: programs{}.run, etc: etc}).resolve(t.Context(), 1002); !errors.Is(err, ErrNoUser) {
		t.Errorf("not in the file: got %+v, %v", u, err)
	}
	if err := os.WriteFile(filepath.Join(etc, "group"), []byte("video:x:44:bob,ada\nbroken:ada\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if u, err := (resolver{run: programs{}.run, etc: etc}).resolve(t.Context(), 1000); err == nil {
		t.Errorf("a group file that cannot be read: got %+v", u)
	}
}

func TestMacsPasswordEntries(t *testing.T) {
	u, err := parsePasswd("ada:********:501:20::0:0:Ada Lovelace:/Users/ada:/bin/zsh\n", masterPasswd)
	want := User{UID: 501, GID: 20, Name: "ada", Home: "/Users/ada", Shell: "/bin/zsh"}
	if err != nil || fmt.Sprint(u) != fmt.Sprint(want) {
		t.Errorf("got %+v, %v", u, err)
	}
}

func FuzzPasswd(f *testing.F) {
	f.Add("ada:x:1000:1000:Ada:/home/ada:/bin/sh\n")
	f.Add("ada:********:501:20::0:0:Ada Lovelace:/Users/ada:/bin/zsh\n")
	f.Add("::::::")
	f.Fuzz(func(t *testing.T, line string) {
		for _, shape := range []passwdShape{linuxPasswd, masterPasswd} {
			u, err := parsePasswd(line, shape)
			if err == nil && u.usable(u.UID) == nil && (u.Name == "" || u.Name[0] == '-' || u.Home[0] != '/' || u.Shell == "") {
				t.Errorf("unusable %+v", u)
			}
		}
	})
}

func FuzzGroups(f *testing.F) {
	f.Add("1000 44\n", "root:x:0:\nvideo:x:44:ada\n")
	f.Add("", "a:b:c:ada")
	f.Add("4294967296", ":::")
	f.Fuzz(func(t *testing.T, out, file string) {
		if groups, err := parseGroups(out); err == nil && len(groups) == 0 {
			t.Error("no groups and no error")
		}
		if groups, err := groupsInFile(file, "ada", 7); err == nil && groups[0] != 7 {
			t.Errorf("groups %v without the user's own", groups)
		}
	})
}

func TestPeopleAreToldFromServices(t *testing.T) {
	const services = "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1::/usr/sbin:/usr/sbin/nologin\nbuild:x:1001:1001::/var/build:/bin/false\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\ngarbage\n"
	for text, want := range map[string]bool{
		services: false,
		services + "ada:x:1000:1000:Ada:/home/ada:/bin/zsh\n": true,
		services + "ada:x:1000:1000:Ada:/home/ada:\n":         true, // an empty shell is /bin/sh
	} {
		etc := t.TempDir()
		if err := os.WriteFile(filepath.Join(etc, "passwd"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		for how, r := range map[string]resolver{
			"getent": {run: programs{"getent passwd": text}.run, etc: "/nonexistent"},
			"file":   {run: programs{}.run, etc: etc},
		} {
			if got, err := r.people(t.Context()); err != nil || got != want {
				t.Errorf("%s: %v, %v, want %v in\n%s", how, got, err, want, text)
			}
		}
	}
	if _, err := (resolver{run: programs{}.run, etc: "/nonexistent"}).people(t.Context()); err == nil {
		t.Error("nothing can be read, and that is an answer")
	}
}
