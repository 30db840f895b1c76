//go:build linux

package vfiouser

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// maxRegions bounds the pieces of guest memory that one client may map. With a
// virtual IOMMU each page that the guest maps is one; VFIO itself allows 65535
// (dma_entry_limit), and QEMU refuses a server that says more.
const maxRegions = 1<<16 - 1

// Memory is the memory of a guest as its device sees it, by the addresses that
// the guest's driver gives to the device. All methods may be called at any
// time; those that return or touch bytes of the guest between Hold and Release
// only.
type Memory struct {
	mu      sync.RWMutex
	epoch   atomic.Uint64
	hint    atomic.Int32 // index of the region that was found last
	regions []region     // sorted, disjoint
	files   map[fileID]*file
}

// region is a piece of the guest's memory.
type region struct {
	first, last uint64 // addresses, inclusive
	file        *file  // nil: known, not mapped
	offset      uint64 // of first in the file
	writable    bool
}

// fileID names what a descriptor is open for; the same file mapped for reading
// only is another.
type fileID struct {
	dev, ino uint64
	writable bool
}

// file is a file of guest memory, mapped as a whole, once for all its regions.
type file struct {
	id   fileID
	mem  []byte
	refs int
}

func newMemory() *Memory { return &Memory{files: map[fileID]*file{}} }

// Hold keeps everything mapped that is mapped now, until Release. Holding is
// shared; a goroutine must not hold the same memory twice.
func (m *Memory) Hold() { m.mu.RLock() }

// Release ends Hold.
func (m *Memory) Release() { m.mu.RUnlock() }

// Epoch changes whenever something is mapped or unmapped: what At returned in
// the same epoch, while the memory is held, is still right.
func (m *Memory) Epoch() uint64 { return m.epoch.Load() }

// At returns the n bytes of guest memory at addr, in place, or nil if they are
// not all there in one piece, or not to be written when write is asked for. The
// memory must be held.
func (m *Memory) At(addr uint64, n int, write bool) []byte {
	i := m.find(addr)
	if i < 0 || n <= 0 {
		return nil
	}
	r := &m.regions[i]
	if r.file == nil || write && !r.writable {
		return nil
	}
	last := addr + uint64(n) - 1
	if last < addr {
		return nil
	}
	// A buffer may span regions that lie side by side in one file: with an
	// IOMMU, each page is a region.
	for end := r; end.last < last; {
		if i++; i == len(m.regions) {
			return nil
		}
		next := &m.regions[i]
		if next.first != end.last+1 || next.file != r.file || write && !next.writable ||
			next.offset != end.offset+(end.last-end.first)+1 {
			return nil
		}
		end = next
	}
	at := r.offset + (addr - r.first)
	return r.file.mem[at : at+uint64(n) : at+uint64(n)]
}

// Read copies guest memory at addr into p, however many regions it spans, and
// reports whether all of it was there. The memory must be held.
func (m *Memory) Read(addr uint64, p []byte) bool {
	return m.pieces(addr, len(p), false, func(done int, b []byte) { copy(p[done:], b) })
}

// Write copies p into guest memory at addr, however many regions it spans, and
// reports whether all of it could be written; if not, nothing is. The memory
// must be held.
func (m *Memory) Write(addr uint64, p []byte) bool {
	return m.pieces(addr, len(p), true, func(done int, b []byte) { copy(b, p[done:]) })
}

// pieces calls f with each mapped piece of a range, if all of it is mapped.
func (m *Memory) pieces(addr uint64, n int, write bool, f func(done int, b []byte)) bool {
	for _, run := range []bool{false, true} { // look first, then touch
		for done := 0; done < n; {
			a := addr + uint64(done)
			if a < addr {
				return false
			}
			i := m.find(a)
			if i < 0 {
				return false
			}
			r := &m.regions[i]
			if r.file == nil || write && !r.writable {
				return false
			}
			k := min(uint64(n-done)-1, r.last-a) + 1
			if run {
				at := r.offset + (a - r.first)
				f(done, r.file.mem[at:at+k])
			}
			done += int(k)
		}
	}
	return true
}

