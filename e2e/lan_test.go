//go:build linux

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
)

// TestCopyOverTheLAN: without a cable a copy goes over the LAN and says by which
// interface; it leaves a cable that is cut and goes back to it once it is mended.
func TestCopyOverTheLAN(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Options{Nodes: 2})
	ctx := context.Background()
	cables := func(n int) func(*v1.ClusterState) bool {
		return func(s *v1.ClusterState) bool { return allUp(s) == nil && links(s, proven) == n }
	}
	cut := func() { c.must(c.lab.Cut(ctx, "alpha", "beta", lab.CutOptions{})) }
	mend := func() { c.must(c.lab.Mend(ctx, "alpha", "beta", lab.MendOptions{})) }
	c.until("alpha", "the cable", cables(1))
	c.run("alpha", "sh", "-c", "head -c 64M /dev/urandom > big")

	cut()
	c.until("alpha", "no cable", cables(0))
	out := c.run("alpha", "tbcluster", "cp", "/etc/hostname", "beta:text")
	c.says(out, "over LAN eth0 (tcp)")
	lines := strings.Split(strings.TrimSpace(c.run("alpha", "tbcluster", "cp", "-o", "json", "/etc/hostname", "beta:json")), "\n")
	var last struct {
		Transfer struct {
			Links []struct {
				LinkID    string `json:"link_id"`
				Interface string `json:"interface"`
				Kind      string `json:"kind"`
			} `json:"links"`
		} `json:"transfer"`
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil {
		t.Fatal(err)
	}
	if l := last.Transfer.Links; len(l) != 1 || l[0].LinkID != "" || l[0].Interface != "eth0" || l[0].Kind != "lan" {
		t.Errorf("the ways in JSON are %+v", l)
	}
	c.says(c.run("alpha", "tbcluster", "cp", "/etc/hostname", "here"), "over loopback (one node)")
	mend()
	c.until("alpha", "the cable", cables(1))

	done := make(chan string, 1)
	go func() {
		out, err := c.tryRun("alpha", "tbcluster", "cp", "--bwlimit", "2M", "big", "beta:big")
		done <- fmt.Sprint(out, err)
	}()
	ways := func(what string, fits func(cable, lan *v1.LinkProgress) bool) *v1.Transfer {
		var found *v1.Transfer
		c.until("beta", what, func(s *v1.ClusterState) bool {
			for _, m := range s.Transfers {
				if m.State != v1.TransferState_TRANSFER_STATE_COPYING {
					continue
				}
				cable, lan := &v1.LinkProgress{}, &v1.LinkProgress{}
				for _, l := range m.Links {
					if l.Kind == "lan" {
						lan = l
					} else {
						cable = l
					}
				}
				if fits(cable, lan) {
					found = m
				}
			}
			return found != nil
		})
		return found
	}
	var before uint64
	ways("bytes over the cable", func(cable, _ *v1.LinkProgress) bool { return cable.Bytes > 0 })
	cut()
	ways("bytes over the LAN", func(cable, lan *v1.LinkProgress) bool {
		before = cable.Bytes
		return lan.BytesPerSecond > 0 && lan.Interface == "eth0"
	})
	mend()
	m := ways("bytes over the cable alone, again", func(cable, lan *v1.LinkProgress) bool {
		return cable.Bytes > before && cable.BytesPerSecond > 0 && lan.Bytes > 0 && lan.BytesPerSecond == 0
	})
	if _, err := v1.NewTransferServiceClient(c.api("alpha")).Cancel(ctx, &v1.CancelTransferRequest{Id: m.Id}); err != nil {
		t.Error(err)
	}
	t.Logf("the copy: %s", <-done)
}
