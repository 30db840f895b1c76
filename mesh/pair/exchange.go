package pair

import (
	"bytes"
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"time"

	"github.com/schollz/pake/v3"
)

// What goes over the wire: frames of a length (two bytes, big endian) and JSON.
//
//	joiner → inviter   hello    number of the code, PAKE point X
//	inviter → joiner   answer   PAKE point Y, or refusal
//	joiner → inviter   confirm  MAC
//	inviter → joiner   confirm  MAC, or refusal (wrong)
//
// From here on both know that the other one has the code and the key that TLS
// showed, and frames may be larger (four bytes of length):
//
//	joiner → inviter   about    its name, its cluster, whether it is alone there
//	inviter → joiner   entry    all records of trust, or refusal
//	joiner → inviter   done     or refusal

// maxExchange is how many bytes either side takes before it is confirmed.
const maxExchange = 4 << 10

// maxEntry is the largest frame after that, bytes.
const maxEntry = 6 << 20

type refusal string

// What the inviting side refuses with.
const (
	refusedWrong  refusal = "wrong" // the code
	refusedOther  refusal = "other" // number of another code
	refusedBusy   refusal = "busy"  // another exchange is under way
	refusedUsed   refusal = "used"  // another node was faster
	refusedEnded  refusal = "ended" // three wrong tries
	refusedExpiry refusal = "expired"
	refusedSlow   refusal = "slow" // the joiner did not answer in time
	// refusedCluster: the joiner is in another one, with others.
	refusedCluster refusal = "cluster"
	// refusedRevoked: the joiner was put out of the cluster.
	refusedRevoked refusal = "revoked"
	refusedFault   refusal = "fault" // Text says it
)

type frame struct {
	Number string  `json:"number,omitempty"`
	Point  []byte  `json:"point,omitempty"`
	MAC    []byte  `json:"mac,omitempty"`
	Refuse refusal `json:"refuse,omitempty"`
	Text   string  `json:"text,omitempty"` // for people, with refusedFault

	Name    string          `json:"name,omitempty"`
	Cluster string          `json:"cluster,omitempty"`
	Alone   bool            `json:"alone,omitempty"`
	Records json.RawMessage `json:"records,omitempty"`
	Done    bool            `json:"done,omitempty"`
}

// wire reads and writes frames and counts what it has read.
type wire struct {
	rw        io.ReadWriter
	confirmed bool
	read      int
	// within bounds each frame, from when it is begun to be written or waited
	// for: what this side does between them, on a machine that is slow, is no
	// fault of the other one. 0 is no bound.
	within time.Duration
}

// begin sets the time that the next frame may take.
func (w *wire) begin() error {
	c, ok := w.rw.(interface{ SetDeadline(time.Time) error })
	if !ok || w.within == 0 {
		return nil
	}
	return c.SetDeadline(time.Now().Add(w.within))
}

func (w *wire) write(f frame) error {
	data, err := json.Marshal(f)
	if err != nil {
		return err
	}
	var head []byte
	if w.confirmed {
		head = binary.BigEndian.AppendUint32(nil, uint32(len(data)))
	} else {
		head = binary.BigEndian.AppendUint16(nil, uint16(len(data)))
	}
	if limit := w.limit(); len(data) > limit {
		return fmt.Errorf("a message of %d bytes is more than %d", len(data), limit)
	}
	if err := w.begin(); err != nil {
		return err
	}
	_, err = w.rw.Write(append(head, data...))
	return err
}

func (w *wire) limit() int {
	if w.confirmed {
		return maxEntry
	}
	return maxExchange - w.read
}

func (w *wire) next() (frame, error) {
	head := make([]byte, 2)
	if w.confirmed {
		head = make([]byte, 4)
	}
	if err := w.begin(); err != nil {
		return frame{}, err
	}
	if _, err := io.ReadFull(w.rw, head); err != nil {
		return frame{}, err
	}
	var size int
	if w.confirmed {
		size = int(binary.BigEndian.Uint32(head))
	} else {
		size = int(binary.BigEndian.Uint16(head))
		w.read += len(head)
	}
	if size > w.limit() {
		return frame{}, fmt.Errorf("a message of %d bytes is too large", size)
	}
	if !w.confirmed {
		w.read += size
	}
	// Grows as it comes, so that a length alone costs nothing.
	var data bytes.Buffer
	if _, err := io.CopyN(&data, w.rw, int64(size)); err != nil {
		return frame{}, err
	}
	return parseFrame(data.Bytes())
}

