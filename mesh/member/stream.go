package member

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	"tbcluster/host/beat"
	"tbcluster/mesh/identity"
)

// maxFeatures bounds what a peer says that it can do.
const maxFeatures = 64

const (
	// helloWithin bounds the wait for the first message.
	helloWithin = 3 * time.Second
	// updateSize is how many bytes of sections share a message.
	updateSize = 1 << 20
	// measureEvery heartbeats one measures the round trip: its echo comes at once.
	// The side that did not dial echoes every one, and sends none of its own as
	// long as it does: so one waking of each process does for both directions.
	measureEvery = 5
	// Promises of other intervals than these are not believed.
	shortestBeat, longestBeat = 10 * time.Millisecond, 30 * time.Second
)

// How streams end that are no errors of the network.
var (
	errCrossed  = errors.New("a stream the other way was first")
	errReplaced = errors.New("a newer stream took its place")
	errGoodbye  = errors.New("goodbye")
	errWayGone  = errors.New("the interface that it went over is gone")
	errStale    = errors.New("it speaks as an earlier incarnation than the one heard last")
)

// wire is either side of a Sync stream.
type wire interface {
	Send(*peerv1.SyncMessage) error
	Recv() (*peerv1.SyncMessage, error)
}

// stream is one Sync stream from hello to its end.
type stream struct {
	wire   wire
	via    string
	dialed bool     // by this node
	from   *attempt // that it came of, where this node dialled
	since  time.Time
	// attached is set once it was the stream of its peer; guarded by Manager.mu.
	attached bool
	// incarnation is the one that the peer speaks as; set when attached.
	incarnation uint64
	ctx         context.Context
	cancel      context.CancelCauseFunc

	wake chan struct{}
	// sent has the versions that the peer has; the sender's alone after hello.
	sent map[string]uint64

	mu       sync.Mutex
	echo     uint64 // to be sent back at once; 0 for none
	farewell string // to be said
	asked    uint64 // sequence whose echo is waited for
	askedAt  time.Time
}

// end ends the stream; the first cause counts.
func (s *stream) end(cause error) { s.cancel(cause) }

// poke has the sender look for something to send.
func (s *stream) poke() { signal(s.wake) }

func (s *stream) sayGoodbye(reason string) {
	s.mu.Lock()
	s.farewell = reason
	s.mu.Unlock()
	s.poke()
}

// HandleSync serves PeerService.Sync.
func (m *Manager) HandleSync(server peerv1.PeerService_SyncServer) error {
	id, via, ok := m.o.Peer(server.Context())
	if !ok {
		return status.Error(codes.Unauthenticated, "no paired node")
	}
	m.mu.Lock()
	p, running := m.peers[id], m.ctx != nil && m.ctx.Err() == nil
	m.mu.Unlock()
	if p == nil {
		// Let in a moment ago, perhaps.
		m.syncPeers()
		m.mu.Lock()
		p = m.peers[id]
		m.mu.Unlock()
	}
	if p == nil {
		return fault.Newf(fault.NotPaired, "", "node %s is not in the cluster", id.Short())
	}
	if !running {
		return status.Error(codes.Unavailable, "the agent is starting or stopping")
	}
	_, err := m.runStream(server.Context(), p, server, via, nil)
	switch {
	case err == nil, errors.Is(err, errGoodbye), errors.Is(err, errReplaced):
		return nil
	case errors.Is(err, errCrossed):
		return status.Error(codes.AlreadyExists, err.Error())
	}
	return status.Error(codes.Aborted, err.Error())
}

// runStream runs a stream to its end and says how that came, and whether it had
// been the stream of p. The dialling side says hello first; the other one
// answers when it takes the stream, so that both take the same ones.
func (m *Manager) runStream(ctx context.Context, p *peer, w wire, via string, from *attempt) (attached bool, err error) {
	s := &stream{wire: w, via: via, dialed: from != nil, from: from, since: time.Now(), wake: make(chan struct{}, 1)}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	defer s.cancel(nil)
	defer context.AfterFunc(p.ctx, func() { s.end(errors.New("it is in the cluster no more")) })()
	late := time.AfterFunc(helloWithin, func() { s.end(errors.New("it said no hello in time")) })
	defer late.Stop()
	go func() { s.end(m.receive(p, s, late)) }()
	<-s.ctx.Done()
	err = context.Cause(s.ctx)
	return m.detach(p, s, err), err
}

