package systemd

import (
	"context"
	"os"
	"testing"
	"time"
)

func TestInUnit(t *testing.T) {
	const v1 = "9:name=systemd:/tbcluster.slice/tbcluster-rank-a-0.scope\n4:memory:/\n0::/\n"
	const v2 = "0::/tbcluster.slice/tbcluster-rank-a-0.scope\n"
	for _, c := range []struct {
		text, unit string
		want       bool
	}{
		{v1, "tbcluster-rank-a-0.scope", true},
		{v2, "tbcluster-rank-a-0.scope", true},
		{v2, "tbcluster-rank-a-1.scope", false},
		{v2, "tbcluster.slice", false},
		{"4:memory:/tbcluster-rank-a-0.scope\n0::/\n", "tbcluster-rank-a-0.scope", false},
		{"", "x.scope", false},
		{"nonsense", "nonsense", false},
	} {
		if got := inUnit(c.text, c.unit); got != c.want {
			t.Errorf("%q in %s: %v", c.unit, c.text, got)
		}
	}
}

func FuzzInUnit(f *testing.F) {
	f.Add("0::/a.slice/b.scope\n", "b.scope")
	f.Add("::::\n\n:", "")
	f.Fuzz(func(_ *testing.T, text, unit string) { inUnit(text, unit) })
}

// Where systemd does not run the machine it is said, and nothing hangs.
func TestWithoutAManagerItIsSaid(t *testing.T) {
	if _, err := os.Stat(private); err == nil {
		t.Skip("systemd runs this machine: the test of the packages has a rank put into a scope")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := Slice("x.slice").Put(ctx, "x", "x", os.Getpid()); err == nil || ctx.Err() != nil {
		t.Errorf("ended with %v", err)
	}
}
