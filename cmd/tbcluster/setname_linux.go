package main

import "os"

// setName is what `ps` shows of a process that was started as /proc/self/exe.
func setName(name string) {
	// It is only for people's eyes: where it cannot be set nothing is lost.
	_ = os.WriteFile("/proc/self/comm", []byte(name), 0)
}
