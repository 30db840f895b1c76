package rig

import (
	"bytes"
	"debug/elf"
	"errors"
	"io/fs"
	"strings"

	"tbcluster/api/fault"
)

// driverRelease returns the release of the kernel that a module was built for, of
// its vermagic.
func driverRelease(file string) (string, error) {
	const what = "load a driver into the hosts"
	f, err := elf.Open(file)
	if err != nil {
		var path *fs.PathError
		if errors.As(err, &path) {
			return "", fault.New(fault.FileMissing, what, err, "name the .ko of each").At(file)
		}
		return "", &fault.Fault{Reason: fault.Usage, What: "cannot " + what, Where: file, Why: "it is no kernel module", Fix: "name the .ko itself, not compressed"}
	}
	defer f.Close()
	if s := f.Section(".modinfo"); s != nil {
		b, err := s.Data()
		if err != nil {
			return "", fault.New(fault.FileIO, what, err, "").At(file)
		}
		for entry := range bytes.SplitSeq(b, []byte{0}) {
			if v, ok := bytes.CutPrefix(entry, []byte("vermagic=")); ok {
				release, _, _ := strings.Cut(string(v), " ")
				return release, nil
			}
		}
	}
	return "", &fault.Fault{Reason: fault.Usage, What: "cannot " + what, Where: file, Why: "it is no kernel module that says which kernel it is for", Fix: "name the .ko of each"}
}

// checkDrivers looks at the drivers of all hosts before anything is built or
// booted.
func (t Topology) checkDrivers() error {
	for _, h := range t.Hosts {
		for _, file := range h.Driver {
			if _, err := driverRelease(file); err != nil {
				return err
			}
		}
	}
	return nil
}

// fits checks that the drivers of a host are for its kernel.
func (h HostSpec) fits(release string) error {
	for _, file := range h.Driver {
		got, err := driverRelease(file)
		if err != nil {
			return err
		}
		if got != release {
			return fault.Newf(fault.Usage, "build it for that one: `tbcluster-rig module` does; or boot another kernel", "a driver for %s is not for the kernel of host %s, %s", got, h.Name, release).At(file)
		}
	}
	return nil
}
