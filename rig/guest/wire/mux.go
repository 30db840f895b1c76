package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
)

// chunk is how many bytes a frame of data carries at most: small enough that a
// flood lets others through, large enough to cost little.
const chunk = 32 << 10

// ErrClosed is the error of streams whose session has ended in good order.
var ErrClosed = errors.New("the session with the guest's agent has ended")

// Mux carries the streams of one session over one connection. Both sides have
// one; the machine opens streams, the agent accepts them.
type Mux struct {
	w       *Writer
	session uint32
	accept  func(*Stream, Request) // nil on the machine

	mu      sync.Mutex
	next    uint32
	streams map[uint32]*Stream
	err     error // why it ended
}

// NewMux returns the Mux of a session. On the machine accept is nil; on the
// agent it is called, in a goroutine of its own, for each stream that begins.
func NewMux(w *Writer, session uint32, accept func(*Stream, Request)) *Mux {
	return &Mux{w: w, session: session, accept: accept, streams: map[uint32]*Stream{}}
}

// Open begins a stream.
func (m *Mux) Open(r Request) (*Stream, error) {
	payload, err := Encode(r)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	if m.err != nil {
		defer m.mu.Unlock()
		return nil, m.err
	}
	m.next++
	s := m.add(m.next)
	m.mu.Unlock()
	if err := s.send(Start, payload); err != nil {
		m.remove(s)
		return nil, err
	}
	return s, nil
}

func (m *Mux) add(id uint32) *Stream {
	s := &Stream{mux: m, id: id, done: make(chan struct{}), signals: make(chan int, 8), sizes: make(chan [2]uint16, 8)}
	for c := range s.in {
		s.in[c] = newPipe(s, uint8(c))
		s.out[c] = &sender{window: Window}
		s.out[c].cond = sync.NewCond(&s.out[c].mu)
	}
	m.streams[id] = s
	return s
}

func (m *Mux) remove(s *Stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.streams, s.id)
}

// Close ends the session: all its streams fail with err.
func (m *Mux) Close(err error) {
	if err == nil {
		err = ErrClosed
	}
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		return
	}
	m.err = err
	streams := m.streams
	m.streams = map[uint32]*Stream{}
	m.mu.Unlock()
	for _, s := range streams {
		s.fail(err)
	}
}

// Handle takes a frame of the session. An error means that the other side
// breaks the protocol: the session is over. Frames for streams that are gone,
// or for another session, are late and of no interest.
func (m *Mux) Handle(f Frame) error {
	if f.Session != m.session {
		return nil
	}
	m.mu.Lock()
	s := m.streams[f.Stream]
	m.mu.Unlock()
	if f.Type == Start {
		return m.start(s, f)
	}
	if s == nil {
		return nil
	}
	if err := s.handle(f); err != nil {
		return fmt.Errorf("stream %d: %w", f.Stream, err)
	}
	return nil
}

func (m *Mux) start(s *Stream, f Frame) error {
	if m.accept == nil || s != nil {
		return fmt.Errorf("stream %d cannot be started from there", f.Stream)
	}
	r, err := DecodeRequest(f.Payload)
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		return nil
	}
	s = m.add(f.Stream)
	m.mu.Unlock()
	if err != nil {
		return s.Finish(Result{Code: -1, Error: err.Error()})
	}
	go m.accept(s, r)
	return nil
}

// Stream is one request while it lasts: a process, a file, a log.
type Stream struct {
	mux     *Mux
	id      uint32
	in      [3]*pipe
	out     [3]*sender
	signals chan int
	sizes   chan [2]uint16

	once   sync.Once
	done   chan struct{}
	result Result
	err    error
}

// Reader returns what the other side sends on a channel.
func (s *Stream) Reader(channel int) io.Reader { return s.in[channel] }

// Writer returns what sends on a channel; closing it says that there is no
// more.
func (s *Stream) Writer(channel int) io.WriteCloser { return channelWriter{s, uint8(channel)} }

// Signals are those that the machine sends; for the agent.
func (s *Stream) Signals() <-chan int { return s.signals }

// Sizes are those of the terminal, columns and rows; for the agent.
func (s *Stream) Sizes() <-chan [2]uint16 { return s.sizes }

// Done is closed when the stream has ended.
func (s *Stream) Done() <-chan struct{} { return s.done }

// Result returns how the stream ended; it waits for that.
func (s *Stream) Result() (Result, error) {
	<-s.done
	return s.result, s.err
}

// Signal sends a signal to the process of the stream.
func (s *Stream) Signal(number int) error { return s.send(Signal, []byte{byte(number)}) }

// Resize says how large the terminal is now.
func (s *Stream) Resize(columns, rows uint16) error {
	return s.send(Resize, binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, columns), rows))
}

// Finish ends the stream; for the agent.
func (s *Stream) Finish(r Result) error {
	if len(r.Error) > chunk {
		r.Error = r.Error[:chunk]
	}
	payload, err := Encode(r)
	if err == nil {
		err = s.send(Exit, payload)
	}
	s.mux.remove(s)
	s.fail(ErrClosed)
	return err
}

