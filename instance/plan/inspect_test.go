package plan

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

// ggufBytes builds a GGUF file: keys in order, tensors of F32 with that many
// elements one after another.
func ggufBytes(version uint32, keys []any, tensors []any) []byte {
	var b bytes.Buffer
	put := func(v any) {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
	str := func(s string) { put(uint64(len(s))); b.WriteString(s) }
	b.WriteString("GGUF")
	put(version)
	put(uint64(len(tensors) / 2))
	put(uint64(len(keys) / 2))
	for i := 0; i < len(keys); i += 2 {
		str(keys[i].(string))
		switch v := keys[i+1].(type) {
		case string:
			put(uint32(8))
			str(v)
		case uint32:
			put(uint32(4))
			put(v)
		case []uint32:
			put(uint32(9))
			put(uint32(4))
			put(uint64(len(v)))
			put(v)
		case []string:
			put(uint32(9))
			put(uint32(8))
			put(uint64(len(v)))
			for _, s := range v {
				str(s)
			}
		}
	}
	var offset uint64
	for i := 0; i < len(tensors); i += 2 {
		n := uint64(tensors[i+1].(int))
		str(tensors[i].(string))
		put(uint32(1))
		put(n)
		put(uint32(0))
		put(offset)
		offset += 4 * n
	}
	for b.Len()%32 != 0 {
		b.WriteByte(0)
	}
	b.Write(make([]byte, offset))
	return b.Bytes()
}

var tinyKeys = []any{
	"general.architecture", "llama", "llama.block_count", uint32(2), "llama.embedding_length", uint32(64),
	"llama.attention.head_count", uint32(4), "llama.attention.head_count_kv", []uint32{2, 1}, "llama.context_length", uint32(1000),
	"tokenizer.ggml.tokens", []string{"a", "b", "c"}, "general.file_type", uint32(15),
}

var tinyTensors = []any{"token_embd.weight", 100, "blk.0.attn.weight", 10, "blk.1.attn.weight", 20, "output.weight", 100}

func write(t *testing.T, path string, b []byte) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSizesComeFromTheFile(t *testing.T) {
	for _, version := range []uint32{2, 3} {
		m, err := Inspect(write(t, filepath.Join(t.TempDir(), "Tiny-Q4_K_M.gguf"), ggufBytes(version, tinyKeys, tinyTensors)))
		if err != nil {
			t.Fatal(err)
		}
		if m.Name != "Tiny-Q4_K_M" || m.Quant != "Q4_K_M" || m.Architecture != "llama" || m.Layers != 2 || m.Hidden != 64 ||
			m.KVHeads != 2 || m.HeadDim != 16 || m.Vocabulary != 3 || m.Context != 1000 || m.KVBytes != 2*2*32 {
			t.Errorf("%+v", m)
		}
		if fmt.Sprint(m.LayerBytes) != "[40 80]" || m.OtherBytes != 800 {
			t.Errorf("layers %v, others %d", m.LayerBytes, m.OtherBytes)
		}
		if !strings.HasPrefix(m.ID, "size:") || len(m.Files) != 1 {
			t.Errorf("ID %s, files %v", m.ID, m.Files)
		}
	}
}

func TestATruncatedGGUFIsBrokenAndSaysByHowMuch(t *testing.T) {
	whole := ggufBytes(3, tinyKeys, tinyTensors)
	path := write(t, filepath.Join(t.TempDir(), "x.gguf"), whole[:len(whole)-123])
	m, err := Inspect(path)
	f := fault.As(err)
	if f == nil || f.Reason != fault.ModelBroken || f.Meta["missing_bytes"] != "123" || !strings.Contains(f.Error(), "123 bytes are missing") || !strings.Contains(f.Error(), path) {
		t.Fatalf("%v", err)
	}
	if m.Layers != 2 {
		t.Errorf("what could be read is lost: %+v", m)
	}
	// At every length it is an error and never a panic.
	for n := range len(whole) {
		if _, err := Inspect(write(t, path, whole[:n])); !fault.Is(err, fault.ModelBroken) {
			t.Fatalf("%d bytes of %d: %v", n, len(whole), err)
		}
	}
}

func TestASplitGGUFIsOneModel(t *testing.T) {
	dir := t.TempDir()
	first := write(t, filepath.Join(dir, "M-Q8_0-00001-of-00002.gguf"), ggufBytes(3, tinyKeys, []any{"token_embd.weight", 100, "blk.0.w", 10}))
	second := write(t, filepath.Join(dir, "M-Q8_0-00002-of-00002.gguf"), ggufBytes(3, []any{"split.no", uint32(1)}, []any{"blk.1.w", 20}))
	m, err := Inspect(first)
	if err != nil {
		t.Fatal(err)
	}
	if m.Name != "M-Q8_0" || m.Quant != "Q8_0" || len(m.Files) != 2 || fmt.Sprint(m.LayerBytes) != "[40 80]" {
		t.Errorf("%+v", m)
	}
	if err := os.Remove(second); err != nil {
		t.Fatal(err)
	}
	if _, err := Inspect(first); !fault.Is(err, fault.ModelIncomplete) || !strings.Contains(err.Error(), "00002-of-00002") {
		t.Errorf("without its second file: %v", err)
	}
}

func safetensors(tensors map[string]int) []byte {
	head := map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	at := 0
	for name, n := range tensors {
		head[name] = map[string]any{"dtype": "F32", "shape": []int{n / 4}, "data_offsets": []int{at, at + n}}
		at += n
	}
	h, err := json.Marshal(head)
	if err != nil {
		panic(err)
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(h)))
	return append(append(b, h...), make([]byte, at)...)
}

