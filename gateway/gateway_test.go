package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// node is a gateway on real listeners: one for clients on loopback, one for
// other nodes over TLS.
type node struct {
	*Gateway
	id   string
	base string // URL of the clients' listener
	peer string // address of the listener for other nodes

	mu        sync.Mutex
	instances []Instance
	peers     map[string]*node
	dials     atomic.Int32
	refuse    atomic.Pointer[string] // why other nodes are refused
	open      map[string]int         // by Activity
}

func (n *node) list() []Instance {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.instances)
}

func (n *node) set(instances ...Instance) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.instances = instances
}

func (n *node) openOf(id string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.open[id]
}

// until waits for something that another goroutine does.
func until(t *testing.T, what string, so func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !so(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)},
		&x509.Certificate{SerialNumber: big.NewInt(1)}, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

const alpn = "tbcluster-http/1"

func newNode(t *testing.T, id string, change func(*Options), tune ...func(*times)) *node {
	t.Helper()
	n := &node{id: id, peers: map[string]*node{}, open: map[string]int{}}
	o := Options{
		Self:      id,
		Instances: n.list,
		DialPeer: func(ctx context.Context, nodeID string) (net.Conn, error) {
			n.dials.Add(1)
			p := n.peers[nodeID]
			if p == nil {
				return nil, fmt.Errorf("node %s is not known", nodeID)
			}
			d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}}}
			return d.DialContext(ctx, "tcp", p.peer)
		},
		LocalNames: func() []string { return []string{"Desk-One"} },
		Activity: func(id string, d int) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.open[id] += d
		},
	}
	if change != nil {
		change(&o)
	}
	n.Gateway = New(o)
	n.times.ended = 10 * time.Millisecond
	n.times.last = 100 * time.Millisecond
	for _, f := range tune {
		f(&n.times)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); n.Close(); wg.Wait() })

	ls, addr, err := ListenLoopback(0)
	if err != nil {
		t.Fatal(err)
	}
	n.base = "http://" + addr
	for _, l := range ls {
		wg.Go(func() {
			if err := n.Serve(ctx, l, n.LoopbackHandler()); err != nil {
				t.Errorf("serve: %v", err)
			}
		})
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate(t)}, NextProtos: []string{alpn}})
	if err != nil {
		t.Fatal(err)
	}
	n.peer = l.Addr().String()
	wg.Go(func() {
		<-ctx.Done()
		l.Close()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				h := n.PeerHandler()
				if why := n.refuse.Load(); why != nil {
					h = RefusePeer(*why)
				}
				if err := n.ServeConn(ctx, c, h); err != nil {
					t.Errorf("serve peer: %v", err)
				}
			})
		}
	})
	return n
}

// engine is an HTTP server in the place of an engine; it counts its requests.
type engine struct {
	*httptest.Server
	requests atomic.Int32
}

func newEngine(t *testing.T, h http.HandlerFunc) *engine {
	e := &engine{}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.requests.Add(1)
		// As engines do, it takes the whole request before it begins; only
		// then does package http notice that a client goes away.
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(b))
		h(w, r)
	}))
	t.Cleanup(e.Close)
	return e
}

func says(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, `{"text":%q}`, text) }
}

func (e *engine) as(id, model, owner string) Instance {
	return Instance{ID: id, Name: id + "-name", ServedNames: []string{model}, ModelID: "sha-" + model, Engine: "llamacpp", State: "ready", Ready: true,
		OwnerNode: owner, OwnerName: owner, HeadAddr: e.Listener.Addr().String(), Created: time.Unix(1000, 0)}
}

// elsewhere is an instance as other nodes than its owner see it.
func elsewhere(i Instance) Instance { i.HeadAddr = ""; return i }

