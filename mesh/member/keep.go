package member

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/renameio/v2"

	"tbcluster/api/fault"
	"tbcluster/host/schema"
	"tbcluster/mesh/identity"
)

// StateFile is the name of the file in the agent's state directory.
const StateFile = "members.json"

const keptSchema = 1

// saveAtMost is how often the file is written at most.
const saveAtMost = 2 * time.Second

// maxKept is the largest section that is kept on disk, bytes.
const maxKept = 256 << 10

// kept is what survives a restart.
type kept struct {
	Schema      int                          `json:"schema"`
	Incarnation uint64                       `json:"incarnation"`
	Nodes       map[identity.NodeID]keptNode `json:"nodes"`
}

type keptNode struct {
	LastHeard   time.Time         `json:"last_heard"`
	Incarnation uint64            `json:"incarnation"`
	Version     string            `json:"version"`
	Sections    map[string][]byte `json:"sections,omitempty"`
}

func statePath(dir string) string { return filepath.Join(dir, StateFile) }

// restore takes what was kept. The time may be one that the clock, having been
// set back, has not come to yet: whoever was heard was heard before now.
func (p *peer) restore(k keptNode, now, wall time.Time) {
	if !k.LastHeard.IsZero() {
		p.lastHeard = now.Add(-max(0, wall.Sub(k.LastHeard)))
	}
	p.incarnation, p.version = k.Incarnation, k.Version
	for name, data := range k.Sections {
		p.sections[name] = Section{Data: data}
	}
}

// byClock turns a time of this process into one of the wall clock.
func byClock(t, now, wall time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return wall.Add(t.Sub(now)).Round(0)
}

func (m *Manager) load() (kept, error) {
	k := kept{}
	data, err := os.ReadFile(m.path)
	if errors.Is(err, fs.ErrNotExist) {
		return k, nil
	}
	if err != nil {
		return k, fault.New(fault.FileIO, "read what was known of the nodes", err, "give the agent the right to read it").At(m.path)
	}
	if err := schema.Check(data, keptSchema, m.path); err != nil {
		return k, err
	}
	if err := json.Unmarshal(data, &k); err != nil {
		// It is a memory, not a record: the nodes say it all again.
		m.o.Log.Warn("what was known of the nodes cannot be read and is begun anew", "file", m.path, "error", err)
		return kept{}, nil
	}
	return k, nil
}

func (m *Manager) save() error {
	m.mu.Lock()
	now, wall := time.Now(), m.o.Clock.Now()
	k := kept{Schema: keptSchema, Incarnation: m.incarnation, Nodes: map[identity.NodeID]keptNode{}}
	for id, p := range m.peers {
		n := keptNode{LastHeard: byClock(p.lastHeard, now, wall), Incarnation: p.incarnation, Version: p.version, Sections: map[string][]byte{}}
		for name, s := range p.sections {
			if m.keeps(name) && len(s.Data) <= maxKept {
				n.Sections[name] = s.Data
			}
		}
		k.Nodes[id] = n
	}
	m.mu.Unlock()
	data, err := json.Marshal(k)
	if err == nil {
		err = renameio.WriteFile(m.path, data, 0o600)
	}
	if err != nil {
		return fault.New(fault.FileIO, "keep what is known of the nodes", err, "make room, or give the agent the right to write there").At(m.path)
	}
	return nil
}

// saveWhenDirty writes the file after changes, not too often, until ctx ends.
func (m *Manager) saveWhenDirty(ctx context.Context) {
	for {
		select {
		case <-m.dirty:
			if err := m.save(); err != nil {
				m.o.Log.Error("cannot keep what is known of the nodes", "error", err)
			}
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(saveAtMost):
		case <-ctx.Done():
			return
		}
	}
}