func TestSafetensorsDirectory(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "config.json"), []byte(`{"model_type":"vl","text_config":{"model_type":"deepseek_v3","num_hidden_layers":2,"hidden_size":64,"num_attention_heads":4,"kv_lora_rank":512,"qk_rope_head_dim":64,"vocab_size":9,"max_position_embeddings":77}}`))
	write(t, filepath.Join(dir, indexName), []byte(`{"weight_map":{"model.layers.0.w":"a.safetensors","model.layers.1.w":"b.safetensors","lm_head":"b.safetensors"}}`))
	write(t, filepath.Join(dir, "a.safetensors"), safetensors(map[string]int{"model.layers.0.w": 40}))
	b := safetensors(map[string]int{"model.layers.1.w": 80, "lm_head": 8})
	write(t, filepath.Join(dir, "b.safetensors"), b)
	m, err := Inspect(dir)
	if err != nil {
		t.Fatal(err)
	}
	if m.Format != "safetensors" || m.Layers != 2 || fmt.Sprint(m.LayerBytes) != "[40 80]" || m.OtherBytes != 8 || m.KVBytes != 2*(512+64) || m.Context != 77 || len(m.Files) != 4 {
		t.Errorf("%+v", m)
	}
	write(t, filepath.Join(dir, "b.safetensors"), b[:len(b)-5])
	if _, err := Inspect(dir); !fault.Is(err, fault.ModelBroken) || !strings.Contains(err.Error(), "5 bytes are missing") {
		t.Errorf("truncated: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "b.safetensors")); err != nil {
		t.Fatal(err)
	}
	if _, err := Inspect(dir); !fault.Is(err, fault.ModelIncomplete) || !strings.Contains(err.Error(), "b.safetensors") {
		t.Errorf("missing: %v", err)
	}
}

func TestAnIndexCannotLeadOut(t *testing.T) {
	for _, name := range []string{"../x", "/etc/passwd", "a/b"} {
		if _, err := parseIndex([]byte(fmt.Sprintf(`{"weight_map":{"t":%q}}`, name))); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func FuzzGGUF(f *testing.F) {
	f.Add(ggufBytes(3, tinyKeys, tinyTensors))
	f.Add(ggufBytes(2, []any{"a", []string{"x"}}, nil))
	f.Add([]byte("GGUF\x03\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := readGGUF(bytes.NewReader(b), uint64(len(b)))
		if err != nil {
			return
		}
		if n, name := g.missing(uint64(len(b))); n > 0 && name == "" && len(g.tensors) == 1 && g.tensors[0].name != "" {
			t.Error("bytes are missing and no tensor is named")
		}
		var m = struct{ n int }{}
		for _, x := range g.tensors {
			m.n += layerOf(x.name)
		}
		if len(g.tensors)*24 > len(b) {
			t.Errorf("%d tensors in %d bytes", len(g.tensors), len(b))
		}
	})
}

func FuzzSafetensors(f *testing.F) {
	f.Add(safetensors(map[string]int{"model.layers.1.w": 80, "lm_head": 8}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, end, err := readSafetensors(bytes.NewReader(b), uint64(len(b))); err == nil && end < 8 {
			t.Errorf("ends at %d", end)
		}
	})
}

func FuzzModelJSON(f *testing.F) {
	f.Add([]byte(`{"weight_map":{"a":"b.safetensors"}}`))
	f.Add([]byte(`{"num_hidden_layers":2,"text_config":{"num_hidden_layers":3}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if shards, err := parseIndex(b); err == nil {
			for _, s := range shards {
				if !filepath.IsLocal(s) {
					t.Errorf("%q", s)
				}
			}
		}
		if c, err := parseConfig(b); err == nil && (c.Layers < 0 || c.Layers > maxLayers) {
			t.Errorf("%+v", c)
		}
	})
}

func TestErrorsWrapWhatWasWrong(t *testing.T) {
	_, err := readGGUF(strings.NewReader("GGML0000"), 8)
	if !errors.Is(err, errMalformed) {
		t.Error(err)
	}
}
