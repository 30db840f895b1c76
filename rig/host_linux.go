package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/guest"
	"tbcluster/rig/image"
	"tbcluster/rig/state"
	"tbcluster/rig/usb4"
)

// Host is one virtual machine and its host router.
type Host struct {
	rig    *Rig
	spec   HostSpec
	index  int
	router *usb4.Host
	guest  *guest.Guest

	// With the lock of the rig:
	on     bool
	driver bool
	power  int    // how often it was switched on
	lost   string // how its QEMU ended, if nobody had it end
	watch  int    // number of the probe whose states count
	seen   bool
	state  state.State
	broken error // why the probe ended, if it should not have
	// stale are peers, by device name, that are on their way out since the rig
	// has done something to them.
	stale map[string]uint64
}

// probePath is where the probe lies in guests.
const probePath = "/usr/bin/rig-probe"

func (h *Host) socket() string { return filepath.Join(h.rig.dir, h.spec.Name+".sock") }

// start makes the guest and boots it the first time.
func (h *Host) start(ctx context.Context, i *images) error {
	o := guest.Options{
		Name: h.spec.Name, Tools: i.tools, Boot: i.boots[h.spec.Kernel], Agent: i.agents,
		Memory: h.spec.Memory, CPUs: h.spec.CPUs, IOMMU: h.spec.IOMMU, ClockOffset: h.spec.ClockOffset,
		VFIOUser: []string{h.socket()}, CommandLine: h.spec.CommandLine, Allow: h.spec.Allow,
		Files: append(append([]image.File{{Path: probePath, Mode: 0o755, Source: i.probe}}, h.rig.options.Files...), h.spec.Files...),
		Dir:   filepath.Join(h.rig.dir, h.spec.Name),
	}
	disks, err := h.disks(ctx, i)
	if err != nil {
		return err
	}
	o.Disks = disks
	if o.System = h.spec.System; o.System {
		// As in the initramfs, where nothing gives interfaces other names.
		o.CommandLine = append([]string{"net.ifnames=0"}, o.CommandLine...)
	}
	if h.rig.lan != nil {
		wire, err := h.rig.lan.plug()
		if err != nil {
			return err
		}
		o.NICs = []guest.NIC{{MAC: fmt.Sprintf("52:54:00:77:00:%02x", h.index+1), Wire: wire}}
	}
	g, err := guest.Start(ctx, o)
	if err != nil {
		return err
	}
	h.rig.change(func() { h.guest = g })
	return h.booted(ctx)
}

// disks makes the disks of the host.
func (h *Host) disks(ctx context.Context, i *images) (disks []string, err error) {
	add := func(kind, base string, size int64) error {
		disk := filepath.Join(h.rig.dir, h.spec.Name+kind+".qcow2")
		disks = append(disks, disk)
		return i.tools.CreateDisk(ctx, disk, base, size)
	}
	if h.spec.System {
		err = add("-system", i.system, 0)
	}
	if h.spec.Disk > 0 && err == nil {
		err = add("", "", int64(h.spec.Disk)<<20)
	}
	if h.spec.Data != "" && err == nil {
		raw := filepath.Join(h.rig.dir, h.spec.Name+"-data.raw")
		if err = i.tools.FileSystem(ctx, raw, DataLabel, h.spec.Data); err == nil {
			err = add("-data", raw, 0)
		}
	}
	return disks, err
}

// booted brings a host that has just booted to where it is used.
func (h *Host) booted(ctx context.Context) error {
	h.rig.change(func() {
		h.on, h.lost = true, ""
		h.power++
		go h.watchPower(h.power)
	})
	if err := h.observe(ctx); err != nil {
		return err
	}
	if h.rig.lan != nil && !h.spec.System {
		if _, err := h.Sh(ctx, fmt.Sprintf("ip link set eth0 up && ip addr add %s/24 dev eth0", h.LANAddress())); err != nil {
			return err
		}
	}
	if h.spec.Bare {
		return nil
	}
	return h.LoadDriver(ctx)
}

// watchPower notes that the host has gone off and nobody had it do so.
func (h *Host) watchPower(number int) {
	if err := h.guest.Wait(h.rig.ctx); err != nil {
		return // the rig is being taken down
	}
	ours := func() bool { return !h.on || h.power != number || h.rig.closed }
	h.rig.mu.Lock()
	known := ours()
	h.rig.mu.Unlock()
	if known {
		return
	}
	h.mark(nil)
	h.rig.change(func() {
		if known = ours(); !known {
			h.off()
			if h.lost = h.guest.Ended(); h.lost == "" {
				h.lost = "signal: killed" // through Guest
			}
		}
	})
	if !known {
		h.rig.options.Log(fmt.Sprintf("host %s's QEMU ended (%s)", h.Name(), h.Lost()))
	}
}

