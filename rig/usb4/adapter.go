//go:build linux

package usb4

// Adapter configuration space (drivers/thunderbolt/tb_regs.h, ADP_CS_*,
// LANE_ADP_CS_*, PORT_CS_*; USB4 specification, 8.2.2). The offsets of
// capabilities are ours.
const (
	adapterSize    = 0x80
	adapterIDs     = 0
	adapterCaps    = 1
	adapterType    = 2
	adapterNumber  = 3
	adapterBuffers = 4
	adapterHops    = 5

	typeLane = 1 | 0x20<<24 // with the version of the protocol
	typeNHI  = 2

	adapterLocked  = 1 << 31 // of adapterBuffers
	adapterNoEvent = 1 << 31 // of adapterHops: hotplug events are off
	countersShift  = 8       // of adapterCaps: how many sets of counters
	countersThere  = 1 << 19

	capLane   = 0x10
	capTMU    = 0x18
	capUSB4   = 0x30
	laneInfo  = capLane
	laneState = capLane + 1
	sideband  = capUSB4 + 1
	sideData  = capUSB4 + 2
	portInfo  = capUSB4 + 0x12
	portCtl   = capUSB4 + 0x13

	laneSpeedShift   = 16 // of laneInfo: supported; of laneState: current
	laneWidthShift   = 20
	laneTargetSpeed  = 0xf
	laneTargetShift  = 4
	laneTargetMask   = 3 << laneTargetShift
	laneTargetSingle = 1 << laneTargetShift
	laneTargetDual   = 3 << laneTargetShift
	laneDisable      = 1 << 14
	laneBond         = 1 << 15
	laneStateShift   = 26
	// laneWritable are the bits of laneState that the driver sets.
	laneWritable = 0xffff

	widthSingle = 1
	widthDual   = 2

	stateDisabled  = 0
	stateTraining  = 1
	stateUp        = 2
	stateUnplugged = 7

	sidePending    = 1 << 31 // of sideband
	sideNoResponse = 1 << 25
	portBonded     = 1 << 8 // of portInfo
	portPlugged    = 1 << 10
	portReset      = 1 << 0 // of portCtl: downstream port reset
	portWakePlug   = 1 << 16
	portWakeUnplug = 1 << 17

	lanePaths   = 64 // entries of a lane adapter's path configuration space
	counterSets = 16
	setSize     = 3 // dwords: packets received, low and high; packets dropped

	pathEnable      = 1 << 31
	pathCreditShift = 17
	pathPending     = 1 << 28 // of the second dword
	pathCounter     = 1 << 23
	pathCounterNum  = 12
	controlCredits  = 2
)

// speedBits are how lane adapters write generations.
var speedBits = map[Generation]uint32{Gen2: 8, Gen3: 4, Gen4: 2}

// adapter is an adapter of a router.
type adapter struct {
	node   *node
	number int
	port   *Port // of a lane adapter
	second bool  // lane 1 of a port
	config [adapterSize]uint32
	paths  []path
	sets   [counterSets]counterSet
}

// path is an entry of a path configuration space: where frames go on that come
// in here with this hop.
type path struct {
	adapter                *adapter
	words                  [2]uint32
	used                   bool // it was enabled once
	frames, bytes, dropped uint64
}

type counterSet struct {
	received uint64
	dropped  uint32
}

func (p *path) enabled() bool   { return p.words[0]&pathEnable != 0 }
func (p *path) outAdapter() int { return int(p.words[0] >> 11 & 0x3f) }
func (p *path) outHop() uint32  { return p.words[0] & 0x7ff }

// count counts a frame.
func (p *path) count(n int, dropped bool) {
	p.frames++
	p.bytes += uint64(n)
	if dropped {
		p.dropped++
	}
	if p.words[1]&pathCounter == 0 {
		return
	}
	if i := p.words[1] >> pathCounterNum & 0x7ff; i < counterSets {
		s := &p.adapter.sets[i]
		s.received++
		if dropped {
			s.dropped++
		}
	}
}

func newAdapter(n *node, number, paths int) *adapter {
	a := &adapter{node: n, number: number, paths: make([]path, paths)}
	for i := range a.paths {
		a.paths[i].adapter = a
	}
	return a
}

