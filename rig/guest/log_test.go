package guest

import (
	"strings"
	"testing"
	"time"
)

func TestRecordsAreRead(t *testing.T) {
	r, err := ParseRecord("30,1234,5000001,-;thunderbolt 0000:00:03.0: total paths: 12; more\n")
	want := Record{Level: 6, Facility: 3, Sequence: 1234, Time: 5000001 * time.Microsecond, Text: "thunderbolt 0000:00:03.0: total paths: 12; more"}
	if err != nil || r != want {
		t.Errorf("%+v %v", r, err)
	}
	if got := r.String(); got != "[    5.000001] thunderbolt 0000:00:03.0: total paths: 12; more" {
		t.Errorf("%q", got)
	}
	for _, bad := range []string{"", "6,1,2", "6,1;x", "x,1,2,-;x", "6,-1,2,-;x", "6,1,99999999999999999999,-;x", "-6,1,2,-;x"} {
		if r, err := ParseRecord(bad); err == nil {
			t.Errorf("%q became %+v", bad, r)
		}
	}
}

func FuzzParseRecord(f *testing.F) {
	for _, s := range []string{"6,1,2,-;text", "30,1234,5000001,c,caller=T1;text with ; and \\x0a", ";;;", ",,,;"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRecord(s)
		if err == nil && (r.Level < 0 || r.Level > 7 || r.Facility < 0 || r.Time < 0 || !strings.Contains(s, r.Text)) {
			t.Errorf("%q became %+v", s, r)
		}
	})
}

// Lines as kernels print them, each beginning a report of its kind.
func TestReportsAreToldByTheirWords(t *testing.T) {
	for line, want := range map[string]Kind{
		"[    6.210817] WARNING: rigfault.c:29 at rigfault_warn+0x10/0x20 [rigfault], CPU#0: insmod/114":          Warning,
		"[   10.012345] WARNING: CPU: 0 PID: 77 at drivers/net/thunderbolt/main.c:100 tbnet_open+0x1/0x2":         Warning,
		"[    6.325206] BUG: kernel NULL pointer dereference, address: 0000000000000000":                          Oops,
		"[    6.326251] Oops: Oops: 0002 [#1] SMP NOPTI":                                                          Oops,
		"[    6.384422] BUG: unable to handle page fault for address: 000145850fed8545":                           Oops,
		"[    1.000000] general protection fault, probably for non-canonical address 0xdead000000000122: 0000":    Oops,
		"[    1.000000] kernel BUG at mm/slub.c:563!":                                                             Oops,
		"[    9.000001][    T1] BUG: KASAN: slab-use-after-free in rigfault_kasan+0x1/0x2 [rigfault]":             KASAN,
		"[    9.000001][   C0] UBSAN: shift-out-of-bounds in lib/x.c:1:2":                                         KASAN,
		"[    9.000001] BUG kmalloc-64 (Not tainted): Poison overwritten":                                         KASAN,
		"[    9.000001] WARNING: possible circular locking dependency detected":                                   Lockdep,
		"[    9.000001] WARNING: possible irq lock inversion dependency detected":                                 Lockdep,
		"[    9.000001] WARNING: possible recursive locking detected":                                             Lockdep,
		"[    9.000001] WARNING: SOFTIRQ-safe -> SOFTIRQ-unsafe lock order detected":                              Lockdep,
		"[    9.000001] WARNING: suspicious RCU usage":                                                            Lockdep,
		"[    9.000001] WARNING: inconsistent lock state":                                                         Lockdep,
		"[    9.000001] BUG: sleeping function called from invalid context at kernel/locking/mutex.c:500":         Lockdep,
		"[    9.000001] BUG: scheduling while atomic: insmod/99/0x00000002":                                       Lockdep,
		"[  242.000001] INFO: task kworker/u4:1:33 blocked for more than 120 seconds.":                            Hung,
		"[  242.000001] watchdog: BUG: soft lockup - CPU#0 stuck for 130s! [insmod:99]":                           Hung,
		"[  242.000001] rcu: INFO: rcu_preempt self-detected stall on CPU":                                        Hung,
		"[  242.000001] unregister_netdevice: waiting for thunderbolt0 to become free. Usage count = 2":           Hung,
		"[    3.000001] DMA-API: thunderbolt 0000:00:03.0: device driver frees DMA memory with different size":    DMA,
		"[    3.000001] thunderbolt 0000:00:03.0: DMA-API: exceeds 7 overlapping mappings of cacheline 0x1":       DMA,
		"[   30.000001] kmemleak: 16 new suspected memory leaks (see /sys/kernel/debug/kmemleak)":                 Leak,
		"[    5.000001] Kernel panic - not syncing: sysrq triggered crash":                                        Panic,
		"[    5.000001] refcount_t: underflow; use-after-free.":                                                   Warning,
		"[    5.000001] list_add corruption. prev->next should be next (0), but was 1. (prev=2).":                 Warning,
		"[    5.000001] ODEBUG: free active (active state 0) object: 0 object type: work_struct hint: tbnet_work": Warning,
	} {
		var r reports
		r.line("[    0.000000] Linux version 7.3.4")
		r.line(line)
		if len(r.list) != 1 || r.list[0].Kind != want {
			t.Errorf("%q: %+v, want %s", line, r.list, want)
		}
	}
}

