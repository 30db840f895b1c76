package agent

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestLogIsReadByTimeAndFollowedThroughRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.log")
	f, err := OpenLog(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	l := NewLogger(f, slog.LevelInfo)
	for i := range 300 {
		l.Info("early", "n", i)
	}
	middle := time.Now()
	l.Info("late")
	count := func(since time.Time) (n int, last string) {
		if err := followLog(t.Context(), path, since, false, func(at time.Time, s string) error {
			if at.IsZero() {
				t.Errorf("no time in %q", s)
			}
			n++
			last = s
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return n, last
	}
	if n, last := count(time.Time{}); n != lastLines || !strings.Contains(last, "late") {
		t.Errorf("%d lines, last %q", n, last)
	}
	if n, _ := count(middle); n != 1 {
		t.Errorf("%d lines since then", n)
	}

	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan string, 64)
	ended := make(chan error, 1)
	go func() {
		ended <- followLog(ctx, path, middle, true, func(_ time.Time, s string) error { got <- s; return nil })
	}()
	if s := <-got; !strings.Contains(s, "late") {
		t.Fatal(s)
	}
	if _, err := fmt.Fprintf(f, "time=%s msg=\"in two ", time.Now().UTC().Format(time.RFC3339Nano)); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write([]byte("parts\"\n")); err != nil {
		t.Fatal(err)
	}
	if s := <-got; !strings.HasSuffix(s, `"in two parts"`) {
		t.Fatal(s)
	}
	if _, err := f.Write(append(bytes.Repeat([]byte("x"), logLimit), '\n')); err != nil { // turns the log over
		t.Fatal(err)
	}
	for len(<-got) < maxLine { // the long line comes in parts
		continue
	}
	l.Info("after")
	for s := range got {
		if strings.Contains(s, "msg=after") {
			break
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func FuzzLineTime(f *testing.F) {
	f.Add([]byte("time=2026-01-02T03:04:05.6Z level=INFO"))
	f.Add([]byte("time="))
	f.Fuzz(func(t *testing.T, b []byte) {
		at := lineTime(b)
		if !at.IsZero() && !bytes.HasPrefix(b, fmt.Appendf(nil, "time=%d", at.Year())) && at.Year() > 999 {
			t.Fatalf("%v out of %q", at, b)
		}
	})
}
