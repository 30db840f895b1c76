package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// serveGateway serves h beside the agent, as the gateway does.
func serveGateway(t *testing.T, d *agentDouble, h http.HandlerFunc) {
	t.Helper()
	l, err := net.Listen("unix", (&endpoint{path: d.socket}).gateway())
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
}

// answer streams these pieces as OpenAI does.
func answer(finish string, pieces ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, p := range pieces {
			piece, err := json.Marshal(p)
			if err != nil {
				panic(err)
			}
			fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":%s},\"finish_reason\":null}]}\n\n", piece)
			w.(http.Flusher).Flush()
		}
		if finish != "" {
			fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{},\"finish_reason\":%q}]}\n\ndata: [DONE]\n\n", finish)
		}
	}
}

func TestChatPrintsTheAnswerAsItComes(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	var mu sync.Mutex
	var asked map[string]any
	serveGateway(t, d, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if r.Method != http.MethodPost || r.URL.Path != "/v1/chat/completions" || r.Host != "localhost" {
			t.Errorf("asked %s %s of %s", r.Method, r.URL, r.Host)
		}
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
			t.Error(err)
		}
		answer("stop", "The capital", " is\n", "Par\x1b[31mis.")(w, r)
	})
	r := tb(t, d, "chat", "smol", "--system", "Be short.", "What", "is", "it?")
	r.wantCode(t, 0)
	if want := "The capital is\nPar\\x1b[31mis.\n"; r.out != want {
		t.Errorf("printed %q, want %q", r.out, want)
	}
	mu.Lock()
	defer mu.Unlock()
	want := map[string]any{"model": "smol", "stream": true, "temperature": 0.0, "max_tokens": 512.0, "messages": []any{
		map[string]any{"role": "system", "content": "Be short."}, map[string]any{"role": "user", "content": "What is it?"}}}
	if fmt.Sprint(asked) != fmt.Sprint(want) {
		t.Errorf("asked for %v, want %v", asked, want)
	}
}

func TestChatTakesThePromptFromStandardInput(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	serveGateway(t, d, answer("length", "Paris"))
	r := tbIn(t.Context(), d, "What is it?\n", "chat", "smol", "--max-tokens", "1")
	r.wantCode(t, 0)
	if r.out != "Paris\n" || !strings.Contains(r.err, "cut off at 1 tokens") {
		t.Errorf("printed %q, said %q", r.out, r.err)
	}
	tbIn(t.Context(), d, "  \n", "chat", "smol").wantCode(t, fault.ExitUsage)
}

func TestChatAsJSON(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	serveGateway(t, d, answer("stop", "Par", "is"))
	r := tb(t, d, "chat", "smol", "x", "-o", "json")
	r.wantCode(t, 0)
	var doc chatJSON
	if err := json.Unmarshal([]byte(r.out), &doc); err != nil || doc.Answer != "Paris" || doc.Model != "smol" || doc.FinishReason != "stop" || doc.Seconds <= 0 {
		t.Errorf("%v in %s", err, r.out)
	}
}

// Half an answer must not look like a whole one.
func TestChatThatBreaksOffFails(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	serveGateway(t, d, answer("", "The cap"))
	r := tb(t, d, "chat", "smol", "x")
	r.wantCode(t, fault.ExitFailed)
	if r.out != "The cap\n" || !strings.Contains(r.err, "the answer of smol broke off") {
		t.Errorf("printed %q, said %q", r.out, r.err)
	}
}

func TestChatErrorsOfTheGateway(t *testing.T) {
	for _, c := range []struct {
		status int
		body   string
		code   int
		why    string
	}{
		{404, `{"error":{"message":"nobody serves gpt-9; ready: smol","code":"model_not_found"}}`, fault.ExitUnknown, "nobody serves gpt-9; ready: smol"},
		{503, `{"error":{"message":"smol is loading","code":"INSTANCE_NOT_READY"}}`, fault.ExitPrecondition, "smol is loading"},
		{502, `{"error":{"message":"gamma is down","code":"node_down"}}`, fault.ExitNodeDown, "gamma is down"},
		{403, `{"error":{"message":"alpha has the role viewer","code":"role_too_low"}}`, fault.ExitDenied, "alpha has the role viewer"},
		{500, `not json`, fault.ExitFailed, "not json"},
		{400, `{"error":{"message":"exceed_context_size_error","code":400}}`, fault.ExitUsage, "exceed_context_size_error"},
	} {
		d := startDouble(t, &agentDouble{})
		serveGateway(t, d, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(c.status)
			io.WriteString(w, c.body)
		})
		r := tb(t, d, "chat", "smol", "x")
		r.wantCode(t, c.code)
		if !strings.Contains(r.err, "why:   "+c.why+"\n") {
			t.Errorf("%d: said\n%s", c.status, r.err)
		}
	}
}

func TestChatWithoutANameTakesTheOneThatIsReady(t *testing.T) {
	s := &tbv1.ClusterState{}
	d := startDouble(t, &agentDouble{state: s})
	serveGateway(t, d, answer("stop", "hi"))
	tbIn(t.Context(), d, "hello", "chat").wantCode(t, fault.ExitPrecondition)
	s.Instances = []*tbv1.Instance{instance(tbv1.InstanceState_INSTANCE_STATE_READY), {Name: "big", State: tbv1.InstanceState_INSTANCE_STATE_LOADING}}
	tbIn(t.Context(), d, "hello", "chat").wantCode(t, 0)
	s.Instances[1].State = tbv1.InstanceState_INSTANCE_STATE_READY
	r := tbIn(t.Context(), d, "hello", "chat")
	r.wantCode(t, fault.ExitUnknown)
	if !strings.Contains(r.err, "smol, big") {
		t.Errorf("the choice is not named:\n%s", r.err)
	}
}

func FuzzReadStream(f *testing.F) {
	f.Add("data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":null}]}\n\ndata: [DONE]\n")
	f.Add("data: {\"error\":{\"message\":\"no\"}}\n")
	f.Add(": comment\r\nevent: x\r\ndata:{}\r\n\r\n")
	f.Add("data: {\"choices\":[{\"finish_reason\":\"stop\"}]}")
	f.Add("data: null\n")
	f.Add("data: {\"choices\":null,\"error\":null}\n")
	f.Fuzz(func(t *testing.T, s string) {
		finished := false
		err := readStream(strings.NewReader(s), func(d chatDelta) { finished = finished || d.finish != "" })
		if err == nil && !finished && !strings.Contains(s, "[DONE]") {
			t.Errorf("%q was taken for a whole answer", s)
		}
	})
}