func post(t *testing.T, url, body string) (*http.Response, string) {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// message is the text of an error, which must have the shape of OpenAI's.
func message(t *testing.T, body string) string {
	t.Helper()
	var e struct {
		Error *struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
			Code    *string `json:"code"`
		} `json:"error"`
	}
	d := json.NewDecoder(strings.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil || e.Error == nil || e.Error.Message == "" || e.Error.Type == "" {
		t.Fatalf("no error of OpenAI's shape: %q (%v)", body, err)
	}
	return e.Error.Message
}

const chat = "/v1/chat/completions"

func TestModelsListsWhatIsReady(t *testing.T) {
	n := newNode(t, "a", nil)
	e := newEngine(t, says("x"))
	loading := e.as("i3", "big", "a")
	loading.Ready, loading.State = false, "loading"
	n.set(e.as("i1", "smol", "a"), elsewhere(e.as("i2", "smol", "b")), loading)
	resp, err := http.Get(n.base + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got struct {
		Object string
		Data   []struct {
			ID, Object string
			Created    int64
			OwnedBy    string   `json:"owned_by"`
			Nodes      []string `json:"tbcluster_nodes"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.Object != "list" || len(got.Data) != 1 {
		t.Fatalf("%+v", got)
	}
	if m := got.Data[0]; m.ID != "smol" || m.Object != "model" || m.Created != 1000 || m.OwnedBy != "llamacpp" || !slices.Equal(m.Nodes, []string{"a", "b"}) {
		t.Errorf("%+v", m)
	}
	for path, status := range map[string]int{"/v1/models/smol": 200, "/v1/models/nope": 404, "/v1/models/big": 503, "/v2": 404, "/metrics": 404, "/": 404, "/v1/models/i1-name": 404} {
		resp, err := http.Get(n.base + path)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != status {
			t.Errorf("%s: %d, want %d", path, resp.StatusCode, status)
		}
		if status != 200 {
			message(t, string(b))
		}
	}
}

// What a node knows of another one's instance is a moment old: who was told there
// that it is ready is served here too.
func TestAnInstanceIsReadyWhenItsNodeSaysSo(t *testing.T) {
	a, b := newNode(t, "a", nil), newNode(t, "b", nil)
	b.peers["a"] = a
	e := newEngine(t, says("x"))
	ready := e.as("i1", "smol", "a")
	warming := ready
	warming.Ready, warming.State, warming.HeadAddr, warming.Reason = false, "warming", "", "asked for a completion"
	a.set(ready)
	b.set(warming)
	if resp, body := post(t, b.base+chat, `{"model":"smol"}`); resp.StatusCode != 200 {
		t.Errorf("ready there: %d %s", resp.StatusCode, body)
	}
	still := warming
	still.HeadAddr = ready.HeadAddr
	const says = `the model "smol" is not ready: instance i1-name on a is warming: asked for a completion`
	for what, x := range map[string]struct {
		there []Instance
		state string
		asked int32
	}{
		"not ready there either":   {[]Instance{still}, "warming", 1},
		"not there any more":       {nil, "warming", 1},
		"degraded: no need to ask": {[]Instance{still}, "degraded", 0},
		"ended: no need to ask":    {[]Instance{still}, "stopping", 0},
	} {
		a.set(x.there...)
		w := warming
		w.State = x.state
		b.set(w)
		b.Gateway.Close() // idle connections
		before := b.dials.Load()
		resp, body := post(t, b.base+chat, `{"model":"smol"}`)
		if resp.StatusCode != 503 || message(t, body) != strings.Replace(says, "warming", x.state, 1) || b.dials.Load()-before != x.asked {
			t.Errorf("%s: %d %s, %d asked", what, resp.StatusCode, body, b.dials.Load()-before)
		}
	}
	delete(b.peers, "a")
	b.set(warming)
	if resp, body := post(t, b.base+chat, `{"model":"smol"}`); resp.StatusCode != 503 || message(t, body) != says {
		t.Errorf("its node is out of reach: %d %s", resp.StatusCode, body)
	}
	if n := e.requests.Load(); n != 1 {
		t.Errorf("the engine saw %d requests", n)
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	n := newNode(t, "a", func(o *Options) { o.MaxBodyBytes = 4096 })
	e := newEngine(t, says("x"))
	loading := e.as("i2", "big", "a")
	loading.Ready, loading.State, loading.Reason = false, "loading", "rank 1 on beta: 40 of 94 layers"
	n.set(e.as("i1", "smol", "a"), loading)
	for _, c := range []struct {
		body   string
		status int
		says   string
	}{
		{`{"model":"nope"}`, 404, `no instance serves the model "nope"; served are: smol`},
		{`{"model":"big"}`, 503, `the model "big" is not ready: instance i2-name on a is loading: rank 1 on beta: 40 of 94 layers`},
		{`{"messages":[]}`, 400, `"model" is missing; served are: smol`},
		{`{"model":""}`, 400, `"model" is missing`},
		{`{"model":7}`, 400, `"model" must be a string`},
		{`{"model":null}`, 400, `"model" must be a string`},
		{`{"model":"smol","model":"nope"}`, 400, `"model" is given twice`},
		{`{"model":"smol"} {}`, 400, `the body is not JSON`},
		{`{"model":"smol"`, 400, `the body is not JSON`},
		{`["model"]`, 400, `the body must be a JSON object`},
		{``, 400, `the body is not JSON`},
		{`{"model":"smol","stream":"yes"}`, 400, `"stream" must be true or false`},
		{`{"model":"` + strings.Repeat("m", 600) + `"}`, 400, `longer than 512 bytes`},
		{`{"model":"smol","x":"` + strings.Repeat("m", 5000) + `"}`, 413, `larger than 4096 bytes`},
	} {
		resp, body := post(t, n.base+chat, c.body)
		if resp.StatusCode != c.status || !strings.Contains(message(t, body), c.says) {
			t.Errorf("%.60s: %d %s, want %d %s", c.body, resp.StatusCode, body, c.status, c.says)
		}
	}
	// A body of unknown length is bounded too.
	resp, err := http.Post(n.base+chat, "application/json", io.LimitReader(neverEnding{}, 1<<30))
	if err == nil {
		defer resp.Body.Close()
		if resp.StatusCode != 413 {
			t.Errorf("an endless body: %d", resp.StatusCode)
		}
	}
	if resp, err := http.Get(n.base + chat); err != nil || resp.StatusCode != 405 || resp.Header.Get("Allow") != "POST" {
		t.Errorf("GET of %s: %v %v", chat, resp, err)
	} else {
		resp.Body.Close()
	}
	if n := e.requests.Load(); n != 0 {
		t.Errorf("the engine saw %d requests", n)
	}
	n.set()
	if resp, body := post(t, n.base+chat, `{"model":"smol"}`); resp.StatusCode != 404 || !strings.Contains(body, "tbcluster place MODEL") {
		t.Errorf("with nothing served: %d %s", resp.StatusCode, body)
	}
}

type neverEnding struct{}

func (neverEnding) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestRequestsPassUntouchedButForSecrets(t *testing.T) {
	n := newNode(t, "a", nil)
	type seen struct {
		path, query, body string
		header            http.Header
	}
	got := make(chan seen, 1)
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- seen{r.URL.Path, r.URL.RawQuery, string(b), r.Header}
		w.Header().Set("Access-Control-Allow-Origin", "*")
		w.Header().Set("Set-Cookie", "a=b")
		w.Header().Set("X-Engine", "yes")
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprint(w, "as it is")
	})
	n.set(e.as("i1", "smol", "a"))
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/embeddings"} {
		body := ` {"z":1, "model" : "smol", "x":"\u00e9"} `
		req, err := http.NewRequest("POST", n.base+path+"?q=1", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range map[string]string{"Authorization": "Bearer secret", "Cookie": "c=d", "X-Forwarded-For": "8.8.8.8", "Tbcluster-Hop": "1", "Tbcluster-Instance": "other", "X-Own": "kept", "Connection": "X-Drop", "X-Drop": "1"} {
			req.Header.Set(k, v)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		s := <-got
		if s.path != path || s.query != "q=1" || s.body != body {
			t.Errorf("the engine got %q ? %q: %q", s.path, s.query, s.body)
		}
		for _, k := range []string{"Authorization", "Cookie", "X-Forwarded-For", "Tbcluster-Hop", "Tbcluster-Instance", "X-Drop"} {
			if s.header.Get(k) != "" {
				t.Errorf("%s was passed on", k)
			}
		}
		if s.header.Get("X-Own") != "kept" {
			t.Error("a header of the client is missing")
		}
		if resp.StatusCode != http.StatusTeapot || string(b) != "as it is" || resp.Header.Get("X-Engine") != "yes" {
			t.Errorf("the client got %d %q %v", resp.StatusCode, b, resp.Header)
		}
		if resp.Header.Get("Access-Control-Allow-Origin") != "" || resp.Header.Get("Set-Cookie") != "" {
			t.Errorf("what browsers go by was passed on: %v", resp.Header)
		}
		if resp.Header.Get("Tbcluster-Instance") != "i1-name" || resp.Header.Get("Tbcluster-Node") != "a" {
			t.Errorf("who answered is not said: %v", resp.Header)
		}
	}
}

// two nodes of which b owns the instance.
func pair(t *testing.T, e *engine, tune ...func(*times)) (a, b *node) {
	a, b = newNode(t, "NODE-A", nil, tune...), newNode(t, "NODE-B", nil, tune...)
	a.peers["NODE-B"] = b
	b.peers["NODE-A"] = a
	i := e.as("i1", "smol", "NODE-B")
	b.set(i)
	a.set(elsewhere(i))
	return a, b
}

func TestStreamsAreNeverBufferedBetweenNodes(t *testing.T) {
	goOn := make(chan struct{})
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 5 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			// The next one is made only when the client has seen this one.
			select {
			case <-goOn:
			case <-r.Context().Done():
				return
			}
		}
	})
	a, b := pair(t, e)
	for range 3 { // over the same connection between the nodes
		resp, err := http.Post(a.base+chat, "application/json", strings.NewReader(`{"model":"smol","stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(resp.Body)
		for i := range 5 {
			l, err := r.ReadString('\n')
			if err != nil || l != fmt.Sprintf("data: %d\n", i) {
				t.Fatalf("event %d: %q %v", i, l, err)
			}
			if _, err := r.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
			if a.openOf("i1") != 1 || b.openOf("i1") != 1 {
				t.Errorf("under way: %d and %d", a.openOf("i1"), b.openOf("i1"))
			}
			goOn <- struct{}{}
		}
		if _, err := r.ReadByte(); err != io.EOF {
			t.Errorf("after the last event: %v", err)
		}
		resp.Body.Close()
	}
	until(t, "nothing to be under way", func() bool { return a.openOf("i1") == 0 && b.openOf("i1") == 0 })
	if n := a.dials.Load(); n != 1 {
		t.Errorf("%d connections for three requests", n)
	}
}

func TestAClientThatGoesAwayStopsTheEngine(t *testing.T) {
	began, stopped := make(chan struct{}), make(chan struct{})
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
		close(stopped)
	})
	a, _ := pair(t, e)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "POST", a.base+chat, strings.NewReader(`{"model":"smol"}`))
	if err != nil {
		t.Fatal(err)
	}
	go func() { <-began; cancel() }()
	if _, err := http.DefaultClient.Do(req); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	select {
	case <-stopped:
	case <-time.After(time.Minute):
		t.Fatal("the engine still works")
	}
}

func TestLeastBusyInstanceIsTaken(t *testing.T) {
	n := newNode(t, "a", nil)
	hold := make(chan struct{})
	began := make(chan string, 8)
	slow := func(name string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			began <- name
			<-hold
			fmt.Fprint(w, name)
		}
	}
	e1, e2 := newEngine(t, slow("one")), newEngine(t, slow("two"))
	n.set(e1.as("i1", "smol", "a"), e2.as("i2", "smol", "a"))
	var wg sync.WaitGroup
	count := map[string]int{}
	for range 4 {
		wg.Go(func() {
			resp, _ := post(t, n.base+chat, `{"model":"smol"}`)
			if resp.StatusCode != 200 {
				t.Errorf("%d", resp.StatusCode)
			}
		})
		count[<-began]++
	}
	close(hold)
	wg.Wait()
	if count["one"] != 2 || count["two"] != 2 {
		t.Errorf("shared out as %v", count)
	}
}

func TestADeadInstanceIsLeftAtOnce(t *testing.T) {
	a, b := newNode(t, "a", nil), newNode(t, "b", nil)
	a.peers["b"] = b
	// In the order in which they are tried: one refuses connections, one closes
	// them, one is on a node that is not there, one was moved off its node.
	gone := newEngine(t, says(""))
	refuses := gone.as("i1", "smol", "a")
	gone.Close()
	closes := newEngine(t, func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) })
	good := newEngine(t, says("hello"))
	nowhere := elsewhere(good.as("i3", "smol", "z"))
	moved := elsewhere(good.as("i4", "smol", "b"))
	a.set(refuses, closes.as("i2", "smol", "a"), nowhere, moved, good.as("i5", "smol", "a"))
	for range 10 {
		if resp, body := post(t, a.base+chat, `{"model":"smol"}`); resp.StatusCode != 200 || !strings.Contains(body, "hello") {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
	}
	if n := good.requests.Load(); n != 10 {
		t.Errorf("the good one saw %d requests", n)
	}
	a.set(refuses)
	if resp, body := post(t, a.base+chat, `{"model":"smol"}`); resp.StatusCode != 502 || !strings.Contains(message(t, body), "instance i1-name on a did not answer: ") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	a.set(moved)
	if resp, body := post(t, a.base+chat, `{"model":"smol"}`); resp.StatusCode != 503 || !strings.Contains(message(t, body), "not on the node") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	for _, id := range []string{"i1", "i2", "i3", "i4", "i5"} {
		// An answer is with its client before it counts as ended.
		until(t, id+" to have nothing under way", func() bool { return a.openOf(id) == 0 })
	}
}

