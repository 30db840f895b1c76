package plan

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"tbcluster/api/fault"
	"tbcluster/instance/spec"
)

const (
	maxSafetensorsHeader = 100 << 20 // the format's own limit
	maxConfig            = 32 << 20
	maxShards            = 4096
)

const indexName = "model.safetensors.index.json"

// config is what we need of a Hugging Face config.json. Multimodal models nest
// the language model's in text_config.
type config struct {
	ModelType  string  `json:"model_type"`
	Layers     int     `json:"num_hidden_layers"`
	Hidden     int     `json:"hidden_size"`
	Heads      int     `json:"num_attention_heads"`
	KVHeads    int     `json:"num_key_value_heads"`
	HeadDim    int     `json:"head_dim"`
	Vocabulary int     `json:"vocab_size"`
	Context    int     `json:"max_position_embeddings"`
	KVLoRA     int     `json:"kv_lora_rank"`
	RopeDim    int     `json:"qk_rope_head_dim"`
	Window     int     `json:"sliding_window"`
	DType      string  `json:"torch_dtype"`
	Text       *config `json:"text_config"`
}

func inspectSafetensors(dir string) (spec.Model, error) {
	m := spec.Model{Name: filepath.Base(dir), Format: "safetensors"}
	shards, problems := shardsOf(dir)
	if problems != nil && len(shards) == 0 {
		return m, problems
	}
	for _, s := range shards {
		if err := addShard(&m, dir, s); err != nil && problems == nil {
			problems = err
		}
	}
	if err := addConfig(&m, filepath.Join(dir, "config.json")); err != nil && problems == nil {
		problems = err
	}
	files, err := filesOf(dir)
	if err != nil && problems == nil {
		problems = err
	}
	m.Files = files
	for _, f := range files {
		m.SizeBytes += f.Size
	}
	m.ID = spec.ModelID(files)
	for len(m.LayerBytes) < m.Layers {
		m.LayerBytes = append(m.LayerBytes, 0)
	}
	return m, problems
}

// shardsOf returns the safetensors files that the index names, or the only one
// where there is no index.
func shardsOf(dir string) ([]string, error) {
	b, err := readBounded(filepath.Join(dir, indexName))
	if errors.Is(err, os.ErrNotExist) {
		found, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
		if err != nil {
			return nil, err
		}
		if len(found) != 1 {
			return nil, fault.Newf(fault.ModelIncomplete, "fetch the model again", "%s holds %d safetensors files and no %s", dir, len(found), indexName).With("path", dir)
		}
		return []string{filepath.Base(found[0])}, nil
	}
	if err != nil {
		return nil, openFault(filepath.Join(dir, indexName), err)
	}
	shards, err := parseIndex(b)
	if err != nil {
		return nil, broken(filepath.Join(dir, indexName), err)
	}
	return shards, nil
}

