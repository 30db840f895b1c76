package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"time"
)

// passed are the paths that engines answer; everything about them is theirs.
var passed = map[string]bool{
	"/v1/chat/completions": true,
	"/v1/completions":      true,
	"/v1/embeddings":       true,
}

// Between gateways a request carries the instance that it is for, and that it
// has crossed a pair of gateways already.
const (
	hopHeader      = "Tbcluster-Hop"
	instanceHeader = "Tbcluster-Instance"
	nodeHeader     = "Tbcluster-Node"
)

// front is what clients talk to, behind a check.
func (g *Gateway) front(check func(*http.Request) *problem) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p := check(r); p != nil {
			g.log.Warn("request refused", "why", p.code, "remote", r.RemoteAddr, "host", r.Host, "origin", r.Header.Get("Origin"))
			p.write(w)
			return
		}
		switch path := r.URL.Path; {
		case path == "/v1/models":
			g.models(w, r, "")
		case strings.HasPrefix(path, "/v1/models/"):
			g.models(w, r, strings.TrimPrefix(path, "/v1/models/"))
		case passed[path]:
			g.route(w, r)
		default:
			(&problem{status: http.StatusNotFound, kind: badRequest, code: "unknown_path",
				message: "there is nothing at this path; served are /v1/models, /v1/chat/completions, /v1/completions and /v1/embeddings"}).write(w)
		}
	})
}

func methodIs(w http.ResponseWriter, r *http.Request, methods ...string) bool {
	for _, m := range methods {
		if r.Method == m {
			return true
		}
	}
	w.Header().Set("Allow", strings.Join(methods, ", "))
	(&problem{status: http.StatusMethodNotAllowed, kind: badRequest, code: "method_not_allowed",
		message: "this path takes " + strings.Join(methods, " or ") + " only"}).write(w)
	return false
}

// modelEntry is a model as /v1/models lists it.
type modelEntry struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
	// Nodes are those whose instances serve it.
	Nodes []string `json:"tbcluster_nodes"`
}

// models answers with what is ready, or with one of it.
func (g *Gateway) models(w http.ResponseWriter, r *http.Request, one string) {
	if !methodIs(w, r, http.MethodGet, http.MethodHead) {
		return
	}
	all := g.o.Instances()
	list := []*modelEntry{}
	for _, name := range served(all) {
		e := &modelEntry{ID: name, Object: "model"}
		for i := range all {
			in := &all[i]
			if !in.Ready || !in.answers(name) {
				continue
			}
			e.OwnedBy = in.Engine
			if c := in.Created.Unix(); !in.Created.IsZero() && (e.Created == 0 || c < e.Created) {
				e.Created = c
			}
			e.Nodes = append(e.Nodes, nodeName(in))
		}
		list = append(list, e)
	}
	var v any = map[string]any{"object": "list", "data": list}
	if one != "" {
		v = nil
		for _, e := range list {
			if e.ID == one {
				v = e
			}
		}
		if v == nil {
			_, p := candidates(all, one)
			if p == nil {
				// Known under its instance's name or ID only.
				p = &problem{status: http.StatusNotFound, kind: badRequest, param: "model", code: "model_not_found", message: servedText(all)}
			}
			p.write(w)
			return
		}
	}
	b, err := json.Marshal(v)
	if err != nil {
		// Strings and numbers always marshal.
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	// The client may have gone; nobody is left to tell.
	_, _ = w.Write(append(b, '\n'))
}

// enter takes one of the slots for requests under way.
func (g *Gateway) enter() (leave func(), p *problem) {
	select {
	case g.slots <- struct{}{}:
		return func() { <-g.slots }, nil
	default:
		return nil, &problem{status: http.StatusServiceUnavailable, kind: unavailable, code: "overloaded", retry: 5, elsewhere: true,
			message: fmt.Sprintf("%d requests are under way here already; try again in a moment", g.o.MaxConcurrent)}
	}
}

// route gives a request to an instance, and to another one when that is dead.
func (g *Gateway) route(w http.ResponseWriter, r *http.Request) {
	if !methodIs(w, r, http.MethodPost) {
		return
	}
	leave, p := g.enter()
	if p != nil {
		p.write(w)
		return
	}
	defer leave()
	body, release, p := g.read(w, r)
	defer release()
	if p != nil {
		// What is left of the request is not worth reading.
		w.Header().Set("Connection", "close")
		p.write(w)
		return
	}
	want, p := inspect(body)
	if p != nil {
		p.write(w)
		return
	}
	dead := map[string]bool{}
	var last *problem
	for {
		all := g.o.Instances()
		g.forget(all)
		fit, p := candidates(all, want.model)
		if p != nil && p.code == notReady {
			if fit = coming(all, want.model, g.o.Self); len(fit) > 0 && last == nil {
				last = p // unless their nodes know better
			}
		}
		if p != nil && len(fit) == 0 {
			if last != nil {
				p = last
			}
			p.write(w)
			return
		}
		in, done := g.take(fit, dead)
		if in == nil {
			last.write(w)
			return
		}
		err := func() error {
			defer done()
			return g.pass(w, r, in, body)
		}()
		var broken *brokenOff
		switch {
		case err == nil:
			return
		case errors.As(err, &broken):
			// Part of an answer is out: it must not look like a whole one.
			if r.Context().Err() == nil { // else it was whoever asked that left
				g.log.Warn("answer broken off", "instance", in.Name, "node", nodeName(in), "why", err)
			}
			panic(http.ErrAbortHandler)
		case r.Context().Err() != nil:
			return // the client has gone
		}
		dead[in.ID] = true
		if !in.Ready {
			continue // what is known here stands
		}
		g.log.Warn("instance does not answer", "instance", in.Name, "node", nodeName(in), "why", err)
		last = &problem{status: http.StatusBadGateway, kind: upstream, code: "instance_gone", retry: 2,
			message: fmt.Sprintf("instance %s on %s did not answer: %v", in.Name, nodeName(in), err)}
		var refusal *problem
		if errors.As(err, &refusal) {
			last = refusal
		}
	}
}

// brokenOff is a failure after part of the answer was sent.
type brokenOff struct{ err error }

func (b *brokenOff) Error() string { return b.err.Error() }
func (b *brokenOff) Unwrap() error { return b.err }

// errEnded is the cause when an instance ends under a request.
var errEnded = errors.New("the instance has ended")

// pass sends a request to one instance and its answer to the client. An error
// means that nothing was sent to the client yet, unless it is a *brokenOff.
func (g *Gateway) pass(w http.ResponseWriter, r *http.Request, in *Instance, body []byte) error {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		g.watch(ctx, cancel, in.ID)
	}()
	defer func() { cancel(nil); <-watched }()

	via, transport := in.HeadAddr, g.local
	if in.OwnerNode != g.o.Self {
		via, transport = hostOf(in.OwnerNode), g.peers
	} else if via == "" {
		return fmt.Errorf("it has no address on this node")
	}
	resp, err := g.send(ctx, r, in, body, via, transport)
	if err != nil {
		return cause(ctx, err)
	}
	defer resp.Body.Close()
	if ctx.Err() != nil {
		// The far end saw that it was called off before the connection was closed,
		// and what it said then is no answer.
		return cause(ctx, ctx.Err())
	}
	if resp.Header.Get(refusedHeader) != "" && in.OwnerNode != g.o.Self {
		return refusalOf(resp)
	}
	return g.answer(ctx, w, in, resp)
}

