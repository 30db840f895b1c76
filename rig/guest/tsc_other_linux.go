//go:build linux && !amd64

package guest

// counterKHz is not known; no guest runs here.
func counterKHz() uint64 { return 0 }