func (s *Stream) send(t Type, payload []byte) error {
	return s.mux.w.Write(Frame{Session: s.mux.session, Stream: s.id, Type: t, Payload: payload})
}

// fail ends the stream without a result.
func (s *Stream) fail(err error) { s.finish(Result{}, err) }

func (s *Stream) finish(r Result, err error) {
	s.once.Do(func() {
		s.result, s.err = r, err
		// A process that has ended reads no more; what it wrote can be read on.
		why := err
		if why == nil {
			why = ErrClosed
		}
		for c := range s.in {
			s.in[c].end(err)
			s.out[c].end(why)
		}
		close(s.done)
	})
}

var errShort = errors.New("a frame is too short for what it is")

func (s *Stream) handle(f Frame) error {
	switch f.Type {
	case Data, End, Credit:
		if len(f.Payload) == 0 || int(f.Payload[0]) >= len(s.in) {
			return fmt.Errorf("no such channel in a frame of type %d", f.Type)
		}
		return s.handleChannel(f.Type, f.Payload[0], f.Payload[1:])
	case Exit:
		if s.mux.accept != nil {
			return errors.New("the machine cannot end a stream")
		}
		r, err := DecodeResult(f.Payload)
		if err != nil {
			return err
		}
		s.mux.remove(s)
		s.finish(r, nil)
		return nil
	case Signal:
		if len(f.Payload) != 1 {
			return errShort
		}
		select {
		case s.signals <- int(f.Payload[0]):
		default: // eight are waiting: one more says nothing new
		}
		return nil
	case Resize:
		if len(f.Payload) != 4 {
			return errShort
		}
		select {
		case s.sizes <- [2]uint16{binary.BigEndian.Uint16(f.Payload), binary.BigEndian.Uint16(f.Payload[2:])}:
		default:
		}
		return nil
	}
	return fmt.Errorf("unknown type %d", f.Type)
}

func (s *Stream) handleChannel(t Type, channel uint8, rest []byte) error {
	switch t {
	case Data:
		return s.in[channel].put(rest)
	case End:
		s.in[channel].end(nil)
		return nil
	}
	if len(rest) != 4 {
		return errShort
	}
	return s.out[channel].grant(binary.BigEndian.Uint32(rest))
}

// pipe holds what has come in on a channel and was not read yet.
type pipe struct {
	stream  *Stream
	channel uint8

	mu    sync.Mutex
	cond  *sync.Cond
	buf   bytes.Buffer
	owed  int // read, but not granted again
	ended bool
	err   error
}

func newPipe(s *Stream, channel uint8) *pipe {
	p := &pipe{stream: s, channel: channel}
	p.cond = sync.NewCond(&p.mu)
	return p
}

func (p *pipe) put(b []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil
	}
	if p.buf.Len()+p.owed+len(b) > Window {
		return fmt.Errorf("more than the %d bytes that channel %d may have on their way", Window, p.channel)
	}
	p.buf.Write(b)
	p.cond.Broadcast()
	return nil
}

func (p *pipe) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		p.ended, p.err = true, err
		p.cond.Broadcast()
	}
}

func (p *pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	for p.buf.Len() == 0 && !p.ended {
		p.cond.Wait()
	}
	if p.buf.Len() == 0 {
		defer p.mu.Unlock()
		if p.err != nil {
			return 0, p.err
		}
		return 0, io.EOF
	}
	n, err := p.buf.Read(b)
	p.owed += n
	grant := 0
	if p.owed >= Window/2 && !p.ended {
		grant, p.owed = p.owed, 0
	}
	p.mu.Unlock()
	if grant > 0 {
		payload := binary.BigEndian.AppendUint32([]byte{p.channel}, uint32(grant))
		if err := p.stream.send(Credit, payload); err != nil {
			return n, err
		}
	}
	return n, err
}

// sender counts what may still be sent on a channel.
type sender struct {
	mu     sync.Mutex
	cond   *sync.Cond
	window int
	err    error
}

func (s *sender) grant(n uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n > Window || s.window+int(n) > Window {
		return fmt.Errorf("credit for %d bytes that were never sent", n)
	}
	s.window += int(n)
	s.cond.Broadcast()
	return nil
}

// take waits until something may be sent and returns how much, at most n.
func (s *sender) take(n int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.window == 0 && s.err == nil {
		s.cond.Wait()
	}
	if s.err != nil {
		return 0, s.err
	}
	n = min(n, s.window)
	s.window -= n
	return n, nil
}

func (s *sender) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
		s.cond.Broadcast()
	}
}

type channelWriter struct {
	s       *Stream
	channel uint8
}

func (w channelWriter) Write(b []byte) (int, error) {
	sent := 0
	for sent < len(b) {
		n, err := w.s.out[w.channel].take(min(len(b)-sent, chunk))
		if err != nil {
			return sent, err
		}
		if err := w.s.send(Data, append([]byte{w.channel}, b[sent:sent+n]...)); err != nil {
			return sent, err
		}
		sent += n
	}
	return sent, nil
}

func (w channelWriter) Close() error {
	w.s.out[w.channel].end(ErrClosed)
	select {
	case <-w.s.done:
		return nil
	default:
		return w.s.send(End, []byte{w.channel})
	}
}
