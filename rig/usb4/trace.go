//go:build linux

package usb4

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"tbcluster/api/fault"
)

// TraceFilter says what a trace writes down. The zero value is everything but
// registers and interrupts.
type TraceFilter struct {
	// NoControl and NoFrames leave out what they name.
	NoControl, NoFrames bool
	// Registers and Interrupts add accesses to registers of the host interface,
	// and interrupts.
	Registers, Interrupts bool
	// Hosts, if not empty, are the names of the hosts that are of interest. A
	// frame is of interest if either end is.
	Hosts []string
	// Rings, if not empty, are the transmit rings whose frames are of interest.
	Rings []int
}

// Trace writes what happens in a fabric to a writer, a line for each thing, in
// the order in which it happens:
//
//	0.104210 a    > READ route 0 router 0+1 seq 0
//	0.104215 a    < READ route 0 router 0+1 seq 0: IDs 40011d6b
//	2.310034 a    > XDOMAIN request route 1: properties request, sequence 0, offset 0
//	3.001200 a.0  = tx1 hop 8 4096 bytes sof 1 eof 2 to b.0 rx1
//
// Columns: seconds since the fabric was made; host or host.port; ">" from the
// driver, "<" to the driver, "=" frames and the state of things.
//
// Writing is done while the fabric is locked, from a buffer of 64 KiB; a writer
// that blocks holds everything up. An error of the writer ends the trace; Close
// returns it.
type Trace struct {
	fabric *Fabric
	filter TraceFilter
	w      io.Writer
	buf    []byte
	err    error
	rings  uint32 // set of rings
}

const traceBuffer = 64 << 10

// Trace starts a trace. Several may run.
func (f *Fabric) Trace(w io.Writer, filter TraceFilter) *Trace {
	t := &Trace{fabric: f, filter: filter, w: w, buf: make([]byte, 0, traceBuffer+1024), rings: 1<<maxHops - 1}
	if len(filter.Rings) > 0 {
		t.rings = 0
		for _, r := range filter.Rings {
			t.rings |= 1 << r
		}
	}
	f.lock()
	defer f.unlock()
	f.traces = append(f.traces, t)
	f.setTraces()
	return t
}

// setTraces works out what any trace wants.
func (f *Fabric) setTraces() {
	f.traceFrames, f.traceRegisters, f.traceInterrupts = false, false, false
	for _, t := range f.traces {
		f.traceFrames = f.traceFrames || !t.filter.NoFrames
		f.traceRegisters = f.traceRegisters || t.filter.Registers
		f.traceInterrupts = f.traceInterrupts || t.filter.Interrupts
	}
}

// Flush writes out what is still in the buffer.
func (t *Trace) Flush() error {
	t.fabric.mu.Lock()
	defer t.fabric.mu.Unlock()
	t.flush()
	return t.err
}

// Close ends the trace and writes out the rest. It returns the writer's error.
func (t *Trace) Close() error {
	f := t.fabric
	f.lock()
	defer f.unlock()
	if i := slices.Index(f.traces, t); i >= 0 {
		f.traces = slices.Delete(slices.Clone(f.traces), i, i+1)
		f.setTraces()
	}
	t.flush()
	return t.err
}

func (t *Trace) flush() {
	if t.err == nil && len(t.buf) > 0 {
		if _, err := t.w.Write(t.buf); err != nil {
			t.err = fault.New(fault.FileIO, "write the trace", err, "")
		}
	}
	t.buf = t.buf[:0]
}

// end ends a line.
func (t *Trace) end() {
	t.buf = append(t.buf, '\n')
	if len(t.buf) >= traceBuffer {
		t.flush()
	}
}

// begin begins a line with the time and the place.
func (t *Trace) begin(now time.Duration, h *node, p *Port, direction string) {
	t.buf = appendTime(t.buf, now-t.fabric.start)
	t.buf = append(t.buf, ' ')
	start := len(t.buf)
	t.buf = appendPlace(t.buf, h, p)
	for len(t.buf)-start < 7 {
		t.buf = append(t.buf, ' ')
	}
	t.buf = append(t.buf, ' ')
	t.buf = append(t.buf, direction...)
	t.buf = append(t.buf, ' ')
}

