//go:build linux

package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// scrape is what a node says to Prometheus: samples by name and labels.
func (c *cluster) scrape(node string) map[string]float64 {
	c.t.Helper()
	const port = 7880 // nothing else runs on a node of a lab
	text := c.run(node, "bash", "-c", fmt.Sprintf(`exec 3<>/dev/tcp/127.0.0.1/%d; printf 'GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3; cat <&3`, port))
	head, body, ok := strings.Cut(text, "\r\n\r\n")
	if !ok || !strings.Contains(head, " 200 ") {
		c.t.Fatalf("%s answers %q", node, text)
	}
	out := map[string]float64{}
	for l := range strings.Lines(body) {
		if strings.HasPrefix(l, "#") {
			continue
		}
		i := strings.LastIndexByte(strings.TrimSpace(l), ' ')
		v, err := strconv.ParseFloat(strings.TrimSpace(l[i+1:]), 64)
		if i < 0 || err != nil {
			c.t.Fatalf("%s says %q: %v", node, l, err)
		}
		out[l[:i]] = v
	}
	return out
}

// labelled is one label of a sample.
var labelled = regexp.MustCompile(`([a-zA-Z_]+)="((?:[^"\\]|\\.)*)"`)

// metricsTell walks all labels after a copy of a file and the placement of a
// model: numbers are there, and names of people, files, models and instances
// are not.
func (c *cluster) metricsTell(t *testing.T, model string, size uint64) {
	c = c.in(t)
	var got map[string]float64
	want := map[string]float64{
		`tbcluster_nodes{state="up"}`:                             3,
		`tbcluster_links{state="proven"}`:                         3,
		`tbcluster_instances{engine="llamacpp",state="ready"}`:    1,
		`tbcluster_transfers_ended_total{state="done"}`:           2,
		`tbcluster_transfer_bytes_total`:                          float64(size),
		`tbcluster_link_proven{node_a="alpha",node_b="beta",port`: 1,
	}
	missing := func() (what string) {
		got = c.scrape("alpha")
		for k, v := range want {
			found := false
			for have, n := range got {
				found = found || strings.HasPrefix(have, k) && n == v
			}
			if !found {
				what += fmt.Sprintf("%s is not %v\n", k, v)
			}
		}
		return what
	}
	// What a node has just done reaches its own numbers with its next picture.
	what := missing()
	for end := time.Now().Add(patience); what != "" && time.Now().Before(end); what = missing() {
		time.Sleep(100 * time.Millisecond)
	}
	if what != "" {
		t.Errorf("after %s:\n%s", patience, what)
	}
	names := []string{"node", "node_a", "node_b", "port_a", "port_b", "state", "engine", "code", "severity", "direction", "os", "arch", "version", "quantile"}
	labels := 0
	for k := range got {
		for _, m := range labelled.FindAllStringSubmatch(k, -1) {
			labels++
			if !slices.Contains(names, m[1]) {
				t.Errorf("%s has a label %s", k, m[1])
			}
			for _, private := range []string{model, "gguf", "models", "root", "/", "llama-server"} {
				if strings.Contains(strings.ToLower(m[2]), strings.ToLower(private)) {
					t.Errorf("%s tells %q", k, private)
				}
			}
			if m[2] == "one" {
				t.Errorf("%s tells the name of an instance", k)
			}
		}
	}
	if labels < 30 || len(got) > 1000 {
		t.Errorf("%d labels in %d series", labels, len(got))
	}
	// Nobody else is answered: it is on the loopback alone.
	lan := strings.TrimSpace(c.run("alpha", "sh", "-c", "ip -o -4 addr show dev eth0 | awk '{ sub(/\\/.*/, \"\", $4); print $4; exit }'"))
	if out, err := c.tryRun("beta", "bash", "-c", "exec 3<>/dev/tcp/"+lan+"/7880"); err == nil || !strings.Contains(out, "refused") {
		t.Errorf("over the LAN (%s): %v %s", lan, err, out)
	}
}