// cause is why a context ended when that is why err came.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil {
		return c
	}
	// The address of the request is of no use to the client.
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// refusalOf is the words of another gateway that has not passed a request on.
func refusalOf(resp *http.Response) error {
	var e struct {
		Error struct{ Message, Type, Code string }
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&e); err != nil {
		return fmt.Errorf("its node refused the request with status %d", resp.StatusCode)
	}
	return &problem{status: resp.StatusCode, kind: e.Error.Type, code: e.Error.Code, message: e.Error.Message, retry: 2}
}

// send makes the request to an engine or to another gateway. A pooled
// connection that turns out to be dead is no word about the instance: then it
// is made once more over a new one.
func (g *Gateway) send(ctx context.Context, r *http.Request, in *Instance, body []byte, via string, t *http.Transport) (*http.Response, error) {
	for {
		reused := false
		traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { reused = i.Reused }})
		u := url.URL{Scheme: "http", Host: via, Path: r.URL.Path, RawQuery: r.URL.RawQuery}
		out, err := http.NewRequestWithContext(traced, http.MethodPost, u.String(), bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		copyHeaders(out.Header, r.Header, forRequest)
		if t == g.peers {
			out.Header.Set(hopHeader, "1")
			out.Header.Set(instanceHeader, in.ID)
		} else if in.Secret != "" {
			out.Header.Set("Authorization", "Bearer "+in.Secret)
		}
		resp, err := t.RoundTrip(out)
		if err == nil || !reused || ctx.Err() != nil {
			return resp, err
		}
		t.CloseIdleConnections()
	}
}

// watch ends the request when its instance ends.
func (g *Gateway) watch(ctx context.Context, cancel context.CancelCauseFunc, id string) {
	t := time.NewTicker(g.times.ended)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		there := false
		for _, i := range g.o.Instances() {
			if i.ID == id {
				there = !i.ended()
				if i.ended() && i.Reason != "" {
					cancel(fmt.Errorf("%w: %s", errEnded, i.Reason))
					return
				}
			}
		}
		if !there {
			cancel(errEnded)
			return
		}
	}
}

