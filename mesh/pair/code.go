package pair

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"tbcluster/api/fault"
	"tbcluster/mesh/identity"
)

// alphabet is Crockford's base32: no I, L, O, U, which are read as 1, 1, 0, V.
const alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

const (
	secretLen = 8 // characters of five random bits each
	firstNum  = 1000
	numbers   = 9000 // firstNum to 9999
)

// Number returns the public number of codes of the node: what TXT announces as
// pair=N while a code is open. It follows from the node's key, so that the
// joining side tries no guess at a node that merely claims the number; two nodes
// have the same one now and then.
func Number(id identity.NodeID) string {
	sum := sha256.Sum256([]byte("tbcluster pairing number\n" + string(id)))
	return fmt.Sprint(firstNum + binary.BigEndian.Uint64(sum[:8])%numbers)
}

// newCode makes a code of the node.
func newCode(id identity.NodeID) (string, error) {
	random := make([]byte, secretLen)
	if _, err := rand.Read(random); err != nil {
		return "", fmt.Errorf("make a code: %w", err)
	}
	secret := make([]byte, secretLen)
	for i, b := range random {
		secret[i] = alphabet[b%32] // 256 is a multiple of 32: no letter is likelier
	}
	return fmt.Sprintf("%s-%s-%s", Number(id), secret[:4], secret[4:]), nil
}

// ParseCode returns the public number and the canonical form of a code as people
// type it: any case, with or without dashes and spaces, look-alikes taken for
// what they look like. Its error is a usage fault.
func ParseCode(s string) (number, canonical string, err error) {
	bad := func(why string) (string, string, error) {
		f := fault.Newf(fault.Usage, "type the code as `tbcluster pair` shows it on the other node: NNNN-XXXX-XXXX", "that is no pairing code")
		f.Why = why
		return "", "", f.With("field", "code")
	}
	if len(s) > 64 {
		return bad("it is too long")
	}
	var b strings.Builder
	for _, r := range strings.ToUpper(s) {
		switch r {
		case '-', ' ', '_':
			continue
		case 'O':
			r = '0'
		case 'I', 'L':
			r = '1'
		case 'U':
			r = 'V'
		}
		if !strings.ContainsRune(alphabet, r) {
			return bad(fmt.Sprintf("%q does not occur in codes", r))
		}
		b.WriteRune(r)
	}
	plain := b.String()
	if want := 4 + secretLen; len(plain) != want {
		return bad(fmt.Sprintf("it has %d characters, a code has %d", len(plain), want))
	}
	number, secret := plain[:4], plain[4:]
	if number[0] == '0' || strings.Trim(number, "0123456789") != "" {
		return bad(fmt.Sprintf("it begins with %q, which is no number", number))
	}
	return number, fmt.Sprintf("%s-%s-%s", number, secret[:4], secret[4:]), nil
}
