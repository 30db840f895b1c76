package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/rig/guest"
	"tbcluster/rig/state"
)

// maxTrafficCables is how many cables have a network of their own in 10.76/16.
const maxTrafficCables = 1 << 14

// Address gives the interfaces at both ends of a cable an address each and waits
// until they have carrier; where the cable is unplugged or a host is off it fails at
// once. The addresses are of a network of the cable's own, a
// /30 in 10.76.0.0/16: .1 at its first end and .2 at its second.
func (c *Cable) Address(ctx context.Context) error {
	if c.link == nil {
		return fault.Newf(fault.Usage, "choose a cable that leads from one host to another", "there is no network over %s, which leads to a hub", c)
	}
	if err := c.joined(); err != nil {
		return err
	}
	var names [2]string
	for i, e := range c.ends() {
		n, err := e.host.waitInterface(ctx, e.device, "an interface", func(state.Interface) string { return "" })
		if err != nil {
			return err
		}
		names[i] = n.Name
	}
	if err := c.bringUp(ctx, names); err != nil {
		return err
	}
	for _, e := range c.ends() {
		if _, err := e.host.waitInterface(ctx, e.device, "the carrier of the interface", noCarrier); err != nil {
			return err
		}
	}
	return nil
}

// joined says why no byte can go over a cable that somebody has to plug in first, or
// whose hosts somebody has to switch on.
func (c *Cable) joined() error {
	for _, other := range c.link.cables {
		if !other.Plugged() {
			return fault.Newf(fault.LabFailed, "plug it in first", "nothing can be sent: the cable %s is unplugged", other)
		}
	}
	for _, e := range c.ends() {
		if err := e.host.powered(); err != nil {
			return err
		}
	}
	return nil
}

// TakeUp takes up the interfaces at both ends of a cable, without an address, where
// nobody has: it waits until they are there. On a host with System it leaves that
// to what runs there.
func (c *Cable) TakeUp(ctx context.Context) error {
	var scripts [2]string
	for i, e := range c.ends() {
		if e.host == nil || e.host.spec.System {
			continue
		}
		n, err := e.host.waitInterface(ctx, e.device, "an interface", func(state.Interface) string { return "" })
		if err != nil {
			return err
		}
		if !n.Up {
			scripts[i] = "ip link set " + n.Name + " up"
		}
	}
	return c.atOnce(ctx, scripts)
}

// bringUp sets the addresses of both interfaces and takes them up.
func (c *Cable) bringUp(ctx context.Context, names [2]string) error {
	var scripts [2]string
	for i, name := range names {
		scripts[i] = fmt.Sprintf("ip addr replace %s/30 dev %s; ip link set %s up", c.IP(i), name, name)
	}
	return c.atOnce(ctx, scripts)
}

// atOnce has both ends do something with their interfaces, or one. Both at once:
// thunderbolt_net logs in when its interface goes up, and tries again only seconds
// later where the other end was not ready.
//
// No packet passes between the hosts meanwhile. A login that comes while the
// interface is going up is a fault of Linux (seen in 7.3): the device counts as
// running before tbnet_open() has made its rings, tbnet_handle_packet() answers the
// login, and tbnet_connected_work() starts rings that are not there.
func (c *Cable) atOnce(ctx context.Context, scripts [2]string) error {
	defer c.Hold()()
	var errs [2]error
	var both sync.WaitGroup
	for i, e := range c.ends() {
		if scripts[i] != "" {
			both.Go(func() { _, errs[i] = e.host.Sh(ctx, scripts[i]) })
		}
	}
	both.Wait()
	return errors.Join(errs[:]...)
}

// IP is the address of one end, 0 or 1, once Address was called.
func (c *Cable) IP(end int) string {
	k := c.index % maxTrafficCables
	return fmt.Sprintf("10.76.%d.%d", k/64, k%64*4+1+end)
}

// Interface returns the name of the network interface at one end, 0 or 1, "" if
// there is none now.
func (c *Cable) Interface(end int) string {
	e := c.ends()[end]
	if e.host == nil {
		return ""
	}
	if n := e.host.State().Peer(e.device).Interface(); n != nil {
		return n.Name
	}
	return ""
}

// Traffic is what went over a cable.
type Traffic struct {
	Bytes int64 // each way
	Took  time.Duration
	// There and Back are the CRC-32C of what went each way; every byte was
	// compared besides.
	There, Back string
}

// Gbps is the throughput, of both ways one after the other.
func (t Traffic) Gbps() float64 { return float64(2*t.Bytes) * 8 / float64(t.Took) }

// Traffic sends pseudo-random bytes over the cable by TCP, from its first end to
// its second and as many back, bound to the interfaces of this cable, and
// compares every byte. It addresses the interfaces first.
func (c *Cable) Traffic(ctx context.Context, seed uint64, size int64) (Traffic, error) {
	if err := c.Address(ctx); err != nil {
		return Traffic{}, err
	}
	ends := c.ends()
	return Stream(ctx, StreamEnd{ends[0].host, c.Interface(0), c.IP(0)}, StreamEnd{ends[1].host, c.Interface(1), c.IP(1)}, seed, size)
}

// StreamEnd is where a stream begins or ends.
type StreamEnd struct {
	Host      *Host
	Interface string
	Address   string // that the interface has
}

// Stream sends pseudo-random bytes by TCP from one host to another and as many
// back, bound to an interface at both ends, and compares every byte.
func Stream(ctx context.Context, from, to StreamEnd, seed uint64, size int64) (Traffic, error) {
	what := fmt.Sprintf("send bytes from host %s to host %s over %s", from.Host.Name(), to.Host.Name(), to.Interface)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out, in := io.Pipe()
	receiver, err := to.Host.Start(ctx, guest.Command{Args: []string{probePath, "receive", to.Interface}, Stdout: in})
	if err != nil {
		return Traffic{}, err
	}
	received := make(chan error, 1)
	go func() {
		err := receiver.Wait()
		in.CloseWithError(errors.Join(err, io.EOF))
		received <- err
	}()
	decoder := json.NewDecoder(out)
	var at struct{ Port int }
	if err := decoder.Decode(&at); err != nil {
		return Traffic{}, fault.New(fault.LabFailed, what, err, "")
	}
	report := make(chan streamResult, 1)
	go func() {
		var r streamResult
		if decoder.Decode(&r) == nil {
			report <- r
		}
		close(report)
		// The receiver must not wait for somebody to read.
		_, _ = io.Copy(io.Discard, out)
	}()
	text, err := from.Host.Run(ctx, probePath, "send", from.Interface, to.Address+":"+strconv.Itoa(at.Port), strconv.FormatUint(seed, 10), strconv.FormatInt(size, 10))
	if err != nil {
		cancel()
		return Traffic{}, errors.Join(err, <-received)
	}
	var sent streamResult
	if err := json.NewDecoder(bytes.NewReader([]byte(text))).Decode(&sent); err != nil {
		return Traffic{}, fault.New(fault.LabFailed, what, err, "")
	}
	if err := <-received; err != nil {
		return Traffic{}, err
	}
	got := <-report
	if got.Bytes != size || sent.Bytes != size || got.Received != sent.Sent || sent.Received != got.Sent {
		return Traffic{}, fault.Newf(fault.Corrupt, "", "%s: one end says %+v, the other %+v", what, sent, got)
	}
	return Traffic{Bytes: size, Took: sent.Took, There: sent.Sent, Back: sent.Received}, nil
}

// streamResult is what the probe says at the end of a stream.
type streamResult struct {
	Bytes          int64
	Sent, Received string
	Took           time.Duration
}
