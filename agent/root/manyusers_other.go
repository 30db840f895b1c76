//go:build !linux

package root

// ManyUsers reports whether this process can become other users.
func ManyUsers() bool { return true }