// sayHello sends the first message.
func (m *Manager) sayHello(p *peer, w wire) error {
	m.mu.Lock()
	have := map[string]uint64{}
	for name, s := range p.sections {
		if s.Version > 0 {
			have[name] = s.Version
		}
	}
	hello := &peerv1.SyncHello{
		Incarnation: m.incarnation, Have: have, HaveIncarnation: p.incarnation,
		Version: m.o.Version, Features: m.o.Features, HeartbeatMs: uint32(m.heartbeat().Milliseconds()),
	}
	m.mu.Unlock()
	return w.Send(&peerv1.SyncMessage{Message: &peerv1.SyncMessage_Hello{Hello: hello}})
}

// receive takes what the peer says until it ends, and returns how it ended.
func (m *Manager) receive(p *peer, s *stream, late *time.Timer) error {
	if s.dialed {
		if err := m.sayHello(p, s.wire); err != nil {
			return streamError(err)
		}
	}
	first, err := s.wire.Recv()
	if err != nil {
		return streamError(err)
	}
	late.Stop()
	hello := first.GetHello()
	if hello == nil {
		return errors.New("its first message is no hello")
	}
	err = m.attach(p, s, hello)
	if !s.dialed && (err == nil || errors.Is(err, errStale)) {
		// To a peer that lost count, hello says how far that was.
		if err := m.sayHello(p, s.wire); err != nil {
			return streamError(err)
		}
	}
	if err != nil {
		return err
	}
	go func() {
		if err := m.send(p, s); err != nil {
			s.end(err)
		}
	}()
	for {
		msg, err := s.wire.Recv()
		if err != nil {
			return streamError(err)
		}
		if err := m.take(p, s, msg); err != nil {
			return err
		}
	}
}

