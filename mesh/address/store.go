package address

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/google/renameio/v2"

	"tbcluster/api/fault"
)

// schema of the state file.
const schema = 1

// memory is the content of the state file.
type memory struct {
	Schema     int          `json:"schema"`
	Node       netip.Prefix `json:"node_address,omitzero"`
	Agreements []*agreement `json:"agreements"`
}

// errBroken is wrapped where the state file cannot be understood.
var errBroken = errors.New("the memory of addresses cannot be understood")

// parseMemory reads a state file and drops what cannot be: a hand may have
// been at it.
func parseMemory(data []byte) (memory, error) {
	var head struct {
		Schema int `json:"schema"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return memory{}, fmt.Errorf("%w: %v", errBroken, err)
	}
	if head.Schema > schema {
		return memory{}, fault.Newf(fault.StateTooNew, "run the newer tbcluster, or remove the file: addresses are then agreed anew", "the memory of addresses has schema %d, this version knows %d", head.Schema, schema)
	}
	var m memory
	if err := json.Unmarshal(data, &m); err != nil {
		return memory{}, fmt.Errorf("%w: %v", errBroken, err)
	}
	kept := m.Agreements[:0]
	for _, a := range m.Agreements {
		if a != nil && a.Peer != "" && a.Port != "" && a.PeerPort != "" && a.Prefix.IsValid() && a.Prefix.Addr().Is4() &&
			a.Prefix.Bits() == 30 && a.Prefix == a.Prefix.Masked() && a.MTU >= 0 {
			kept = append(kept, a)
		}
	}
	m.Agreements = kept
	return m, nil
}

// load reads the state file; a missing one is an empty memory, a broken one is
// set aside and reported.
func load(path string) (memory, error) {
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return memory{Schema: schema}, nil
	case err != nil:
		return memory{}, fault.New(fault.FileIO, "read the memory of addresses", err, "look at the file and its owner").At(path)
	}
	m, err := parseMemory(data)
	if f := fault.As(err); f != nil {
		return memory{}, f.At(path)
	}
	if err != nil {
		if moved := os.Rename(path, path+".broken"); moved != nil {
			return memory{}, fault.New(fault.FileIO, "set the broken memory of addresses aside", moved, "remove the file").At(path)
		}
		return memory{Schema: schema}, err
	}
	return m, nil
}

// save writes the state file so that it is whole after a power cut.
func save(path string, m memory) error {
	m.Schema = schema
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := renameio.WriteFile(path, append(data, '\n'), 0o600); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
