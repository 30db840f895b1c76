package identity

import (
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/api/fault"
)

func TestIDIsReadAsPeopleWriteIt(t *testing.T) {
	id := mustKey(t).ID()
	if len(id) != 63 || strings.Count(string(id), "-") != 7 {
		t.Fatalf("ID %q has not eight groups of seven", id)
	}
	for name, s := range map[string]string{
		"as it is":       string(id),
		"lower case":     strings.ToLower(string(id)),
		"without dashes": strings.ReplaceAll(string(id), "-", ""),
		"with spaces":    strings.ReplaceAll(string(id), "-", " "),
		"mistaken":       strings.NewReplacer("O", "0", "I", "1", "B", "8").Replace(string(id)),
	} {
		got, err := ParseID(s)
		if err != nil || got != id {
			t.Errorf("%s: ParseID(%q) = %q, %v", name, s, got, err)
		}
	}
}

func TestEveryWrongCharacterIsFound(t *testing.T) {
	id := string(mustKey(t).ID())
	for i := range id {
		if id[i] == '-' {
			continue
		}
		for _, c := range idAlphabet {
			if byte(c) == id[i] {
				continue
			}
			wrong := id[:i] + string(c) + id[i+1:]
			if _, err := ParseID(wrong); !fault.Is(err, fault.Usage) {
				t.Fatalf("ParseID(%q) = %v, want a usage fault", wrong, err)
			}
		}
	}
	for _, s := range []string{"", "alpha", id + "A", id[:60], strings.Repeat("A", 1<<16), "9" + id[1:]} {
		if _, err := ParseID(s); !fault.Is(err, fault.Usage) {
			t.Errorf("ParseID(%.20q) = %v, want a usage fault", s, err)
		}
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("")
	f.Add("AAAAAAA-AAAAAAA-AAAAAAA-AAAAAAA-AAAAAAA-AAAAAAA-AAAAAAA-AAAAAAA")
	f.Add("ıſ\xff-0 18")
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseID(s)
		if err != nil {
			return
		}
		again, err := ParseID(string(id))
		if err != nil || again != id {
			t.Fatalf("ParseID(%q) = %q, which reads as %q, %v", s, id, again, err)
		}
	})
}

func TestKeyIsMadeOnceAndKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "agent")
	first, created, err := OpenKey(dir)
	if err != nil || !created {
		t.Fatalf("first OpenKey: created %v, %v", created, err)
	}
	second, created, err := OpenKey(dir)
	if err != nil || created || second.ID() != first.ID() {
		t.Fatalf("second OpenKey: created %v, ID %s, want %s, %v", created, second.ID(), first.ID(), err)
	}
	info, err := os.Stat(filepath.Join(dir, KeyFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v", info.Mode(), err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Fatalf("left behind: %v, %v", entries, err)
	}
}

func TestManyAtOnceMakeOneKey(t *testing.T) {
	dir := t.TempDir()
	ids := make([]NodeID, 16)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			k, _, err := OpenKey(dir)
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = k.ID()
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Fatalf("two keys: %s and %s", ids[0], id)
		}
	}
}

func TestUnusableKeyIsNeverReplaced(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"empty":    func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"garbage":  func(p string) error { return os.WriteFile(p, []byte("not a key"), 0o600) },
		"huge":     func(p string) error { return os.WriteFile(p, make([]byte, maxKeyFile+1), 0o600) },
		"open":     func(p string) error { return os.Chmod(p, 0o644) },
		"a folder": func(p string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o700)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, KeyFile)
			if _, _, err := OpenKey(dir); err != nil {
				t.Fatal(err)
			}
			if err := spoil(path); err != nil {
				t.Fatal(err)
			}
			before, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if _, created, err := OpenKey(dir); created || !fault.Is(err, fault.FileIO) {
				t.Fatalf("created %v, error %v", created, err)
			}
			after, err := os.Stat(path)
			if err != nil || !os.SameFile(before, after) {
				t.Fatalf("the file was replaced (%v)", err)
			}
		})
	}
}

func TestRenewIsAnotherNode(t *testing.T) {
	dir := t.TempDir()
	old, _, err := OpenKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenStore(dir, old, StoreOptions{Name: "alpha"}); err != nil {
		t.Fatal(err)
	}
	fresh, err := Renew(dir, time.Now())
	if err != nil || fresh.ID() == old.ID() {
		t.Fatalf("Renew: %v", err)
	}
	store, err := OpenStore(dir, fresh, StoreOptions{Name: "alpha"})
	if err != nil || !store.Alone() || store.Self().ID != fresh.ID() {
		t.Fatalf("store after Renew: %v", err)
	}
}

func TestCertificateCarriesTheKeyAndNoName(t *testing.T) {
	k := mustKey(t)
	cert, err := x509.ParseCertificate(k.Certificate().Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	if len(cert.DNSNames)+len(cert.IPAddresses) != 0 || cert.IsCA {
		t.Errorf("certificate names %v %v", cert.DNSNames, cert.IPAddresses)
	}
	if !k.Public().Equal(cert.PublicKey) {
		t.Error("certificate of another key")
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n-----END PRIVATE KEY-----\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		k, err := parseKey(data)
		if err == nil && k.ID() != IDOf(k.Public()) {
			t.Fatal("ID of another key")
		}
	})
}

func mustKey(t testing.TB) *Key {
	t.Helper()
	k, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}
