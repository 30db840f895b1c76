package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// wanted is what the gateway reads of a request; the rest is the engine's.
type wanted struct {
	model  string
	stream bool
}

// maxModelName bounds what is looked up and echoed.
const maxModelName = 512

// inspect reads the model and stream of a request body. It is strict where two
// readers could disagree: one object, nothing after it, each of the two names
// once at most.
func inspect(body []byte) (wanted, *problem) {
	var w wanted
	wrong := func(format string, args ...any) (wanted, *problem) {
		return wanted{}, &problem{status: http.StatusBadRequest, kind: badRequest, message: fmt.Sprintf(format, args...)}
	}
	if !json.Valid(body) {
		var v any
		err := json.Unmarshal(body, &v)
		return wrong("the body is not JSON: %v", err)
	}
	d := json.NewDecoder(bytes.NewReader(body))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return wrong("the body must be a JSON object")
	}
	seen := map[string]bool{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return wrong("the body is not JSON: %v", err)
		}
		name, _ := t.(string)
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return wrong("the body is not JSON: %v", err)
		}
		if name != "model" && name != "stream" {
			continue
		}
		if seen[name] {
			return wrong("%q is given twice", name)
		}
		seen[name] = true
		switch name {
		case "model":
			var s *string
			if err := json.Unmarshal(raw, &s); err != nil || s == nil {
				p := &problem{status: http.StatusBadRequest, kind: badRequest, param: "model", message: "\"model\" must be a string"}
				return wanted{}, p
			}
			w.model = *s
		case "stream":
			var b *bool
			if err := json.Unmarshal(raw, &b); err != nil {
				return wanted{}, &problem{status: http.StatusBadRequest, kind: badRequest, param: "stream", message: "\"stream\" must be true or false"}
			}
			w.stream = b != nil && *b
		}
	}
	if len(w.model) > maxModelName {
		return wanted{}, &problem{status: http.StatusBadRequest, kind: badRequest, param: "model", message: fmt.Sprintf("\"model\" is longer than %d bytes", maxModelName)}
	}
	return w, nil
}

// bodyRate is how fast a body has to come, in bytes a second, when it takes
// longer than times.body.
const bodyRate = 64 << 10

// read takes the whole body in, within bounds. The bytes count as held until
// release is called.
func (g *Gateway) read(w http.ResponseWriter, r *http.Request) (body []byte, release func(), p *problem) {
	var mine int64
	release = func() { g.held.Add(-mine); mine = 0 }
	tooLarge := &problem{status: http.StatusRequestEntityTooLarge, kind: badRequest, code: "request_too_large",
		message: fmt.Sprintf("the request is larger than %d bytes", g.o.MaxBodyBytes)}
	if r.ContentLength > g.o.MaxBodyBytes {
		return nil, release, tooLarge
	}
	rc := http.NewResponseController(w)
	began := time.Now()
	buf := bytes.NewBuffer(make([]byte, 0, max(min(r.ContentLength, 64<<10), 512)))
	chunk := make([]byte, 32<<10)
	for {
		limit := began.Add(g.times.body + time.Duration(buf.Len()/bodyRate)*time.Second)
		if err := rc.SetReadDeadline(limit); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return nil, release, &problem{status: http.StatusInternalServerError, kind: upstream, message: "the request could not be read"}
		}
		n, err := r.Body.Read(chunk)
		mine += int64(n)
		if g.held.Add(int64(n)) > heldBytes {
			return nil, release, &problem{status: http.StatusServiceUnavailable, kind: unavailable, code: "overloaded", retry: 5,
				message: "too much is under way here just now; try again in a moment"}
		}
		buf.Write(chunk[:n])
		if int64(buf.Len()) > g.o.MaxBodyBytes {
			return nil, release, tooLarge
		}
		switch {
		case err == io.EOF:
			if err := rc.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
				return nil, release, &problem{status: http.StatusInternalServerError, kind: upstream, message: "the request could not be read"}
			}
			return buf.Bytes(), release, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, release, &problem{status: http.StatusRequestTimeout, kind: badRequest, message: "the request came too slowly"}
		case err != nil:
			return nil, release, &problem{status: http.StatusBadRequest, kind: badRequest, message: "the request ended early"}
		}
	}
}
