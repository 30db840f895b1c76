package wire

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
)

// A frame is, in big-endian order:
//
//	0  magic    4 bytes, "tbrg"
//	4  session  4 bytes, chosen by the agent anew at each of its starts
//	8  stream   4 bytes, 0 for the session itself
//	12 type     1 byte
//	13 length   3 bytes, of the payload
//	16 checksum 4 bytes, CRC-32C of bytes 0 to 15
//	20 payload
//	   checksum 4 bytes, CRC-32C of the payload
//
// A guest that is reset leaves half a frame on either side of the port. The
// reader looks for the next magic then; since the header has a checksum of its
// own, it never waits for a length that was no length, and since the agent
// begins with Preamble bytes of zeros, what the old half still swallows is
// nothing.
const (
	headerSize  = 20
	trailerSize = 4
	magic       = 0x74627267

	// MaxPayload is the most bytes that a frame carries.
	MaxPayload = 64 << 10
	// Preamble is how many zeros the agent sends before its first frame: as many
	// as a frame that was cut off may still want.
	Preamble = headerSize + MaxPayload + trailerSize
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Type says what a frame is.
type Type uint8

// The types of frames.
const (
	// Hello is the agent's first frame, on stream 0: a JSON Greeting.
	Hello Type = 1 + iota
	// Start begins a stream: a JSON Request. Only the machine sends it.
	Start
	// Data carries bytes of a channel of a stream: the channel's number, then
	// the bytes.
	Data
	// End says that a channel has no more bytes: the channel's number.
	End
	// Credit lets the other side send more bytes of a channel: its number, then
	// how many, 4 bytes.
	Credit
	// Exit ends a stream: a JSON Result. Only the agent sends it.
	Exit
	// Signal is for the process of a stream: the signal's number, 1 byte.
	Signal
	// Resize is for the terminal of a stream: columns and rows, 2 bytes each.
	Resize
)

// Frame is one message.
type Frame struct {
	Session uint32
	Stream  uint32
	Type    Type
	Payload []byte
}

// Append appends the frame to b in the form in which it is sent.
func (f Frame) Append(b []byte) ([]byte, error) {
	if len(f.Payload) > MaxPayload {
		return b, fmt.Errorf("a frame of %d bytes: at most %d are allowed", len(f.Payload), MaxPayload)
	}
	at := len(b)
	b = binary.BigEndian.AppendUint32(b, magic)
	b = binary.BigEndian.AppendUint32(b, f.Session)
	b = binary.BigEndian.AppendUint32(b, f.Stream)
	b = binary.BigEndian.AppendUint32(b, uint32(f.Type)<<24|uint32(len(f.Payload)))
	b = binary.BigEndian.AppendUint32(b, crc32.Checksum(b[at:at+16], castagnoli))
	b = append(b, f.Payload...)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(f.Payload, castagnoli)), nil
}

// Writer writes frames, each whole; it may be used by several goroutines.
type Writer struct {
	mu  sync.Mutex
	w   io.Writer
	buf []byte
}

// NewWriter returns a Writer to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Write sends a frame.
func (w *Writer) Write(f Frame) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	b, err := f.Append(w.buf[:0])
	if err != nil {
		return err
	}
	w.buf = b
	_, err = w.w.Write(b)
	return err
}

// WritePreamble sends the zeros that come before the first frame of an agent.
func (w *Writer) WritePreamble() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.w.Write(make([]byte, Preamble))
	return err
}

// Reader reads frames and skips what is none.
type Reader struct {
	r       *bufio.Reader
	skipped int64
}

// NewReader returns a Reader of r.
func NewReader(r io.Reader) *Reader { return &Reader{r: bufio.NewReaderSize(r, 2*Preamble)} }

// Skipped returns how many bytes belonged to no frame.
func (r *Reader) Skipped() int64 { return r.skipped }

// Read returns the next frame; its payload is the caller's. The error is
// io.EOF at the end, also where that cuts a frame.
func (r *Reader) Read() (Frame, error) {
	for {
		header, err := r.r.Peek(headerSize)
		if err != nil {
			return Frame{}, ended(err)
		}
		length := int(binary.BigEndian.Uint32(header[12:]) & 0xffffff)
		if binary.BigEndian.Uint32(header) != magic || length > MaxPayload ||
			binary.BigEndian.Uint32(header[16:]) != crc32.Checksum(header[:16], castagnoli) {
			if err := r.skip(header); err != nil {
				return Frame{}, err
			}
			continue
		}
		whole, err := r.r.Peek(headerSize + length + trailerSize)
		if err != nil {
			return Frame{}, ended(err)
		}
		payload := whole[headerSize : headerSize+length]
		if binary.BigEndian.Uint32(whole[headerSize+length:]) != crc32.Checksum(payload, castagnoli) {
			if err := r.skip(header); err != nil {
				return Frame{}, err
			}
			continue
		}
		f := Frame{
			Session: binary.BigEndian.Uint32(whole[4:]),
			Stream:  binary.BigEndian.Uint32(whole[8:]),
			Type:    Type(whole[12]),
			Payload: append([]byte(nil), payload...),
		}
		_, err = r.r.Discard(len(whole))
		return f, err
	}
}

// skip leaves out the first byte and all that follow in b which cannot begin a
// frame.
func (r *Reader) skip(b []byte) error {
	n := 1
	for n < len(b) && b[n] != magic>>24 {
		n++
	}
	r.skipped += int64(n)
	_, err := r.r.Discard(n)
	return err
}

func ended(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return io.EOF
	}
	return err
}