// attach makes s the stream of p, unless another one is better.
func (m *Manager) attach(p *peer, s *stream, hello *peerv1.SyncHello) error {
	if err := m.o.Store.Seen(p.id); err != nil {
		m.o.Log.Error("cannot note that a node was met", "node", p.id, "error", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if have := hello.GetHaveIncarnation(); have > m.incarnation {
		go m.raise(have)
		return fmt.Errorf("it remembers a later incarnation of this node (%d)", have)
	}
	switch inc := hello.GetIncarnation(); {
	case s.ctx.Err() != nil:
		return context.Cause(s.ctx)
	case p.gone:
		return errors.New("it is in the cluster no more")
	case inc == 0 || inc >= maxIncarnation:
		return fmt.Errorf("it has no incarnation (%d)", inc)
	case inc < p.incarnation:
		return errStale
	case inc > p.incarnation:
		// Another process: what the last one said is true no more. What is kept
		// for its description stays until it is said anew.
		kept := map[string]Section{}
		for name, old := range p.sections {
			if m.keeps(name) {
				kept[name] = Section{Data: old.Data}
			}
		}
		m.setSections(p, kept)
		p.incarnation = inc
	case p.stream != nil && s.dialed != p.dials && p.stream.dialed == p.dials && now.Sub(p.stream.since) < settling:
		return errCrossed
	}
	if p.stream != nil {
		p.stream.end(errReplaced)
	}
	s.sent = map[string]uint64{}
	if hello.GetHaveIncarnation() == m.incarnation {
		for name, section := range m.own {
			if have := hello.GetHave()[name]; have <= section.Version {
				s.sent[name] = have
			}
		}
	}
	s.attached, s.incarnation = true, p.incarnation
	p.stream, p.version, p.features = s, clip(hello.GetVersion(), 64), nil
	for _, f := range hello.GetFeatures()[:min(len(hello.GetFeatures()), maxFeatures)] {
		p.features = append(p.features, clip(f, maxName))
	}
	p.heartbeat = min(max(time.Duration(hello.GetHeartbeatMs())*time.Millisecond, shortestBeat), longestBeat)
	p.connected, p.met, p.lastHeard = true, true, now
	p.refused, p.farewell, p.failures, p.untrusting = "", "", 0, false
	if s.dialed {
		p.drop(s.from)
		p.abandon()
	}
	p.kicked = false
	signal(p.wake)
	m.touch()
	m.tell()
	return nil
}

func (m *Manager) keeps(name string) bool {
	for _, k := range m.o.Keep {
		if k == name {
			return true
		}
	}
	return false
}

// detach notes that a stream has ended, if it was the one of p.
func (m *Manager) detach(p *peer, s *stream, err error) (attached bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.stream != s {
		return s.attached
	}
	m.o.Log.Info("stream ended", "node", p.id, "via", s.via, "error", err)
	now := time.Now()
	p.stream, p.connected, p.broken = nil, false, now
	p.unplugged = errors.Is(err, errWayGone)
	p.rtt = 0
	// An attempt that began before may hang on what has just gone.
	p.abandon()
	p.nextDial = now
	if !p.dials {
		p.nextDial = now.Add(knockAfter)
	}
	if errors.Is(err, errGoodbye) {
		p.nextDial = now.Add(suspectPause)
	}
	signal(p.wake)
	m.tell()
	return true
}

// take acts on one message.
func (m *Manager) take(p *peer, s *stream, msg *peerv1.SyncMessage) error {
	var trust []byte
	m.mu.Lock()
	if bye := msg.GetGoodbye(); bye != nil && s.incarnation == p.incarnation {
		// It counts on whichever of two streams it comes.
		p.farewell = clip(bye.GetReason(), 200)
		if p.farewell == "" {
			p.farewell = "it said goodbye"
		}
		if p.stream != nil {
			p.stream.end(errGoodbye)
		}
		m.mu.Unlock()
		return errGoodbye
	}
	if p.stream != s {
		m.mu.Unlock()
		return errReplaced
	}
	now := time.Now()
	p.lastHeard = now
	if p.state != Up {
		signal(p.wake)
	}
	var err error
	switch msg := msg.GetMessage().(type) {
	case *peerv1.SyncMessage_Update:
		trust, err = m.takeUpdate(p, msg.Update)
	case *peerv1.SyncMessage_Heartbeat:
		m.takeHeartbeat(p, s, msg.Heartbeat, now)
	case *peerv1.SyncMessage_Hello:
		err = errors.New("it said hello twice")
	default:
		// Of a newer version: it lives, and that is all we understand.
	}
	m.mu.Unlock()
	if trust != nil {
		m.mergeTrust(p.id, trust)
	}
	return err
}

// takeUpdate keeps sections. The caller holds mu.
func (m *Manager) takeUpdate(p *peer, u *peerv1.SyncUpdate) (trust []byte, err error) {
	any := false
	for _, section := range u.GetSections() {
		changed, err := m.acceptSection(p, section.GetName(), Section{Version: section.GetVersion(), Data: section.GetData()})
		if err != nil {
			return nil, err
		}
		if changed && section.GetName() == TrustSection {
			trust = section.GetData()
		}
		any = any || changed
	}
	if any {
		m.tell()
	}
	return trust, nil
}

// mergeTrust takes the records of another node into the store.
func (m *Manager) mergeTrust(from identity.NodeID, data []byte) {
	// In a cluster of many all say the same, one after the other.
	m.mu.Lock()
	known := bytes.Equal(data, m.own[TrustSection].Data) || bytes.Equal(data, m.merged)
	m.mu.Unlock()
	if known {
		return
	}
	records, err := identity.ParseRecords(data)
	if err != nil {
		m.o.Log.Warn("records of trust that cannot be read", "node", from, "error", err)
		return
	}
	changed, rejected, err := m.o.Store.Merge(records)
	if rejected != nil {
		m.o.Log.Warn("records of trust that do not hold", "node", from, "error", rejected)
	}
	if err != nil {
		m.o.Log.Error("cannot keep records of trust", "node", from, "error", err)
	}
	if rejected == nil && err == nil {
		m.mu.Lock()
		m.merged = data
		m.mu.Unlock()
	}
	if len(changed) > 0 {
		m.o.Log.Info("learnt who is in the cluster", "node", from, "changed", changed)
	}
}

// takeHeartbeat measures. The caller holds mu.
func (m *Manager) takeHeartbeat(p *peer, s *stream, h *peerv1.SyncHeartbeat, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.GetEcho() != 0 && h.GetEcho() == s.asked {
		p.rtt = max(now.Sub(s.askedAt), time.Microsecond)
		s.asked = 0
	}
	if seq := h.GetSequence(); seq != 0 && (!s.dialed || seq%measureEvery == 1) {
		s.echo = seq
		s.poke()
	}
	if h.GetTime() != nil {
		p.skew = h.GetTime().AsTime().Sub(m.o.Clock.Now())
	}
}

// send sends what is new and the heartbeats until the stream ends.
func (m *Manager) send(p *peer, s *stream) error {
	var sequence uint64
	m.mu.Lock()
	every := m.heartbeat()
	m.mu.Unlock()
	timer := time.NewTimer(0) // the first at once, which measures
	defer timer.Stop()
	next := func() uint64 {
		sequence++
		if sequence%measureEvery == 1 {
			s.mu.Lock()
			s.asked, s.askedAt = sequence, time.Now()
			s.mu.Unlock()
		}
		return sequence
	}
	for {
		s.mu.Lock()
		echo, farewell := s.echo, s.farewell
		s.echo = 0
		s.mu.Unlock()
		if farewell != "" {
			// The peer ends the stream when it has heard it.
			return s.wire.Send(&peerv1.SyncMessage{Message: &peerv1.SyncMessage_Goodbye{Goodbye: &peerv1.SyncGoodbye{Reason: farewell}}})
		}
		if echo != 0 {
			own := uint64(0)
			if !s.dialed {
				own = next()
				timer.Reset(every + every/2)
			}
			if err := s.wire.Send(heartbeat(own, echo, m.o.Clock.Now())); err != nil {
				return streamError(err)
			}
		}
		for _, update := range m.news(p, s) {
			if err := s.wire.Send(&peerv1.SyncMessage{Message: &peerv1.SyncMessage_Update{Update: update}}); err != nil {
				return streamError(err)
			}
		}
		select {
		case <-s.wake:
		case <-timer.C:
			if err := s.wire.Send(heartbeat(next(), 0, m.o.Clock.Now())); err != nil {
				return streamError(err)
			}
			timer.Reset(beat.Until(every))
		case <-s.ctx.Done():
			return nil
		}
	}
}

func heartbeat(sequence, echo uint64, wall time.Time) *peerv1.SyncMessage {
	return &peerv1.SyncMessage{Message: &peerv1.SyncMessage_Heartbeat{Heartbeat: &peerv1.SyncHeartbeat{
		Sequence: sequence, Echo: echo, Time: timestamppb.New(wall),
	}}}
}

// news returns the sections that the peer has not, in messages of their size,
// and takes them for sent. Records of trust that it says itself need no telling:
// in a cluster of many most have them from somebody else already.
func (m *Manager) news(p *peer, s *stream) []*peerv1.SyncUpdate {
	m.mu.Lock()
	defer m.mu.Unlock()
	var updates []*peerv1.SyncUpdate
	size := 0
	for name, section := range m.own {
		if section.Version <= s.sent[name] {
			continue
		}
		s.sent[name] = section.Version
		if name == TrustSection && bytes.Equal(p.sections[name].Data, section.Data) {
			continue
		}
		if len(updates) == 0 || size+len(section.Data) > updateSize {
			updates, size = append(updates, &peerv1.SyncUpdate{}), 0
		}
		u := updates[len(updates)-1]
		u.Sections = append(u.Sections, &peerv1.SyncSection{Name: name, Version: section.Version, Data: section.Data})
		size += len(section.Data)
	}
	return updates
}

// streamError turns gRPC's words into ours.
func streamError(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return errors.New("it closed the stream")
	}
	if status.Code(err) == codes.AlreadyExists {
		return errCrossed
	}
	return err
}

// words says an error for people.
func words(err error) string {
	if f := fault.As(err); f != nil {
		return f.Why
	}
	if st, ok := status.FromError(err); ok {
		return clip(st.Message(), 200)
	}
	return err.Error()
}

// clip bounds what others say.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n]
}
