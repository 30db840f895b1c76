package plan

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"strconv"
	"strings"
)

// Bounds of what is read of a GGUF file. The tokenizer of a large vocabulary
// takes some 20 MB.
const (
	maxHeader  = 512 << 20
	maxString  = 64 << 10 // of a string that is kept
	maxTensors = 1 << 20
	maxKeys    = 1 << 20
	maxDepth   = 4 // arrays in arrays
)

// errMalformed is wrapped by errors about the form of a header.
var errMalformed = errors.New("malformed header")

// gguf is what is kept of the header of one file.
type gguf struct {
	version uint32
	keys    map[string]value
	tensors []tensor
	data    uint64 // where tensor data begins
}

// value is a scalar or a string, or an array of which length and largest
// integer are kept.
type value struct {
	s      string
	n      uint64 // integers and booleans; the largest of an array
	number bool
	length uint64 // of an array
}

type tensor struct {
	name   string
	typ    uint32
	offset uint64 // from the beginning of tensor data
	size   uint64 // bytes; 0 where the type is not known
}

// ggmlTypes are the tensor types of ggml.h: elements and bytes of a block.
var ggmlTypes = map[uint32]struct{ elements, bytes uint64 }{
	0: {1, 4}, 1: {1, 2}, 2: {32, 18}, 3: {32, 20}, 6: {32, 22}, 7: {32, 24}, 8: {32, 34}, 9: {32, 36},
	10: {256, 84}, 11: {256, 110}, 12: {256, 144}, 13: {256, 176}, 14: {256, 210}, 15: {256, 292},
	16: {256, 66}, 17: {256, 74}, 18: {256, 98}, 19: {256, 50}, 20: {32, 18}, 21: {256, 110}, 22: {256, 82}, 23: {256, 136},
	24: {1, 1}, 25: {1, 2}, 26: {1, 4}, 27: {1, 8}, 28: {1, 8}, 29: {256, 56}, 30: {1, 2}, 34: {256, 54}, 35: {256, 66},
	39: {32, 17}, 40: {64, 36},
}

// ggufReader reads little-endian fields and knows how much the file can hold.
type ggufReader struct {
	r    *bufio.Reader
	at   uint64
	size uint64 // of the file
}

func (g *ggufReader) left() uint64 { return g.size - min(g.at, g.size) }

func (g *ggufReader) bytes(n uint64) ([]byte, error) {
	if n > g.left() {
		return nil, io.ErrUnexpectedEOF
	}
	b := make([]byte, n)
	_, err := io.ReadFull(g.r, b)
	g.at += n
	return b, noEOF(err)
}

func (g *ggufReader) skip(n uint64) error {
	if n > g.left() {
		return io.ErrUnexpectedEOF
	}
	if g.at+n > maxHeader {
		return fmt.Errorf("%w: longer than %d bytes", errMalformed, maxHeader)
	}
	for n > 0 {
		k := min(n, math.MaxInt32)
		if _, err := g.r.Discard(int(k)); err != nil {
			return noEOF(err)
		}
		n -= k
		g.at += k
	}
	return nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (g *ggufReader) u32() (uint32, error) {
	b, err := g.bytes(4)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint32(b), nil
}

func (g *ggufReader) u64() (uint64, error) {
	b, err := g.bytes(8)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b), nil
}

func (g *ggufReader) str() (string, error) {
	n, err := g.u64()
	if err != nil {
		return "", err
	}
	if n > maxString { // a chat template, a licence: not kept
		return "", g.skip(n)
	}
	b, err := g.bytes(n)
	return string(b), err
}

