package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

func frame(t testing.TB, f Frame) []byte {
	t.Helper()
	b, err := f.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestAFrameArrivesAsItWasSent(t *testing.T) {
	want := Frame{Session: 7, Stream: 9, Type: Data, Payload: bytes.Repeat([]byte("x"), MaxPayload)}
	r := NewReader(bytes.NewReader(frame(t, want)))
	got, err := r.Read()
	if err != nil || got.Session != 7 || got.Stream != 9 || got.Type != Data || !bytes.Equal(got.Payload, want.Payload) {
		t.Fatalf("%v %v", got.Type, err)
	}
	if _, err := r.Read(); !errors.Is(err, io.EOF) {
		t.Fatalf("after the last frame: %v", err)
	}
	if _, err := (Frame{Payload: make([]byte, MaxPayload+1)}).Append(nil); err == nil {
		t.Fatal("a frame that is too large was made")
	}
}

// A reset leaves half a frame; what comes after is found, wherever it was cut.
func TestAReaderFindsTheNextFrameAfterAReset(t *testing.T) {
	old := frame(t, Frame{Session: 1, Stream: 1, Type: Data, Payload: bytes.Repeat([]byte("old"), 20000)})
	hello := frame(t, Frame{Session: 2, Type: Hello, Payload: []byte(`{}`)})
	for _, cut := range []int{1, 3, 4, 11, 19, 20, 21, 100, 30000, len(old) - 1} {
		for name, stream := range map[string][]byte{
			"agent to machine": append(append(bytes.Clone(old[:cut]), make([]byte, Preamble)...), hello...),
			"machine to agent": append(bytes.Clone(old[cut:]), hello...),
		} {
			// Not all at once: the reader must not wait for more than is there.
			ours, theirs := net.Pipe()
			go func() {
				for b := range slices.Chunk(stream, 1009) {
					if _, err := theirs.Write(b); err != nil {
						return
					}
				}
			}()
			r := NewReader(ours)
			got := make(chan Frame, 1)
			go func() {
				if f, err := r.Read(); err == nil {
					got <- f
				}
			}()
			select {
			case f := <-got:
				if f.Session != 2 || f.Type != Hello {
					t.Errorf("%s, cut at %d: %+v", name, cut, f)
				}
			case <-time.After(time.Minute):
				t.Errorf("%s, cut at %d: no frame", name, cut)
			}
			ours.Close()
			theirs.Close()
		}
	}
}

func TestACorruptFrameIsSkipped(t *testing.T) {
	good := frame(t, Frame{Session: 1, Type: End, Payload: []byte{2}})
	for i := range len(good) {
		bad := bytes.Clone(good)
		bad[i] ^= 0x40
		r := NewReader(bytes.NewReader(append(bad, append(make([]byte, Preamble), good...)...)))
		f, err := r.Read()
		if err != nil || f.Type != End || r.Skipped() < int64(len(good)) {
			t.Fatalf("byte %d: %+v %v, %d skipped", i, f, err, r.Skipped())
		}
	}
}

// link is a machine and an agent that are connected.
func link(t *testing.T, accept func(*Stream, Request)) (machine, agent *Mux) {
	t.Helper()
	a, b := net.Pipe()
	t.Cleanup(func() { a.Close(); b.Close() })
	machine = NewMux(NewWriter(a), 5, nil)
	agent = NewMux(NewWriter(b), 5, accept)
	serve := func(m *Mux, c net.Conn) {
		r := NewReader(c)
		for {
			f, err := r.Read()
			if err == nil {
				err = m.Handle(f)
			}
			if err != nil {
				m.Close(err)
				return
			}
		}
	}
	go serve(machine, a)
	go serve(agent, b)
	return machine, agent
}

func TestAStreamCarriesBothWaysAndEnds(t *testing.T) {
	machine, _ := link(t, func(s *Stream, r Request) {
		out := s.Writer(Output)
		n, _ := io.Copy(out, s.Reader(Input))
		_ = out.Close()
		_ = s.Finish(Result{Code: 3, Size: n})
	})
	s, err := machine.Open(Request{Kind: Exec, Args: []string{"cat"}})
	if err != nil {
		t.Fatal(err)
	}
	sent := make([]byte, 5*Window+123) // more than may be on its way
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range sent {
		sent[i] = byte(rng.Uint32())
	}
	go func() {
		in := s.Writer(Input)
		_, _ = in.Write(sent)
		_ = in.Close()
	}()
	got, err := io.ReadAll(s.Reader(Output))
	if err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d of %d bytes came back: %v", len(got), len(sent), err)
	}
	r, err := s.Result()
	if err != nil || r.Code != 3 || r.Size != int64(len(sent)) {
		t.Fatalf("%+v %v", r, err)
	}
}