// find returns the index of the region that has addr, -1 if none has.
func (m *Memory) find(addr uint64) int {
	if i := int(m.hint.Load()); i < len(m.regions) && m.regions[i].first <= addr && addr <= m.regions[i].last {
		return i
	}
	i, found := slices.BinarySearchFunc(m.regions, addr, func(r region, a uint64) int {
		switch {
		case r.last < a:
			return -1
		case r.first > a:
			return 1
		}
		return 0
	})
	if !found {
		return -1
	}
	m.hint.Store(int32(i))
	return i
}

// mapping is a request of the client.
type mapping struct {
	addr, size, offset uint64
	writable           bool
	fd                 int // -1: none came along
}

// add maps a region. It does not close the descriptor.
func (m *Memory) add(r mapping) error {
	if r.size == 0 || r.addr+(r.size-1) < r.addr || r.offset+r.size < r.offset {
		return unix.EINVAL
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.regions) >= maxRegions {
		return unix.ENOSPC
	}
	n := region{first: r.addr, last: r.addr + (r.size - 1), offset: r.offset, writable: r.writable}
	i, found := slices.BinarySearchFunc(m.regions, n, func(have, want region) int {
		switch {
		case have.last < want.first:
			return -1
		case have.first > want.last:
			return 1
		}
		return 0
	})
	if found {
		return unix.EEXIST
	}
	if r.fd >= 0 {
		f, err := m.open(r)
		if err != nil {
			return err
		}
		n.file = f
		f.refs++
	}
	m.regions = slices.Insert(m.regions, i, n)
	m.epoch.Add(1)
	return nil
}

// open returns the mapped file behind a descriptor.
func (m *Memory) open(r mapping) (*file, error) {
	var st unix.Stat_t
	if err := unix.Fstat(r.fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size <= 0 || uint64(st.Size) > math.MaxInt || r.offset+r.size > uint64(st.Size) {
		return nil, unix.EINVAL // touching what lies behind a file's end kills
	}
	flags, err := unix.FcntlInt(uintptr(r.fd), unix.F_GETFL, 0)
	if err != nil {
		return nil, err
	}
	writable := flags&unix.O_ACCMODE == unix.O_RDWR
	if r.writable && !writable {
		return nil, unix.EACCES
	}
	id := fileID{uint64(st.Dev), st.Ino, writable}
	f := m.files[id]
	if f != nil && uint64(len(f.mem)) < r.offset+r.size {
		return nil, unix.EINVAL // it has grown since
	}
	if f == nil {
		prot := unix.PROT_READ
		if writable {
			prot |= unix.PROT_WRITE
		}
		mem, err := unix.Mmap(r.fd, 0, int(st.Size), prot, unix.MAP_SHARED)
		if err != nil {
			return nil, err
		}
		f = &file{id: id, mem: mem}
		m.files[id] = f
	}
	return f, nil
}

// remove unmaps all regions in a range. A region that lies in it in part is an
// error, and nothing is unmapped.
func (m *Memory) remove(addr, size uint64) error {
	if size == 0 || addr+(size-1) < addr {
		return unix.EINVAL
	}
	last := addr + (size - 1)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.regions {
		if r.first <= last && addr <= r.last && (r.first < addr || r.last > last) {
			return unix.EINVAL
		}
	}
	return m.drop(func(r region) bool { return r.first >= addr && r.last <= last })
}

// clear unmaps everything.
func (m *Memory) clear() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.drop(func(region) bool { return true })
}

func (m *Memory) drop(gone func(region) bool) error {
	var first error
	m.regions = slices.DeleteFunc(m.regions, func(r region) bool {
		if !gone(r) {
			return false
		}
		if f := r.file; f != nil {
			if f.refs--; f.refs == 0 {
				delete(m.files, f.id)
				if err := unix.Munmap(f.mem); err != nil && first == nil {
					first = err
				}
			}
		}
		return true
	})
	m.hint.Store(0)
	m.epoch.Add(1)
	return first
}
