package llamacpp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// maxAnswer bounds what is read of an answer of the engine.
const maxAnswer = 4 << 20

// RankReady checks the port of a rank from its own node. "starting" is the
// phase before it listens, "loading" while weights are read.
func (a *Adapter) RankReady(ctx context.Context, rank spec.Rank) (bool, string, error) {
	if len(rank.Ports) == 0 {
		return false, "", fault.Newf(fault.Internal, "", "rank %d has no port", rank.Index)
	}
	at := rank.Ports[0].AddrPort().String()
	if rank.Role == RoleRPC {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", at)
		if err != nil {
			return false, "starting", notYet(err)
		}
		return true, "", c.Close()
	}
	status, body, err := a.do(ctx, rank, http.MethodGet, "/health", nil)
	if err != nil {
		return false, "starting", notYet(err)
	}
	switch {
	case status == http.StatusOK && bytes.Contains(body, []byte(`"ok"`)):
		return true, "", nil
	case status == http.StatusServiceUnavailable:
		return false, "loading", nil
	}
	return false, "", fault.Newf(fault.PortInUse, "end what listens there, then place again", "something that is not llama-server answers on %s: HTTP %d", at, status)
}

// notYet is nil for the errors of a port that nobody listens on yet.
func notYet(err error) error {
	var ne net.Error
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) || errors.As(err, &ne) && ne.Timeout() {
		return nil
	}
	return err
}

// Complete asks rank 0 for the words after a fixed prompt, at temperature 0.
func (a *Adapter) Complete(ctx context.Context, rank spec.Rank, _ string, tokens int) (spec.Completion, error) {
	q := map[string]any{"prompt": "The capital of France is", "n_predict": tokens, "temperature": 0, "cache_prompt": true}
	if slices.Contains(rank.Args, "-kvu") {
		q["id_slot"] = probeSlot
	}
	start := time.Now()
	status, body, err := a.do(ctx, rank, http.MethodPost, "/completion", q)
	if err != nil {
		return spec.Completion{}, fault.New(fault.EngineFailed, "no completion came back", err, "`tbcluster logs` shows what the engine said")
	}
	if status != http.StatusOK {
		return spec.Completion{}, &fault.Fault{Reason: fault.EngineFailed, What: "no completion came back", Why: fmt.Sprintf("HTTP %d: %s", status, message(body)), Fix: "`tbcluster logs` shows what the engine said"}
	}
	c, err := parseCompletion(body)
	c.Took = time.Since(start)
	if err != nil {
		return spec.Completion{}, fault.New(fault.EngineFailed, "the completion that came back is none", err, "`tbcluster logs` shows what the engine said")
	}
	return c, nil
}

func parseCompletion(body []byte) (spec.Completion, error) {
	var v struct {
		Content   *string `json:"content"`
		Predicted int     `json:"tokens_predicted"`
		Timings   struct {
			PerSecond float64 `json:"predicted_per_second"`
		} `json:"timings"`
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return spec.Completion{}, err
	}
	if v.Content == nil || v.Predicted < 1 {
		return spec.Completion{}, errors.New("it holds no token")
	}
	c := spec.Completion{Text: *v.Content, Tokens: v.Predicted}
	if v.Predicted > 1 { // the first token comes with the prompt
		c.TokensPerSecond = max(0, v.Timings.PerSecond)
	}
	return c, nil
}

// Progress tells from the slots whether requests are worked on.
func (a *Adapter) Progress(ctx context.Context, rank spec.Rank) (bool, string, error) {
	status, body, err := a.do(ctx, rank, http.MethodGet, "/slots", nil)
	if err != nil {
		return false, "", err
	}
	if status != http.StatusOK { // an older or differently built server does not tell
		return false, "", nil
	}
	return parseSlots(body)
}

func parseSlots(body []byte) (bool, string, error) {
	var slots []struct {
		ID        int  `json:"id"`
		Busy      bool `json:"is_processing"`
		Task      int  `json:"id_task"`
		Processed int  `json:"n_prompt_tokens_processed"`
		Next      []struct {
			Decoded int `json:"n_decoded"`
		} `json:"next_token"`
	}
	if err := json.Unmarshal(body, &slots); err != nil {
		return false, "", fmt.Errorf("slots: %w", err)
	}
	var mark strings.Builder
	for _, s := range slots {
		if !s.Busy {
			continue
		}
		fmt.Fprintf(&mark, "%d:%d:%d", s.ID, s.Task, s.Processed)
		for _, n := range s.Next {
			fmt.Fprintf(&mark, ":%d", n.Decoded)
		}
		mark.WriteByte(' ')
	}
	return mark.Len() > 0, mark.String(), nil
}

func (a *Adapter) do(ctx context.Context, rank spec.Rank, method, path string, body any) (int, []byte, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return 0, nil, err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+rank.Ports[0].AddrPort().String()+path, r)
	if err != nil {
		return 0, nil, err
	}
	if key := rank.Env[keyVariable]; key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	return resp.StatusCode, out, err
}

// message takes the words out of an error answer.
func message(body []byte) string {
	var v struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &v) == nil && v.Error.Message != "" {
		return v.Error.Message
	}
	return strings.TrimSpace(string(body[:min(len(body), 200)]))
}