func TestWhatIsNoReportIsNone(t *testing.T) {
	var r reports
	for _, line := range []string{
		"WARNING: printed by a program", "[    1.0] rig: WARNING: not at the beginning", "[    1.000000] systemd[1]: BUG: of a unit's name",
		"[    1.000000] clocksource: timekeeping watchdog on CPU0: Marking clocksource 'tsc' as unstable", "[    1.000000] kmemleak: 0 new suspected memory leaks",
		"[    1.000000] tbring: loading out-of-tree module taints kernel.", "[    1.000000] x86/mm: Checked W+X mappings: passed, no W+X pages found.",
		"[    0.000000] debug: DMA-API: preallocated 65536 debug entries", "[    0.000000] DMA-API: debugging enabled by kernel config", "",
	} {
		r.line(line)
	}
	if len(r.list) != 0 {
		t.Errorf("%+v", r.list)
	}
}

func TestAReportHasItsTextAndNotTheNextOnes(t *testing.T) {
	var r reports
	for line := range strings.Lines(`[    6.0] BUG: KASAN: slab-use-after-free in f+0x1/0x2
[    6.0] ==================================================================
[    6.0] Write of size 1
[    6.0] Call Trace:
[    6.0]  f+0x1
[    6.0]  g+0x1
a line of a program
[    6.0] ==================================================================
[    6.1] something else
[    6.2] WARNING: a.c:1 at a+0x1/0x2, CPU#0: x/1
[    6.2] Call Trace:
[    6.2] BUG: kernel NULL pointer dereference, address: 0
[    6.2] Call Trace of the second
`) {
		r.line(line)
	}
	if len(r.list) != 3 {
		t.Fatalf("%+v", r.list)
	}
	if text := r.list[0].Text; !strings.Contains(text, "g+0x1") || strings.Contains(text, "something else") || strings.Contains(text, "program") {
		t.Errorf("the first: %s", text)
	}
	if text := r.list[1].Text; !strings.HasSuffix(text, "Call Trace:") {
		t.Errorf("the second: %s", text)
	}
	if r.list[2].Title != "BUG: kernel NULL pointer dereference, address: 0" || !strings.HasSuffix(r.list[2].Text, "of the second") {
		t.Errorf("the third: %+v", r.list[2])
	}
}

// A guest decides what its console has: however much, what is kept is bounded.
func FuzzConsole(f *testing.F) {
	f.Add("[    1.0] WARNING: x\n[    1.0] Call Trace:\n[    1.0] ---[ end trace 0 ]---\n", 3)
	f.Add("[    1.0] BUG: x\n\x00\xff\n<4>[ 1.2][ T1] Oops: y", 2000)
	f.Fuzz(func(t *testing.T, text string, times int) {
		var r reports
		for range min(max(times, 0), 3000) {
			for line := range strings.Lines(text) {
				r.line(line)
			}
			if len(text) > 1000 {
				break
			}
		}
		if len(r.list) > maxReports {
			t.Fatalf("%d reports", len(r.list))
		}
		for _, x := range r.list {
			if strings.Count(x.Text, "\n") > reportLines || x.Title == "" {
				t.Fatalf("%d lines of %q", strings.Count(x.Text, "\n"), x.Title)
			}
		}
	})
}
