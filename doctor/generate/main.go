package main

import (
	"fmt"
	"os"

	"tbcluster/doctor"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate FILE")
		os.Exit(1)
	}
	if err := os.WriteFile(os.Args[1], doctor.Markdown(), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
