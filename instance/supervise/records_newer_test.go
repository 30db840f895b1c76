package supervise

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

func TestRecordsOfANewerVersionAreRefusedAsAWhole(t *testing.T) {
	dir := t.TempDir()
	s, err := newStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	first, second := strings.Repeat("a", 26), strings.Repeat("b", 26)
	if !instanceID.MatchString(first) {
		first, second = "a1b2c3d4", "b1b2c3d4"
	}
	type saved struct {
		ID string `json:"id"`
	}
	for _, id := range []string{first, second} {
		if err := s.save(id, saved{id}); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	each := func(id string, data []byte) error {
		got = append(got, id)
		if !strings.Contains(string(data), id) {
			t.Errorf("record of %s: %s", id, data)
		}
		return nil
	}
	if err := s.load(each); err != nil || len(got) != 2 {
		t.Fatalf("%v, %v", got, err)
	}
	got = nil
	newer := []byte(`{"schema":2,"id":["another","shape"]}`)
	path := filepath.Join(dir, second+".json")
	if err := os.WriteFile(path, newer, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.load(each); !fault.Is(err, fault.StateTooNew) || len(got) != 0 {
		t.Errorf("%v; %v were handed out", err, got)
	}
	if now, err := os.ReadFile(path); err != nil || string(now) != string(newer) {
		t.Errorf("it is now %s, %v", now, err)
	}
}
