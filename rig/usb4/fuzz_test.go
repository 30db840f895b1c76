//go:build linux

package usb4

import (
	"encoding/binary"
	"io"
	"testing"
	"time"

	"tbcluster/rig/vfiouser"
)

// FuzzPacket takes control packets apart and puts them together again.
func FuzzPacket(f *testing.F) {
	for _, p := range []packet{
		newPacket(packetRead, 0, 1, accessWord(spaceRouter, 0, 0, 5)),
		newPacket(packetWrite, 0, 0, accessWord(spacePaths, 3, 18, 2), 0x80001808, 0),
		newPacket(packetError, fromRouter, 0, errorAckPlug|1<<8|3<<30),
		newPacket(packetEvent, fromRouter, 0, 1|1<<31),
		newPacket(packetXDomainRequest, 0, 1, 14, uuidXDP, 1, 2, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 5),
		newPacket(packetXDomainResponse, 0, 1, 14, uuidXDP, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 7<<16|3, 9, 1, 2),
		newPacket(packetXDomainRequest, 0, 1, 14, uuidTBNet, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1),
	} {
		f.Add(uint8(p.kind), p.append(nil))
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		kind &= 0xf
		if len(b)%4 == 0 && len(b) >= 12 && len(b) <= maxPacket { // make the CRC right
			p := packet{}
			for p.n = 0; p.n < len(b)/4-1; p.n++ {
				p.words[p.n] = be.Uint32(b[4*p.n:])
			}
			b = p.append(nil)
		}
		p, ok := parsePacket(kind, b)
		if !ok {
			return
		}
		if again := p.append(nil); string(again) != string(b) {
			t.Errorf("% x became % x", b, again)
		}
		if p.describe(true) == "" || p.describe(false) == "" {
			t.Error("nothing to say")
		}
	})
}

// fuzzed is two hosts with a cable, of which a fuzz test drives the first, and
// between their second ports a hub with another one behind it, which leads back to
// the first by its downstream port.
func fuzzed(t *testing.T) (a, b *driver) {
	f := fabric(t, Options{})
	f.Trace(io.Discard, TraceFilter{Registers: true, Interrupts: true})
	ha, hb := addHost(t, f, HostOptions{Name: "a", Version: 2, Ports: 2}), addHost(t, f, HostOptions{Name: "b", Ports: 2})
	connect(t, ha.Port(0), hb.Port(0), CableOptions{Training: -1, WireOptions: WireOptions{Latency: time.Microsecond, Corrupt: Injection{Every: 3}}})
	one, err := f.AddHub(HubOptions{Name: "one", Ports: 4})
	if err != nil {
		t.Fatal(err)
	}
	two, err := f.AddHub(HubOptions{Name: "two"})
	if err != nil {
		t.Fatal(err)
	}
	for _, ends := range [][2]*Port{{ha.Port(1), one.Port(0)}, {hb.Port(1), one.Port(1)}, {one.Port(2), two.Port(0)}, {one.Port(3), two.Port(1)}} {
		connect(t, ends[0], ends[1], CableOptions{Training: -1})
	}
	a, b = bring(t, ha), bring(t, hb)
	b.event(0, true)
	b.event(1, true)
	return a, b
}

// alive checks that the second host is as it was.
func alive(t *testing.T, b *driver) {
	if got := b.get1(spaceRouter, 0, routerIDs); got != 0x40011d6b {
		t.Errorf("the other host's IDs are %#x", got)
	}
}

