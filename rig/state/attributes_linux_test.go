package state

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

var somePeer = Attributes{
	"domain0": "/", "domain0/security": "= user", "domain0/power": "/",
	"domain0/0-0": "/", "domain0/0-0/unique_id": "= adf18f24-3a61-04e6-ffff-ffffffffffff", "domain0/0-0/nvm_authenticate": "!",
	"domain0/0-0/0-1": "/", "domain0/0-0/0-1/device_name": "= b", "domain0/0-0/0-1/uevent": "= DEVTYPE=thunderbolt_xdomain\nX=1",
	"domain0/0-0/0-1/0-1.0": "/", "domain0/0-0/0-1/0-1.0/key": "= network", "domain0/0-0/0-1/0-1.0/driver": "-> ../../../../../../../bus/thunderbolt/drivers/thunderbolt-net",
	"domain0/0-0/0-1/0-1.0/net": "/", "domain0/0-0/0-1/0-1.0/net/thunderbolt0": "/", "domain0/0-0/0-1/0-1.0/net/thunderbolt0/mtu": "= 1500",
}

func TestAttributesAreWrittenAndReadAgain(t *testing.T) {
	var b bytes.Buffer
	b.WriteString("# of a guest\n\n")
	if err := somePeer.Write(&b); err != nil {
		t.Fatal(err)
	}
	got, err := ParseAttributes(&b)
	if err != nil || !reflect.DeepEqual(got, somePeer) {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"", "#\n", "a b\n", `a "x` + "\n", `a "= 1"` + "\n" + `a "= 2"` + "\n", ` "= 1"` + "\n", `../x "= 1"` + "\n", `/x "= 1"` + "\n"} {
		if got, err := ParseAttributes(strings.NewReader(bad)); err == nil {
			t.Errorf("%q is read as %v", bad, got)
		}
	}
}

func TestMadeSysfsShowsTheAttributes(t *testing.T) {
	dir := t.TempDir()
	if err := somePeer.Make(dir); err != nil {
		t.Fatal(err)
	}
	// In there as on a machine, where root reads everything but that.
	secret := filepath.Join(dir, "devices/pci0000:00/0000:00:05.0/domain0/0-0/nvm_authenticate")
	if err := os.Remove(secret); err != nil {
		t.Fatal(err)
	}
	got, err := ReadAttributes(dir)
	want := Attributes{}
	for k, v := range somePeer {
		if v != "!" {
			want[k] = v
		}
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v, %v\nwant %v", got, err, want)
	}
	s, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	if p := s.Peer("0-1"); p != nil {
		t.Errorf("a peer without a UUID is %+v", p)
	}
	if _, err := os.Stat(filepath.Join(dir, "class/net/thunderbolt0/mtu")); err != nil {
		t.Error(err)
	}
}

func TestShapes(t *testing.T) {
	for _, x := range []struct{ path, value, place, shape string }{
		{"domain1/1-0/1-3/rx_speed", "= 20.0 Gb/s", "domain/host/peer/rx_speed", "#.# Gb/s"},
		{"domain0/0-0/unique_id", "= adf18f24-3a61-04e6-ffff-ffffffffffff", "domain/host/unique_id", "UUID"},
		{"domain0/0-0/0-1/vendor", "= 0x8086", "domain/host/peer/vendor", "0x#"},
		{"domain0/0-0/0-1/0-1.0/prtcstns", "= 0x00000003", "domain/host/peer/service/prtcstns", "0x#8"},
		{"domain0/0-0/0-1/device_name", "= b", "domain/host/peer/device_name", "a name"},
		{"domain0/0-0/0-1/device_name", "= b\nc", "domain/host/peer/device_name", "several lines"},
		{"domain0/0-0/usb4_port3/link", "= usb4", "domain/host/usb4_port/link", "usb#"},
		{"domain0/0-0/0-1/0-1.0/net/thunderbolt0", "/", "domain/host/peer/service/net/interface", "/"},
		{"domain0/0-0/0-1/key", "= ", "domain/host/peer/key", "empty"},
	} {
		if got := Place(x.path); got != x.place {
			t.Errorf("%s is %s, want %s", x.path, got, x.place)
		}
		if got := Shape(x.path, x.value); got != x.shape {
			t.Errorf("%s: %q is %q, want %q", x.path, x.value, got, x.shape)
		}
	}
	got := Attributes{"domain0/0-0/0-1/x": "= 1", "domain0/0-0/0-3/x": "= 22", "domain0/0-0/0-5/x": "= y"}.Shapes()
	if want := map[string][]string{"domain/host/peer/x": {"#", "y"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
}

func FuzzParseAttributes(f *testing.F) {
	var b bytes.Buffer
	if err := somePeer.Write(&b); err != nil {
		f.Fatal(err)
	}
	f.Add(b.String())
	f.Add("# x\na \"= \\x00\"\n")
	f.Fuzz(func(t *testing.T, text string) {
		a, err := ParseAttributes(strings.NewReader(text))
		if err != nil {
			return
		}
		for path, v := range a {
			Place(path)
			Shape(path, v)
		}
	})
}
