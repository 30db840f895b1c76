package guest

import (
	"context"
	"testing"
	"time"

	"tbcluster/rig/image"
)

func TestTry(t *testing.T) {
	s, err := image.Open(image.Options{Log: func(l string) { t.Log(l) }})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	tools, err := s.Tools(ctx)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := s.Boot(ctx, image.Stable)
	if err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	g, err := Start(ctx, Options{Name: "a", Tools: tools, Boot: boot, Dir: "/tmp/images-exp/a"})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	t.Log("boot", time.Since(begun), g.BootTime())
	out, err := g.Run(ctx, "sh", "-c", "uname -a; lsmod; free; ip a; df")
	t.Log(out, err)
	t.Log(g.Verify(ctx))
}
