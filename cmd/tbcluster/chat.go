package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type chatOptions struct {
	g           *globals
	model       string
	prompt      string
	system      string
	temperature float64
	maxTokens   int
}

func newChatCommand(g *globals) *cobra.Command {
	o := &chatOptions{g: g}
	cmd := &cobra.Command{
		Use:     "chat [MODEL] [PROMPT...]",
		Short:   "Talk to a model that is ready",
		GroupID: groupModels,
		Long: `Sends a prompt through this node's gateway to whichever node serves the model,
and prints the answer as it comes. MODEL is the name of an instance or a model;
it may be left out when just one instance is ready and no prompt is given.

Without a prompt it reads one from standard input, or, on a terminal, holds a
conversation: one line is one message, an empty line or Ctrl-D ends it.` +
			exitHelp(fault.InstanceUnknown, fault.InstanceAmbiguous, fault.InstanceNotReady, fault.EngineFailed, fault.NodeDown, fault.Interrupted),
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: complete(g, 1, instanceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				o.model, o.prompt = args[0], strings.Join(args[1:], " ")
			}
			return runChat(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.system, "system", "", "what the model is told before the conversation")
	f.Float64Var(&o.temperature, "temperature", 0, "0 for the likeliest answer, more for more variety")
	f.IntVar(&o.maxTokens, "max-tokens", 512, "longest answer, in tokens")
	return cmd
}

// chatMessage is one message of a conversation, as OpenAI has it.
type chatMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chatJSON is `tbcluster chat -o json`.
type chatJSON struct {
	Model           string  `json:"model"`
	Answer          string  `json:"answer"`
	FinishReason    string  `json:"finish_reason"`
	Seconds         float64 `json:"seconds"`
	FirstTokenAfter float64 `json:"first_token_seconds"`
}

func runChat(ctx context.Context, o *chatOptions) error {
	e, err := choose(ctx, o.g)
	if err != nil {
		return err
	}
	if o.model == "" {
		if o.model, err = onlyReady(ctx, e); err != nil {
			return err
		}
	}
	var history []chatMessage
	if o.system != "" {
		history = append(history, chatMessage{"system", o.system})
	}
	talk := o.prompt == "" && isTerminal(o.g.in)
	if o.prompt == "" && !talk {
		b, err := io.ReadAll(io.LimitReader(o.g.in, 1<<20))
		if err != nil {
			return fault.New(fault.FileIO, "read the prompt from standard input", err, "give it as an argument instead")
		}
		if o.prompt = strings.TrimSpace(string(b)); o.prompt == "" {
			return fault.Newf(fault.Usage, "tbcluster chat "+o.model+" \"Hello\"", "there is no prompt")
		}
	}
	http := gatewayClient(e)
	if !talk {
		_, err := ask(ctx, o, http, append(history, chatMessage{"user", o.prompt}))
		return err
	}
	lines := bufio.NewReader(o.g.in)
	for {
		fmt.Fprintf(o.g.errOut, "%s> ", plain(o.model))
		line, err := readLineCtx(ctx, lines)
		if line = strings.TrimSpace(line); line == "" || err != nil && !errors.Is(err, io.EOF) {
			fmt.Fprintln(o.g.errOut)
			return ctx.Err()
		}
		history = append(history, chatMessage{"user", line})
		answer, err := ask(ctx, o, http, history)
		if err != nil {
			return err
		}
		history = append(history, chatMessage{"assistant", answer})
	}
}

// readLineCtx reads a line unless ctx ends first.
func readLineCtx(ctx context.Context, r *bufio.Reader) (string, error) {
	type result struct {
		line string
		err  error
	}
	got := make(chan result, 1)
	go func() {
		line, err := r.ReadString('\n')
		got <- result{line, err}
	}()
	select {
	case <-ctx.Done():
		return "", ctx.Err()
	case g := <-got:
		return g.line, g.err
	}
}

// onlyReady returns the name of the one instance that is ready.
func onlyReady(ctx context.Context, e *endpoint) (string, error) {
	c, err := dial(e)
	if err != nil {
		return "", err
	}
	defer c.close()
	resp, err := c.instance.List(ctx, &tbv1.ListInstancesRequest{})
	if err != nil {
		return "", err
	}
	var ready []string
	for _, i := range resp.GetInstances() {
		if i.GetState() == tbv1.InstanceState_INSTANCE_STATE_READY {
			ready = append(ready, i.GetName())
		}
	}
	switch len(ready) {
	case 0:
		return "", fault.Newf(fault.InstanceNotReady, "`tbcluster place MODEL` starts one; `tbcluster ps` says how far it is", "no instance is ready")
	case 1:
		return ready[0], nil
	}
	return "", fault.New(fault.InstanceAmbiguous, "several instances are ready", errors.New(strings.Join(ready, ", ")), "name one of them")
}

// gatewayClient returns an HTTP client of the gateway beside the agent.
func gatewayClient(e *endpoint) *http.Client {
	path := e.gateway()
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
		DisableCompression: true,
	}}
}

