package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"

	"tbcluster/api/fault"
)

// maxEvent bounds one event of an answer: far more than any token needs.
const maxEvent = 1 << 20

// chatDelta is what one event of a streamed answer adds.
type chatDelta struct {
	text   string
	finish string // "stop", "length", …, in the last one
}

// readStream reads a streamed chat completion: server-sent events, each a JSON
// document, until "[DONE]". A stream that ends without either that or a reason
// to finish was cut off, which is an error: half an answer is not an answer.
func readStream(r io.Reader, each func(chatDelta)) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 4096), maxEvent)
	finished := false
	for lines.Scan() {
		data, ok := bytes.CutPrefix(bytes.TrimRight(lines.Bytes(), "\r"), []byte("data:"))
		if !ok {
			continue // comments, event names and the empty lines between events
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			// Read to the end, so that nobody on the way takes us for gone.
			_, err := io.Copy(io.Discard, io.LimitReader(r, maxEvent))
			return err
		}
		var event struct {
			Choices []struct {
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
				FinishReason string `json:"finish_reason"`
			} `json:"choices"`
			Error *struct {
				Message string `json:"message"`
			} `json:"error"`
		}
		if err := json.Unmarshal(data, &event); err != nil {
			return fault.New(fault.Protocol, "read the answer", err, "the engine does not speak OpenAI's protocol; `tbcluster logs` shows what it said")
		}
		if event.Error != nil {
			return fault.New(fault.EngineFailed, "the engine gave up on the answer", errors.New(event.Error.Message), "`tbcluster ps` says what became of it, `tbcluster logs` what it said")
		}
		for _, c := range event.Choices {
			finished = finished || c.FinishReason != ""
			each(chatDelta{c.Delta.Content, c.FinishReason})
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	if !finished {
		return io.ErrUnexpectedEOF
	}
	return nil
}
