package rig

import (
	"os"
	"testing"
)

func TestFirst(t *testing.T) {
	f, _ := os.Create("/tmp/trace.txt")
	r := StartWith(t, Pair(), Options{Trace: f})
	r.Settled(t)
	tr, err := r.Cable("a.0").Traffic(t.Context(), 1, 4<<20)
	t.Log(tr, err)
	t.Log(r.Describe())
}
