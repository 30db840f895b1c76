package main

import (
	"fmt"
	"os"
)

func main() {
	var err error
	switch {
	case os.Getpid() == 1:
		err = runInit()
	case len(os.Args) == 2 && os.Args[1] == "agent":
		err = runAgent()
	default:
		err = fmt.Errorf("it is process 1 of a guest, or `guestd agent` in one")
	}
	fmt.Fprintln(os.Stderr, "guestd:", err)
	os.Exit(1)
}
