package address

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"tbcluster/api/fault"
)

func TestWhatWasAgreedSurvivesOnDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent", "addresses.json")
	if m, err := load(path); err != nil || len(m.Agreements) != 0 {
		t.Fatalf("a missing file: %v, %v", m, err)
	}
	want := memory{Node: netip.MustParsePrefix("10.77.200.7/32"), Agreements: []*agreement{
		{Peer: "beta", Port: "0-1", PeerPort: "0-2", Prefix: netip.MustParsePrefix("10.77.3.0/30"), MTU: 65520, Turn: 4}}}
	if err := save(path, want); err != nil {
		t.Fatal(err)
	}
	got, err := load(path)
	if err != nil || got.Node != want.Node || len(got.Agreements) != 1 || *got.Agreements[0] != *want.Agreements[0] {
		t.Errorf("came back as %+v, %v", got, err)
	}
}

func TestABrokenMemoryIsSetAsideAndANewerOneRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "addresses.json")
	for _, text := range []string{"", "{", `{"schema":1,"agreements":[{"prefix":"nonsense"}]}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := load(path); !errors.Is(err, errBroken) {
			t.Errorf("%q: %v", text, err)
		}
		if kept, err := os.ReadFile(path + ".broken"); err != nil || string(kept) != text {
			t.Errorf("%q was kept as %q, %v", text, kept, err)
		}
	}
	if err := os.WriteFile(path, []byte(`{"schema":2,"agreements":"of another kind"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := load(path); !fault.Is(err, fault.StateTooNew) {
		t.Errorf("a newer schema: %v", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a newer file was touched: %v", err)
	}
}

func FuzzMemory(f *testing.F) {
	f.Add([]byte(`{"schema":1,"node_address":"10.77.200.7/32","agreements":[{"peer":"b","port":"0-1","peer_port":"0-2","prefix":"10.77.3.0/30","turn":1}]}`))
	f.Add([]byte(`{"schema":1,"agreements":[null,{"peer":"b","prefix":"10.0.0.1/8"}]}`))
	f.Add([]byte(`{"schema":99}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := parseMemory(data)
		if err != nil {
			return
		}
		for _, a := range m.Agreements {
			if a == nil || a.Peer == "" || a.Prefix != a.Prefix.Masked() || a.Prefix.Bits() != 30 {
				t.Fatalf("%q gave %+v", data, a)
			}
		}
		again, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parseMemory(again); err != nil {
			t.Fatalf("%q was written as %q: %v", data, again, err)
		}
	})
}
