package member

import (
	"context"
	"io"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	peerv1 "tbcluster/api/tbcluster/peer/v1"
)

// script is a peer that says what it was given and listens to nothing.
type script struct{ messages []*peerv1.SyncMessage }

func (s *script) Send(*peerv1.SyncMessage) error { return nil }

func (s *script) Recv() (*peerv1.SyncMessage, error) {
	if len(s.messages) == 0 {
		return nil, io.EOF
	}
	m := s.messages[0]
	s.messages = s.messages[1:]
	return m, nil
}

// FuzzSync has a member say anything after a good hello, and instead of one.
func FuzzSync(f *testing.F) {
	a, b := newNode(f, "a"), newNode(f, "b")
	pairUp(f, a, b)
	m, err := New(Options{Self: a.id(), Store: a.store, Dir: a.dir})
	if err != nil {
		f.Fatal(err)
	}
	m.ctx = context.Background()
	for _, msg := range []*peerv1.SyncMessage{
		hello(5), {}, update(&peerv1.SyncSection{Name: TrustSection, Version: 1, Data: []byte("[null]")}),
		{Message: &peerv1.SyncMessage_Heartbeat{Heartbeat: &peerv1.SyncHeartbeat{Sequence: 1, Echo: 1}}},
		{Message: &peerv1.SyncMessage_Goodbye{Goodbye: &peerv1.SyncGoodbye{Reason: "x"}}},
	} {
		data, err := proto.Marshal(msg)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	incarnation := uint64(time.Now().Unix())
	f.Fuzz(func(t *testing.T, data []byte) {
		var msg peerv1.SyncMessage
		if proto.Unmarshal(data, &msg) != nil {
			return
		}
		members := len(a.store.Members())
		for _, messages := range [][]*peerv1.SyncMessage{{&msg}, {hello(incarnation), &msg}} {
			p := newPeer(a.id(), b.id(), time.Now())
			if _, err := m.runStream(context.Background(), p, &script{messages}, "", nil); err == nil {
				t.Fatal("a stream that ended for no reason")
			}
			if len(p.sections) > MaxSections || len(p.version) > 64 || p.connected || p.stream != nil {
				t.Fatalf("left behind: %d sections, %+v", len(p.sections), p.life)
			}
		}
		if len(a.store.Members()) != members {
			t.Fatal("unsigned records changed the members")
		}
	})
}
