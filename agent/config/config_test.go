package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"tbcluster/api/fault"
)

func TestNoFileIsTheDefaults(t *testing.T) {
	c, err := Load(filepath.Join(t.TempDir(), "none.toml"))
	if err != nil || !reflect.DeepEqual(c, Default()) {
		t.Fatalf("%+v, %v", c, err)
	}
}

func TestErrorsNameFileLineAndKey(t *testing.T) {
	for _, c := range []struct{ text, line, why string }{
		{"name = \"a\"\n\nmodel-dirs = []\n", "line 3", `there is no key "model-dirs"; did you mean "model_dirs"?`},
		{"peers = [\"x:0\"]", "line 1", "peers"},
		{"peers = [\"::::\", \"a b\"]", "line 1", `"::::" is no host`},
		{"peers = [\"fd00::1\", \"[fd00::1]\", \"[fd00::1]:7871\", \"192.0.2.1\", \"beta.example:7871\", \"a b\"]", "line 1", `"a b" is no host`},
		{"forward = 1", "line 1", "forward: expected true or false"},
		{"mtu = \"x\"", "line 1", "mtu: expected a number"},
		{"name = 1", "line 1", "name: expected text in quotes"},
		{"peers = \"x\"", "line 1", "peers: expected a list of text"},
		{"memory_bytes = 99999999999999999999", "line 1", "memory_bytes"},
		{"\ncontrol_port = \"x\"", "line 2", "control_port"},
		{"control_port = 70000", "line 1", "70000 is no port number"},
		{"name = \"Ada\"", "line 1", "name"},
		{"name = ", "line 1", ""},
		{"address_block = \"10.77.1.0/16\"", "line 1", "10.77.0.0/16 is meant?"},
		{"address_block = \"10.0.0.0/30\"", "line 1", "no IPv4 block"},
		{"address_block = \"127.0.0.0/8\"", "line 1", "the loopback"},
		{"address_block = \"0.0.0.0/8\"", "line 1", "this network"},
		{"address_block = \"169.254.0.0/16\"", "line 1", "addresses that machines give themselves"},
		{"address_block = \"224.0.0.0/8\"", "line 1", "multicast"},
		{"mtu = 0\naddress_spares = [\"10.213.0.0/16\", \"239.1.0.0/16\"]", "line 2", "multicast"},
		{"address_block = \"255.0.0.0/8\"", "line 1", "no use yet"},
		{"gateway_listen = [\"192.0.2.1:80\"]", "line 1", "gateway_keys must be set"},
		{"gateway_keys = [\"short\"]", "line 1", "less than 20"},
		{"metrics_listen = [\"192.0.2.1:80\"]", "line 1", "metrics_keys must be set, or metrics_open = true"},
		{"metrics_listen = [\"x\"]\nmetrics_open = true", "line 1", "no address with a port"},
		{"metrics_keys = [\"short\"]", "line 1", "less than 20"},
		{"metrics_keys = [\"0123456789012345678901\"]\nmetrics_open = true", "line 2", "say one of them"},
		{"metrics_port = -1", "line 1", "no port number"},
		{"metrics_open = \"yes\"", "line 1", "metrics_open"},
		{"mtu = 100", "line 1", "1280"},
		{"model_dirs = [\"x\"]", "line 1", "absolute"},
		{"memory_bytes = -1", "line 1", "negative"},
	} {
		_, err := Parse("/etc/x.toml", []byte(c.text))
		f := fault.As(err)
		if f == nil || f.Reason != fault.ConfigInvalid {
			t.Errorf("%q: %v is no configuration fault", c.text, err)
			continue
		}
		if !strings.Contains(f.Where, "/etc/x.toml") || !strings.Contains(f.Where, c.line) || !strings.Contains(f.Why, c.why) || f.Fix == "" {
			t.Errorf("%q: where %q why %q fix %q", c.text, f.Where, f.Why, f.Fix)
		}
	}
}

func TestEveryKeyIsDocumentedAndShown(t *testing.T) {
	typ := reflect.TypeOf(Config{})
	if typ.NumField() != len(Keys) {
		t.Errorf("%d fields, %d documented keys", typ.NumField(), len(Keys))
	}
	for i := range typ.NumField() {
		name := typ.Field(i).Tag.Get("toml")
		if Keys[i].Name != name || Keys[i].Meaning == "" {
			t.Errorf("key %d is %q, documented %q", i, name, Keys[i].Name)
		}
		if got := Default().Value(name); got != Keys[i].Default {
			t.Errorf("%s: default %s, documented %s", name, got, Keys[i].Default)
		}
	}
}

func TestWhatIsShownCanBeReadAgain(t *testing.T) {
	var b strings.Builder
	for _, k := range Keys {
		b.WriteString(k.Name + " = " + Default().Value(k.Name) + "\n")
	}
	p := filepath.Join(t.TempDir(), "c.toml")
	if err := os.WriteFile(p, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := Load(p)
	if err != nil || len(c.Changed()) != 0 {
		t.Fatalf("%+v changed %v: %v", c, c.Changed(), err)
	}
}

func TestKeysAreNeverShown(t *testing.T) {
	c := Default()
	c.GatewayKeys = []string{"0123456789012345678901"}
	c.MetricsKeys = c.GatewayKeys
	for _, k := range []string{"gateway_keys", "metrics_keys"} {
		if v := c.Value(k); strings.Contains(v, "0123") || !strings.Contains(v, "hidden") {
			t.Errorf("%s is shown as %s", k, v)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("name = \"a\"\npeers = [\"h:1\"]"))
	f.Add([]byte("a.b = 1"))
	f.Add([]byte("address_block = \"::/0\""))
	f.Fuzz(func(t *testing.T, in []byte) {
		c, err := Parse("f", in)
		if err != nil {
			if fault.As(err) == nil {
				t.Fatalf("no fault: %v", err)
			}
			return
		}
		if k, why := c.check(); k != "" {
			t.Fatalf("accepted %s: %s", k, why)
		}
	})
}
