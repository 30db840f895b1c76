package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"tbcluster/rig/state"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("usage: probe watch | attributes | receive INTERFACE | send INTERFACE ADDRESS:PORT SEED BYTES")

func run(ctx context.Context, args []string, out io.Writer) error {
	say := json.NewEncoder(out)
	switch {
	case len(args) == 1 && args[0] == "watch":
		return watch(ctx, "/sys", say)
	case len(args) == 1 && args[0] == "attributes":
		a, err := state.ReadAttributes("/sys")
		if err != nil {
			return err
		}
		return say.Encode(a)
	case len(args) == 2 && args[0] == "receive":
		return receive(ctx, args[1], say)
	case len(args) == 5 && args[0] == "send":
		seed, err := strconv.ParseUint(args[3], 10, 64)
		if err != nil {
			return errUsage
		}
		size, err := strconv.ParseInt(args[4], 10, 64)
		if err != nil || size < 0 {
			return errUsage
		}
		return send(ctx, args[1], args[2], seed, size, say)
	}
	return errUsage
}
