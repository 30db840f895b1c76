package rig

import (
	"slices"
	"testing"

	"tbcluster/rig/guest"
)

func TestFaultsOfLinuxAreKnownByTheirText(t *testing.T) {
	const request = "\n[   33.4] Workqueue: events tb_cfg_request_work [thunderbolt]\n[   33.4]  tb_cfg_request_put+0x4a/0x80 [thunderbolt]" +
		"\n[   33.4]  tb_cfg_request_dequeue+0x104/0x110 [thunderbolt]\n[   33.4]  process_one_work+0x547/0xb90"
	const other = "\n[   33.4] Workqueue: events tb_handle_hotplug [thunderbolt]\n[   33.4]  tb_switch_remove+0x4a/0x80 [thunderbolt]"
	for text, known := range map[string]bool{
		"[  575.7] BUG: KASAN: slab-use-after-free in tb_xdomain_match+0x83/0xf0 [thunderbolt]":                                               true,
		"[  575.7] BUG: KASAN: slab-use-after-free in tb_xdomain_remove+0x83/0xf0 [thunderbolt]":                                              false,
		"[   33.4] ODEBUG: free active (active state 0) object: 00000000f9cdf20b object type: work_struct hint: tb_cfg_request_work+0x0/0x60": true,
		"[   33.4] ODEBUG: free active (active state 0) object: 00000000f9cdf20b object type: work_struct hint: tb_handle_hotplug+0x0/0x60":   false,
		"[   33.4] WARNING: lib/debugobjects.c:629 at debug_print_object+0xd3/0x120, CPU#0: kworker/0:2/35" + request:                         true,
		"[   33.4] WARNING: lib/debugobjects.c:629 at debug_print_object+0xd3/0x120, CPU#0: kworker/0:2/35" + other:                           false,
		"[   33.7] WARNING: possible recursive locking detected\n[   33.7] 7.3.4-rigdebug #1 Tainted: G        W" + request:                   true,
		"[   33.7] WARNING: possible recursive locking detected\n[   33.7] 7.3.4-rigdebug #1 Tainted: G        W" + other:                     false,
		"[   33.7] WARNING: possible circular locking dependency detected" + request:                                                          false,
	} {
		if got := slices.ContainsFunc(LinuxFaults, func(a guest.Allowance) bool { return a.Pattern.MatchString(text) }); got != known {
			t.Errorf("known %v: %s", got, text)
		}
	}
	for _, a := range LinuxFaults {
		if a.Reference == "" {
			t.Errorf("%s: nothing says why it may be", a.Pattern)
		}
	}
}
