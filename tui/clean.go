package tui

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// maxClean is how many bytes of one string are shown; more is cut with "…".
const maxClean = 4096

// clean returns s as it may be written to a terminal: what moves the cursor,
// hides, reverses or joins text is written out (`\x1b`, `\u202e`), a line
// break becomes "↵", a tab a space. What is left has a width on which
// terminals agree, so that no name can push a border out of its column.
func clean(s string) string {
	if isPlain(s) {
		return s
	}
	cut := false
	if len(s) > maxClean {
		n := maxClean
		for n > 0 && !utf8.RuneStart(s[n]) {
			n--
		}
		s, cut = s[:n], true
	}
	var b strings.Builder
	marks := 0
	// base is whether a mark would have something to stand on.
	base := false
	for _, r := range norm.NFC.String(s) {
		switch {
		case r == '\n':
			b.WriteString("↵")
			base, marks = true, 0
		case r == '\t':
			b.WriteByte(' ')
			base, marks = true, 0
		case r == '\r':
			// A line end of the other systems; alone it would move the cursor.
		case unicode.Is(unicode.Mn, r) && base && marks < 2 && !isVariation(r):
			b.WriteRune(r)
			marks++
		case isSafe(r):
			b.WriteRune(r)
			base, marks = true, 0
		default:
			b.WriteString(spell(r))
			base, marks = false, 0
		}
	}
	if cut {
		b.WriteString("…")
	}
	return b.String()
}

// isPlain is the quick answer for nearly everything: printable ASCII.
func isPlain(s string) bool {
	if len(s) > maxClean {
		return false
	}
	for i := 0; i < len(s); i++ {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

func isVariation(r rune) bool {
	return unicode.Is(unicode.Variation_Selector, r)
}

// isSafe reports whether r alone takes the cells that every terminal thinks it
// takes, and changes nothing around it.
func isSafe(r rune) bool {
	switch {
	case !unicode.IsPrint(r), unicode.Is(unicode.M, r):
		return false
	case r == utf8.RuneError:
		return true
	case r >= 0x1160 && r <= 0x11ff, r >= 0xd7b0 && r <= 0xd7ff: // Hangul parts that join
		return false
	case r == 0x115f, r == 0x3164, r == 0xffa0: // Hangul fillers: printable and invisible
		return false
	case r == 0x2800: // empty Braille cell: printable and invisible
		return false
	case r >= 0x1f3fb && r <= 0x1f3ff: // skin tones join
		return false
	case r >= 0x1f1e6 && r <= 0x1f1ff: // flags join in pairs
		return false
	case r >= 0xe0000: // tags and private planes
		return false
	}
	return true
}

func spell(r rune) string {
	switch {
	case r < 0x100:
		return fmt.Sprintf(`\x%02x`, r)
	case r < 0x10000:
		return fmt.Sprintf(`\u%04x`, r)
	}
	return fmt.Sprintf(`\U%06x`, r)
}

// cleanMessage returns a copy of m in which every string, however deep and in
// whatever field, has been cleaned. It works by reflection so that a field
// added to the API tomorrow cannot be forgotten.
func cleanMessage[M proto.Message](m M) M {
	c := proto.Clone(m).(M)
	cleanFields(c.ProtoReflect())
	return c
}

func cleanFields(m protoreflect.Message) {
	// Unknown fields may hold anything and are never shown.
	m.SetUnknown(nil)
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			// Keys are cleaned too: a new map is made when one changes.
			cleanMap(m, f, v.Map())
		case f.IsList():
			l := v.List()
			for i := 0; i < l.Len(); i++ {
				switch f.Kind() {
				case protoreflect.StringKind:
					l.Set(i, protoreflect.ValueOfString(clean(l.Get(i).String())))
				case protoreflect.MessageKind, protoreflect.GroupKind:
					cleanFields(l.Get(i).Message())
				}
			}
		case f.Kind() == protoreflect.StringKind:
			m.Set(f, protoreflect.ValueOfString(clean(v.String())))
		case f.Kind() == protoreflect.MessageKind, f.Kind() == protoreflect.GroupKind:
			cleanFields(v.Message())
		}
		return true
	})
}

func cleanMap(m protoreflect.Message, f protoreflect.FieldDescriptor, old protoreflect.Map) {
	fresh := m.NewField(f).Map()
	old.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		if f.MapKey().Kind() == protoreflect.StringKind {
			k = protoreflect.ValueOfString(clean(k.String())).MapKey()
		}
		switch f.MapValue().Kind() {
		case protoreflect.StringKind:
			v = protoreflect.ValueOfString(clean(v.String()))
		case protoreflect.MessageKind, protoreflect.GroupKind:
			cleanFields(v.Message())
		}
		fresh.Set(k, v)
		return true
	})
	m.Set(f, protoreflect.ValueOfMap(fresh))
}