// appendTime appends seconds with microseconds, twelve columns.
func appendTime(b []byte, d time.Duration) []byte {
	us := int64(d / time.Microsecond)
	s := us / 1e6
	for w := int64(10000); w > max(s, 1); w /= 10 {
		b = append(b, ' ')
	}
	b = strconv.AppendInt(b, s, 10)
	b = append(b, '.')
	for w, v := int64(100000), us%1e6; w > 0; w /= 10 {
		b = append(b, byte('0'+v/w%10))
	}
	return b
}

func appendPlace(b []byte, h *node, p *Port) []byte {
	b = append(b, h.name...)
	if p != nil {
		b = append(b, '.')
		b = strconv.AppendInt(b, int64(p.index), 10)
	}
	return b
}

func (t *Trace) wants(h *node) bool {
	return len(t.filter.Hosts) == 0 || slices.Contains(t.filter.Hosts, h.name)
}

// kind is what a line is about.
type kind int

const (
	kindState kind = iota
	kindRegister
	kindInterrupt
)

// trace writes a line to the traces that want it. The text begins with its
// direction.
func (f *Fabric) trace(k kind, h *node, p *Port, text func() string) {
	line := ""
	for _, t := range f.traces {
		if !t.wants(h) || k == kindRegister && !t.filter.Registers || k == kindInterrupt && !t.filter.Interrupts {
			continue
		}
		if line == "" {
			line = text()
		}
		t.begin(f.clock.Now(), h, p, line)
		t.buf = t.buf[:len(t.buf)-1]
		t.end()
	}
}

// note writes down a change of state.
func (f *Fabric) note(h *node, p *Port, format string, args ...any) {
	if len(f.traces) > 0 {
		f.trace(kindState, h, p, func() string { return "= " + fmt.Sprintf(format, args...) })
	}
}

// tracePacket writes down a control packet.
func (f *Fabric) tracePacket(h *node, p *Port, fromDriver bool, pk *packet) {
	line := ""
	for _, t := range f.traces {
		if t.filter.NoControl || !t.wants(h) {
			continue
		}
		if line == "" {
			line = pk.describe(fromDriver)
		}
		direction := "<"
		if fromDriver {
			direction = ">"
		}
		t.begin(f.clock.Now(), h, p, direction)
		t.buf = append(t.buf, line...)
		t.end()
	}
}

// traceFrame writes down what became of a frame. to is nil for one that did not
// get to a receive ring.
func (f *Fabric) traceFrame(from *ring, rt *route, to *ring, word uint32, n int, why cause, flags uint32) {
	now := f.clock.Now()
	for _, t := range f.traces {
		if t.filter.NoFrames || t.rings&(1<<from.number) == 0 || !t.wants(&from.host.node) && (to == nil || !t.wants(&to.host.node)) {
			continue
		}
		var port *Port
		if rt.wire != nil {
			port = from.host.ports[rt.first().from]
		}
		t.begin(now, &from.host.node, port, "=")
		b := append(t.buf, "tx"...)
		b = strconv.AppendInt(b, int64(from.number), 10)
		if rt.out != nil {
			b = append(b, " hop "...)
			b = strconv.AppendUint(b, uint64(rt.out.outHop()), 10)
		}
		b = append(b, ' ')
		b = strconv.AppendInt(b, int64(n), 10)
		b = append(b, " bytes sof "...)
		b = strconv.AppendUint(b, uint64(word>>descSOFShift&0xf), 10)
		b = append(b, " eof "...)
		b = strconv.AppendUint(b, uint64(word>>descEOFShift&0xf), 10)
		if to != nil {
			b = append(b, " to "...)
			b = appendPlace(b, &to.host.node, to.host.ports[rt.last().to])
			b = append(b, " rx"...)
			b = strconv.AppendInt(b, int64(to.number), 10)
		}
		if flags&flipped != 0 {
			b = append(b, ", a bit flipped"...)
		}
		if flags&descCRCError != 0 {
			b = append(b, ", CRC error"...)
		}
		if flags&descOverrun != 0 {
			b = append(b, ", overrun"...)
		}
		if why != arrives {
			b = append(b, ", dropped: "...)
			b = append(b, causeNames[why]...)
		}
		t.buf = b
		t.end()
	}
}

func vectorNames(vectors uint32) string {
	b := []byte("< interrupt")
	for i := range numVectors {
		if vectors&(1<<i) != 0 {
			b = append(b, ' ')
			b = strconv.AppendInt(b, int64(i), 10)
		}
	}
	return string(b)
}