// reset brings the adapter to where it is after power-on.
func (a *adapter) reset() {
	o := a.node.options
	c := &a.config
	*c = [adapterSize]uint32{}
	a.sets = [counterSets]counterSet{}
	for i := range a.paths {
		a.paths[i].words = [2]uint32{}
	}
	c[adapterIDs] = uint32(o.Vendor) | uint32(o.Device)<<16
	c[adapterCaps] = counterSets<<countersShift | countersThere
	c[adapterNumber] = uint32(a.number) << 20
	last := uint32(len(a.paths) - 1)
	c[adapterHops] = last | last<<11
	if a.port == nil {
		c[adapterType] = typeNHI
		c[adapterBuffers] = 60 << 20
		return
	}
	c[adapterCaps] |= capLane
	c[adapterType] = typeLane
	c[adapterBuffers] = 120<<20 | adapterLocked
	c[adapterHops] |= adapterNoEvent
	var speeds uint32
	for g := Gen2; g <= o.Speed; g++ {
		speeds |= speedBits[g]
	}
	widths := uint32(widthSingle)
	if o.Lanes == 2 {
		widths |= widthDual
	}
	c[laneInfo] = capTMU | 1<<8 | speeds<<laneSpeedShift | widths<<laneWidthShift
	c[laneState] = 0xc | laneTargetSingle
	c[capTMU] = 3 << 8
	if !a.second {
		c[capTMU] |= capUSB4
		c[capUSB4] = 6 << 8
		a.paths[0].words[0] = controlCredits << pathCreditShift
	}
	a.showLane(stateUnplugged, widthSingle, min(o.Speed, Gen3))
}

// showLane sets what the lane adapter says of its lane.
func (a *adapter) showLane(state, width uint32, speed Generation) {
	c := &a.config
	c[laneState] = c[laneState]&laneWritable | speedBits[speed]<<laneSpeedShift | width<<laneWidthShift | state<<laneStateShift
}

// enabledPath returns the entry of a hop, nil if it is not enabled.
func (a *adapter) enabledPath(hop uint32) *path {
	if hop >= uint32(len(a.paths)) || !a.paths[hop].enabled() {
		return nil
	}
	return &a.paths[hop]
}

// space returns how many dwords a configuration space of the adapter has.
func (a *adapter) space(s space) uint32 {
	switch s {
	case spaceAdapter:
		return adapterSize
	case spacePaths:
		if !a.second { // lane 1 has none
			return uint32(2 * len(a.paths))
		}
	case spaceCounters:
		return counterSets * setSize
	}
	return 0
}

// read reads a dword that lies in the space.
func (a *adapter) read(s space, offset uint32) uint32 {
	switch s {
	case spacePaths:
		return a.paths[offset/2].words[offset%2]
	case spaceCounters:
		set := &a.sets[offset/setSize]
		switch offset % setSize {
		case 0:
			return uint32(set.received)
		case 1:
			return uint32(set.received >> 32)
		}
		return set.dropped
	}
	return a.config[offset]
}

// write writes a dword that lies in the space.
func (a *adapter) write(s space, offset, v uint32) {
	switch s {
	case spacePaths:
		a.writePath(offset, v)
	case spaceCounters: // any write clears
		a.sets[offset/setSize] = counterSet{}
	case spaceAdapter:
		a.writeConfig(offset, v)
	}
}

func (a *adapter) writePath(offset, v uint32) {
	p := &a.paths[offset/2]
	if offset%2 == 1 {
		v &^= pathPending // nothing stays in our buffers
	}
	if p.words[offset%2] == v {
		return
	}
	p.words[offset%2] = v
	if offset%2 == 0 {
		if p.enabled() {
			p.used = true
		}
		a.node.fabric.rewired()
	}
}

func (a *adapter) writeConfig(offset, v uint32) {
	c := &a.config
	switch offset {
	case adapterIDs, adapterCaps, adapterType, adapterNumber:
		return
	case adapterBuffers:
		v = v&(adapterLocked|0x3ff) | c[offset]&^(adapterLocked|0x3ff)
	case adapterHops:
		was := c[offset]
		c[offset] = v&adapterNoEvent | was&^adapterNoEvent
		if a.port != nil && !a.second && was&adapterNoEvent != 0 && v&adapterNoEvent == 0 {
			a.port.listen()
		}
		return
	}
	if a.port == nil {
		c[offset] = v
		return
	}
	switch {
	case offset == laneInfo || offset == capTMU:
		return
	case offset == laneState:
		was := c[offset]
		c[offset] = v&laneWritable | was&^laneWritable
		a.port.laneWritten(a, was)
		return
	case a.second || offset < capUSB4: // no more that means something
	case offset == capUSB4 || offset == portInfo:
		return
	case offset == sideband && v&sidePending != 0: // nobody answers: there are no retimers
		v = v&^sidePending | sideNoResponse
	case offset == portCtl:
		was := c[offset]
		c[offset] = v
		a.port.portWritten(was, v)
		return
	}
	c[offset] = v
}