// ask sends the conversation, prints the answer as it comes and returns it.
func ask(ctx context.Context, o *chatOptions, client *http.Client, history []chatMessage) (string, error) {
	body, err := json.Marshal(struct {
		Model       string        `json:"model"`
		Messages    []chatMessage `json:"messages"`
		Stream      bool          `json:"stream"`
		Temperature float64       `json:"temperature"`
		MaxTokens   int           `json:"max_tokens"`
	}{o.model, history, true, o.temperature, o.maxTokens})
	if err != nil {
		panic(err) // strings and numbers
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		panic(err) // a constant URL
	}
	req.Header.Set("Content-Type", "application/json")
	start := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return "", chatFault(ctx, o, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", httpFault(o, resp)
	}
	var answer strings.Builder
	var out chatJSON
	err = readStream(resp.Body, func(d chatDelta) {
		if answer.Len() == 0 && d.text != "" {
			out.FirstTokenAfter = time.Since(start).Seconds()
		}
		answer.WriteString(d.text)
		if d.finish != "" {
			out.FinishReason = d.finish
		}
		if !o.g.json() {
			o.g.printf("%s", plainText(d.text))
		}
	})
	if !o.g.json() && answer.Len() > 0 {
		o.g.printf("\n")
	}
	if err != nil {
		return "", chatFault(ctx, o, err)
	}
	if out.FinishReason == "length" && !o.g.json() {
		o.g.notef("the answer was cut off at %d tokens; --max-tokens allows more", o.maxTokens)
	}
	if o.g.json() {
		out.Model, out.Answer, out.Seconds = o.model, answer.String(), time.Since(start).Seconds()
		writeJSON(o.g.out, out)
	}
	return answer.String(), nil
}

// plainText is plain, but lets line breaks pass: an answer has several lines.
func plainText(s string) string {
	parts := strings.Split(s, "\n")
	for i := range parts {
		parts[i] = plain(parts[i])
	}
	return strings.Join(parts, "\n")
}

// chatFault says why no answer came, or no whole one.
func chatFault(ctx context.Context, o *chatOptions, err error) error {
	if ctx.Err() != nil {
		return fault.New(fault.Interrupted, "stopped waiting for "+o.model, nil, "")
	}
	if f := fault.As(err); f != nil {
		return f
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return o.g.chosen.unanswered("the gateway does not answer", op.Err, "start the agent with `tbcluster up`")
	}
	return fault.New(fault.EngineFailed, "the answer of "+o.model+" broke off", err, "`tbcluster ps` says what became of it, `tbcluster logs` what it said")
}

// httpReasons maps the gateway's status codes to reasons.
var httpReasons = map[int]fault.Reason{
	http.StatusNotFound:           fault.InstanceUnknown,
	http.StatusConflict:           fault.InstanceAmbiguous,
	http.StatusServiceUnavailable: fault.InstanceNotReady,
	http.StatusTooManyRequests:    fault.InstanceNotReady,
	http.StatusBadGateway:         fault.EngineFailed,
	http.StatusGatewayTimeout:     fault.EngineFailed,
	http.StatusUnauthorized:       fault.Denied,
	http.StatusForbidden:          fault.Denied,
	http.StatusBadRequest:         fault.Usage,
}

// httpFault turns an answer that is an error into a fault, in the words of
// whoever wrote it.
func httpFault(o *chatOptions, resp *http.Response) error {
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return fault.New(fault.EngineFailed, "the answer of "+o.model+" broke off", err, "try again")
	}
	var doc struct {
		Error struct {
			Message string `json:"message"`
			Code    any    `json:"code"`
		} `json:"error"`
	}
	why := strings.TrimSpace(string(b))
	if json.Unmarshal(b, &doc) == nil && doc.Error.Message != "" {
		why = doc.Error.Message
	}
	reason, ok := httpReasons[resp.StatusCode]
	if !ok {
		reason = fault.EngineFailed
	}
	// The gateway says the reason itself where it has one of ours.
	if code, isText := doc.Error.Code.(string); isText {
		if _, known := fault.Table[fault.Reason(strings.ToUpper(code))]; known {
			reason = fault.Reason(strings.ToUpper(code))
		}
	}
	fix := "`tbcluster ps` lists the instances and says which are ready"
	if reason == fault.Denied {
		fix = "`tbcluster pair --list` says which role each node has"
	}
	return fault.New(reason, "ask "+o.model, errors.New(why), fix).
		With("http_status", fmt.Sprint(resp.StatusCode))
}
