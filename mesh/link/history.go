package link

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/renameio/v2"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	tbclusterv1 "tbcluster/api/tbcluster/v1"
)

const (
	historySchema = 1
	// maxFlaps is how many times down one end remembers.
	maxFlaps = 16
	// maxHistories is how many ends are remembered: many more than a machine
	// has ports, few enough that moving cables about for years stays small.
	maxHistories = 256
	// maxFlapReason bounds the words of one flap, bytes.
	maxFlapReason = 160
	// maxHistoryFile bounds what is read, bytes: more was not written by us.
	maxHistoryFile = 4 << 20
)

// Flap is one time that an end went down.
type Flap struct {
	Down   time.Time `json:"down"`
	Back   time.Time `json:"back,omitzero"` // zero until it was proven again
	Reason string    `json:"reason,omitempty"`
}

// Measurement is what a bench found. A is the node with the lower ID.
type Measurement struct {
	AToB     uint64        `json:"a_to_b"` // bytes a second
	BToA     uint64        `json:"b_to_a"`
	RTT      time.Duration `json:"rtt"`
	At       time.Time     `json:"at"`
	Duration time.Duration `json:"duration"` // of each direction
	// NegotiatedGbps is what the cable ran at then; 0 if unknown.
	NegotiatedGbps float64 `json:"negotiated_gbps"`
	// Shared is set where something else used the cable meanwhile.
	Shared bool `json:"shared,omitempty"`
}

// Proto returns the measurement as others see it.
func (m Measurement) Proto() *tbclusterv1.LinkMeasurement {
	return &tbclusterv1.LinkMeasurement{
		AToBBytesPerSecond: m.AToB, BToABytesPerSecond: m.BToA, RttUs: uint64(max(m.RTT.Microseconds(), 1)),
		MeasuredAt: timestamppb.New(m.At), Duration: durationpb.New(m.Duration), NegotiatedGbps: m.NegotiatedGbps, Shared: m.Shared,
	}
}

// MeasurementOf reads what another node found. It fails for what nothing can
// have found.
func MeasurementOf(p *tbclusterv1.LinkMeasurement) (Measurement, error) {
	m := Measurement{
		AToB: p.GetAToBBytesPerSecond(), BToA: p.GetBToABytesPerSecond(), RTT: time.Duration(min(p.GetRttUs(), 60e6)) * time.Microsecond,
		NegotiatedGbps: p.GetNegotiatedGbps(), Shared: p.GetShared(),
	}
	if p.GetMeasuredAt().CheckValid() != nil || p.GetDuration().CheckValid() != nil ||
		!(m.NegotiatedGbps >= 0 && m.NegotiatedGbps < 1e6) || max(m.AToB, m.BToA) > 1e15 {
		return m, errors.New("no measurement of a cable")
	}
	m.At, m.Duration = p.GetMeasuredAt().AsTime(), p.GetDuration().AsDuration()
	return m, nil
}

// record is what is remembered of one own end. Its UUIDs are not: integrated
// controllers change theirs at boot.
type record struct {
	Port     string       `json:"port"`
	Peer     string       `json:"peer"`                // node ID
	PeerPort string       `json:"peer_port,omitempty"` // that was measured
	Flaps    []Flap       `json:"flaps,omitempty"`
	Measured *Measurement `json:"measured,omitempty"`
	Used     time.Time    `json:"used"` // last news of it
}

// History remembers over restarts when own ends went down and what benches
// found. It is bounded. Its methods may be called at once; nil remembers
// nothing.
type History struct {
	path string
	log  *slog.Logger

	mu    sync.Mutex
	list  []record
	dirty bool
}

// OpenHistory reads a history file; one that is not there is an empty history,
// and so is one that cannot be read, which is said in the log: it is a
// convenience and no truth rests on it. Faults: STATE_TOO_NEW, FILE_IO.
func OpenHistory(path string, log *slog.Logger) (*History, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	h := &History{path: path, log: log}
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return h, nil
	}
	var data []byte
	if err == nil && st.Size() > maxHistoryFile {
		log.Warn("the history of cables is too large and is begun anew", "file", path, "bytes", st.Size())
		return h, nil
	}
	if err == nil {
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, fault.New(fault.FileIO, "read the history of cables", err, "give the agent the right to read it").At(path)
	}
	list, err := parseHistory(data)
	if fault.Is(err, fault.StateTooNew) {
		return nil, fault.As(err).At(path)
	}
	if err != nil {
		log.Warn("the history of cables cannot be read and is begun anew", "file", path, "error", err)
	}
	h.list = list
	return h, nil
}

type historyFile struct {
	Schema int      `json:"schema"`
	Ends   []record `json:"ends"`
}