// Lost says how the host's QEMU has ended where nobody had it do so, "" otherwise
// and when the host is on again, or was Cut.
func (h *Host) Lost() string {
	h.rig.mu.Lock()
	defer h.rig.mu.Unlock()
	return h.lost
}

// powered returns an error where the host has no power: a Fault that names it as
// "node".
func (h *Host) powered() error {
	h.rig.mu.Lock()
	defer h.rig.mu.Unlock()
	if h.on {
		return nil
	}
	why := ""
	if h.lost != "" {
		why = ": its QEMU ended (" + h.lost + ")"
	}
	return fault.Newf(fault.NodeDown, "boot it first", "host %s is off%s", h.spec.Name, why).With("node", h.spec.Name)
}

// observe starts the probe and waits for its first word.
func (h *Host) observe(ctx context.Context) error {
	out, in := io.Pipe()
	p, err := h.guest.Start(h.rig.ctx, guest.Command{Args: []string{probePath, "watch"}, Stdout: in})
	if err != nil {
		return err
	}
	var number int
	h.rig.change(func() {
		h.watch++
		number, h.seen, h.broken = h.watch, false, nil
	})
	go func() {
		err := p.Wait()
		if err == nil {
			err = io.EOF
		}
		in.CloseWithError(err)
	}()
	go func() {
		decoder := json.NewDecoder(out)
		for {
			var s state.State
			err := decoder.Decode(&s)
			out := err != nil
			h.rig.change(func() {
				switch {
				case number != h.watch:
					out = true
				case err == nil:
					h.state, h.seen = s, true
				default:
					h.state, h.seen, h.broken = state.State{}, false, err
				}
			})
			if out {
				break
			}
		}
		// Nobody reads any more; the probe must not wait for that.
		_, _ = io.Copy(io.Discard, out)
	}()
	return h.rig.Await(ctx, "see what host "+h.Name()+" shows", func() string {
		h.rig.mu.Lock()
		defer h.rig.mu.Unlock()
		switch {
		case h.seen:
			return ""
		case h.broken != nil:
			return "the probe has ended: " + h.broken.Error()
		}
		return "the probe has said nothing yet"
	})
}

// Name returns the name.
func (h *Host) Name() string { return h.spec.Name }

// Spec returns what the host is made of.
func (h *Host) Spec() HostSpec { return h.spec }

// Guest returns the virtual machine: for what Host has no method for.
func (h *Host) Guest() *guest.Guest { return h.guest }

// Router returns the host router.
func (h *Host) Router() *usb4.Host { return h.router }

// On reports whether the host has power.
func (h *Host) On() bool {
	h.rig.mu.Lock()
	defer h.rig.mu.Unlock()
	return h.on
}

// LANAddress returns the address of the host on the LAN, if the rig has one.
func (h *Host) LANAddress() string { return fmt.Sprintf("192.168.77.%d", h.index+1) }

// Console returns the file with the console of the guest.
func (h *Host) Console() string { return filepath.Join(h.rig.dir, h.spec.Name, "console.log") }

// Run runs a program and returns its standard output. A program that does not
// end with 0 is a *guest.ExitError.
func (h *Host) Run(ctx context.Context, args ...string) (string, error) {
	if err := h.powered(); err != nil {
		return "", err
	}
	return h.guest.Run(ctx, args...)
}

// Sh runs a shell script, which ends at the first command that fails.
func (h *Host) Sh(ctx context.Context, script string) (string, error) {
	if err := h.powered(); err != nil {
		return "", err
	}
	return h.guest.Sh(ctx, script)
}

// Start starts a program.
func (h *Host) Start(ctx context.Context, c guest.Command) (*guest.Process, error) {
	if err := h.powered(); err != nil {
		return nil, err
	}
	return h.guest.Start(ctx, c)
}

// CopyIn copies a file of the machine into the host, CopyOut one out of it.
func (h *Host) CopyIn(ctx context.Context, from, to string) error {
	if err := h.powered(); err != nil {
		return err
	}
	return h.guest.PushFile(ctx, from, to)
}

// CopyOut copies a file of the host to the machine.
func (h *Host) CopyOut(ctx context.Context, from, to string) error {
	if err := h.powered(); err != nil {
		return err
	}
	return h.guest.PullFile(ctx, from, to)
}

