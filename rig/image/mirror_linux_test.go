package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

const oneLine = `# deb http://commented.example/debian trixie main
deb-src http://source.example/debian trixie main
deb cdrom:[Debian]/ trixie main
deb [arch=amd64 signed-by=/x.gpg] https://vendor.example/apt nodistro main
deb http://security.example/debian-security trixie-security main
deb [ arch=amd64 ] http://mirror.example/debian/ trixie main contrib # ours
`

const stanzas = `Types: deb
URIs: https://vendor.example/apt
Suites: nodistro
Components: main

# a comment
Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: trixie
Components: main

Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm-updates
 bookworm
Components: main
`

func TestTheMirrorIsTheOneOfTheMachine(t *testing.T) {
	if got := parseList(oneLine); got != "http://mirror.example/debian/" {
		t.Errorf("one-line format: %q", got)
	}
	if got := parseSources(stanzas); got != "http://mirror.example/debian" {
		t.Errorf("deb822 format: %q", got)
	}
	etc := t.TempDir()
	if _, err := findMirror(etc); !fault.Is(err, fault.Unsupported) {
		t.Errorf("without any: %v", err)
	}
	if err := os.Mkdir(filepath.Join(etc, "sources.list.d"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(etc, "sources.list.d/debian.sources"), []byte(stanzas), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := findMirror(etc); err != nil || got != "http://mirror.example/debian" {
		t.Errorf("%q %v", got, err)
	}
}

func FuzzSources(f *testing.F) {
	f.Add(oneLine)
	f.Add(stanzas)
	f.Fuzz(func(t *testing.T, text string) {
		for _, uri := range []string{parseList(text), parseSources(text)} {
			if uri != "" && (!strings.Contains(text, uri) || !strings.HasPrefix(uri, "http")) {
				t.Errorf("%q", uri)
			}
		}
	})
}

func TestThePackagesOfAKernelAreReadOffItsRecord(t *testing.T) {
	record := "Package: linux-headers-7.3.4+deb13-amd64\nVersion: 7.3.4-1~bpo13+1\nDepends: gcc-14-for-host, linux-base (>= 4.12~), linux-headers-7.3.4+deb13-common (= 7.3.4-1), a | b\n"
	if got := strings.Join(dependencies(record), " "); got != "gcc-14-for-host linux-base linux-headers-7.3.4+deb13-common a" {
		t.Errorf("%q", got)
	}
	if got := field(record, "Version"); got != "7.3.4-1~bpo13+1" {
		t.Errorf("%q", got)
	}
	if got, err := sourcePackage("7.3.4+deb13-amd64"); err != nil || got != "linux-source-7.3" {
		t.Errorf("%q %v", got, err)
	}
	if _, err := sourcePackage("7"); err == nil {
		t.Error("7 is a release")
	}
}

func TestAnOptionThatVanishedIsNoticed(t *testing.T) {
	config := filepath.Join(t.TempDir(), ".config")
	if err := os.WriteFile(config, []byte("CONFIG_A=y\nCONFIG_B=m\n# CONFIG_C is not set\nCONFIG_D=y\nCONFIG_S=\"-x\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := checkConfig(config, "# words\nCONFIG_A=y\n\nCONFIG_B=m\n# CONFIG_C is not set\n# CONFIG_E is not set\nCONFIG_S=\"-x\"\n"); err != nil {
		t.Error(err)
	}
	for _, wanted := range []string{"CONFIG_B=y", "CONFIG_C=y", "CONFIG_E=y", "# CONFIG_D is not set"} {
		if err := checkConfig(config, wanted+"\n"); err == nil || !strings.Contains(err.Error(), wanted) {
			t.Errorf("%s: %v", wanted, err)
		}
	}
}

func TestModulesComeWithWhatTheyNeed(t *testing.T) {
	dir := t.TempDir()
	dep := "kernel/a/thunderbolt-net.ko.xz: kernel/b/thunderbolt.ko.xz kernel/c/configfs.ko.xz\nkernel/b/thunderbolt.ko.xz: kernel/c/configfs.ko.xz\nkernel/c/configfs.ko.xz:\nkernel/d/other.ko:\n"
	if err := os.WriteFile(filepath.Join(dir, "modules.dep"), []byte(dep), 0o644); err != nil {
		t.Fatal(err)
	}
	m, err := readModuleIndex(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(m.closure([]string{"thunderbolt_net", "not-there"}), " "); got != "kernel/a/thunderbolt-net.ko.xz kernel/b/thunderbolt.ko.xz kernel/c/configfs.ko.xz" {
		t.Errorf("%q", got)
	}
}