// ggufWidths are the sizes of the scalar types by their number; strings (8) and
// arrays (9) have none.
var ggufWidths = map[uint32]uint64{0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

const (
	ggufF32    = 6
	ggufString = 8
	ggufArray  = 9
	ggufF64    = 12
)

func (g *ggufReader) value(typ uint32, depth int) (value, error) {
	switch typ {
	case ggufString:
		s, err := g.str()
		return value{s: s}, err
	case ggufArray:
		return g.array(depth)
	}
	w, ok := ggufWidths[typ]
	if !ok {
		return value{}, fmt.Errorf("%w: value of unknown type %d", errMalformed, typ)
	}
	b, err := g.bytes(w)
	if err != nil {
		return value{}, err
	}
	if typ == ggufF32 || typ == ggufF64 {
		return value{}, nil
	}
	var wide [8]byte
	copy(wide[:], b)
	return value{n: binary.LittleEndian.Uint64(wide[:]), number: true}, nil
}

func (g *ggufReader) array(depth int) (value, error) {
	if depth >= maxDepth {
		return value{}, fmt.Errorf("%w: arrays nested deeper than %d", errMalformed, maxDepth)
	}
	typ, err := g.u32()
	if err != nil {
		return value{}, err
	}
	n, err := g.u64()
	if err != nil {
		return value{}, err
	}
	out := value{length: n}
	w, scalar := ggufWidths[typ]
	if !scalar {
		w = 8 // a string or an array has a length at least
	}
	if hi, total := bits.Mul64(n, w); hi != 0 || total > g.left() {
		return value{}, fmt.Errorf("an array of %d elements: %w", n, io.ErrUnexpectedEOF)
	}
	if scalar && n > 1<<16 { // nothing that we ask for is that long
		return out, g.skip(n * w)
	}
	for range n {
		if g.at > maxHeader {
			return value{}, fmt.Errorf("%w: longer than %d bytes", errMalformed, maxHeader)
		}
		if typ == ggufString {
			k, err := g.u64()
			if err == nil {
				err = g.skip(k)
			}
			if err != nil {
				return value{}, err
			}
			continue
		}
		v, err := g.value(typ, depth+1)
		if err != nil {
			return value{}, err
		}
		if v.number {
			out.n, out.number = max(out.n, v.n), true
		}
	}
	return out, nil
}

// readGGUF reads the header of a file of that size.
func readGGUF(r io.Reader, size uint64) (*gguf, error) {
	g := &ggufReader{r: bufio.NewReaderSize(r, 256<<10), size: size}
	magic, err := g.bytes(4)
	if err != nil {
		return nil, err
	}
	if string(magic) != "GGUF" {
		return nil, fmt.Errorf("%w: it does not begin with GGUF", errMalformed)
	}
	out := &gguf{keys: map[string]value{}}
	if out.version, err = g.u32(); err != nil {
		return nil, err
	}
	if out.version != 2 && out.version != 3 {
		return nil, fmt.Errorf("%w: GGUF version %d; 2 and 3 are known, little-endian", errMalformed, out.version)
	}
	tensors, err := g.u64()
	if err != nil {
		return nil, err
	}
	keys, err := g.u64()
	if err != nil {
		return nil, err
	}
	if tensors > maxTensors || keys > maxKeys {
		return nil, fmt.Errorf("%w: %d tensors and %d keys", errMalformed, tensors, keys)
	}
	for range keys {
		if err := out.readKey(g); err != nil {
			return nil, err
		}
	}
	for range tensors {
		t, err := readTensor(g)
		if err != nil {
			return nil, err
		}
		out.tensors = append(out.tensors, t)
	}
	align := uint64(32)
	if v, ok := out.keys["general.alignment"]; ok && v.number {
		align = v.n
	}
	if align == 0 || align > 1<<20 || align&(align-1) != 0 {
		return nil, fmt.Errorf("%w: alignment %d", errMalformed, align)
	}
	out.data = (g.at + align - 1) &^ (align - 1)
	return out, nil
}

func (f *gguf) readKey(g *ggufReader) error {
	if g.at > maxHeader {
		return fmt.Errorf("%w: longer than %d bytes", errMalformed, maxHeader)
	}
	key, err := g.str()
	if err != nil {
		return err
	}
	typ, err := g.u32()
	if err != nil {
		return err
	}
	v, err := g.value(typ, 0)
	if err != nil {
		return fmt.Errorf("key %.100q: %w", key, err)
	}
	f.keys[key] = v
	return nil
}

func readTensor(g *ggufReader) (tensor, error) {
	var t tensor
	var err error
	if t.name, err = g.str(); err != nil {
		return t, err
	}
	dims, err := g.u32()
	if err != nil {
		return t, err
	}
	if dims > 8 {
		return t, fmt.Errorf("%w: tensor %.100q of %d dimensions", errMalformed, t.name, dims)
	}
	elements := uint64(1)
	for range dims {
		d, err := g.u64()
		if err != nil {
			return t, err
		}
		hi, lo := bits.Mul64(elements, d)
		if hi != 0 {
			return t, fmt.Errorf("%w: tensor %.100q is too large", errMalformed, t.name)
		}
		elements = lo
	}
	if t.typ, err = g.u32(); err != nil {
		return t, err
	}
	if t.offset, err = g.u64(); err != nil {
		return t, err
	}
	if k, ok := ggmlTypes[t.typ]; ok {
		blocks := elements / k.elements
		if elements%k.elements != 0 {
			blocks++
		}
		hi, lo := bits.Mul64(blocks, k.bytes)
		if hi != 0 {
			return t, fmt.Errorf("%w: tensor %.100q is too large", errMalformed, t.name)
		}
		t.size = lo
	}
	return t, nil
}

// missing returns how many bytes the file would have to be longer to hold all
// its tensors, and the first tensor that is not whole.
func (f *gguf) missing(size uint64) (uint64, string) {
	var most uint64
	var name string
	first := uint64(math.MaxUint64)
	for _, t := range f.tensors {
		end, carry := bits.Add64(t.offset, t.size, 0)
		end, carry2 := bits.Add64(end, f.data, 0)
		if carry|carry2 != 0 {
			end = math.MaxUint64
		}
		if end <= size {
			continue
		}
		most = max(most, end-size)
		if t.offset < first {
			first, name = t.offset, t.name
		}
	}
	return most, name
}

// number returns an integer key, or the largest of an array of them; 0 for one
// that is larger than any model's could be.
func (f *gguf) number(key string) int {
	v := f.keys[key]
	if !v.number || v.n > 1<<28 {
		return 0
	}
	return int(v.n)
}

// layerOf returns the layer that a tensor belongs to, or -1.
func layerOf(name string) int {
	rest, ok := strings.CutPrefix(name, "blk.")
	if !ok {
		return -1
	}
	num, _, ok := strings.Cut(rest, ".")
	n, err := strconv.Atoi(num)
	if !ok || err != nil || n < 0 || n >= maxLayers {
		return -1
	}
	return n
}

// maxLayers is far above any model there is.
const maxLayers = 4096
