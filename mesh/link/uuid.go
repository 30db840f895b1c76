package link

import (
	"encoding/hex"
	"strings"
)

// CanonicalUUID returns one form for all spellings of a domain UUID: case and
// dashes do not count, and of the text and its form with the bytes of each
// 32-bit word reversed the smaller one stands for both. The Thunderbolt
// registers hold the UUID as four words, and whether macOS prints them in the
// order that Linux does is not verified. Text that is no UUID stands for itself.
func CanonicalUUID(text string) string {
	lower := strings.ToLower(strings.TrimSpace(text))
	b, err := hex.DecodeString(strings.ReplaceAll(lower, "-", ""))
	if err != nil || len(b) != 16 {
		return lower
	}
	swapped := make([]byte, 16)
	for i := range b {
		swapped[i] = b[i&^3|3-i&3]
	}
	one, other := hex.EncodeToString(b), hex.EncodeToString(swapped)
	return min(one, other)
}

// canonicalUUIDs returns CanonicalUUID that remembers: in a full mesh each UUID
// is named by every node.
func canonicalUUIDs() func(string) string {
	known := map[string]string{}
	return func(text string) string {
		c, ok := known[text]
		if !ok {
			c = CanonicalUUID(text)
			known[text] = c
		}
		return c
	}
}
