//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "tbcluster-rig: the rig needs Linux on amd64")
	os.Exit(1)
}