// parseHistory reads a history file and holds it to its bounds.
func parseHistory(data []byte) ([]record, error) {
	// The schema first: what a newer version wrote need not be readable else.
	var head struct {
		Schema int `json:"schema"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, err
	}
	if head.Schema > historySchema {
		f := fault.Newf(fault.StateTooNew, "install that version again, or a newer one", "read the history of cables")
		f.Why = fmt.Sprintf("it was written by a newer tbcluster (schema %d, this one knows %d)", head.Schema, historySchema)
		return nil, f
	}
	var file historyFile
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	var list []record
	seen := map[[2]string]bool{}
	for _, r := range file.Ends {
		k := [2]string{r.Port, r.Peer}
		if r.Port == "" || r.Peer == "" || len(r.Port) > maxPortName || len(r.Peer) > 256 || len(r.PeerPort) > maxPortName || seen[k] || len(list) == maxHistories {
			continue
		}
		seen[k] = true
		r.Flaps = r.Flaps[max(0, len(r.Flaps)-maxFlaps):]
		for i := range r.Flaps {
			r.Flaps[i].Reason = cut(r.Flaps[i].Reason)
		}
		if r.Measured != nil {
			if _, err := MeasurementOf(r.Measured.Proto()); err != nil {
				r.Measured = nil
			}
		}
		list = append(list, r)
	}
	return list, nil
}

// cut keeps the beginning of words, as text.
func cut(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), maxFlapReason)], "")
}

// at returns the record of an end, made if there is none.
func (h *History) at(port, peer string, now time.Time) *record {
	h.dirty = true
	for i := range h.list {
		if r := &h.list[i]; r.Port == port && r.Peer == peer {
			r.Used = now
			return r
		}
	}
	if len(h.list) >= maxHistories {
		oldest := 0
		for i, r := range h.list {
			if r.Used.Before(h.list[oldest].Used) {
				oldest = i
			}
		}
		h.list = slices.Delete(h.list, oldest, oldest+1)
	}
	h.list = append(h.list, record{Port: port, Peer: peer, Used: now})
	return &h.list[len(h.list)-1]
}

// find returns the record of an end; nil if there is none.
func (h *History) find(port, peer string) *record {
	i := slices.IndexFunc(h.list, func(r record) bool { return r.Port == port && r.Peer == peer })
	if i < 0 {
		return nil
	}
	return &h.list[i]
}

func (h *History) down(port, peer, reason string, now time.Time) {
	if h == nil || peer == "" {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.at(port, peer, now)
	if n := len(r.Flaps); n > 0 && r.Flaps[n-1].Back.IsZero() {
		return // it has not been back since: one outage
	}
	r.Flaps = append(r.Flaps, Flap{Down: now, Reason: cut(reason)})
	r.Flaps = slices.Clone(r.Flaps[max(0, len(r.Flaps)-maxFlaps):])
}

// back notes that an end is proven again.
func (h *History) back(port, peer string, now time.Time) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.find(port, peer)
	if r == nil || len(r.Flaps) == 0 || !r.Flaps[len(r.Flaps)-1].Back.IsZero() {
		return
	}
	r.Flaps[len(r.Flaps)-1].Back, r.Used, h.dirty = now, now, true
}

func (h *History) measured(port, peer, peerPort string, m Measurement, now time.Time) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.at(port, peer, now)
	r.PeerPort, r.Measured = peerPort, &m
}

// of returns what is remembered of an end. A measurement of another cable is
// not: one to another port, or one that ran at another rate.
func (h *History) of(port, peer, peerPort string, negotiated float64) ([]Flap, *Measurement) {
	if h == nil {
		return nil, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.find(port, peer)
	if r == nil {
		return nil, nil
	}
	m := r.Measured
	if m != nil && (peerPort != "" && r.PeerPort != "" && peerPort != r.PeerPort ||
		negotiated > 0 && m.NegotiatedGbps > 0 && negotiated != m.NegotiatedGbps) {
		m = nil
	}
	return slices.Clone(r.Flaps), m
}

// forget drops all that is remembered of the cables to a node.
func (h *History) forget(peer string) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	before := len(h.list)
	h.list = slices.DeleteFunc(h.list, func(r record) bool { return r.Peer == peer })
	h.dirty = h.dirty || len(h.list) != before
}

// Save writes what is new.
func (h *History) Save() error {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	if !h.dirty {
		h.mu.Unlock()
		return nil
	}
	h.dirty = false
	data, err := json.Marshal(historyFile{Schema: historySchema, Ends: h.list})
	h.mu.Unlock()
	if err == nil {
		err = renameio.WriteFile(h.path, data, 0o600)
	}
	if err != nil {
		h.mu.Lock()
		h.dirty = true
		h.mu.Unlock()
		return fault.New(fault.FileIO, "keep the history of cables", err, "make room, or give the agent the right to write there").At(h.path)
	}
	return nil
}