func parseIndex(b []byte) ([]string, error) {
	var index struct {
		Map map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(b, &index); err != nil {
		return nil, err
	}
	var shards []string
	seen := map[string]bool{}
	for _, s := range index.Map {
		if seen[s] {
			continue
		}
		if !filepath.IsLocal(s) || strings.ContainsAny(s, `/\`) || len(seen) >= maxShards {
			return nil, fmt.Errorf("it names %.100q as a file", s)
		}
		seen[s] = true
		shards = append(shards, s)
	}
	if len(shards) == 0 {
		return nil, errors.New("it names no file")
	}
	slices.Sort(shards)
	return shards, nil
}

func readBounded(name string) ([]byte, error) {
	f, err := open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err == nil && len(b) > maxConfig {
		err = fmt.Errorf("%s is longer than %d bytes", name, maxConfig)
	}
	return b, err
}

func addShard(m *spec.Model, dir, name string) error {
	path := filepath.Join(dir, name)
	f, err := open(path)
	if err != nil {
		return openFault(path, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return broken(path, errors.Join(errors.New("it is no regular file"), err))
	}
	tensors, end, err := readSafetensors(f, uint64(st.Size()))
	if err != nil {
		return broken(path, err)
	}
	for name, size := range tensors {
		addSized(m, name, size)
	}
	if size := uint64(st.Size()); end > size {
		return broken(path, fmt.Errorf("it is truncated: %d bytes are missing after the first %d", end-size, size)).
			With("missing_bytes", strconv.FormatUint(end-size, 10))
	}
	return nil
}

var layerName = regexp.MustCompile(`(?:^|\.)(?:layers|h|blocks)\.(\d{1,4})\.`)

func addSized(m *spec.Model, name string, size uint64) {
	match := layerName.FindStringSubmatch(name)
	if match == nil {
		m.OtherBytes += size
		return
	}
	n, err := strconv.Atoi(match[1])
	if err != nil || n >= maxLayers {
		m.OtherBytes += size
		return
	}
	for len(m.LayerBytes) <= n {
		m.LayerBytes = append(m.LayerBytes, 0)
	}
	m.LayerBytes[n] += size
}

// readSafetensors returns the size of each tensor and where the data must end.
func readSafetensors(r io.Reader, size uint64) (map[string]uint64, uint64, error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, 0, errors.New("it is truncated within its first 8 bytes")
	}
	n := binary.LittleEndian.Uint64(head[:])
	if n > maxSafetensorsHeader {
		return nil, 0, fmt.Errorf("%w of %d bytes", errMalformed, n)
	}
	if n+8 > size {
		return nil, 0, fmt.Errorf("it is truncated within its header: %d bytes are missing", n+8-size)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, 0, err
	}
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", errMalformed, err)
	}
	tensors := map[string]uint64{}
	end := n + 8
	for name, v := range raw {
		if name == "__metadata__" {
			continue
		}
		var t struct {
			Offsets [2]uint64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(v, &t); err != nil {
			return nil, 0, fmt.Errorf("%w: tensor %.100q: %w", errMalformed, name, err)
		}
		if t.Offsets[1] < t.Offsets[0] || t.Offsets[1] > 1<<60 {
			return nil, 0, fmt.Errorf("%w: tensor %.100q ends before it begins", errMalformed, name)
		}
		tensors[name] = t.Offsets[1] - t.Offsets[0]
		end = max(end, n+8+t.Offsets[1])
	}
	return tensors, end, nil
}

func addConfig(m *spec.Model, path string) error {
	b, err := readBounded(path)
	if err != nil {
		return openFault(path, err)
	}
	c, err := parseConfig(b)
	if err != nil {
		return broken(path, err)
	}
	m.Architecture, m.Layers, m.Hidden, m.Heads = c.ModelType, c.Layers, c.Hidden, c.Heads
	m.KVHeads, m.HeadDim, m.Vocabulary, m.Context, m.Window = c.KVHeads, c.HeadDim, c.Vocabulary, c.Context, c.Window
	m.Quant = strings.ToUpper(c.DType)
	if m.KVHeads == 0 {
		m.KVHeads = m.Heads
	}
	if m.HeadDim == 0 && m.Heads > 0 {
		m.HeadDim = m.Hidden / m.Heads
	}
	m.KVBytes = kvBytes(m.KVHeads, 2*m.HeadDim)
	if c.KVLoRA > 0 {
		m.KVBytes = kvBytes(1, c.KVLoRA+c.RopeDim)
	}
	return nil
}

func parseConfig(b []byte) (config, error) {
	var c config
	if err := json.Unmarshal(b, &c); err != nil {
		return c, err
	}
	if c.Layers == 0 && c.Text != nil {
		c.Text.Text = nil
		c = *c.Text
	}
	const most = 1 << 28
	for _, n := range []int{c.Layers, c.Hidden, c.Heads, c.KVHeads, c.HeadDim, c.Vocabulary, c.Context, c.KVLoRA, c.RopeDim, c.Window} {
		if n < 0 || n > most {
			return c, fmt.Errorf("a size of %d", n)
		}
	}
	c.Layers = min(c.Layers, maxLayers)
	return c, nil
}

// filesOf lists the files of a model directory that are part of it: not
// hidden ones, not what is in directories below it.
func filesOf(dir string) ([]spec.File, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, openFault(dir, err)
	}
	var files []spec.File
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		st, err := os.Stat(filepath.Join(dir, e.Name()))
		if err != nil {
			return files, openFault(filepath.Join(dir, e.Name()), err)
		}
		if st.Mode().IsRegular() {
			files = append(files, spec.File{Name: e.Name(), Size: uint64(st.Size())})
		}
	}
	return files, nil
}
