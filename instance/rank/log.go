package rank

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// timeFormat is of fixed width, so that lines can be told from what follows.
const timeFormat = "2006-01-02T15:04:05.000000Z"

// maxLine is the most bytes of one line; what is longer is broken.
const maxLine = 16 << 10

// logWriter writes lines with their time and rotates by size. A disk that is
// full must not stop the engine: what cannot be written is counted and dropped.
type logWriter struct {
	dir    string
	limit  int64
	files  int
	f      *os.File
	size   int64
	last   []string // ring of the last lines
	next   int
	lost   int
	skip   []string
	now    func() time.Time
	failed error
}

func newLogWriter(dir string, p Process, now func() time.Time) (*logWriter, error) {
	w := &logWriter{dir: dir, limit: p.LogBytes, files: p.LogFiles, skip: p.Skip, now: now}
	return w, w.open()
}

func (w *logWriter) name(i int) string { return logName(w.dir, i) }

func logName(dir string, i int) string {
	if i == 0 {
		return filepath.Join(dir, LogFile)
	}
	return filepath.Join(dir, fmt.Sprintf("%s.%d", LogFile, i))
}

func (w *logWriter) open() error {
	f, err := os.OpenFile(w.name(0), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err == nil {
		err = f.Chmod(0o640)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	w.f, w.size = f, st.Size()
	return nil
}

func (w *logWriter) rotate() error {
	if err := w.f.Close(); err != nil {
		return err
	}
	w.f = nil
	for i := w.files - 1; i > 0; i-- {
		if err := os.Rename(w.name(i-1), w.name(i)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if w.files == 1 {
		if err := os.Remove(w.name(0)); err != nil {
			return err
		}
	}
	return w.open()
}

// line takes one line without its end.
func (w *logWriter) line(text string) {
	for _, s := range w.skip {
		if strings.Contains(text, s) {
			return
		}
	}
	if len(w.last) < LastLines {
		w.last = append(w.last, text)
	} else {
		w.last[w.next] = text
		w.next = (w.next + 1) % LastLines
	}
	if err := w.write(w.now().UTC().Format(timeFormat) + " " + text + "\n"); err != nil {
		w.lost++
		w.failed = err
	}
}

func (w *logWriter) write(s string) error {
	if w.f == nil {
		if err := w.open(); err != nil {
			return err
		}
	}
	if w.size > 0 && w.size+int64(len(s)) > w.limit {
		if err := w.rotate(); err != nil {
			return err
		}
	}
	n, err := w.f.WriteString(s)
	w.size += int64(n)
	return err
}

// tail returns the last lines, oldest first.
func (w *logWriter) tail() []string {
	return append(append([]string{}, w.last[w.next:]...), w.last[:w.next]...)
}

func (w *logWriter) close() error {
	if w.f == nil {
		return nil
	}
	return errors.Join(w.f.Sync(), w.f.Close())
}

// copyLines reads r to its end and hands on its lines. A carriage return ends a
// line too: engines draw progress with it.
func copyLines(r io.Reader, line func(string)) error {
	b := bufio.NewReaderSize(r, maxLine)
	var buf []byte
	flush := func(always bool) {
		if always || len(buf) > 0 {
			line(clean(buf))
		}
		buf = buf[:0]
	}
	for {
		c, err := b.ReadByte()
		switch {
		case err != nil:
			flush(false)
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case c == '\n':
			flush(true)
		case c == '\r':
			flush(false)
		default:
			if buf = append(buf, c); len(buf) >= maxLine {
				flush(true)
			}
		}
	}
}

// clean makes a line harmless on a terminal and valid UTF-8.
func clean(b []byte) string {
	s := strings.ToValidUTF8(string(b), "\uFFFD")
	return strings.Map(func(r rune) rune {
		if r != '\t' && (r < 0x20 || r == 0x7f || r >= 0x80 && r < 0xa0) {
			return -1
		}
		return r
	}, s)
}

// parseLine splits a line of the file. Where it carries no time, ok is false.
func parseLine(s string) (l Line, ok bool) {
	n := len(timeFormat)
	if len(s) <= n || s[n] != ' ' {
		return Line{Text: s}, false
	}
	t, err := time.Parse(timeFormat, s[:n])
	if err != nil {
		return Line{Text: s}, false
	}
	return Line{Time: t, Text: s[n+1:]}, true
}

// splitLines takes the whole lines off data and returns what is left.
func splitLines(data []byte, at time.Time, emit func(Line)) (rest []byte, last time.Time) {
	for {
		i := bytes.IndexByte(data, '\n')
		if i < 0 {
			return data, at
		}
		l, ok := parseLine(string(data[:i]))
		if !ok {
			l.Time = at
		}
		at = l.Time
		emit(l)
		data = data[i+1:]
	}
}