// Dmesg returns the kernel's log of this boot.
func (h *Host) Dmesg() string {
	var b strings.Builder
	for _, r := range h.guest.Dmesg() {
		fmt.Fprintln(&b, r)
	}
	return b.String()
}

// State returns what the host's kernel shows of Thunderbolt; that of a host that
// is off is empty.
func (h *Host) State() state.State {
	h.rig.mu.Lock()
	defer h.rig.mu.Unlock()
	return h.state
}

// Counters returns the counters of the host router.
func (h *Host) Counters() usb4.HostCounters { return h.rig.fabric.Counters().Hosts[h.index] }

// Device returns the name of what is behind a port: "0-1" for port 0.
func (h *Host) Device(port int) string {
	return fmt.Sprintf("0-%x", h.router.Port(port).Adapter())
}

// Cable returns the cable in a port; it panics if there is none.
func (h *Host) Cable(port int) *Cable { return h.rig.Cable(fmt.Sprintf("%s.%d", h.Name(), port)) }

// Plug, Unplug and Flap are those of the cable in a port.
func (h *Host) Plug(port int) { h.Cable(port).Plug() }

// Unplug pulls the cable in a port.
func (h *Host) Unplug(port int) { h.Cable(port).Unplug() }

// awake sees that the driver has found its router and keeps that awake: without
// a PCIe root port above it the driver would not hear of a plug once it has
// suspended the router. The debug kernel has no power management.
const awake = `for d in /sys/bus/pci/drivers/thunderbolt/0000:*; do
	[ -d "$d" ] || { echo 'the thunderbolt driver has found no router' >&2; exit 1; }
	[ ! -e "$d/power/control" ] || echo on >"$d/power/control"
done`

// LoadDriver loads the thunderbolt driver and thunderbolt_net.
func (h *Host) LoadDriver(ctx context.Context) error {
	if err := h.powered(); err != nil {
		return err
	}
	load := "modprobe thunderbolt\nmodprobe thunderbolt_net\n"
	if len(h.spec.Driver) > 0 {
		load = ""
		for _, file := range h.spec.Driver {
			name := "/tmp/" + filepath.Base(file)
			if err := h.CopyIn(ctx, file, name); err != nil {
				return err
			}
			load += "insmod " + name + "\n"
		}
	}
	h.mark(nil)
	_, err := h.Sh(ctx, load+awake)
	if err == nil {
		h.rig.change(func() { h.driver = true })
	}
	return err
}

// UnloadDriver unloads what LoadDriver has loaded.
//
// Between the two of Debian's modules it waits until the peers show no service
// of this host any more. A peer that is told of a change of services asks for
// them, and a request that comes while the driver goes is a fault of Linux (seen
// in 7.3): tb_xdp_schedule_request() has it handled on the system's
// workqueue, which tb_domain_remove() does not flush, and nhi_pci_do_remove()
// does not wait for the end of the domain where icm_probe() has completed
// domain_released before; nhi_shutdown() then warns of ring 0, which is in use.
// For another one, see silently.
func (h *Host) UnloadDriver(ctx context.Context) error {
	if err := h.powered(); err != nil {
		return err
	}
	h.mark(nil)
	if len(h.spec.Driver) > 0 {
		h.rig.change(func() { h.driver = false })
		var names []string
		for _, file := range h.spec.Driver {
			name, _, _ := strings.Cut(filepath.Base(file), ".")
			names = append([]string{name}, names...)
		}
		_, err := h.Sh(ctx, "rmmod "+strings.Join(names, " "))
		return err
	}
	var cables []*Cable
	for _, l := range h.rig.links {
		if l.joins(h) {
			cables = append(cables, l.cables...)
		}
	}
	err := h.rig.silently(ctx, cables, func() error {
		_, err := h.Sh(ctx, "rmmod thunderbolt_net")
		return err
	})
	if err != nil {
		return err
	}
	if err := h.unseen(ctx); err != nil {
		return err
	}
	h.rig.change(func() { h.driver = false })
	_, err = h.Sh(ctx, "rmmod thunderbolt")
	return err
}

// noticed is how long peers may take to notice a change of services.
const noticed = 10 * time.Second

// unseen waits until no peer shows a network service of this host, or a while.
func (h *Host) unseen(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, noticed)
	defer cancel()
	err := h.rig.Await(ctx, "wait until nobody shows a service of host "+h.Name(), func() string {
		h.rig.mu.Lock()
		defer h.rig.mu.Unlock()
		for _, l := range h.rig.links {
			ends := l.ends
			for i, e := range ends {
				if e.host == h && e.host.state.Peer(e.device) != nil && ends[1-i].host.state.Peer(ends[1-i].device).Interface() != nil {
					return "host " + ends[1-i].host.Name() + " does"
				}
			}
		}
		return ""
	})
	if fault.Is(err, fault.Timeout) && ctx.Err() != nil {
		return nil // one that hangs, or whose driver goes too
	}
	return err
}

