package agent

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "tbcluster/api/tbcluster/v1"
)

// logLimit is the size at which the agent's log is rotated; one old file is
// kept.
const logLimit = 8 << 20

// LogFile is the agent's log: a file that is rotated by size.
type LogFile struct {
	path string

	mu   sync.Mutex
	f    *os.File
	size int64
}

// OpenLog opens the log at path, making its directory.
func OpenLog(path string) (*LogFile, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	l := &LogFile{path: path}
	return l, l.open()
}

func (l *LogFile) open() error {
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	l.f, l.size = f, st.Size()
	return nil
}

// Write appends one record.
func (l *LogFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.size+int64(len(p)) > logLimit {
		if err := errors.Join(l.f.Close(), os.Rename(l.path, l.path+".1"), l.open()); err != nil {
			return 0, err
		}
	}
	n, err := l.f.Write(p)
	l.size += int64(n)
	return n, err
}

// Close closes the file.
func (l *LogFile) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.f.Close()
}

// NewLogger returns a logger whose records begin with the time, so that they
// can be picked by it.
func NewLogger(w io.Writer, level slog.Leveler) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.String(slog.TimeKey, a.Value.Time().UTC().Format(time.RFC3339Nano))
		}
		return a
	}}))
}

// lineTime reads the time at the start of a record; zero if there is none.
func lineTime(line []byte) time.Time {
	rest, ok := bytes.CutPrefix(line, []byte("time="))
	if !ok {
		return time.Time{}
	}
	word, _, _ := bytes.Cut(rest, []byte(" "))
	t, err := time.Parse(time.RFC3339Nano, string(word))
	if err != nil {
		return time.Time{}
	}
	return t
}

const (
	lastLines = 200
	// followEvery is how often a followed log is looked at: files tell nobody
	// that they have grown.
	followEvery = 250 * time.Millisecond
	maxLine     = 1 << 20
)

// followLog emits the lines of a log from since on, or its last 200, and goes
// on as it grows where follow is set, through rotation.
func followLog(ctx context.Context, path string, since time.Time, follow bool, emit func(time.Time, string) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // only read from
	var keep [][]byte
	old, err := os.ReadFile(path + ".1")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	take := func(line []byte) error {
		at := lineTime(line)
		if since.IsZero() {
			if keep = append(keep, bytes.Clone(line)); len(keep) > lastLines {
				keep = keep[1:]
			}
			return nil
		}
		if at.Before(since) {
			return nil
		}
		return emit(at, string(line))
	}
	for line := range bytes.Lines(old) {
		if err := take(bytes.TrimRight(line, "\n")); err != nil {
			return err
		}
	}
	var part []byte
	read := func(take func([]byte) error) error {
		r := bufio.NewReader(f)
		for {
			chunk, err := r.ReadSlice('\n')
			part = append(part, chunk...)
			switch {
			case err == nil || len(part) > maxLine:
				if err := take(bytes.TrimRight(part, "\n")); err != nil {
					return err
				}
				part = part[:0]
			case errors.Is(err, bufio.ErrBufferFull):
			case errors.Is(err, io.EOF):
				return nil
			default:
				return err
			}
		}
	}
	if err := read(take); err != nil {
		return err
	}
	for _, line := range keep {
		if err := emit(lineTime(line), string(line)); err != nil {
			return err
		}
	}
	if !follow {
		return nil
	}
	tell := func(line []byte) error { return emit(lineTime(line), string(line)) }
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(followEvery):
		}
		if err := read(tell); err != nil {
			return err
		}
		now, err := os.Stat(path)
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue // between the two steps of a rotation
			}
			return err
		}
		if was, err := f.Stat(); err != nil || !os.SameFile(was, now) {
			next, err := os.Open(path)
			if err != nil {
				return fmt.Errorf("open the log again: %w", err)
			}
			// What was written between the look at it and its turning over.
			if err := read(tell); err != nil {
				return errors.Join(err, next.Close())
			}
			_ = f.Close() // only read from
			f = next
		}
	}
}

// withoutTime is a record without the time at its start, which the API tells
// apart.
func withoutTime(line string) string {
	if rest, ok := strings.CutPrefix(line, "time="); ok && !lineTime([]byte(line)).IsZero() {
		if _, text, ok := strings.Cut(rest, " "); ok {
			return text
		}
	}
	return line
}

// logLine is the API's form of a line.
func logLine(at time.Time, rank uint32, node, text string) *v1.LogLine {
	l := &v1.LogLine{Rank: rank, NodeName: node, Text: text}
	if !at.IsZero() {
		l.Time = timestamppb.New(at)
	}
	return l
}
