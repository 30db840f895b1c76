package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// monitor speaks QMP with QEMU (docs/interop/qmp-spec.rst): one JSON object a
// line, commands answered in order, events in between.
type monitor struct {
	conn  net.Conn
	dec   *json.Decoder
	mu    sync.Mutex // one command at a time
	event func(name string)
	reply chan reply
}

type reply struct {
	Return json.RawMessage
	Error  *struct{ Class, Desc string }
}

// message is any object that QEMU sends.
type message struct {
	QMP    json.RawMessage
	Event  string
	Return json.RawMessage
	Error  *struct{ Class, Desc string }
}

// newMonitor begins to talk; event is called with the name of each event.
func newMonitor(conn net.Conn, event func(string)) *monitor {
	m := &monitor{conn: conn, dec: json.NewDecoder(conn), event: event, reply: make(chan reply, 1)}
	go m.read()
	return m
}

func (m *monitor) read() {
	defer close(m.reply)
	for {
		var msg message
		if err := m.dec.Decode(&msg); err != nil {
			return // QEMU has ended, or is ended for it
		}
		switch {
		case msg.Event != "":
			m.event(msg.Event)
		case msg.Return != nil || msg.Error != nil:
			m.reply <- reply{msg.Return, msg.Error}
		}
	}
}

// do runs a command.
func (m *monitor) do(ctx context.Context, command string, arguments map[string]any) (json.RawMessage, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	request := map[string]any{"execute": command}
	if arguments != nil {
		request["arguments"] = arguments
	}
	b, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := m.conn.SetWriteDeadline(deadline); err != nil {
			return nil, err
		}
		defer m.conn.SetWriteDeadline(time.Time{})
	}
	if _, err := m.conn.Write(append(b, '\n')); err != nil {
		return nil, fmt.Errorf("QEMU's monitor: %w", err)
	}
	select {
	case r, ok := <-m.reply:
		if !ok {
			return nil, errors.New("QEMU's monitor has closed")
		}
		if r.Error != nil {
			return nil, fmt.Errorf("QEMU refuses %s: %s", command, r.Error.Desc)
		}
		return r.Return, nil
	case <-ctx.Done():
		// Its answer would be taken for that of the next command.
		return nil, errors.Join(context.Cause(ctx), m.conn.Close())
	}
}

var _ io.Closer = (*monitor)(nil)

// Close ends it.
func (m *monitor) Close() error { return m.conn.Close() }

func quoteJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of strings
	}
	return string(b)
}
