package discover

import (
	"errors"
	"syscall"
)

// Cause is why multicast cannot be sent on an interface.
type Cause string

// The causes.
const (
	// Permission: the system does not let this program use the local network.
	// macOS says "no route to host" then, for unicast to neighbours too.
	Permission Cause = "permission"
	// Refused: a packet filter drops it, or the program may not send it.
	Refused Cause = "refused"
	// Unrouted: the routes lead nowhere, or to an interface that is not up.
	Unrouted Cause = "unrouted"
	// Gone: the interface has just gone, or lost its address.
	Gone Cause = "gone"
	// Other: none of these; Err says what.
	Other Cause = "other"
)

// Trouble is why multicast does not work on an interface.
type Trouble struct {
	Interface string
	Err       error
	Cause     Cause
}

// Blocked reports whether somebody keeps this program from multicast on purpose,
// so that a person can allow it.
func (t Trouble) Blocked() bool { return t.Cause == Permission || t.Cause == Refused }

// String says what is the matter, for people.
func (t Trouble) String() string {
	words := map[Cause]string{
		Permission: "the system does not let tbcluster use the local network",
		Refused:    "a packet filter refuses what is sent",
		Unrouted:   "the routes lead nowhere",
		Gone:       "the interface is gone",
	}[t.Cause]
	if words == "" {
		return t.Interface + ": " + t.Err.Error()
	}
	return t.Interface + ": " + words + " (" + t.Err.Error() + ")"
}

// causeOf tells the causes of a failed send apart. EHOSTUNREACH is a matter of
// routes on Linux, where an "unreachable" route gives it. On macOS it is what a
// program without the Local Network permission gets; a missing route there is
// ENETUNREACH, and the message was bound to an interface that has an address.
// Where families fail differently, what a person can allow comes first.
func causeOf(goos string, err error) Cause {
	var errno = func(list ...syscall.Errno) bool {
		for _, e := range list {
			if errors.Is(err, e) {
				return true
			}
		}
		return false
	}
	switch {
	case goos == "darwin" && errno(syscall.EHOSTUNREACH):
		return Permission
	case errno(syscall.EPERM, syscall.EACCES):
		return Refused
	case errno(syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN):
		return Unrouted
	case errno(syscall.ENODEV, syscall.ENXIO, syscall.EADDRNOTAVAIL):
		return Gone
	}
	return Other
}
