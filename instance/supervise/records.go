package supervise

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"tbcluster/host"

	"tbcluster/api/fault"
	"tbcluster/host/schema"
)

// person is a host.Asker as it is kept: without its socket.
type person struct {
	UID  uint32 `json:"uid"`
	Name string `json:"name"`
	Node string `json:"node,omitempty"`
}

func personOf(a host.Asker) person { return person{a.UID, a.Name, a.Node} }

func (p person) asker() host.Asker { return host.Asker{UID: p.UID, Name: p.Name, Node: p.Node} }

const maxRecord = 16 << 20

// instanceID is the form of IDs that a file or directory may be named by.
var instanceID = regexp.MustCompile(`^[a-z0-9]{6,32}$`)

// store keeps one JSON file for each instance, for this user only: they hold
// secrets.
type store struct{ dir string }

// recordSchema is the number of what a record means.
const recordSchema = 1

func newStore(dir string) (store, error) {
	return store{dir}, os.MkdirAll(dir, 0o700)
}

func (s store) name(id string) string { return filepath.Join(s.dir, id+".json") }

// save is on disk when it returns.
func (s store) save(id string, v any) (err error) {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	// Every record is an object.
	data = append(fmt.Appendf(nil, `{"schema":%d,`, recordSchema), data[1:]...)
	f, err := os.CreateTemp(s.dir, ".new-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), s.name(id)); err != nil {
		return err
	}
	return syncDir(s.dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (s store) remove(id string) error {
	err := os.Remove(s.name(id))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// load hands every record to each; one that cannot be read is an error that
// names it, after the others. Where one is of a newer version none is handed out,
// and the error is a fault that says so (STATE_TOO_NEW).
func (s store) load(each func(id string, data []byte) error) error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	var errs []error
	var ids []string
	var whole []func() error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".new-") { // a save that was cut off
			errs = append(errs, os.Remove(filepath.Join(s.dir, e.Name())))
			continue
		}
		id, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !instanceID.MatchString(id) {
			continue
		}
		data, err := readRecord(s.name(id))
		if err == nil {
			err = schema.Check(data, recordSchema, s.name(id))
		}
		if fault.Is(err, fault.StateTooNew) {
			return err
		}
		if err == nil {
			whole = append(whole, func() error { return each(id, data) })
			ids = append(ids, id)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("record of instance %s: %w", id, err))
		}
	}
	for i, hand := range whole {
		if err := hand(); err != nil {
			errs = append(errs, fmt.Errorf("record of instance %s: %w", ids[i], err))
		}
	}
	return errors.Join(errs...)
}

func readRecord(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	if err == nil && len(data) > maxRecord {
		err = fmt.Errorf("longer than %d bytes", maxRecord)
	}
	return data, err
}