// FuzzControl sends packets to a router, with a right CRC.
func FuzzControl(f *testing.F) {
	f.Add([]byte{1, 3, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 32, 0})
	f.Add([]byte{6, 8, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 5, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0x20, 0x1a, 0x80, 0, 0, 0x33})
	// Of the hub: it is enabled, and a port of it is unlocked and hears of events.
	f.Add([]byte{2, 2, 0, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0x20, 3, 0x80, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 3, 2, 0x18, 0x20, 4, 0, 0, 0, 0, 6, 8, 0, 0, 0, 0, 0, 0, 5, 3})
	f.Fuzz(func(t *testing.T, data []byte) {
		a, b := fuzzed(t)
		for n := 0; len(data) > 2 && n < 100; n++ {
			p := packet{kind: packetType(data[0] & 0xf)}
			p.n = 2 + int(data[1])%(maxDwords-2)
			data = data[2:]
			for i := 0; i < p.n && len(data) >= 4; i++ {
				p.words[i] = be.Uint32(data)
				data = data[4:]
			}
			a.send(p)
		}
		a.settled()
		alive(t, b)
	})
}

// FuzzRegisters writes and reads registers, configuration space and memory as
// it likes.
func FuzzRegisters(f *testing.F) {
	add := func(writes ...[3]uint32) {
		var b []byte
		for _, w := range writes {
			for _, v := range w {
				b = binary.LittleEndian.AppendUint32(b, v)
			}
		}
		f.Add(b)
	}
	add([3]uint32{0, regReset, 1}, [3]uint32{0, regTXOptions, optionEnable}, [3]uint32{0, regEnable, 0xffffffff})
	add([3]uint32{0, regTXRing + 16 + ringBase, guestBase}, [3]uint32{0, regTXRing + 16 + ringSize, 5}, [3]uint32{0, regTXOptions + 32, optionEnable}, [3]uint32{0, regTXRing + 16 + ringIndices, 4 << 16})
	add([3]uint32{0, regRXRing + ringSize, 1}, [3]uint32{0, regRXRing + ringIndices, 7}, [3]uint32{7, pciCommand, 0}, [3]uint32{2, 16, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		a, b := fuzzed(t)
		for n := 0; len(data) >= 12 && n < 200; n++ {
			region, at, v := binary.LittleEndian.Uint32(data), binary.LittleEndian.Uint32(data[4:]), binary.LittleEndian.Uint32(data[8:])
			data = data[12:]
			switch region % 8 {
			case 7:
				a.client.Post(vfiouser.RegionConfig, uint64(at%(configSize-4)), v)
			case 2:
				a.client.Post(vfiouser.RegionBAR2, uint64(at%(msixSize-4)), v)
			case 1:
				binary.LittleEndian.PutUint32(a.memory.Bytes[at%(guestSize-4):], v)
			case 3:
				a.client.Read(vfiouser.RegionBAR0, uint64(at%(barSize-8)), int(v%8)+1)
			default:
				a.client.Post(vfiouser.RegionBAR0, uint64(at%(barSize-4)), v)
			}
		}
		a.client.Read(vfiouser.RegionConfig, 0, 4)
		alive(t, b)
	})
}

// FuzzDescriptors has rings run over descriptors that it makes.
func FuzzDescriptors(f *testing.F) {
	d := binary.LittleEndian.AppendUint64(nil, guestBase+4096)
	d = binary.LittleEndian.AppendUint32(d, 64|2<<descEOFShift|1<<descSOFShift|8<<descFlagShift)
	d = binary.LittleEndian.AppendUint32(d, 0)
	f.Add(d, d)
	f.Add(append(d, d...), make([]byte, 32))
	f.Fuzz(func(t *testing.T, sent, received []byte) {
		a, b := fuzzed(t)
		c := a.host.fabric.Cables()[0]
		s := streamOver(c, a, b, 1, 16, 0)
		copy(s.tx.table, sent)
		copy(s.rx.table, received)
		b.write(regRXRing+16+ringIndices, 15)
		b.settled()
		for range 3 {
			a.write(regTXRing+16+ringIndices, 15<<16)
			a.settled()
			a.write(regTXRing+16+ringIndices, 0)
			a.settled()
		}
		k := a.host.fabric.Counters()
		if n := k.Hosts[0].TX[1].Frames; n == 0 || n > 16*3 {
			t.Errorf("%d frames were sent", n)
		}
		alive(t, b)
	})
}