func parseFrame(data []byte) (frame, error) {
	var f frame
	dec := json.NewDecoder(bytes.NewReader(data))
	if err := dec.Decode(&f); err != nil {
		return frame{}, fmt.Errorf("a message that is no JSON: %w", err)
	}
	if dec.More() {
		return frame{}, errors.New("a message with something behind it")
	}
	return f, nil
}

// The roles in the PAKE.
const (
	joinerRole  = 0
	inviterRole = 1
)

// exchange is one side of a PAKE bound to both keys and the TLS connection.
type exchange struct {
	pake   *pake.Pake
	role   int
	keys   [2][]byte // hash of the key of each role
	number string
	x, y   []byte
	bind   []byte // TLS exporter
}

// exporterLabel is private to us: see RFC 5705, section 4.
const exporterLabel = "EXPERIMENTAL tbcluster pairing 1"

func newExchange(code string, role int, joiner, inviter ed25519.PublicKey, cs tls.ConnectionState) (*exchange, error) {
	number, code, err := ParseCode(code)
	if err != nil {
		return nil, err
	}
	e := &exchange{role: role, number: number}
	for i, key := range []ed25519.PublicKey{joiner, inviter} {
		spki, err := x509.MarshalPKIXPublicKey(key)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(spki)
		e.keys[i] = sum[:]
	}
	if e.bind, err = cs.ExportKeyingMaterial(exporterLabel, nil, 32); err != nil {
		return nil, err
	}
	password := sha256.Sum256([]byte("tbcluster pairing code\n" + code))
	e.pake, err = pake.InitCurveWithIdentities(password[:], role, "p256", e.keys[joinerRole], e.keys[inviterRole])
	if err != nil {
		return nil, err
	}
	if role == joinerRole {
		e.x, err = encodePoint(e.pake.Xᵤ, e.pake.Xᵥ)
	}
	return e, err
}

// take takes the other side's point. The library panics on values that are
// missing or not on the curve, so it sees none that we have not checked, and
// never a byte that the other side wrote.
func (e *exchange) take(point []byte) error {
	u, v, err := decodePoint(point)
	if err != nil {
		return err
	}
	theirs := &pake.Pake{Role: 1 - e.role}
	if e.role == inviterRole {
		theirs.Xᵤ, theirs.Xᵥ, e.x = u, v, point
	} else {
		theirs.Yᵤ, theirs.Yᵥ, e.y = u, v, point
	}
	data, err := json.Marshal(theirs)
	if err != nil {
		return err
	}
	if err := e.pake.Update(data); err != nil {
		return err
	}
	if e.role == inviterRole {
		e.y, err = encodePoint(e.pake.Yᵤ, e.pake.Yᵥ)
	}
	return err
}

// mac is what the side of that role confirms with.
func (e *exchange) mac(role int) ([]byte, error) {
	secret, err := e.pake.SessionKey()
	if err != nil {
		return nil, err
	}
	info := "tbcluster pairing, joiner confirms"
	if role == inviterRole {
		info = "tbcluster pairing, inviter confirms"
	}
	key, err := hkdf.Key(sha256.New, secret, e.bind, info, sha256.Size)
	if err != nil {
		return nil, err
	}
	h := hmac.New(sha256.New, key)
	for _, part := range [][]byte{[]byte(e.number), e.keys[joinerRole], e.keys[inviterRole], e.x, e.y, e.bind} {
		// Writes to a hash do not fail.
		_, _ = h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		_, _ = h.Write(part)
	}
	return h.Sum(nil), nil
}

// confirms says whether mac is the other side's.
func (e *exchange) confirms(mac []byte) (bool, error) {
	want, err := e.mac(1 - e.role)
	if err != nil {
		return false, err
	}
	return hmac.Equal(mac, want), nil
}

const coordinate = 32 // bytes of P-256

func encodePoint(u, v *big.Int) ([]byte, error) {
	if u == nil || v == nil || u.Sign() < 0 || v.Sign() < 0 || u.BitLen() > 8*coordinate || v.BitLen() > 8*coordinate {
		return nil, errors.New("a point of the PAKE is out of range")
	}
	point := make([]byte, 1+2*coordinate)
	point[0] = 4 // uncompressed, SEC 1
	u.FillBytes(point[1 : 1+coordinate])
	v.FillBytes(point[1+coordinate:])
	return point, nil
}

func decodePoint(point []byte) (u, v *big.Int, err error) {
	// Checks length, form, that it is on the curve and not at infinity.
	if _, err := ecdh.P256().NewPublicKey(point); err != nil {
		return nil, nil, fmt.Errorf("a point that is not on the curve: %w", err)
	}
	return new(big.Int).SetBytes(point[1 : 1+coordinate]), new(big.Int).SetBytes(point[1+coordinate:]), nil
}
