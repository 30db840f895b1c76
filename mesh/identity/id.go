package identity

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base32"
	"fmt"
	"strings"

	"tbcluster/api/fault"
)

// NodeID names a node: base32 of the SHA-256 of its public key
// (SubjectPublicKeyInfo), a check digit after every thirteen characters, in
// eight groups of seven joined by dashes. Only canonical values are equal to
// each other: take IDs of outside from ParseID.
type NodeID string

const (
	idAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
	idDigest   = 52 // base32 characters of a SHA-256
	idBlock    = 13 // characters under one check digit
	idPlain    = idDigest + idDigest/idBlock
	idGroup    = 7
)

// IDOf returns the node ID of a public key.
func IDOf(pub ed25519.PublicKey) NodeID {
	spki, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		// Only for a key of another type, which the signature rules out.
		panic("identity: " + err.Error())
	}
	sum := sha256.Sum256(spki)
	s := base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:])
	var b strings.Builder
	for i := 0; i < len(s); i += idBlock {
		block := s[i : i+idBlock]
		b.WriteString(block)
		b.WriteByte(checkDigit(block))
	}
	return group(b.String())
}

// ParseID returns the node ID that s writes: upper or lower case, with or
// without dashes and spaces, and with the digits 0, 1 and 8 for the letters
// that they are mistaken for. Its error is a usage fault that says which part
// is mistyped.
func ParseID(s string) (NodeID, error) {
	if len(s) > 4*idPlain {
		return "", idFault("", fmt.Sprintf("it is %d characters long, a node ID has %d", len(s), idPlain))
	}
	var b strings.Builder
	for _, r := range strings.ToUpper(s) {
		switch r {
		case '-', ' ':
			continue
		case '0':
			r = 'O'
		case '1':
			r = 'I'
		case '8':
			r = 'B'
		}
		if !strings.ContainsRune(idAlphabet, r) {
			return "", idFault(s, fmt.Sprintf("%q does not occur in node IDs", r))
		}
		b.WriteRune(r)
	}
	plain := b.String()
	if len(plain) != idPlain {
		return "", idFault(s, fmt.Sprintf("it has %d characters, a node ID has %d", len(plain), idPlain))
	}
	for i := 0; i < idPlain; i += idBlock + 1 {
		if checkDigit(plain[i:i+idBlock]) != plain[i+idBlock] {
			return "", idFault(s, fmt.Sprintf("a character between the %d. and the %d. is mistyped", i+1, i+idBlock+1))
		}
	}
	return group(plain), nil
}

// Short returns the first group, for people: enough to tell nodes apart on a
// desk, never enough to trust one.
func (id NodeID) Short() string {
	if len(id) < idGroup {
		return string(id)
	}
	return string(id[:idGroup])
}

// String returns the whole ID.
func (id NodeID) String() string { return string(id) }

func idFault(s, why string) *fault.Fault {
	f := fault.Newf(fault.Usage, "copy the whole ID from `tbcluster status` on that node", "%q is no node ID", s)
	f.Why = why
	return f
}

func group(plain string) NodeID {
	var b strings.Builder
	for i := 0; i < len(plain); i += idGroup {
		if i > 0 {
			b.WriteByte('-')
		}
		b.WriteString(plain[i : i+idGroup])
	}
	return NodeID(b.String())
}

// checkDigit is Luhn's algorithm over the 32 characters: it finds every single
// wrong character and nearly every swapped pair.
func checkDigit(s string) byte {
	factor, sum := 2, 0
	for i := len(s) - 1; i >= 0; i-- {
		v := factor * strings.IndexByte(idAlphabet, s[i])
		sum += v/32 + v%32
		factor = 3 - factor
	}
	return idAlphabet[(32-sum%32)%32]
}
