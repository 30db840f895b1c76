package guest

import (
	"regexp"
	"strings"
	"time"
)

// Kind is a kind of Report.
type Kind string

// The kinds.
const (
	Panic   Kind = "panic"
	Oops    Kind = "oops"    // a fault of the kernel, or its BUG()
	Warning Kind = "warning" // its WARN()
	KASAN   Kind = "kasan"   // memory used wrongly; also KFENCE and UBSAN
	Lockdep Kind = "lockdep" // locks that may deadlock, RCU used wrongly, sleeping where one must not
	Hung    Kind = "hung"    // tasks, CPUs or work that stand still
	DMA     Kind = "dma"     // the DMA API used wrongly
	Leak    Kind = "leak"    // of kmemleak
)

// Report is what a kernel says of its own faults.
type Report struct {
	Kind  Kind
	Title string // its first line, without the time
	Text  string // all of it, as far as it was seen
}

// signs are how reports begin, the first that fits counts. They are the words of
// the kernel: lib/bug.c, kernel/panic.c, arch/x86/mm/fault.c,
// kernel/locking/lockdep.c, mm/kasan/report.c, kernel/hung_task.c,
// kernel/watchdog.c, kernel/rcu/tree_stall.h, kernel/dma/debug.c,
// mm/kmemleak.c, lib/debugobjects.c, mm/slub.c, net/core/dev.c.
var signs = []struct {
	kind    Kind
	pattern *regexp.Regexp
}{
	{Panic, regexp.MustCompile(`^Kernel panic - not syncing`)},
	{KASAN, regexp.MustCompile(`^(BUG: (KASAN|KFENCE|KMSAN|KCSAN)|UBSAN): `)},
	{KASAN, regexp.MustCompile(`^BUG [\w:.-]+ \((Not tainted|Tainted)`)}, // slub_debug
	{Hung, regexp.MustCompile(`^(watchdog: )?BUG: (soft lockup|workqueue lockup)|^(watchdog: Watchdog|NMI watchdog: Watchdog) detected hard LOCKUP|^INFO: task .* blocked for more than|^(rcu: )?INFO: rcu_\w+ (self-)?detected (expedited )?stalls?|^unregister_netdevice: waiting for`)},
	{Lockdep, regexp.MustCompile(`^WARNING: (possible (circular|irq lock inversion|recursive|.*unsafe.*)|inconsistent lock state|suspicious RCU usage|bad unlock balance|held lock freed|lock held when returning|.*lock order detected|Nested lock was not taken)|^INFO: (possible (circular|recursive) locking|trying to register non-static key)|^BUG: (sleeping function called from invalid context|scheduling while atomic|Invalid wait context|MAX_LOCK|MAX_STACK_TRACE)|^\[ BUG: `)},
	{DMA, regexp.MustCompile(`^(.*: )?DMA-API: .*(device driver|exceeds|cacheline)`)},
	{Leak, regexp.MustCompile(`^kmemleak: [1-9]\d* new suspected memory leak`)},
	{Oops, regexp.MustCompile(`^(BUG: |kernel BUG at |Oops: |Oops:|general protection fault|double fault|invalid opcode|divide error:|stack segment|int3: )`)},
	{Warning, regexp.MustCompile(`^(WARNING: |ODEBUG: |refcount_t: |list_(add|del) corruption)`)},
}

// stamp is what the kernel puts before each line on the console: the time, and
// the task or CPU with CONFIG_PRINTK_CALLER. Lines without come from programs.
var stamp = regexp.MustCompile(`^(?:<\d+>)?\[ *\d+\.\d+\](?:\[ *[TC]\d+\])? ?`)

// reportEnds is how a report ends.
var reportEnds = regexp.MustCompile(`---\[ end |^={40,}$`)

// What is kept of one report, and how many reports.
const (
	reportLines = 200
	maxReports  = 1000
)

// reports finds Reports in a console, line by line.
type reports struct {
	list []Report
	open bool      // the last one may go on
	n    int       // its lines
	at   time.Time // when the last of them came
}

// line takes a line of the console.
func (r *reports) line(text string) {
	text = strings.TrimRight(text, "\r\n")
	at := stamp.FindStringIndex(text)
	if at == nil {
		return
	}
	said := text[at[1]:]
	for _, s := range signs {
		if !s.pattern.MatchString(said) {
			continue
		}
		if len(r.list) < maxReports {
			r.list = append(r.list, Report{Kind: s.kind, Title: said, Text: text})
			r.open, r.n, r.at = true, 1, time.Now()
		}
		return
	}
	if !r.open {
		return
	}
	last := &r.list[len(r.list)-1]
	// KASAN and lockdep rule a line under their titles, too: one that comes
	// early is not the end.
	r.n++
	if r.n > reportLines || r.n > 5 && reportEnds.MatchString(said) {
		r.open = false
	}
	last.Text += "\n" + text
	r.at = time.Now()
}
