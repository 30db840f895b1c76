package discover

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/google/renameio/v2"

	"tbcluster/api/fault"
	"tbcluster/host/schema"
	"tbcluster/mesh/identity"
)

// MemoryFile is the name of the file in the agent's state directory.
const MemoryFile = "addresses.json"

const memorySchema = 1

// memory is where nodes were met.
type memory struct {
	Schema int                                              `json:"schema"`
	Nodes  map[identity.NodeID]map[netip.AddrPort]time.Time `json:"nodes"`
}

func loadMemory(dir string, log *slog.Logger) (memory, error) {
	var m memory
	path := filepath.Join(dir, MemoryFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return m, fault.New(fault.FileIO, "read where nodes were met", err, "give the agent the right to read it").At(path)
	}
	if err := schema.Check(data, memorySchema, path); err != nil {
		return memory{}, err
	}
	if err := json.Unmarshal(data, &m); err != nil {
		// A convenience, no record: it comes again with the nodes.
		log.Warn("where nodes were met cannot be read and is begun anew", "file", path, "error", err)
		return memory{}, nil
	}
	return m, nil
}

func (t *table) remember(m memory) {
	for node, addrs := range m.Nodes {
		if id, err := identity.ParseID(string(node)); err != nil || id != node {
			continue
		}
		for a, at := range addrs {
			t.met(node, a, at)
		}
	}
}

func (f *Finder) save() error {
	f.mu.Lock()
	if !f.unsaved {
		f.mu.Unlock()
		return nil
	}
	f.unsaved = false
	m := memory{Schema: memorySchema, Nodes: map[identity.NodeID]map[netip.AddrPort]time.Time{}}
	for id, found := range f.table.nodes {
		if len(found.metAt) == 0 {
			continue
		}
		m.Nodes[id] = map[netip.AddrPort]time.Time{}
		for a, at := range found.metAt {
			m.Nodes[id][a] = at
		}
	}
	f.mu.Unlock()
	path := filepath.Join(f.o.Dir, MemoryFile)
	data, err := json.Marshal(m)
	if err == nil {
		err = renameio.WriteFile(path, data, 0o600)
	}
	if err != nil {
		f.mu.Lock()
		f.unsaved = true
		f.mu.Unlock()
		return fault.New(fault.FileIO, "keep where nodes were met", err, "make room, or give the agent the right to write there").At(path)
	}
	return nil
}