func TestABrokenAnswerIsNotRepeatedAndNotTakenForWhole(t *testing.T) {
	for _, far := range []bool{false, true} {
		die := func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: half")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
		e := newEngine(t, die)
		a, b := pair(t, e)
		from := b
		if far {
			from = a
		}
		resp, err := http.Post(from.base+chat, "application/json", strings.NewReader(`{"model":"smol","stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		all, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("far %v: the answer ends with %v", far, err)
		}
		first, rest, _ := strings.Cut(string(all), "\n\n")
		if first != "data: half" || !strings.HasPrefix(rest, "data: {") || !strings.Contains(rest, "ended in the middle of the answer") {
			t.Errorf("far %v: %q", far, all)
		}
		if n := e.requests.Load(); n != 1 {
			t.Errorf("far %v: asked %d times", far, n)
		}
	}
}

func TestAnInstanceThatEndsReleasesThoseWhoWait(t *testing.T) {
	began := make(chan struct{}, 1)
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		began <- struct{}{}
		<-r.Context().Done() // as an engine on a silent cable
	})
	a, _ := pair(t, e)
	go func() {
		<-began
		i := elsewhere(e.as("i1", "smol", "NODE-B"))
		i.Ready, i.State, i.Reason = false, "failed", "rank 1 on NODE-B: signal 9"
		a.set(i)
	}()
	resp, body := post(t, a.base+chat, `{"model":"smol"}`)
	if m := message(t, body); resp.StatusCode != 502 || !strings.Contains(m, "the instance has ended: rank 1 on NODE-B: signal 9") {
		t.Errorf("%d %s", resp.StatusCode, m)
	}
}

func TestARequestCrossesOnePairOfGatewaysAtMost(t *testing.T) {
	e := newEngine(t, says("x"))
	a, b := pair(t, e)
	// Each believes that the other owns it.
	a.set(elsewhere(e.as("i1", "smol", "NODE-B")))
	b.set(elsewhere(e.as("i1", "smol", "NODE-A")))
	resp, body := post(t, a.base+chat, `{"model":"smol"}`)
	if resp.StatusCode != 503 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if a.dials.Load() != 1 || b.dials.Load() != 0 || e.requests.Load() != 0 {
		t.Errorf("%d and %d connections between gateways, %d requests", a.dials.Load(), b.dials.Load(), e.requests.Load())
	}
	// What is no request of a gateway is not served to a node.
	c, err := tls.Dial("tcp", b.peer, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r := bufio.NewReader(c)
	for _, head := range []string{
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTbcluster-Hop: 2\r\nTbcluster-Instance: i1\r\nContent-Length: 2\r\n\r\n{}",
		"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /v1/admin HTTP/1.1\r\nHost: x\r\nTbcluster-Hop: 1\r\nTbcluster-Instance: i1\r\nContent-Length: 2\r\n\r\n{}",
	} {
		if _, err := io.WriteString(c, head); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		if resp.StatusCode < 400 || resp.Header.Get(refusedHeader) == "" {
			t.Errorf("%q: %d", head, resp.StatusCode)
		}
	}
}

func TestADeadConnectionBetweenNodesIsNoDeadInstance(t *testing.T) {
	e := newEngine(t, says("hello"))
	a, _ := pair(t, e, func(x *times) { x.idle = time.Millisecond })
	// A client's connection ends as soon, which is no word about those between nodes.
	fresh := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for range 5 {
		resp, err := fresh.Post(a.base+chat, "application/json", strings.NewReader(`{"model":"smol"}`))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%d %s %v", resp.StatusCode, body, err)
		}
	}
}

// A node whose role is too low reads why, and its people too.
func TestANodeThatMayOnlyLookIsToldSo(t *testing.T) {
	e := newEngine(t, says("x"))
	a, b := pair(t, e)
	why := "alpha has the role viewer and may only look"
	b.refuse.Store(&why)
	resp, body := post(t, a.base+chat, `{"model":"smol"}`)
	if resp.StatusCode != http.StatusForbidden || message(t, body) != why || e.requests.Load() != 0 {
		t.Errorf("%d %s, %d requests", resp.StatusCode, body, e.requests.Load())
	}
}

func TestTooManyRequestsAreRefusedWithWords(t *testing.T) {
	n := newNode(t, "a", func(o *Options) { o.MaxConcurrent = 1 })
	hold, began := make(chan struct{}), make(chan struct{})
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) { close(began); <-hold })
	n.set(e.as("i1", "smol", "a"))
	done := make(chan struct{})
	go func() { defer close(done); post(t, n.base+chat, `{"model":"smol"}`) }()
	<-began
	resp, body := post(t, n.base+chat, `{"model":"smol"}`)
	if resp.StatusCode != 503 || !strings.Contains(message(t, body), "1 requests are under way") || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	close(hold)
	<-done
}

// raw sends bytes and returns the status of the answer, 0 when the connection
// is closed without one.
func raw(t *testing.T, addr, text string) (int, string) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	// A server that refuses early need not read it all.
	_, _ = io.Copy(c, strings.NewReader(text))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, err.Error()
	}
	var b bytes.Buffer
	_, _ = io.Copy(&b, resp.Body)
	return resp.StatusCode, b.String()
}

func TestWebPagesDoNotReachIt(t *testing.T) {
	n := newNode(t, "a", nil)
	e := newEngine(t, says("hello"))
	n.set(e.as("i1", "smol", "a"))
	addr := strings.TrimPrefix(n.base, "http://")
	_, port, _ := net.SplitHostPort(addr)
	for _, c := range []struct {
		head string // after the request line
		ok   bool
	}{
		{"Host: 127.0.0.1:PORT", true},
		{"Host: 127.0.0.1", true},
		{"Host: [::1]:PORT", true},
		{"Host: localhost:PORT", true},
		{"Host: LocalHost.", true},
		{"Host: desk-one:PORT", true},
		{"Host: 127.0.0.1:PORT\r\nOrigin: http://127.0.0.1:PORT", true},
		{"Host: localhost:PORT\r\nSec-Fetch-Site: none", true},

		{"Host: evil.example:PORT", false}, // a name that was rebound to 127.0.0.1
		{"Host: evil.example", false},
		{"Host: localhost.evil.example", false},
		{"Host: 127.0.0.1.evil.example", false},
		{"Host: 10.77.3.1:PORT", false},
		{"Host: 0.0.0.0:PORT", false},
		{"Host: [::]:PORT", false},
		{"Host: [::ffff:8.8.8.8]", false},
		{"Host: [fe80::1%25lo]", false},
		{"Host: 127.0.0.1:PORT:1", false},
		{"Host: localhost:80x", false},
		{"Host: user@localhost", false},
		{"Host: ", false},
		{"Host: 127.0.0.1:PORT\r\nOrigin: http://evil.example", false},
		{"Host: 127.0.0.1:PORT\r\nOrigin: null", false},
		{"Host: 127.0.0.1:PORT\r\nOrigin: ", false},
		{"Host: 127.0.0.1:PORT\r\nOrigin: http://127.0.0.1:1", false},
		{"Host: 127.0.0.1:PORT\r\nOrigin: https://127.0.0.1:PORT", false},
		{"Host: 127.0.0.1:PORT\r\nOrigin: http://127.0.0.1:PORT\r\nOrigin: http://evil.example", false},
		{"Host: localhost:PORT\r\nOrigin: http://127.0.0.1:PORT", false},
		{"Host: 127.0.0.1:PORT\r\nSec-Fetch-Site: cross-site", false},
		{"Host: 127.0.0.1:PORT\r\nSec-Fetch-Site: same-site", false},
	} {
		head := strings.ReplaceAll(c.head, "PORT", port)
		for _, line := range []string{"GET /v1/models HTTP/1.1", "POST /v1/chat/completions HTTP/1.1"} {
			body := `{"model":"smol"}`
			if strings.HasPrefix(line, "GET") {
				body = ""
			}
			before := e.requests.Load()
			status, text := raw(t, addr, fmt.Sprintf("%s\r\n%s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s", line, head, len(body), body))
			if (status == 200) != c.ok || (!c.ok && status != 403 && status != 400) {
				t.Errorf("%s with %q: %d %s", line, head, status, text)
			}
			if !c.ok && e.requests.Load() != before {
				t.Errorf("%q reached the engine", head)
			}
		}
	}
	// A preflight is refused, and nothing allows an origin.
	status, text := raw(t, addr, "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: "+addr+"\r\nOrigin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n\r\n")
	if status != 403 || strings.Contains(text, "Access-Control") {
		t.Errorf("preflight: %d %s", status, text)
	}
	// The absolute form names a host as well.
	if status, _ := raw(t, addr, "GET http://evil.example/v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"); status != 403 {
		t.Errorf("absolute form: %d", status)
	}
	if status, _ := raw(t, addr, "GET /v1/models HTTP/1.0\r\n\r\n"); status != 403 {
		t.Errorf("without a Host: %d", status)
	}
}

func TestOtherAddressesNeedAKey(t *testing.T) {
	var keys []string
	n := newNode(t, "a", func(o *Options) { o.APIKeys = func() []string { return keys } })
	e := newEngine(t, says("hello"))
	n.set(e.as("i1", "smol", "a"))
	s := httptest.NewServer(n.OpenHandler())
	defer s.Close()
	for _, c := range []struct {
		keys   []string
		header http.Header
		status int
	}{
		{nil, http.Header{"Authorization": {"Bearer "}}, 403},
		{nil, http.Header{"Authorization": {"Bearer x"}}, 403},
		{[]string{""}, http.Header{"Authorization": {"Bearer "}}, 401},
		{[]string{"k1", "k2"}, nil, 401},
		{[]string{"k1", "k2"}, http.Header{"Authorization": {"Bearer k"}}, 401},
		{[]string{"k1", "k2"}, http.Header{"Authorization": {"k1"}}, 401},
		{[]string{"k1", "k2"}, http.Header{"Authorization": {"Basic k1"}}, 401},
		{[]string{"k1", "k2"}, http.Header{"Authorization": {"Bearer k1", "Bearer k2"}}, 401},
		{[]string{"k1", "k2"}, http.Header{"Authorization": {"Bearer k2"}}, 200},
		{[]string{"k1", "k2"}, http.Header{"Authorization": {"bearer k1"}}, 200},
		{[]string{"k1", "k1"}, http.Header{"Authorization": {"Bearer k1"}}, 200},
		{[]string{"k1"}, http.Header{"Authorization": {"Bearer k1"}, "Origin": {"http://evil.example"}}, 403},
	} {
		keys = c.keys
		req, err := http.NewRequest("GET", s.URL+"/v1/models", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "some.name.example"
		for k, v := range c.header {
			req.Header[k] = v
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != c.status {
			t.Errorf("keys %q, %v: %d %s, want %d", c.keys, c.header, resp.StatusCode, b, c.status)
		}
	}
	// The handler for loopback does not serve by mistake what is not loopback.
	for _, local := range []net.Addr{&net.TCPAddr{IP: net.IPv4(192, 168, 1, 5), Port: 8555}, &net.TCPAddr{IP: net.IPv6unspecified}, &net.UnixAddr{}} {
		r := httptest.NewRequest("GET", "http://localhost/v1/models", nil)
		r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, local))
		w := httptest.NewRecorder()
		n.LoopbackHandler().ServeHTTP(w, r)
		if w.Code != 403 {
			t.Errorf("on %v: %d", local, w.Code)
		}
	}
}

func TestUnixSocketNeedsNoHost(t *testing.T) {
	n := newNode(t, "a", nil)
	e := newEngine(t, says("hello"))
	n.set(e.as("i1", "smol", "a"))
	path := t.TempDir() + "/gateway.sock"
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- n.Serve(ctx, l, n.SocketHandler()) }()
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}}}
	resp, err := c.Post("http://gateway"+chat, "application/json", strings.NewReader(`{"model":"i1-name"}`))
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != 200 || !strings.Contains(string(b), "hello") {
		t.Errorf("%d %s", resp.StatusCode, b)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("serving ended with %v", err)
	}
}

func TestSlowAndLargeClientsAreCutOff(t *testing.T) {
	n := newNode(t, "a", nil, func(x *times) { x.header, x.body = 2*time.Second, 2*time.Second })
	e := newEngine(t, says("hello"))
	n.set(e.as("i1", "smol", "a"))
	addr := strings.TrimPrefix(n.base, "http://")
	if status, text := raw(t, addr, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "); status != 0 && status != 408 {
		t.Errorf("half a header: %d %s", status, text)
	}
	if status, text := raw(t, addr, "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"); status != 408 {
		t.Errorf("half a body: %d %s", status, text)
	}
	if status, _ := raw(t, addr, "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Large: "+strings.Repeat("x", 64<<10)+"\r\n\r\n"); status != 431 {
		t.Errorf("a large header: %d", status)
	}
	// What is held of the requests above is let go.
	if resp, body := post(t, "http://"+addr+chat, `{"model":"smol"}`); resp.StatusCode != 200 {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	until(t, "the memory of requests to be let go", func() bool { return n.held.Load() == 0 })
}

func TestAnswersThatTakeLongAreNotCutOff(t *testing.T) {
	n := newNode(t, "a", nil, func(x *times) { x.body = 20 * time.Millisecond })
	e := newEngine(t, func(w http.ResponseWriter, r *http.Request) {
		// Longer than a body may take: the limit must be gone by now.
		select {
		case <-time.After(300 * time.Millisecond):
			fmt.Fprint(w, "late")
		case <-r.Context().Done():
		}
	})
	n.set(e.as("i1", "smol", "a"))
	if resp, body := post(t, n.base+chat, `{"model":"smol"}`); resp.StatusCode != 200 || body != "late" {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

func TestTheNextFreePortIsTaken(t *testing.T) {
	ls, addr, err := ListenLoopback(0)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range ls {
		defer l.Close()
	}
	port := ls[0].Addr().(*net.TCPAddr).Port
	more, next, err := ListenLoopback(port)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range more {
		defer l.Close()
		a := l.Addr().(*net.TCPAddr)
		if !a.IP.IsLoopback() || a.Port <= port || a.Port > port+99 {
			t.Errorf("listens on %v", a)
		}
	}
	if addr == next {
		t.Errorf("%s twice", addr)
	}
}

func TestServeConnEndsWithItsContext(t *testing.T) {
	n := newNode(t, "a", nil)
	client, server := net.Pipe()
	defer client.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- n.ServeConn(ctx, server, n.PeerHandler()) }()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := client.Read(make([]byte, 1)); err == nil {
		t.Error("the connection is still open")
	}
}
