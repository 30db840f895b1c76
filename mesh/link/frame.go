package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// A frame on a probe connection, after TLS:
//
//	0   magic 't'
//	1   version 1
//	2   kind: 1 ping, 2 pong
//	3   flags: bit 0 set where the sender's pings come back on this connection
//	4   sequence, 8 bytes, big endian; a pong repeats its ping's
//	12  length of the sender's port name, 1 to 64
//	13  port name, printable ASCII
const (
	frameMagic   = 't'
	frameVersion = 1
	frameHeader  = 13
	maxPortName  = 64
)

type frameKind byte

const (
	framePing frameKind = 1
	framePong frameKind = 2
)

const flagGood = 1

type frame struct {
	kind     frameKind
	good     bool
	sequence uint64
	port     string
}

var errFrame = errors.New("not a probe frame")

// append appends the frame's bytes to b. The port is cut to maxPortName.
func (f frame) append(b []byte) []byte {
	port := f.port
	if len(port) > maxPortName {
		port = port[:maxPortName]
	}
	var flags byte
	if f.good {
		flags = flagGood
	}
	b = append(b, frameMagic, frameVersion, byte(f.kind), flags)
	b = binary.BigEndian.AppendUint64(b, f.sequence)
	b = append(b, byte(len(port)))
	return append(b, port...)
}

// readFrame reads one frame, or fails at the first byte that cannot be one.
func readFrame(r io.Reader) (frame, error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return frame{}, err
	}
	f := frame{kind: frameKind(head[2]), good: head[3]&flagGood != 0, sequence: binary.BigEndian.Uint64(head[4:12])}
	length := int(head[12])
	switch {
	case head[0] != frameMagic:
		return frame{}, fmt.Errorf("%w: it begins with %#x", errFrame, head[0])
	case head[1] != frameVersion:
		return frame{}, fmt.Errorf("%w: version %d", errFrame, head[1])
	case f.kind != framePing && f.kind != framePong:
		return frame{}, fmt.Errorf("%w: kind %d", errFrame, head[2])
	case length == 0 || length > maxPortName:
		return frame{}, fmt.Errorf("%w: a port name of %d bytes", errFrame, length)
	}
	name := make([]byte, length)
	if _, err := io.ReadFull(r, name); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return frame{}, err
	}
	for _, c := range name {
		if c <= ' ' || c > '~' {
			return frame{}, fmt.Errorf("%w: byte %#x in a port name", errFrame, c)
		}
	}
	f.port = string(name)
	return f, nil
}
