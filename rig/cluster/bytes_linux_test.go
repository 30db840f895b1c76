package cluster

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"tbcluster/rig"
	"tbcluster/rig/usb4"
)

var unplugged = usb4.CableOptions{Unplugged: true}

// errors are what a kernel counts of frames and segments that came in broken:
// by the names of /proc/net/snmp, and of the statistics of interfaces.
func errorsOf(t *testing.T, h *rig.Host) map[string]uint64 {
	t.Helper()
	counts := map[string]uint64{}
	lines := strings.Split(sh(t, h, "cat /proc/net/snmp"), "\n")
	for i := 0; i+1 < len(lines); i += 2 {
		proto, names, _ := strings.Cut(lines[i], ":")
		_, values, _ := strings.Cut(lines[i+1], ":")
		v := strings.Fields(values)
		for j, name := range strings.Fields(names) {
			// Udp's InErrors counts full buffers too; the rest has nothing of frames.
			if name != "InCsumErrors" && name != "InHdrErrors" && proto+name != "TcpInErrs" {
				continue
			}
			if n, err := strconv.ParseUint(v[j], 10, 64); err == nil {
				counts[proto+name] = n
			}
		}
	}
	if len(counts) < 4 {
		t.Fatalf("host %s: it counts only %v", h.Name(), counts)
	}
	for _, line := range strings.Split(sh(t, h, "cd /sys/class/net; for i in eth0 thunderbolt*; do for s in rx_errors rx_crc_errors rx_length_errors rx_over_errors; do echo $i/$s $(cat $i/statistics/$s); done; done"), "\n") {
		name, value, _ := strings.Cut(line, " ")
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			t.Fatalf("host %s: %q: %v", h.Name(), line, err)
		}
		counts[name] = n
	}
	return counts
}

// virtioOffloads are the bits of virtio (1.2, section 5.1.3) by which a frame may
// be handed over without its checksum, or several as one: the LAN of the rig
// could not pass that on.
var virtioOffloads = regexp.MustCompile(`^(0|1|7|8|9|10|11|12|13|14)$`)

// bothWays sends bytes over LAN and cable at the same time, in both directions,
// while both hosts have more to do than they can. Every byte is compared, and no
// kernel has seen a broken frame: neither the emulated memory nor the LAN spoils
// anything that a checksum would have to find.
func bothWays(t *testing.T, d *desk) {
	d.lan(t, true)
	defer d.lan(t, false)
	for _, h := range d.Hosts() {
		features := sh(t, h, "cat /sys/class/net/eth0/device/features")
		for bit, on := range features {
			if on == '1' && virtioOffloads.MatchString(strconv.Itoa(bit)) {
				t.Errorf("host %s: the network card has bit %d: it may leave checksums out", h.Name(), bit)
			}
		}
	}
	l := d.status(t, d.Host("a")).link(t)
	ways := map[string][2]rig.StreamEnd{}
	for i, e := range []*LinkEnd{l.A, l.B} {
		h := d.Host(e.Node)
		address, _, _ := strings.Cut(e.Address, "/")
		x, y := ways["cable"], ways["LAN"]
		x[i], y[i] = rig.StreamEnd{Host: h, Interface: e.Interface, Address: address}, rig.StreamEnd{Host: h, Interface: "eth0", Address: h.LANAddress()}
		ways["cable"], ways["LAN"] = x, y
	}
	before := map[string]map[string]uint64{}
	for _, h := range d.Hosts() {
		before[h.Name()] = errorsOf(t, h)
		sh(t, h, "for i in 1 2; do (while :; do :; done) & done >/dev/null 2>&1; jobs -p >/tmp/load")
		defer sh(t, h, "kill $(cat /tmp/load) 2>/dev/null; rm /tmp/load")
	}
	const size = 2 << 20
	var all sync.WaitGroup
	for name, ends := range ways {
		for turn := range 2 {
			all.Go(func() {
				got, err := rig.Stream(within(t), ends[turn], ends[1-turn], uint64(turn), size)
				if err != nil {
					t.Errorf("%s from host %s: %v", name, ends[turn].Host.Name(), err)
					return
				}
				t.Logf("%-5s from host %s: %d bytes each way, %.3f Gb/s", name, ends[turn].Host.Name(), got.Bytes, got.Gbps())
			})
		}
	}
	all.Wait()
	for _, h := range d.Hosts() {
		for name, n := range errorsOf(t, h) {
			if was := before[h.Name()][name]; n != was {
				t.Errorf("host %s: %s went from %d to %d", h.Name(), name, was, n)
			}
		}
	}
	for _, c := range d.Cables() {
		for _, w := range []usb4.WireCounters{c.Counters().AtoB, c.Counters().BtoA} {
			if w.Corrupted+w.CorruptedFlagged+w.Overrun+w.Lost != 0 {
				t.Errorf("%s: %s", c, fmt.Sprintf("%+v", w))
			}
		}
	}
}
