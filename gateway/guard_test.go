package gateway

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
)

// A handler that is not the gateway's is guarded by the gateway's own rules.
func TestGuard(t *testing.T) {
	const key = "a-key-of-more-than-twenty-characters"
	d := Guard{LocalNames: func() []string { return []string{"alpha"} }, Keys: []string{key}}
	said := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "numbers") })
	serve := func(h http.Handler) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- New(Options{}).Serve(ctx, l, h) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		return "http://" + l.Addr().String()
	}
	loopback, keyed, keyless := serve(d.Loopback(said)), serve(d.Keyed(said)), serve(d.Keyless(said))
	for _, c := range []struct {
		name, at, host, header, value string
		want                          int
	}{
		{"on this machine", loopback, "", "", "", 200},
		{"by this machine's name", loopback, "alpha:7880", "", "", 200},
		{"by a name that a page made resolve to here", loopback, "evil.example", "", "", 403},
		{"of a page of elsewhere", loopback, "", "Origin", "http://evil.example", 403},
		{"of a page of elsewhere, as browsers say it now", loopback, "", "Sec-Fetch-Site", "cross-site", 403},
		{"with the key", keyed, "", "Authorization", "Bearer " + key, 200},
		{"without a key", keyed, "", "", "", 401},
		{"with another key", keyed, "", "Authorization", "Bearer " + key + "x", 401},
		{"open to all", keyless, "anything.example", "", "", 200},
		{"open to all but pages of elsewhere", keyless, "", "Origin", "http://evil.example", 403},
	} {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.at, nil)
		if err != nil {
			t.Fatal(err)
		}
		q.Host = c.host
		if c.header != "" {
			q.Header.Set(c.header, c.value)
		}
		r, err := http.DefaultClient.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		if err := r.Body.Close(); err != nil {
			t.Error(err)
		}
		if err != nil || r.StatusCode != c.want || (string(body) == "numbers") != (c.want == 200) {
			t.Errorf("%s: %d %q, %v, want %d", c.name, r.StatusCode, body, err, c.want)
		}
	}
}
