package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"tbcluster/api/fault"
	"tbcluster/host/frame"
)

// packet is one message on a control stream: a call (ID set), its answer
// (Answer set), or a note that wants none.
type packet struct {
	ID     uint64          `json:"id,omitempty"`
	Answer uint64          `json:"answer,omitempty"`
	Kind   kind            `json:"kind,omitempty"`
	Body   json.RawMessage `json:"body,omitempty"`
	Fault  *failure        `json:"fault,omitempty"`
}

// failure is a Fault as it travels.
type failure struct {
	Reason fault.Reason      `json:"reason"`
	What   string            `json:"what"`
	Where  string            `json:"where,omitempty"`
	Why    string            `json:"why,omitempty"`
	Fix    string            `json:"fix,omitempty"`
	Meta   map[string]string `json:"meta,omitempty"`
}

func toFailure(err error) *failure {
	if err == nil {
		return nil
	}
	f := asFault(err)
	return &failure{f.Reason, f.What, f.Where, f.Why, f.Fix, f.Meta}
}

func (f *failure) fault() *fault.Fault {
	return &fault.Fault{Reason: f.Reason, What: f.What, Where: f.Where, Why: f.Why, Fix: f.Fix, Meta: f.Meta}
}

// asFault returns err as a Fault: as it is, or as an interruption, or as a bug.
func asFault(err error) *fault.Fault {
	return fault.FromStatus(err)
}

// errEnded is returned by calls on a stream that has ended.
var errEnded = errors.New("the worker's control stream ended")

// control speaks over one stream. Notes are handled one by one in the order
// they came, before anything that came after them; calls each in a goroutine.
type control struct {
	conn *frame.Conn
	note func(kind, json.RawMessage) error
	call func(context.Context, kind, json.RawMessage) (any, error)

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan packet
	ended   chan struct{}
	err     error
}

func newControl(conn *frame.Conn) *control {
	return &control{conn: conn, waiting: map[uint64]chan packet{}, ended: make(chan struct{})}
}

// serve reads until the stream ends, ctx ends, or a note's handler fails. A
// clean end is nil. It waits for the calls that it has begun.
func (c *control) serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var calls sync.WaitGroup
	stop := context.AfterFunc(ctx, func() { _ = c.conn.Close() }) // wakes Receive; its error is told there
	err := c.read(ctx, &calls)
	stop()
	cancel()
	c.mu.Lock()
	c.err = err
	c.mu.Unlock()
	close(c.ended)
	calls.Wait()
	if cerr := c.conn.Close(); err == nil && cerr != nil && !isClosed(cerr) {
		err = cerr
	}
	return err
}

func (c *control) read(ctx context.Context, calls *sync.WaitGroup) error {
	for {
		var p packet
		if err := c.conn.Receive(&p); err != nil {
			if errors.Is(err, io.EOF) || ctx.Err() != nil || isClosed(err) {
				return nil
			}
			return err
		}
		switch {
		case p.Answer != 0:
			c.mu.Lock()
			ch := c.waiting[p.Answer]
			delete(c.waiting, p.Answer)
			c.mu.Unlock()
			if ch != nil {
				ch <- p
			}
		case p.ID != 0:
			if c.call == nil {
				return fmt.Errorf("a call of %q that nobody here answers", p.Kind)
			}
			calls.Add(1)
			go func() {
				defer calls.Done()
				c.answer(ctx, p)
			}()
		default:
			if err := c.note(p.Kind, p.Body); err != nil {
				return err
			}
		}
	}
}

func (c *control) answer(ctx context.Context, p packet) {
	out, err := c.call(ctx, p.Kind, p.Body)
	a := packet{Answer: p.ID, Fault: toFailure(err)}
	if err == nil && out != nil {
		if a.Body, err = json.Marshal(out); err != nil {
			a.Fault = toFailure(fault.New(fault.Internal, "encode an answer", err, ""))
		}
	}
	// Where it cannot be sent the stream has ended, and serve says so.
	_ = c.conn.Send(a)
}

// ask calls and waits for the answer, which goes into out unless that is nil.
func (c *control) ask(ctx context.Context, k kind, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("encode %s: %w", k, err)
	}
	ch := make(chan packet, 1)
	c.mu.Lock()
	c.next++
	id := c.next
	c.waiting[id] = ch
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, id)
		c.mu.Unlock()
	}()
	if err := c.conn.Send(packet{ID: id, Kind: k, Body: body}); err != nil {
		return fmt.Errorf("%w: %w", errEnded, err)
	}
	var p packet
	select {
	case p = <-ch:
	case <-ctx.Done():
		return ctx.Err()
	case <-c.ended:
		select { // it may have come just before the end
		case p = <-ch:
		default:
			return errEnded
		}
	}
	if p.Fault != nil {
		return p.Fault.fault()
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(p.Body, out); err != nil {
		return fmt.Errorf("decode the answer to %s: %w", k, err)
	}
	return nil
}

// tell sends a note.
func (c *control) tell(k kind, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode %s: %w", k, err)
	}
	if err := c.conn.Send(packet{Kind: k, Body: b}); err != nil {
		return fmt.Errorf("%w: %w", errEnded, err)
	}
	return nil
}

// decode reads a body strictly enough for us: what is missing is zero.
func decode[T any](body json.RawMessage) (T, error) {
	var v T
	if err := json.Unmarshal(body, &v); err != nil {
		return v, fault.New(fault.Protocol, "a control message is malformed", err, "use the same version of tbcluster on both nodes")
	}
	return v, nil
}

// isClosed reports whether err says that either side has closed the stream,
// whatever was still on its way.
func isClosed(err error) bool {
	for _, e := range []error{net.ErrClosed, os.ErrClosed, io.ErrClosedPipe, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
