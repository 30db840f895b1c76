//go:build linux

package vfiouser_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tbcluster/rig/vfiouser"
	"tbcluster/rig/vfiouser/vfiotest"
)

// device is a device with a BAR of plain memory, a ROM, and two doorbells: a
// write to 0x100 has it copy guest memory, one to 0x110 fires a vector.
type device struct {
	mu       sync.Mutex
	client   vfiouser.Client
	bar      [4096]byte
	rom      [64]byte
	calls    []string
	settled  chan int // number of writes before each Settle
	writes   int
	detached chan struct{}
}

func newDevice() *device {
	d := &device{settled: make(chan int, 1<<16), detached: make(chan struct{})}
	copy(d.rom[:], "this is the rom")
	return d
}

func (d *device) Regions() (r [vfiouser.NumRegions]vfiouser.Region) {
	r[vfiouser.RegionBAR0] = vfiouser.Region{Size: uint64(len(d.bar))}
	r[vfiouser.RegionROM] = vfiouser.Region{Size: uint64(len(d.rom)), ReadOnly: true}
	r[vfiouser.RegionConfig] = vfiouser.Region{Size: 256}
	return r
}

func (d *device) Interrupts() (n [vfiouser.NumInterrupts]int) {
	n[vfiouser.InterruptINTx] = 1
	n[vfiouser.InterruptMSIX] = 4
	return n
}

func (d *device) Attach(c vfiouser.Client) { d.note("attach"); d.client = c }
func (d *device) Detach()                  { d.note("detach"); close(d.detached) }
func (d *device) Reset()                   { d.note("reset") }
func (d *device) note(s string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, s)
}

func (d *device) Settle() {
	select {
	case d.settled <- d.writes:
	default:
	}
}

func (d *device) Read(region int, offset uint64, p []byte) error {
	switch region {
	case vfiouser.RegionBAR0:
		copy(p, d.bar[offset:])
	case vfiouser.RegionROM:
		copy(p, d.rom[offset:])
	}
	return nil
}

func (d *device) Write(region int, offset uint64, p []byte) error {
	d.writes++
	if region != vfiouser.RegionBAR0 {
		return nil
	}
	copy(d.bar[offset:], p)
	switch le := binary.LittleEndian; offset {
	case 0x100: // copy guest memory: from, to, length
		d.client.Memory.Hold()
		defer d.client.Memory.Release()
		n := int(le.Uint32(d.bar[0x120:]))
		from := d.client.Memory.At(le.Uint64(d.bar[0x108:]), n, false)
		to := d.client.Memory.At(le.Uint64(d.bar[0x118:]), n, true)
		if from == nil || to == nil {
			return errors.New("not mapped")
		}
		copy(to, from)
	case 0x110:
		if !d.client.Interrupts.Fire(vfiouser.InterruptMSIX, int(p[0])) {
			return errors.New("nobody listens")
		}
	case 0x114:
		if !d.client.Interrupts.Fire(vfiouser.InterruptINTx, 0) {
			return errors.New("nobody listens")
		}
	}
	return nil
}

// serve starts a server for a device and returns a client that has said hello.
func serve(t *testing.T, d vfiouser.Device) (*vfiotest.Client, chan error) {
	t.Helper()
	c, done := start(t, d)
	c.Hello()
	return c, done
}

func start(t *testing.T, d vfiouser.Device) (*vfiotest.Client, chan error) {
	t.Helper()
	client, server := vfiotest.Pair(t)
	done := make(chan error, 1)
	go func() { done <- vfiouser.Serve(context.Background(), server, d) }()
	t.Cleanup(func() {
		_ = client.Close()
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Error("the server does not end")
		}
	})
	return vfiotest.New(t, client), done
}

func TestTheVersionIsAgreedOnFirst(t *testing.T) {
	d := newDevice()
	c, _ := start(t, d)
	if got := c.Hello(); !bytes.Contains(got, []byte(`"write_multiple":true`)) || got[len(got)-1] != 0 || got[0] != 0 || got[2] != 1 {
		t.Errorf("version is answered with %q", got)
	}
	if _, err := c.Call(vfiotest.Version, []byte{0, 0, 1, 0}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a second hello: %v", err)
	}

	c, done := start(t, newDevice())
	if _, err := c.Call(vfiotest.Version, []byte{1, 0, 0, 0}); !errors.Is(err, unix.EINVAL) {
		t.Errorf("major version 1: %v", err)
	}
	c.Send(vfiotest.Message(9, vfiotest.DeviceInfo, 0, make([]byte, 16)))
	c.Closed()
	if err := <-done; err == nil || !strings.Contains(err.Error(), "before the version") {
		t.Errorf("a command before hello: %v", err)
	}
	done <- nil
}

