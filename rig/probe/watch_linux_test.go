package main

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"testing"

	"tbcluster/rig/state"
)

func TestWatchSaysWhatIsThereAndWhatChanges(t *testing.T) {
	sysfs := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	end := make(chan error, 1)
	go func() {
		err := watch(ctx, sysfs, json.NewEncoder(w))
		w.CloseWithError(io.EOF)
		end <- err
	}()
	out := json.NewDecoder(r)
	var s state.State
	if err := out.Decode(&s); err != nil || s.Driver {
		t.Fatalf("at first it says %+v, %v", s, err)
	}
	// A directory that is made by hand makes no event: the second look finds it.
	router := filepath.Join(sysfs, "bus/thunderbolt/devices/0-0")
	if err := os.MkdirAll(router+".new", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(router+".new/unique_id", []byte("u\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(router+".new", router); err != nil {
		t.Fatal(err)
	}
	for len(s.Domains) == 0 {
		if err := out.Decode(&s); err != nil {
			t.Fatal(err)
		}
	}
	if !s.Driver || s.Domains[0].UUID != "u" {
		t.Errorf("then it says %+v", s)
	}
	cancel()
	if err := <-end; err != nil {
		t.Error(err)
	}
}