// ReloadDriver unloads the driver and loads it again. The host that comes back
// resets its router, so that its peers lose it and find it anew.
func (h *Host) ReloadDriver(ctx context.Context) error {
	if err := h.UnloadDriver(ctx); err != nil {
		return err
	}
	return h.LoadDriver(ctx)
}

// mark notes that the peers at both ends of a cable and of what is behind it, or
// of all plugged cables of the host, are no longer those that will be there.
func (h *Host) mark(only *Cable) {
	if only != nil {
		only.trained()
	}
	for _, l := range h.rig.links {
		if only == nil && !l.joins(h) || only != nil && !slices.Contains(l.cables, only) {
			continue
		}
		for _, end := range l.ends {
			h.rig.mu.Lock()
			if p := end.host.state.Peer(end.device); p != nil {
				end.host.stale[p.Device] = p.Inode
			}
			h.rig.mu.Unlock()
		}
		l.last().trained()
	}
}

// off notes that the host has lost its power. The rig's lock is held.
func (h *Host) off() {
	h.on, h.driver, h.seen, h.state, h.broken, h.lost = false, false, false, state.State{}, nil, ""
	h.watch++ // what the old probe still says counts no more
	clear(h.stale)
}

// Cut cuts the power: whatever is in memory is lost.
func (h *Host) Cut() error {
	h.mark(nil)
	h.rig.change(h.off)
	return h.guest.Kill()
}

// PowerOff shuts the host down in good order.
func (h *Host) PowerOff(ctx context.Context) error {
	if err := h.powered(); err != nil {
		return err
	}
	h.mark(nil)
	h.rig.change(h.off)
	return h.guest.PowerOff(ctx)
}

// Boot switches a host on that is off, and loads its driver.
func (h *Host) Boot(ctx context.Context) error {
	if h.On() {
		return fault.Newf(fault.LabFailed, "", "host %s is on", h.Name())
	}
	if err := h.guest.PowerOn(ctx); err != nil {
		return err
	}
	return h.booted(ctx)
}

// Reboot restarts the host in good order; its power stays on.
func (h *Host) Reboot(ctx context.Context) error {
	if err := h.powered(); err != nil {
		return err
	}
	h.mark(nil)
	h.rig.change(h.off)
	if err := h.guest.Reboot(ctx); err != nil {
		return err
	}
	return h.booted(ctx)
}

// WaitXDomain waits until the host shows a peer behind a port, of that name, and
// returns it. "" is any name.
func (h *Host) WaitXDomain(ctx context.Context, port int, name string) (state.Peer, error) {
	var found state.Peer
	err := h.rig.Await(ctx, fmt.Sprintf("wait for host %q behind port %d of host %s", name, port, h.Name()), func() string {
		p := h.State().Peer(h.Device(port))
		switch {
		case p == nil:
			return "there is none"
		case name != "" && p.Name != name:
			return "there is " + p.Name
		}
		found = *p
		return ""
	})
	return found, err
}

// WaitInterface waits until the host has a network interface towards the peer
// behind a port, and returns it.
func (h *Host) WaitInterface(ctx context.Context, port int) (state.Interface, error) {
	return h.waitInterface(ctx, h.Device(port), "an interface", func(state.Interface) string { return "" })
}

// WaitCarrier waits until the interface towards the peer behind a port is up at
// both ends. It takes up none: Cable.TakeUp does, and Cable.Address.
func (h *Host) WaitCarrier(ctx context.Context, port int) (state.Interface, error) {
	return h.waitInterface(ctx, h.Device(port), "the carrier of the interface", noCarrier)
}

func noCarrier(n state.Interface) string {
	switch {
	case n.Carrier:
		return ""
	case !n.Up:
		return n.Name + " has no carrier: it is down, nobody has taken it up"
	}
	return n.Name + " has no carrier: it is up, and the other end is not"
}

func (h *Host) waitInterface(ctx context.Context, device, what string, missing func(state.Interface) string) (state.Interface, error) {
	var found state.Interface
	err := h.rig.Await(ctx, fmt.Sprintf("wait for %s of %s on host %s", what, device, h.Name()), func() string {
		n := h.State().Peer(device).Interface()
		if n == nil {
			return "there is no interface"
		}
		found = *n
		return missing(found)
	})
	return found, err
}
