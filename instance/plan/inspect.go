package plan

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

// Inspect reads what a placement must know of the model at path, a GGUF file
// (the first of a split one) or a directory of safetensors. File digests and so
// the final ID are not known to it.
//
// Faults: ModelBroken for a file that is truncated or malformed, naming it and
// the bytes that are missing; ModelIncomplete where files are missing. The Model
// holds what could be read in both cases.
func Inspect(path string) (spec.Model, error) {
	st, err := os.Stat(path)
	if err != nil {
		return spec.Model{}, openFault(path, err)
	}
	if st.IsDir() {
		return inspectSafetensors(path)
	}
	return inspectGGUF(path)
}

var splitName = regexp.MustCompile(`^(.+)-(\d{5})-of-(\d{5})\.gguf$`)

// SplitName takes apart the name of one file of a split GGUF: its stem, number
// and how many there are.
func SplitName(name string) (stem string, no, of int, ok bool) {
	m := splitName.FindStringSubmatch(name)
	if m == nil {
		return "", 0, 0, false
	}
	no, err1 := strconv.Atoi(m[2])
	of, err2 := strconv.Atoi(m[3])
	return m[1], no, of, err1 == nil && err2 == nil && no >= 1 && no <= of
}

// Stem returns the name of a GGUF without extension and number of the part.
func Stem(name string) string {
	name = filepath.Base(name)
	if stem, _, _, ok := SplitName(name); ok {
		return stem
	}
	if ext := filepath.Ext(name); strings.EqualFold(ext, ".gguf") {
		return strings.TrimSuffix(name, ext)
	}
	return name
}

// ggufParts returns the files of which path is the first.
func ggufParts(path string) []string {
	dir, name := filepath.Split(path)
	stem, _, of, ok := SplitName(name)
	if !ok {
		return []string{path}
	}
	parts := make([]string, of)
	for i := range parts {
		parts[i] = filepath.Join(dir, fmt.Sprintf("%s-%05d-of-%05d.gguf", stem, i+1, of))
	}
	return parts
}

func inspectGGUF(path string) (spec.Model, error) {
	m := spec.Model{Name: Stem(path), Format: "gguf", Quant: quantOf(path)}
	var problems error
	var first *gguf
	for i, part := range ggufParts(path) {
		g, size, err := openGGUF(part)
		if size > 0 {
			m.Files = append(m.Files, spec.File{Name: filepath.Base(part), Size: size})
			m.SizeBytes += size
		}
		if err != nil && problems == nil {
			problems = err
		}
		if g == nil {
			continue
		}
		if i == 0 {
			first = g
		}
		addTensors(&m, g)
	}
	m.ID = spec.ModelID(m.Files)
	if first == nil {
		return m, problems
	}
	describe(&m, first)
	if problems == nil && m.Layers == 0 {
		problems = broken(path, errors.New("it names no layers: it is no language model"))
	}
	return m, problems
}

// openGGUF reads one file; what could be read of a broken one comes with the
// error.
func openGGUF(path string) (*gguf, uint64, error) {
	f, err := open(path)
	if err != nil {
		return nil, 0, openFault(path, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return nil, 0, broken(path, errors.Join(errors.New("it is no regular file"), err))
	}
	size := uint64(st.Size())
	g, err := readGGUF(f, size)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, size, broken(path, fmt.Errorf("it ends after %d bytes, within its header: the rest is missing", size))
	}
	if err != nil {
		return nil, size, broken(path, err)
	}
	if n, tensor := g.missing(size); n > 0 {
		f := broken(path, fmt.Errorf("it is truncated: %d bytes are missing after the first %d, from tensor %s on", n, size, tensor))
		return g, size, f.With("missing_bytes", strconv.FormatUint(n, 10))
	}
	return g, size, nil
}

// open does not wait where the file is a pipe that nobody writes to.
func open(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
}

func broken(path string, err error) *fault.Fault {
	return fault.New(fault.ModelBroken, "the model file "+path+" cannot be used", err,
		"fetch or copy it again; `tbcluster models` shows which node has a whole one").With("path", path)
}

func openFault(path string, err error) *fault.Fault {
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fault.New(fault.ModelIncomplete, "the model file "+path+" is missing", errors.New("no such file"),
			"fetch or copy it again").With("path", path)
	case errors.Is(err, os.ErrPermission):
		return fault.New(fault.FileDenied, "the model file "+path+" cannot be read", errors.New("permission denied"),
			"let your user read it").With("path", path)
	case errors.Is(err, syscall.ELOOP):
		return fault.New(fault.ModelBroken, "the model file "+path+" cannot be opened", errors.New("its links lead in a circle"), "put the file itself there").With("path", path)
	}
	return fault.New(fault.FileIO, "the model file "+path+" cannot be read", err, "").With("path", path)
}

func addTensors(m *spec.Model, g *gguf) {
	for _, t := range g.tensors {
		n := layerOf(t.name)
		if n < 0 {
			m.OtherBytes += t.size
			continue
		}
		for len(m.LayerBytes) <= n {
			m.LayerBytes = append(m.LayerBytes, 0)
		}
		m.LayerBytes[n] += t.size
	}
}

// describe reads the metadata of the first file. Keys are those of the GGUF
// specification; some models give one number per layer: the largest counts.
func describe(m *spec.Model, g *gguf) {
	arch := g.keys["general.architecture"].s
	n := func(key string) int { return g.number(arch + "." + key) }
	m.Architecture = arch
	m.Layers = min(n("block_count"), maxLayers)
	m.Hidden = n("embedding_length")
	m.Heads = n("attention.head_count")
	m.KVHeads = n("attention.head_count_kv")
	m.Context = n("context_length")
	m.Window = n("attention.sliding_window")
	m.Vocabulary = n("vocab_size")
	if v := g.keys["tokenizer.ggml.tokens"]; m.Vocabulary == 0 && v.length < 1<<31 {
		m.Vocabulary = int(v.length)
	}
	if m.KVHeads == 0 {
		m.KVHeads = m.Heads
	}
	m.HeadDim = n("attention.key_length")
	if m.HeadDim == 0 && m.Heads > 0 {
		m.HeadDim = m.Hidden / m.Heads
	}
	valueDim := n("attention.value_length")
	if valueDim == 0 {
		valueDim = m.HeadDim
	}
	m.KVBytes = kvBytes(m.KVHeads, m.HeadDim+valueDim)
	if rank := n("attention.kv_lora_rank"); rank > 0 {
		m.KVBytes = kvBytes(1, rank+n("rope.dimension_count"))
	}
	if m.Quant == "" {
		m.Quant = fileTypes[g.number("general.file_type")]
	}
	for len(m.LayerBytes) < m.Layers {
		m.LayerBytes = append(m.LayerBytes, 0)
	}
}

// kvBytes is the cache of one token in one layer, at 16 bits a number.
func kvBytes(heads, dim int) uint64 { return 2 * uint64(heads) * uint64(dim) }

// fileTypes are the common values of general.file_type (llama_ftype).
var fileTypes = map[int]string{
	1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
	14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S",
	22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
	30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}

var quantName = regexp.MustCompile(`(?i)[.\-_]((?:UD-)?(?:I?Q|TQ)\d+(?:_[0-9A-Z]+)*|BF16|F16|F32|MXFP4(?:_MOE)?)$`)

// quantOf reads the quantisation from the name of a GGUF; "" when it has none.
func quantOf(path string) string {
	if m := quantName.FindStringSubmatch(Stem(path)); m != nil {
		return strings.ToUpper(m[1])
	}
	return ""
}
