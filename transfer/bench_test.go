package transfer

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
)

// BenchmarkCopy copies one file between two worker processes over the loopback,
// with TLS, verification and fsync, from and to memory-backed files where there
// is /dev/shm.
func BenchmarkCopy(b *testing.B) {
	const size = 1 << 30
	dir := b.TempDir()
	if d, err := os.MkdirTemp("/dev/shm", "transfer-bench-"); err == nil {
		dir = d
		b.Cleanup(func() { _ = os.RemoveAll(d) })
	}
	c := &cluster{t: b, root: dir, workers: map[string][]*exec.Cmd{}}
	c.paths = func(string, string) []Path { return []Path{tcpPath("cable-1", "127.0.0.2", "127.0.0.3")} }
	write(b, c.home("alpha", "x"), random(b, size))
	b.SetBytes(size)
	for i := 0; b.Loop(); i++ {
		c.mustCp(Options{}, "alpha:x", fmt.Sprintf("beta:x%d", i))
		b.StopTimer()
		if err := os.Remove(c.home("beta", fmt.Sprintf("x%d", i))); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
