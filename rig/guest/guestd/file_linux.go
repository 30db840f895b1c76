package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"tbcluster/rig/guest/wire"
)

// receiveFile writes a file aside and renames it, so that it is there whole or
// not at all.
func receiveFile(s *wire.Stream, r wire.Request) (result wire.Result, err error) {
	dir := filepath.Dir(r.Path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return result, err
	}
	f, err := os.CreateTemp(dir, ".rig-")
	if err != nil {
		return result, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, h), s.Reader(wire.Input))
	if err != nil {
		return result, err
	}
	if err := f.Chmod(os.FileMode(r.Mode).Perm()); err != nil {
		return result, err
	}
	if r.Sync {
		if err := f.Sync(); err != nil {
			return result, err
		}
	}
	if err := os.Rename(f.Name(), r.Path); err != nil {
		return result, err
	}
	if r.Sync {
		d, err := os.Open(dir)
		if err != nil {
			return result, err
		}
		if err := errors.Join(d.Sync(), d.Close()); err != nil {
			return result, err
		}
	}
	return wire.Result{Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}, f.Close()
}

func sendFile(s *wire.Stream, r wire.Request) (wire.Result, error) {
	f, err := os.Open(r.Path)
	if err != nil {
		return wire.Result{}, err
	}
	defer f.Close()
	h := sha256.New()
	out := s.Writer(wire.Output)
	n, err := io.Copy(out, io.TeeReader(f, h))
	if err != nil {
		return wire.Result{}, err
	}
	return wire.Result{Size: n, SHA256: hex.EncodeToString(h.Sum(nil))}, out.Close()
}

// sendLog sends the records of the kernel's log as /dev/kmsg gives them
// (Documentation/ABI/testing/dev-kmsg), from the first, until the stream ends.
func sendLog(s *wire.Stream) error {
	f, err := os.Open("/dev/kmsg")
	if err != nil {
		return err
	}
	go func() {
		<-s.Done()
		f.Close() // ends the read below
	}()
	out := s.Writer(wire.Output)
	record := make([]byte, 16<<10)
	for {
		n, err := f.Read(record)
		if errors.Is(err, unix.EPIPE) {
			continue // overtaken; the numbers of the records show the gap
		}
		if err != nil {
			return err
		}
		if _, err := out.Write(record[:n]); err != nil {
			return err
		}
	}
}
