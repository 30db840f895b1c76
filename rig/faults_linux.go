package rig

import (
	"context"
	"fmt"
	"regexp"

	"tbcluster/rig/guest"
)

// LinuxFaults are faults of Linux's own driver that random steps bring out now
// and then and that no order of steps avoids. No report of them was found; the
// references are to the code that has them.
var LinuxFaults = []guest.Allowance{
	// A response is sent and freed. Until the work that ends its request has run,
	// the request is still in the list that every packet is compared with.
	{Pattern: regexp.MustCompile(`BUG: KASAN: slab-use-after-free in tb_xdomain_match`), Reference: linuxXDomain},
	// A packet that matches a request whose work has begun, which takes it off that
	// list last, has the work done once more; the request is freed before. It is
	// reported by debugobjects in two ways, and by lockdep, as what debugobjects
	// does about it waits for the work in the work.
	{Pattern: regexp.MustCompile(`ODEBUG: free active .* hint: tb_cfg_request_work`), Reference: linuxRequest},
	{Pattern: regexp.MustCompile(`(?s)WARNING: lib/debugobjects\.c.* at debug_print_object.*tb_cfg_request_dequeue`), Reference: linuxRequest},
	{Pattern: regexp.MustCompile(`(?s)WARNING: possible recursive locking.*tb_cfg_request_dequeue`), Reference: linuxRequest},
}

const (
	linuxSource  = "https://git.kernel.org/pub/scm/linux/kernel/git/torvalds/linux.git/tree/drivers/thunderbolt/"
	linuxXDomain = linuxSource + "xdomain.c: __tb_xdomain_response(), tb_xdp_properties_response(), tb_xdomain_match(); ctl.c: tb_cfg_request(), tb_cfg_request_find(). Seen in 7.3"
	linuxRequest = linuxSource + "ctl.c: tb_ctl_rx_callback(), tb_cfg_request_work(), tb_cfg_request_dequeue(). Seen in 7.3"
)

// refresh boots hosts anew whose kernels have reported what is let pass: lockdep
// is off after a report of KASAN's. It returns how many reports there were since
// seen, by host, was brought up to date last.
func (r *Rig) refresh(ctx context.Context, off map[string]bool, seen map[string]int) (reports int, err error) {
	for _, h := range r.Hosts() {
		n := len(h.guest.Allowed())
		if n == seen[h.Name()] {
			continue
		}
		reports += n - seen[h.Name()]
		if seen[h.Name()] = n; off[h.Name()] {
			continue
		}
		r.options.Log(fmt.Sprintf("host %s is booted anew: its kernel has reported a known fault", h.Name()))
		if err := h.Cut(); err != nil {
			return reports, err
		}
		if err := h.Boot(ctx); err != nil {
			return reports, err
		}
		if err := r.Settle(ctx); err != nil {
			return reports, err
		}
	}
	return reports, nil
}
