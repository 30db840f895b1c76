package rank

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// maxSmall bounds the JSON files that are read: far above what we write.
const maxSmall = 4 << 20

// ReadStatus reads status.json in dir as it was written. A file that is not
// there yet is an os.ErrNotExist.
func ReadStatus(dir string) (Status, error) {
	data, err := readSmall(filepath.Join(dir, StatusFile))
	if err != nil {
		return Status{}, err
	}
	return decodeStatus(data)
}

func decodeStatus(data []byte) (Status, error) {
	var s Status
	if err := json.Unmarshal(data, &s); err != nil {
		return Status{}, fmt.Errorf("%s: %w", StatusFile, err)
	}
	switch s.Phase {
	case Starting, Running, Stopping, Ended:
	default:
		return Status{}, fmt.Errorf("%s: unknown phase %q", StatusFile, s.Phase)
	}
	return s, nil
}

// Observe is ReadStatus, with the truth about a shim that could not write any
// more: when it is gone and had not said so, the status is Ended with an Error
// and the last lines of the log.
func Observe(dir string) (Status, error) {
	s, err := ReadStatus(dir)
	if err != nil || s.Phase == Ended || s.Shim.Alive() {
		return s, err
	}
	// It may have ended properly between the two looks.
	if s, err = ReadStatus(dir); err != nil || s.Phase == Ended {
		return s, err
	}
	why := "its shim was killed"
	if s.Shim.earlierBoot() {
		why = "its node was restarted"
	}
	s.Phase, s.ExitCode, s.Signal = Ended, -1, 0
	s.Error = why + " before it could tell how the engine ended"
	s.LastLines = nil
	var lines []Line
	if lines, err = LastOf(dir, LastLines); err == nil {
		for _, l := range lines {
			s.LastLines = append(s.LastLines, l.Text)
		}
	}
	return s, nil
}

// openRegular opens a file for reading that somebody else may have put there:
// no link is followed, and nothing that is no file can hold us up.
func openRegular(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s: not a regular file", name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func readSmall(name string) ([]byte, error) {
	f, err := openRegular(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSmall+1))
	if err == nil && len(data) > maxSmall {
		err = fmt.Errorf("%s: longer than %d bytes", name, maxSmall)
	}
	return data, err
}

// writeJSON replaces a file: readable for the group, on disk before it has its
// name.
func writeJSON(name string, v any) (err error) {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.Write(append(data, '\n'))
	err = errors.Join(err, f.Chmod(0o640), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
