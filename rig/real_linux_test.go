package rig

import "testing"

func TestFirst(t *testing.T) {
	r := Start(t, Pair())
	r.Settled(t)
	t.Log(r.Describe())
	tr, err := r.Cable("a.0").Traffic(t.Context(), 1, 4<<20)
	t.Log(tr, err)
}