func TestTheDeviceIsDescribed(t *testing.T) {
	c, _ := serve(t, newDevice())
	le := binary.LittleEndian
	info, err := c.Call(vfiotest.DeviceInfo, make([]byte, 16))
	if err != nil || le.Uint32(info[4:]) != 3 || le.Uint32(info[8:]) != 9 || le.Uint32(info[12:]) != 5 {
		t.Errorf("device info: % x, %v", info, err)
	}
	for region, want := range map[uint32][2]uint64{0: {3, 4096}, 1: {0, 0}, 6: {1, 64}, 7: {3, 256}} {
		b := make([]byte, 32)
		le.PutUint32(b[8:], region)
		r, err := c.Call(vfiotest.RegionInfo, b)
		if err != nil || len(r) != 32 || le.Uint32(r[4:]) != uint32(want[0]) || le.Uint64(r[16:]) != want[1] {
			t.Errorf("region %d: % x, %v", region, r, err)
		}
	}
	for kind, want := range map[uint32][2]uint32{0: {1 | 2, 1}, 1: {0, 0}, 2: {1 | 8, 4}} {
		b := make([]byte, 16)
		le.PutUint32(b[8:], kind)
		r, err := c.Call(vfiotest.IRQInfo, b)
		if err != nil || len(r) != 16 || le.Uint32(r[4:]) != want[0] || le.Uint32(r[12:]) != want[1] {
			t.Errorf("interrupt %d: % x, %v", kind, r, err)
		}
	}
}

func TestRegionsAreReadAndWritten(t *testing.T) {
	c, _ := serve(t, newDevice())
	c.Write(0, 8, []byte("abcdefgh"))
	if got := c.Read(0, 10, 4); string(got) != "cdef" {
		t.Errorf("read %q", got)
	}
	if got := c.Read(6, 0, 15); string(got) != "this is the rom" {
		t.Errorf("rom %q", got)
	}
	// Several writes in one message, posted, then a read: it sees them.
	c.Multi(0, [2]uint32{0, 1}, [2]uint32{4, 2}, [2]uint32{8, 3})
	c.Post(0, 12, 4)
	for i := range uint64(4) {
		if got := c.Read32(0, 4*i); got != uint32(i)+1 {
			t.Errorf("dword %d is %d", i, got)
		}
	}
}

func TestWhatDoesNotFitIsRefused(t *testing.T) {
	c, _ := serve(t, newDevice())
	rw := func(offset uint64, region, n uint32, data int) []byte {
		b := binary.LittleEndian.AppendUint64(nil, offset)
		b = binary.LittleEndian.AppendUint32(b, region)
		b = binary.LittleEndian.AppendUint32(b, n)
		return append(b, make([]byte, data)...)
	}
	multi := func(n uint64, b []byte) []byte { return append(binary.LittleEndian.AppendUint64(nil, n), b...) }
	for name, m := range map[string]struct {
		command uint16
		body    []byte
		want    unix.Errno
	}{
		"read behind the end":        {vfiotest.RegionRead, rw(4095, 0, 2, 0), unix.EINVAL},
		"read at a huge offset":      {vfiotest.RegionRead, rw(1<<64-2, 0, 4, 0), unix.EINVAL},
		"read of nothing":            {vfiotest.RegionRead, rw(0, 0, 0, 0), unix.EINVAL},
		"read of too much":           {vfiotest.RegionRead, rw(0, 0, 1<<31, 0), unix.EINVAL},
		"read of no region":          {vfiotest.RegionRead, rw(0, 99, 4, 0), unix.EINVAL},
		"read of an absent region":   {vfiotest.RegionRead, rw(0, 3, 4, 0), unix.EINVAL},
		"read cut short":             {vfiotest.RegionRead, rw(0, 0, 4, 0)[:12], unix.EINVAL},
		"write with too little data": {vfiotest.RegionWrite, rw(0, 0, 8, 4), unix.EINVAL},
		"write to the rom":           {vfiotest.RegionWrite, rw(0, 6, 4, 4), unix.EINVAL},
		"write-multi of more":        {vfiotest.RegionWriteMulti, multi(3, rw(0, 0, 4, 8)), unix.EINVAL},
		"write-multi of a huge":      {vfiotest.RegionWriteMulti, multi(1<<63, rw(0, 0, 4, 8)), unix.EINVAL},
		"write-multi of 9 bytes":     {vfiotest.RegionWriteMulti, multi(1, rw(0, 0, 9, 8)), unix.EINVAL},
		"info of no region":          {vfiotest.RegionInfo, rw(0, 9, 0, 16), unix.EINVAL},
		"info of no interrupt":       {vfiotest.IRQInfo, rw(0, 5, 0, 0), unix.EINVAL},
		"an unknown command":         {77, nil, unix.ENOTSUP},
		"dirty pages":                {vfiotest.DirtyPages, make([]byte, 64), unix.ENOTSUP},
		"a device that says no":      {vfiotest.RegionWrite, append(rw(0x110, 0, 4, 0), 2, 0, 0, 0), unix.EIO},
	} {
		if _, err := c.Call(m.command, m.body); !errors.Is(err, m.want) {
			t.Errorf("%s: %v, want %v", name, err, m.want)
		}
	}
	if got := c.Read(6, 0, 4); string(got) != "this" {
		t.Errorf("afterwards the rom is %q", got)
	}
}

