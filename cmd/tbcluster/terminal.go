package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"tbcluster/api/fault"
)

// isTerminal reports whether v is a terminal; buffers of tests are none.
func isTerminal(v any) bool {
	f, ok := v.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// terminalWidth returns the columns of w, 80 when it cannot tell.
func terminalWidth(w any) int {
	if f, ok := w.(*os.File); ok {
		if cols, _, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 {
			return cols
		}
	}
	return 80
}

// confirm asks a question that a yes must follow; without a terminal the
// answer is an error that names the flag to use instead.
func confirm(ctx context.Context, g *globals, question, flag string) error {
	if !isTerminal(g.in) {
		return fault.Newf(fault.Usage, "say "+flag+" to do it without being asked", "%s", question).
			With("flag", flag)
	}
	fmt.Fprintf(g.errOut, "%s [y/N] ", question)
	answer := make(chan string, 1)
	go func() { answer <- readLine(g.in) }()
	select {
	case <-ctx.Done():
		fmt.Fprintln(g.errOut)
		return fault.FromStatus(ctx.Err())
	case a := <-answer:
		if a = strings.ToLower(strings.TrimSpace(a)); a == "y" || a == "yes" {
			return nil
		}
		return fault.New(fault.Interrupted, "not done: the answer was no", nil, "")
	}
}

// readLine returns the next line of r, or what there is before its end.
func readLine(r io.Reader) string {
	line, err := bufio.NewReader(r).ReadString('\n')
	if err != nil && line == "" {
		return ""
	}
	return line
}

// newRequestID returns an ID under which the agent knows a repeated request.
func newRequestID() string { return rand.Text() }
