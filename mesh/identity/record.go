package identity

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Bounds of what is read of others.
const (
	maxRecords     = 4096
	maxExport      = 4 << 20 // bytes
	maxPayload     = 512 << 10
	maxClusterName = 63
)

// signDomain goes before every signed payload, so that a signature made for
// something else is never a record.
const signDomain = "tbcluster trust record 1\n"

type kind string

// The kinds of record. Who must sign: found, its own key; introduce and revoke,
// an admin; name, the node itself or an admin; forget, an operator; client, an
// admin.
const (
	kindFound     kind = "found"
	kindIntroduce kind = "introduce"
	kindRevoke    kind = "revoke"
	kindName      kind = "name"
	kindForget    kind = "forget"
	kindClient    kind = "client"
)

// payload is what is signed, as JSON. Unknown fields are of newer versions and
// stay in the bytes that travel.
type payload struct {
	Kind kind `json:"kind"`
	// Cluster is the ID of the cluster: derived from the founding record, and
	// empty in it.
	Cluster string `json:"cluster,omitempty"`
	// Key is whom it is about: of a client the SHA-256 of its public key, which is
	// as long as a node's key and never one.
	Key  []byte `json:"key"`
	Name string `json:"name,omitempty"`
	Role Role   `json:"role,omitempty"`
	// Sequence grows with what its signer signs; of names and forgets of one
	// node the highest counts.
	Sequence uint64 `json:"sequence"`
	Time     int64  `json:"time"` // Unix seconds by the signer's clock, for people
	// Of a founding.
	ClusterName string `json:"cluster_name,omitempty"`
	Nonce       []byte `json:"nonce,omitempty"`
	// Keep lists the records (by hash) of a revoked node that still stand.
	Keep [][]byte `json:"keep,omitempty"`
}

type hash [sha256.Size]byte

// record is a SignedRecord whose form and signature hold.
type record struct {
	signed  SignedRecord
	payload payload
	hash    hash
	signer  NodeID
	subject NodeID
	keep    map[hash]bool
}

func (r *record) time() time.Time { return time.Unix(r.payload.Time, 0).UTC() }

func signRecord(k *Key, p payload) (*record, error) {
	data, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	return checkRecord(SignedRecord{
		Payload:   data,
		Signer:    k.Public(),
		Signature: k.sign(append([]byte(signDomain), data...)),
	})
}

// checkRecord checks form and signature, not whether the signer may say that.
func checkRecord(s SignedRecord) (*record, error) {
	switch {
	case len(s.Payload) > maxPayload:
		return nil, fmt.Errorf("a record of %d bytes is too large", len(s.Payload))
	case len(s.Signer) != ed25519.PublicKeySize:
		return nil, errors.New("a record without a signer's key")
	case len(s.Signature) != ed25519.SignatureSize:
		return nil, errors.New("a record without a signature")
	}
	if !ed25519.Verify(s.Signer, append([]byte(signDomain), s.Payload...), s.Signature) {
		return nil, errors.New("a record whose signature does not hold")
	}
	r := &record{signed: SignedRecord{
		Payload: bytes.Clone(s.Payload), Signer: bytes.Clone(s.Signer), Signature: bytes.Clone(s.Signature),
	}}
	if err := json.Unmarshal(s.Payload, &r.payload); err != nil {
		return nil, fmt.Errorf("a record that is no JSON: %w", err)
	}
	p := &r.payload
	if len(p.Key) != ed25519.PublicKeySize {
		return nil, errors.New("a record about no key")
	}
	r.signer, r.subject = IDOf(s.Signer), IDOf(p.Key)
	r.hash = sha256.Sum256(append(bytes.Clone(s.Signer), s.Payload...))
	switch p.Kind {
	case kindFound:
		if r.signer != r.subject || p.Cluster != "" || len(p.Nonce) < 16 || p.ClusterName == "" || len(p.ClusterName) > maxClusterName {
			return nil, errors.New("a founding that is not its founder's")
		}
	case kindIntroduce, kindClient:
		if p.Role < Viewer || p.Role > Admin {
			return nil, fmt.Errorf("an introduction with the unknown role %d", p.Role)
		}
	case kindRevoke:
		r.keep = make(map[hash]bool, len(p.Keep))
		for _, k := range p.Keep {
			if len(k) != sha256.Size {
				return nil, errors.New("a tombstone with a malformed list of what stands")
			}
			r.keep[hash(k)] = true
		}
	case kindName, kindForget:
	default:
		return nil, fmt.Errorf("a record of the unknown kind %q", p.Kind)
	}
	if needsName := p.Kind == kindFound || p.Kind == kindIntroduce || p.Kind == kindName || p.Kind == kindClient; needsName && !validName(p.Name) {
		return nil, fmt.Errorf("a record with the name %q, which is none", p.Name)
	}
	if p.Kind != kindFound && p.Cluster == "" {
		return nil, errors.New("a record of no cluster")
	}
	return r, nil
}

// clusterID is derived from the founding, so that nobody founds a cluster of
// that ID again.
func clusterID(found *record) string {
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(found.hash[:15]))
}

// ParseRecords reads what Export wrote, at another node. It checks the form
// only; Merge and Adopt check the rest.
func ParseRecords(data []byte) ([]SignedRecord, error) {
	if len(data) > maxExport {
		return nil, fmt.Errorf("records of trust of %d bytes are too large", len(data))
	}
	var records []SignedRecord
	dec := json.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(&records); err != nil {
		return nil, fmt.Errorf("records of trust: %w", err)
	}
	if dec.More() {
		return nil, errors.New("records of trust: something follows them")
	}
	if len(records) > maxRecords {
		return nil, fmt.Errorf("%d records of trust are too many", len(records))
	}
	return records, nil
}

const nameLetters = "abcdefghijklmnopqrstuvwxyz0123456789"

func validName(s string) bool {
	return s != "" && s == CleanName(s)
}

// CleanName makes a node name (1 to 63 of a-z, 0-9 and "-") of any host name.
func CleanName(s string) string {
	s, _, _ = strings.Cut(s, ".")
	var b strings.Builder
	for _, r := range strings.ToLower(s) {
		switch {
		case strings.ContainsRune(nameLetters, r):
			b.WriteRune(r)
		case b.Len() > 0 && !strings.HasSuffix(b.String(), "-"):
			b.WriteByte('-')
		}
		if b.Len() == 63 {
			break
		}
	}
	if name := strings.TrimRight(b.String(), "-"); name != "" {
		return name
	}
	return "node"
}