func TestGuestMemoryIsReachedInPlace(t *testing.T) {
	d := newDevice()
	c, _ := serve(t, d)
	m := vfiotest.NewMemory(t, 64<<10)
	copyGuest := func(from, to uint64, n uint32) error {
		c.Write(0, 0x108, binary.LittleEndian.AppendUint64(nil, from))
		c.Write(0, 0x118, binary.LittleEndian.AppendUint64(nil, to))
		c.Write(0, 0x120, binary.LittleEndian.AppendUint32(nil, n))
		b := binary.LittleEndian.AppendUint64(nil, 0x100)
		b = binary.LittleEndian.AppendUint32(b, 0)
		b = binary.LittleEndian.AppendUint32(b, 4)
		_, err := c.Call(vfiotest.RegionWrite, append(b, 1, 0, 0, 0))
		return err
	}
	check := func(what string, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	check("map", c.Map(0x10000, 32<<10, 0, m.FD, true), nil)
	check("map what is mapped", c.Map(0x17fff, 1, 0, m.FD, true), unix.EEXIST)
	check("map behind the end of the file", c.Map(0x90000, 8<<10, 60<<10, m.FD, true), unix.EINVAL)
	check("map nothing", c.Map(0x90000, 0, 0, m.FD, true), unix.EINVAL)
	check("map round the end", c.Map(1<<64-4096, 8192, 0, -1, true), unix.EINVAL)
	check("map what is no file", c.Map(0x90000, 4096, 0, vfiotest.NewInterrupt(t).FD, true), unix.EINVAL)
	check("map without a descriptor", c.Map(0x50000, 4096, 0, -1, true), nil)
	check("map for reading only", c.Map(0x60000, 4096, 40<<10, m.FD, false), nil)

	copy(m.Bytes[100:], "hello, guest")
	check("copy", copyGuest(0x10000+100, 0x10000+5000, 12), nil)
	if got := string(m.Bytes[5000:5012]); got != "hello, guest" {
		t.Errorf("copied %q", got)
	}
	copy(m.Bytes[40<<10:], "read me")
	check("copy from read-only", copyGuest(0x60000, 0x10000, 7), nil)
	if got := string(m.Bytes[:7]); got != "read me" {
		t.Errorf("copied %q", got)
	}
	check("copy to read-only", copyGuest(0x10000, 0x60000, 7), unix.EIO)
	check("copy to what cannot be mapped", copyGuest(0x10000, 0x50000, 7), unix.EIO)
	check("copy over the end", copyGuest(0x10000, 0x17ffc, 8), unix.EIO)

	// As with an IOMMU: page by page. What lies side by side in the file is one
	// piece, what does not is not.
	for i := range uint64(4) {
		check("map a page", c.Map(0x200000+i*4096, 4096, (48<<10)+i*4096, m.FD, true), nil)
	}
	check("copy over pages", copyGuest(0x10000+100, 0x200000+4090, 12), nil)
	if got := string(m.Bytes[48<<10+4090:][:12]); got != "hello, guest" {
		t.Errorf("copied %q", got)
	}
	check("unmap a part", c.Unmap(0x200000+1024, 1024), unix.EINVAL)
	check("unmap", c.Unmap(0x200000, 2*4096), nil)
	check("copy to what was unmapped", copyGuest(0x10000, 0x200000, 8), unix.EIO)
	check("copy to what was not", copyGuest(0x10000, 0x200000+2*4096, 8), nil)
	check("unmap all of it", c.Unmap(0, 1<<63), nil)
	check("copy to nothing", copyGuest(0x10000, 0x10000, 8), unix.EIO)
}

func TestMemoryStaysMappedWhileItIsHeld(t *testing.T) {
	d := newDevice()
	c, _ := serve(t, d)
	m := vfiotest.NewMemory(t, 4096)
	if err := c.Map(0, 4096, 0, m.FD, true); err != nil {
		t.Fatal(err)
	}
	mem := d.client.Memory
	mem.Hold()
	epoch := mem.Epoch()
	b := mem.At(0, 4096, true)
	unmapped := make(chan error, 1)
	go func() { unmapped <- c.Unmap(0, 4096) }()
	for i := range 1000 { // the client waits, and this does not die
		b[i] = byte(i)
		time.Sleep(10 * time.Microsecond)
	}
	select {
	case err := <-unmapped:
		t.Fatalf("unmapped while held (%v)", err)
	default:
	}
	mem.Release()
	if err := <-unmapped; err != nil {
		t.Fatal(err)
	}
	mem.Hold()
	defer mem.Release()
	if mem.At(0, 1, false) != nil || mem.Epoch() == epoch {
		t.Error("still there")
	}
}

func TestScatteredMemoryIsReadAndWritten(t *testing.T) {
	d := newDevice()
	c, _ := serve(t, d)
	m := vfiotest.NewMemory(t, 3*4096)
	for i, page := range []uint64{2, 0, 1} { // not in the order of the file
		if err := c.Map(uint64(i)*4096, 4096, page*4096, m.FD, true); err != nil {
			t.Fatal(err)
		}
	}
	mem := d.client.Memory
	mem.Hold()
	defer mem.Release()
	if mem.At(4090, 12, false) != nil {
		t.Error("two pieces are taken for one")
	}
	want := bytes.Repeat([]byte("0123456789"), 800)
	if !mem.Write(100, want) {
		t.Fatal("cannot write")
	}
	got := make([]byte, len(want))
	if !mem.Read(100, got) || !bytes.Equal(got, want) {
		t.Error("what was written is not what is read")
	}
	if !bytes.Equal(m.Bytes[2*4096+100:3*4096], want[:4096-100]) {
		t.Error("the first piece is not where it should be")
	}
	if mem.Read(3*4096-4, make([]byte, 8)) || mem.Write(3*4096-4, make([]byte, 8)) {
		t.Error("reached what is not there")
	}
}

func TestInterruptsAsQEMUSendsThem(t *testing.T) {
	const msix, trigger, eventfd, none = 2, 1 << 5, 1 << 2, 1 << 0
	d := newDevice()
	c, _ := serve(t, d)
	var v [4]*vfiotest.Interrupt
	for i := range v {
		v[i] = vfiotest.NewInterrupt(t)
	}
	set := func(want error, flags, kind, start, count uint32, fds ...int) {
		t.Helper()
		if err := c.SetIRQs(flags, kind, start, count, fds...); !errors.Is(err, want) {
			t.Errorf("SET_IRQS %#x %d %d+%d: %v", flags, kind, start, count, err)
		}
	}
	fire := func(i int, want bool) {
		t.Helper()
		if got := d.client.Interrupts.Fire(vfiouser.InterruptMSIX, i); got != want {
			t.Errorf("vector %d fired: %v", i, got)
		}
		if !want {
			return
		}
		if n := v[i].Wait(time.Minute); n != 1 {
			t.Errorf("vector %d came %d times", i, n)
		}
	}
	fire(0, false)
	// For each vector more: all off, then the whole set again.
	for n := uint32(1); n <= 4; n++ {
		set(nil, none|trigger, msix, 0, 0)
		fds := make([]int, n)
		for i := range fds {
			fds[i] = v[i].FD
		}
		set(nil, eventfd|trigger, msix, 0, n, fds...)
		for i := range 4 {
			fire(i, i < int(n))
		}
	}
	set(nil, eventfd|trigger, msix, 2, 1) // one off
	fire(1, true)
	fire(2, false)
	fire(3, true)
	set(unix.EINVAL, eventfd|trigger, msix, 0, 2, v[0].FD)
	set(unix.EINVAL, eventfd|trigger, msix, 4, 1, v[0].FD)
	set(unix.EINVAL, eventfd|trigger, msix, 1<<31, 1<<31, v[0].FD)
	set(unix.EINVAL, eventfd|trigger, 7, 0, 1, v[0].FD)
	set(unix.EINVAL, 1<<9, msix, 0, 1)
	fire(0, true)
	// Loopback and masking.
	set(nil, none|trigger, msix, 3, 1)
	if n := v[3].Wait(time.Minute); n != 1 {
		t.Errorf("triggered by the client: %d", n)
	}
	set(nil, eventfd|trigger, 0, 0, 1, v[2].FD)
	set(nil, none|1<<3, 0, 0, 1)
	if !d.client.Interrupts.Fire(vfiouser.InterruptINTx, 0) || v[2].Wait(50*time.Millisecond) != 0 {
		t.Error("a masked interrupt came, or is lost")
	}
	set(nil, none|1<<4, 0, 0, 1)
	if n := v[2].Wait(time.Minute); n != 1 {
		t.Errorf("unmasked: %d", n)
	}
}

func TestDescriptorsGoWithTheirMessages(t *testing.T) {
	d := newDevice()
	c, _ := serve(t, d)
	a, b := vfiotest.NewMemory(t, 4096), vfiotest.NewMemory(t, 4096)
	a.Bytes[0], b.Bytes[0] = 'a', 'b'
	dma := func(addr uint64) []byte {
		body := binary.LittleEndian.AppendUint32(nil, 32)
		body = binary.LittleEndian.AppendUint32(body, 3)
		for _, v := range []uint64{0, addr, 4096} {
			body = binary.LittleEndian.AppendUint64(body, v)
		}
		return body
	}
	// Doorbells, a map, doorbells, a map in two parts, all in one go.
	post := func(i uint32) []byte {
		body := binary.LittleEndian.AppendUint64(nil, 0)
		body = binary.LittleEndian.AppendUint32(body, 0)
		body = binary.LittleEndian.AppendUint32(body, 4)
		return vfiotest.Message(900, vfiotest.RegionWrite, 1<<4, binary.LittleEndian.AppendUint32(body, i))
	}
	for i := range uint32(100) {
		c.Send(post(i))
	}
	c.Send(vfiotest.Message(1, vfiotest.DMAMap, 0, dma(0x1000)), a.FD)
	for i := range uint32(100) {
		c.Send(post(i))
	}
	m := vfiotest.Message(2, vfiotest.DMAMap, 0, dma(0x2000))
	c.Send(m[:20], b.FD)
	c.Send(m[20:])
	for _, id := range []uint16{1, 2} {
		if _, err := c.Answer(id, vfiotest.DMAMap); err != nil {
			t.Fatal(err)
		}
	}
	d.client.Memory.Hold()
	defer d.client.Memory.Release()
	for addr, want := range map[uint64]byte{0x1000: 'a', 0x2000: 'b'} {
		if got := d.client.Memory.At(addr, 1, false); got == nil || got[0] != want {
			t.Errorf("at %#x: %q, want %q", addr, got, want)
		}
	}
}

func TestABurstIsSettledOnce(t *testing.T) {
	d := newDevice()
	c, _ := serve(t, d)
	for len(d.settled) > 0 {
		<-d.settled
	}
	var burst []byte
	for i := range uint32(500) {
		body := binary.LittleEndian.AppendUint64(nil, 0)
		body = binary.LittleEndian.AppendUint32(body, 0)
		body = binary.LittleEndian.AppendUint32(body, 4)
		burst = append(burst, vfiotest.Message(7, vfiotest.RegionWrite, 1<<4, binary.LittleEndian.AppendUint32(body, i))...)
	}
	c.Send(burst)
	if got := c.Read32(0, 0); got != 499 {
		t.Errorf("after the burst the register is %d", got)
	}
	settles := 0
	for n := 0; n < 500; settles++ {
		n = <-d.settled
	}
	if settles > 10 {
		t.Errorf("500 doorbells in one go were settled %d times", settles)
	}
}

func TestTheEndOfAClient(t *testing.T) {
	t.Run("it leaves", func(t *testing.T) {
		d := newDevice()
		c, done := serve(t, d)
		if _, err := c.Call(vfiotest.DeviceReset, nil); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if err := <-done; err != nil {
			t.Errorf("it ended with %v", err)
		}
		done <- nil
		if got := fmt.Sprint(d.calls); got != "[attach reset detach]" {
			t.Errorf("calls %s", got)
		}
	})
	t.Run("in the middle of a message", func(t *testing.T) {
		c, done := serve(t, newDevice())
		c.Send(vfiotest.Message(1, vfiotest.RegionRead, 0, make([]byte, 16))[:20])
		c.Close()
		if err := <-done; err == nil || !strings.Contains(err.Error(), "half a message") {
			t.Errorf("it ended with %v", err)
		}
		done <- nil
	})
	t.Run("a size that is none", func(t *testing.T) {
		for _, size := range []uint32{0, 15, 1 << 30, 1<<32 - 1} {
			c, done := serve(t, newDevice())
			m := vfiotest.Message(1, vfiotest.RegionRead, 0, nil)
			binary.LittleEndian.PutUint32(m[4:], size)
			c.Send(m)
			c.Closed()
			if err := <-done; err == nil || !strings.Contains(err.Error(), fmt.Sprint(size)) {
				t.Errorf("size %d: it ended with %v", size, err)
			}
			done <- nil
		}
	})
	t.Run("ctx ends", func(t *testing.T) {
		client, server := vfiotest.Pair(t)
		ctx, cancel := context.WithCancel(context.Background())
		d := newDevice()
		done := make(chan error, 1)
		go func() { done <- vfiouser.Serve(ctx, server, d) }()
		vfiotest.New(t, client).Hello()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("it ended with %v", err)
		}
		<-d.detached
	})
}

