//go:build !linux

package proc

// Trim gives back the pages of this program's own file where the system lets it
// be asked for that; here it does not.
func Trim() error { return nil }