// One that nobody reads holds up no other.
func TestAFloodHoldsUpNobodyElse(t *testing.T) {
	blocked := make(chan struct{})
	machine, _ := link(t, func(s *Stream, r Request) {
		if r.Args[0] == "flood" {
			_, _ = s.Writer(Output).Write(make([]byte, 2*Window))
			close(blocked)
			return
		}
		_ = s.Finish(Result{})
	})
	flood, err := machine.Open(Request{Kind: Exec, Args: []string{"flood"}})
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		s, err := machine.Open(Request{Kind: Exec, Args: []string{"true"}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Result(); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-blocked:
		t.Fatal("twice the window was sent, and nobody read")
	default:
	}
	if _, err := io.CopyN(io.Discard, flood.Reader(Output), 2*Window); err != nil {
		t.Fatal(err)
	}
	<-blocked
}

func TestTheEndOfASessionEndsItsStreams(t *testing.T) {
	started := make(chan struct{})
	machine, _ := link(t, func(s *Stream, r Request) { close(started) })
	s, err := machine.Open(Request{Kind: Log})
	if err != nil {
		t.Fatal(err)
	}
	<-started
	why := errors.New("the power went")
	machine.Close(why)
	if _, err := s.Result(); !errors.Is(err, why) {
		t.Errorf("result: %v", err)
	}
	if _, err := s.Reader(Output).Read(make([]byte, 1)); !errors.Is(err, why) {
		t.Errorf("read: %v", err)
	}
	if _, err := machine.Open(Request{Kind: Log}); !errors.Is(err, why) {
		t.Errorf("open: %v", err)
	}
}

func TestABrokenProtocolEndsTheSession(t *testing.T) {
	for name, f := range map[string]Frame{
		"data beyond the credit": {Type: Data, Payload: append([]byte{Output}, make([]byte, MaxPayload-1)...)},
		"credit for nothing":     {Type: Credit, Payload: binary.BigEndian.AppendUint32([]byte{Input}, 1)},
		"credit, huge":           {Type: Credit, Payload: binary.BigEndian.AppendUint32([]byte{Input}, 1<<31)},
		"a channel of 9":         {Type: Data, Payload: []byte{9}},
		"no channel":             {Type: End},
		"a start from the agent": {Type: Start, Payload: []byte(`{"kind":"log"}`)},
		"a broken result":        {Type: Exit, Payload: []byte(`{"code":99999}`)},
		"a type of 77":           {Type: 77},
		"half a size":            {Type: Resize, Payload: []byte{1}},
	} {
		t.Run(name, func(t *testing.T) {
			m := NewMux(NewWriter(io.Discard), 1, nil)
			if _, err := m.Open(Request{Kind: Log}); err != nil {
				t.Fatal(err)
			}
			f.Session, f.Stream = 1, 1
			var err error
			for i := 0; i < Window/MaxPayload+2 && err == nil; i++ {
				err = m.Handle(f)
			}
			if err == nil {
				t.Error("nobody minded")
			}
			f.Session = 2
			if err := m.Handle(f); err != nil {
				t.Errorf("of another session: %v", err)
			}
		})
	}
}

func TestRequestsAreChecked(t *testing.T) {
	for _, bad := range []string{`{}`, `{"kind":"exec"}`, `{"kind":"push","path":"x"}`, `{"kind":"log","what":1}`, `{"kind":"log"}{}`, `{"kind":"pull","path":"/a\u0000"}`, `[]`} {
		if r, err := DecodeRequest([]byte(bad)); err == nil {
			t.Errorf("%s became %+v", bad, r)
		}
	}
	if _, err := Encode(Request{Kind: Exec, Args: []string{strings.Repeat("x", MaxPayload)}}); err == nil {
		t.Error("a request that fits into no frame was made")
	}
	if _, err := DecodeGreeting([]byte(`{"version":2,"system":"initramfs"}`)); err == nil {
		t.Error("an agent of another version was welcome")
	}
}

// FuzzReader feeds anything to the reader and to both kinds of Mux: they may
// refuse it, and must neither fail otherwise nor grow beyond the window.
func FuzzReader(f *testing.F) {
	hello, _ := Encode(Greeting{Version: Version, System: "initramfs"})
	start, _ := Encode(Request{Kind: Exec, Args: []string{"true"}})
	result, _ := Encode(Result{Code: 1})
	for _, fr := range []Frame{
		{Session: 1, Type: Hello, Payload: hello}, {Session: 1, Stream: 1, Type: Start, Payload: start}, {Session: 1, Stream: 1, Type: Data, Payload: []byte{1, 'x'}},
		{Session: 1, Stream: 1, Type: Credit, Payload: []byte{0, 0, 0, 0, 1}}, {Session: 1, Stream: 1, Type: Exit, Payload: result}, {Session: 1, Stream: 1, Type: Signal, Payload: []byte{9}},
	} {
		b := frame(f, fr)
		f.Add(b)
		f.Add(append(b[3:], b...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		machine := NewMux(NewWriter(io.Discard), 1, nil)
		agent := NewMux(NewWriter(io.Discard), 1, func(*Stream, Request) {})
		s, err := machine.Open(Request{Kind: Log})
		if err != nil {
			t.Fatal(err)
		}
		r := NewReader(bytes.NewReader(b))
		total := int64(0)
		for {
			fr, err := r.Read()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			total += int64(headerSize + len(fr.Payload) + trailerSize)
			_, _ = DecodeGreeting(fr.Payload)
			_ = machine.Handle(fr) // may refuse
			_ = agent.Handle(fr)
			for _, p := range s.in {
				if p.buf.Len() > Window {
					t.Fatalf("%d bytes are held", p.buf.Len())
				}
			}
		}
		if total+r.Skipped() > int64(len(b)) {
			t.Fatalf("%d bytes of frames and %d skipped are more than %d", total, r.Skipped(), len(b))
		}
	})
}
