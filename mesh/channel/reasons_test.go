package channel

import (
	"context"
	"net/netip"
	"syscall"
	"testing"
)

func TestReasonsAreShort(t *testing.T) {
	way := func(addr string) Way { return Way{Kind: LAN, Interface: "eth0", Addr: netip.MustParseAddrPort(addr)} }
	refused := func(addr string) error { return wayError{way(addr), syscall.ECONNREFUSED} }
	for want, errs := range map[string][]error{
		"eth0 10.0.0.1:1: no agent listens there (connection refused)": {refused("10.0.0.1:1")},
		"eth0 10.0.0.1:1, eth0 10.0.0.2:1, 3 more: no agent listens there (connection refused); eth0 10.0.0.9:1: no answer": {
			refused("10.0.0.1:1"), refused("10.0.0.2:1"), wayError{way("10.0.0.9:1"), context.DeadlineExceeded},
			refused("10.0.0.3:1"), refused("10.0.0.4:1"), refused("10.0.0.5:1")},
		"eth0 10.0.0.1:1: no agent listens there (connection refused); no answer in time by 3 ways": {
			refused("10.0.0.1:1"), unansweredError{3, context.DeadlineExceeded}},
		"no answer in time by one way": {unansweredError{1, context.DeadlineExceeded}},
	} {
		if got := reasons(errs); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}