func TestNoDescriptorIsLeftBehind(t *testing.T) {
	count := func() int {
		e, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, f := range e { // eventfds and memory only: sockets are the test's
			if l, err := os.Readlink(filepath.Join("/proc/self/fd", f.Name())); err == nil && (strings.Contains(l, "eventfd") || strings.Contains(l, "memfd")) {
				n++
			}
		}
		return n
	}
	m, i := vfiotest.NewMemory(t, 4096), vfiotest.NewInterrupt(t)
	before := count()
	d := newDevice()
	c, done := serve(t, d)
	if err := c.Map(0, 4096, 0, m.FD, true); err != nil {
		t.Fatal(err)
	}
	_ = c.Map(0, 4096, 0, m.FD, true)                              // refused
	_, _ = c.Call(vfiotest.DeviceInfo, nil, m.FD, i.FD)            // nobody wants them
	_, _ = c.Call(vfiotest.DMAMap, make([]byte, 4), m.FD)          // too short
	_, _ = c.Call(vfiotest.SetIRQs, make([]byte, 4), i.FD)         // too short
	_ = c.SetIRQs(1<<2|1<<5, 2, 0, 3, i.FD)                        // refused
	_ = c.SetIRQs(1<<2|1<<5, 2, 0, 2, i.FD, i.FD)                  // kept
	c.Send(vfiotest.Message(1, vfiotest.DMAMap, 0, nil)[:8], m.FD) // never whole
	c.Close()
	<-done
	done <- nil
	if after := count(); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// FuzzMessages feeds a server what it likes.
func FuzzMessages(f *testing.F) {
	hello := vfiotest.Message(1, vfiotest.Version, 0, append([]byte{0, 0, 1, 0}, "{}\x00"...))
	add := func(messages ...[]byte) { f.Add(bytes.Join(messages, nil)) }
	add(hello)
	rw := binary.LittleEndian.AppendUint64(nil, 0x100)
	rw = append(rw, 0, 0, 0, 0, 4, 0, 0, 0)
	add(hello, vfiotest.Message(2, vfiotest.RegionRead, 0, rw), vfiotest.Message(3, vfiotest.RegionWrite, 1<<4, append(rw, 1, 2, 3, 4)))
	add(hello, vfiotest.Message(2, vfiotest.DMAMap, 0, make([]byte, 32)), vfiotest.Message(3, vfiotest.DMAUnmap, 0, bytes.Repeat([]byte{0xff}, 24)))
	add(hello, vfiotest.Message(2, vfiotest.SetIRQs, 0, []byte{20, 0, 0, 0, 0x21, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}))
	add(hello, vfiotest.Message(2, vfiotest.RegionWriteMulti, 0, append([]byte{1, 0, 0, 0, 0, 0, 0, 0}, append(rw, make([]byte, 8)...)...)))
	add(hello, vfiotest.Message(2, vfiotest.DeviceReset, 0, nil), []byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		client, server := vfiotest.Pair(t)
		d := newDevice()
		done := make(chan error, 1)
		go func() { done <- vfiouser.Serve(t.Context(), server, d) }()
		go func() { _, _ = client.Write(b); _ = client.CloseWrite() }()
		buf := make([]byte, 64<<10)
		for {
			if _, err := client.Read(buf); err != nil {
				break
			}
		}
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatal("the server does not end")
		}
	})
}
