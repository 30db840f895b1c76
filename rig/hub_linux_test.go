package rig

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tbcluster/rig/guest"
	"tbcluster/rig/image"
	"tbcluster/rig/usb4"
)

// machines are guests on a fabric that a test has made itself.
type machines map[string]*guest.Guest

// machinesOn boots a guest for each host of a fabric, with thunderbolt,
// thunderbolt_net and the raw ring module loaded.
func machinesOn(t *testing.T, hosts ...*usb4.Host) machines {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bootPatience)
	defer cancel()
	store, err := image.Open(image.Options{Log: func(line string) { t.Log(line) }})
	if err != nil {
		t.Fatal(err)
	}
	tools, err := store.Tools(ctx)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := store.Boot(ctx, image.Backport)
	if err != nil {
		t.Fatal(err)
	}
	modules, err := store.Modules(ctx, image.Backport)
	if err != nil {
		t.Fatal(err)
	}
	serve, stop := context.WithCancel(context.Background())
	t.Cleanup(stop)
	dir := t.TempDir()
	var mu sync.Mutex
	var all sync.WaitGroup
	m := machines{}
	for _, h := range hosts {
		socket := filepath.Join(dir, h.Name()+".sock")
		done, err := h.Start(serve, socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			stop()
			<-done
		})
		all.Go(func() {
			g, err := guest.Start(ctx, guest.Options{Name: h.Name(), Tools: tools, Boot: boot, VFIOUser: []string{socket}})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			m[h.Name()] = g
			mu.Unlock()
			err = g.PushFile(ctx, filepath.Join(modules, "tbring.ko"), "/tmp/tbring.ko")
			if err == nil {
				_, err = g.Sh(ctx, "modprobe thunderbolt; modprobe thunderbolt_net; insmod /tmp/tbring.ko; for d in /sys/bus/pci/drivers/thunderbolt/0000:*/power/control; do echo on >$d; done")
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	t.Cleanup(func() {
		for name, g := range m {
			if err := g.Verify(context.Background()); err != nil {
				t.Errorf("host %s: %v", name, err)
			}
			if t.Failed() {
				var b strings.Builder
				for _, r := range g.Dmesg() {
					if s := fmt.Sprint(r); strings.Contains(s, "thunderbolt") || strings.Contains(s, "tbring") {
						b.WriteString(s + "\n")
					}
				}
				t.Logf("host %s:\n%s", name, &b)
			}
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return m
}

func (m machines) sh(t *testing.T, name, script string) string {
	t.Helper()
	out, err := m[name].Sh(t.Context(), script)
	if err != nil {
		t.Fatalf("host %s: %s: %v\n%s", name, script, err, out)
	}
	return strings.TrimSpace(out)
}

// await waits until a script says what is wanted.
func (m machines) await(t *testing.T, name, script, want string) {
	t.Helper()
	got := ""
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if got = m.sh(t, name, script); got == want {
			return
		}
	}
	t.Fatalf("host %s: %s says %q, not %q", name, script, got, want)
}

// names prints what is on the Thunderbolt bus of a host, without services.
const names = `cd /sys/bus/thunderbolt/devices; for d in 0-*[0-9a-f]; do case $d in *.*|*:*|0-0) ;; *) [ -e $d/device_name ] && echo $d $(cat $d/device_name) ;; esac; done; true`

// A hub of ours is a router that the driver takes, and finds hosts of other
// domains behind.
func TestHub(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("boots virtual machines")
	}
	f, err := usb4.New(usb4.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	hub, err := f.AddHub(usb4.HubOptions{Name: "hub", Lanes: 1})
	if err != nil {
		t.Fatal(err)
	}
	var hosts []*usb4.Host
	var cables []*usb4.Cable
	for i, name := range []string{"a", "b", "c"} {
		h, err := f.AddHost(usb4.HostOptions{Name: name, Lanes: 1})
		if err != nil {
			t.Fatal(err)
		}
		c, err := f.Connect(h.Port(0), hub.Port(i), usb4.CableOptions{})
		if err != nil {
			t.Fatal(err)
		}
		hosts, cables = append(hosts, h), append(cables, c)
	}
	m := machinesOn(t, hosts...)

	const all = "0-1 hub\n0-301 b\n0-501 c"
	m.await(t, "a", names, all)
	m.await(t, "b", names, "0-1 a")
	m.await(t, "c", names, "0-1 a")
	if out := m.sh(t, "a", "cd /sys/bus/thunderbolt/devices/0-1; cat vendor_name generation"); out != "tbcluster rig\n4" {
		t.Errorf("the hub says of itself %q", out)
	}

	// Networks through the hub.
	for i, peer := range []string{"b", "c"} {
		address := func(name, service string, end int) {
			m.await(t, name, "ls /sys/bus/thunderbolt/devices/"+service+"/net | wc -l", "1")
			m.sh(t, name, fmt.Sprintf("n=$(ls /sys/bus/thunderbolt/devices/%s/net); ip addr add 10.9.%d.%d/24 dev $n; ip link set $n up", service, i, end))
		}
		address("a", fmt.Sprintf("0-%d01.0", 3+2*i), 1)
		address(peer, "0-1.0", 2)
		m.await(t, "a", fmt.Sprintf("cat /sys/bus/thunderbolt/devices/0-%d01.0/net/*/carrier", 3+2*i), "1")
		if out := m.sh(t, "a", fmt.Sprintf("ping -c 3 -i 0.2 -W 10 -s 1400 10.9.%d.2", i)); !strings.Contains(out, " 0% packet loss") {
			t.Errorf("to %s: %s", peer, out)
		}
	}

	// Frames through the hub, every byte compared, and counted on each cable.
	before := f.Counters()
	const frames = 2000
	for i, peer := range []string{"b", "c"} {
		from, to := fmt.Sprintf("/sys/kernel/debug/tbring/0-%d01.1", 3+2*i), "/sys/kernel/debug/tbring/0-1.1"
		m.await(t, "a", "[ -d "+from+" ] && echo yes || true", "yes")
		m.await(t, peer, "[ -d "+to+" ] && echo yes || true", "yes")
		m.sh(t, "a", "echo 1 >"+from+"/verify")
		m.sh(t, peer, "echo 1 >"+to+"/verify")
		m.sh(t, "a", fmt.Sprintf("echo %d 4096 >%s/send", frames, from))
		m.await(t, peer, "grep -h -e rx_frames -e rx_bad -e rx_lost "+to+"/stats", fmt.Sprintf("rx_frames %d\nrx_bad 0\nrx_lost 0", frames))
	}
	after := f.Counters()
	up, b, c := after.Cables[0].AtoB.Sent-before.Cables[0].AtoB.Sent, after.Cables[1].BtoA.Delivered-before.Cables[1].BtoA.Delivered, after.Cables[2].BtoA.Delivered-before.Cables[2].BtoA.Delivered
	if up < 2*frames || b < frames || c < frames {
		t.Errorf("%d frames went to the hub, %d to b and %d to c", up, b, c)
	}

	// A cable behind the hub goes, and the hub.
	cables[1].Unplug()
	m.await(t, "a", names, "0-1 hub\n0-501 c")
	m.await(t, "b", names, "")
	cables[1].Plug()
	m.await(t, "a", names, all)
	m.await(t, "b", names, "0-1 a")
	cables[0].Unplug()
	m.await(t, "a", names, "")
	m.await(t, "c", names, "")
	cables[0].Plug()
	m.await(t, "a", names, all)
	m.await(t, "b", names, "0-1 a")
	m.await(t, "c", names, "0-1 a")
}
