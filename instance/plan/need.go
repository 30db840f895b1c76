package plan

import (
	"fmt"
	"math/bits"

	"tbcluster/instance/spec"
)

const (
	// defaultContext is what is counted where neither the person nor the model
	// wants less.
	defaultContext = 4096
	// microBatch is how many tokens an engine computes at once (llama.cpp's
	// default); its buffers grow with it.
	microBatch = 512

	minHeadroom      = 2 << 30
	headroomFraction = 20 // 5 %
)

// ContextFor returns the context that a request means for a model, in tokens.
func ContextFor(asked, trained int) int {
	switch {
	case asked > 0:
		return asked
	case trained > 0:
		return min(trained, defaultContext)
	}
	return defaultContext
}

// needs counts what the parts of a model take, in bytes:
//
//	need = Σ layers · (weights + KV of a token · context) + ends + activation + headroom
//
// with the embeddings and the head at both ends, activation for one micro-batch
// of tokens, and the larger of 2 GiB and 5 % of the machine's memory left free.
type needs struct {
	layers     []uint64 // by layer
	largest    uint64
	ends       uint64
	activation uint64
}

func needsOf(m spec.Model, context int) needs {
	tokens := context
	if m.Window > 0 {
		tokens = min(tokens, m.Window)
	}
	kv := mul(m.KVBytes, uint64(tokens))
	n := needs{
		layers: make([]uint64, m.Layers),
		ends:   m.OtherBytes,
		// Logits in 32 bits, and some sixteen vectors of the width of the model.
		activation: mul(microBatch, 4*uint64(m.Vocabulary)+64*uint64(m.Hidden)),
	}
	for i := range n.layers {
		if i < len(m.LayerBytes) {
			n.layers[i] = m.LayerBytes[i]
		}
		n.layers[i] = add(n.layers[i], kv)
		n.largest = max(n.largest, n.layers[i])
	}
	return n
}

// fixed is what rank i of n takes without any layer.
func (n needs) fixed(i, ranks int) uint64 {
	out := n.activation
	if i == 0 || i == ranks-1 {
		out = add(out, n.ends)
	}
	return out
}

// of is what layers from one to before another take.
func (n needs) of(from, to int) uint64 {
	var out uint64
	for _, l := range n.layers[from:to] {
		out = add(out, l)
	}
	return out
}

func headroom(total uint64) uint64 { return max(minHeadroom, total/headroomFraction) }

// add and mul stop at the largest number: a model of absurd sizes fits nowhere.
func add(a, b uint64) uint64 {
	s, carry := bits.Add64(a, b, 0)
	if carry != 0 {
		return ^uint64(0)
	}
	return s
}

func mul(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	if hi != 0 {
		return ^uint64(0)
	}
	return lo
}

// split spreads layers over ranks in proportion to weights, at least one each
// and at most caps[i]. It returns nil when they do not fit.
func split(layers int, weights []uint64, caps []int) []int {
	out := make([]int, len(caps))
	sum := 0
	for i, c := range caps {
		if c < 1 {
			return nil
		}
		sum += min(c, layers)
		out[i] = 1
	}
	if sum < layers || layers < len(caps) {
		return nil
	}
	// One layer at a time to the rank that is furthest behind its share: exact
	// under every cap, and the same each time.
	for left := layers - len(caps); left > 0; left-- {
		best := -1
		for i := range out {
			if out[i] >= caps[i] {
				continue
			}
			if best < 0 || behind(out[i], weights[i], out[best], weights[best]) {
				best = i
			}
		}
		out[best]++
	}
	return out
}

// behind reports whether a layers at weight wa is a smaller share than b at wb.
func behind(a int, wa uint64, b int, wb uint64) bool {
	h1, l1 := bits.Mul64(uint64(a+1), max(wb, 1))
	h2, l2 := bits.Mul64(uint64(b+1), max(wa, 1))
	return h1 < h2 || h1 == h2 && l1 < l2
}

// gib writes bytes for people.
func gib(b uint64) string {
	const g = 1 << 30
	if b < g/10 {
		return fmt.Sprintf("%d MiB", b>>20)
	}
	return fmt.Sprintf("%.1f GiB", float64(b)/g)
}