// answer sends an answer on piece by piece, as it comes.
func (g *Gateway) answer(ctx context.Context, w http.ResponseWriter, in *Instance, resp *http.Response) error {
	rc := http.NewResponseController(w)
	// Until the first piece is here nothing is sent, so that an instance that
	// dies before it can still be left.
	buf := make([]byte, 32<<10)
	n, readErr := resp.Body.Read(buf)
	if readErr != nil && readErr != io.EOF {
		return cause(ctx, readErr)
	}
	copyHeaders(w.Header(), resp.Header, forAnswer)
	w.Header().Set(instanceHeader, in.Name)
	w.Header().Set(nodeHeader, nodeName(in))
	w.WriteHeader(resp.StatusCode)
	for {
		if n > 0 {
			if err := rc.SetWriteDeadline(time.Now().Add(g.times.client)); err != nil && !errors.Is(err, http.ErrNotSupported) {
				return &brokenOff{err}
			}
			if _, err := w.Write(buf[:n]); err != nil {
				return &brokenOff{err}
			}
			if err := rc.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
				return &brokenOff{err}
			}
		}
		switch {
		case readErr == io.EOF:
			return nil
		case readErr != nil:
			err := cause(ctx, readErr)
			if ctx.Err() == nil || errors.Is(err, errEnded) {
				g.sayBroken(w, rc, in, resp, err)
			}
			return &brokenOff{err}
		}
		n, readErr = resp.Body.Read(buf)
	}
}

// sayBroken tells a client that reads a stream of events why it ends.
func (g *Gateway) sayBroken(w http.ResponseWriter, rc *http.ResponseController, in *Instance, resp *http.Response, err error) {
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		return
	}
	p := &problem{kind: upstream, code: "instance_gone", message: fmt.Sprintf("instance %s on %s ended in the middle of the answer: %v", in.Name, nodeName(in), err)}
	// The empty lines end whatever event was begun. That it cannot be written
	// changes nothing: the connection is cut next.
	if _, err := fmt.Fprintf(w, "\n\ndata: %s\n\n", bytes.TrimSpace(p.body())); err == nil {
		_ = rc.Flush()
	}
}

// forRequest and forAnswer name what is not passed on, beyond what concerns one
// connection only: secrets of the client, and what a browser goes by.
var (
	forRequest = map[string]bool{
		"Authorization": true, "Cookie": true, "Origin": true, "Referer": true, "Forwarded": true, "Content-Length": true, "Expect": true,
		hopHeader: true, instanceHeader: true, nodeHeader: true, refusedHeader: true,
	}
	forAnswer = map[string]bool{"Set-Cookie": true, "Server": true, hopHeader: true, refusedHeader: true}
	oneHop    = map[string]bool{
		"Connection": true, "Keep-Alive": true, "Proxy-Authenticate": true, "Proxy-Authorization": true, "Proxy-Connection": true,
		"Te": true, "Trailer": true, "Transfer-Encoding": true, "Upgrade": true,
	}
)

func copyHeaders(to, from http.Header, without map[string]bool) {
	listed := map[string]bool{}
	for _, v := range from.Values("Connection") {
		for _, n := range strings.Split(v, ",") {
			listed[textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(n))] = true
		}
	}
	for k, vs := range from {
		if oneHop[k] || listed[k] || without[k] || strings.HasPrefix(k, "X-Forwarded-") || strings.HasPrefix(k, "Access-Control-") || strings.HasPrefix(k, "Sec-") {
			continue
		}
		to[k] = append([]string(nil), vs...)
	}
}

// servePeer passes a request of another gateway to an instance of this node,
// and never further.
func (g *Gateway) servePeer(w http.ResponseWriter, r *http.Request) {
	refuse := func(status int, code, format string, args ...any) {
		(&problem{status: status, kind: unavailable, code: code, elsewhere: true, message: fmt.Sprintf(format, args...)}).write(w)
	}
	if !passed[r.URL.Path] || r.Method != http.MethodPost {
		refuse(http.StatusNotFound, "unknown_path", "no such path between gateways")
		return
	}
	if r.Header.Get(hopHeader) != "1" || r.Header.Get(instanceHeader) == "" {
		refuse(http.StatusBadRequest, "bad_hop", "a request between gateways names its instance and its hop")
		return
	}
	leave, p := g.enter()
	if p != nil {
		p.write(w)
		return
	}
	defer leave()
	body, release, p := g.read(w, r)
	defer release()
	if p != nil {
		w.Header().Set("Connection", "close")
		p.write(w)
		return
	}
	id := r.Header.Get(instanceHeader)
	all := g.o.Instances()
	g.forget(all)
	var in *Instance
	for i := range all {
		if all[i].ID == id {
			in = &all[i]
		}
	}
	switch {
	case in == nil || in.OwnerNode != g.o.Self:
		refuse(http.StatusServiceUnavailable, "instance_gone", "the instance is not on the node that was asked for it any more")
		return
	case !in.Ready:
		s := fmt.Sprintf("instance %s on %s is %s", in.Name, nodeName(in), in.State)
		if in.Reason != "" {
			s += ": " + in.Reason
		}
		refuse(http.StatusServiceUnavailable, notReady, "%s", s)
		return
	}
	one, done := g.take([]Instance{*in}, nil)
	defer done()
	err := g.pass(w, r, one, body)
	var broken *brokenOff
	switch {
	case err == nil:
	case errors.As(err, &broken):
		if r.Context().Err() == nil {
			g.log.Warn("answer broken off", "instance", in.Name, "why", err)
		}
		panic(http.ErrAbortHandler)
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // an empty answer would look like a whole one
	default:
		refuse(http.StatusBadGateway, "instance_gone", "instance %s on %s did not answer: %v", in.Name, nodeName(in), err)
	}
}
