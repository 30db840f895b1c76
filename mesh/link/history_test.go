package link

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	peerv1 "tbcluster/api/tbcluster/peer/v1"
	tbclusterv1 "tbcluster/api/tbcluster/v1"
)

var day = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

func openHistory(t *testing.T, path string) *History {
	t.Helper()
	h, err := OpenHistory(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestWhatHappenedToACableOutlivesARestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.json")
	h := openHistory(t, path)
	h.down("0-1", "beta", "pulled", day)
	h.back("0-1", "beta", day.Add(time.Minute))
	h.back("0-1", "beta", day.Add(time.Hour)) // it was back
	h.down("0-1", "beta", "silent", day.Add(2*time.Hour))
	m := Measurement{AToB: 3e9, BToA: 2e9, RTT: 80 * time.Microsecond, At: day, Duration: 2 * time.Second, NegotiatedGbps: 40}
	h.measured("0-1", "beta", "0-3", m, day)
	if err := h.Save(); err != nil {
		t.Fatal(err)
	}
	h = openHistory(t, path)
	flaps, got := h.of("0-1", "beta", "0-3", 40)
	want := []Flap{{day, day.Add(time.Minute), "pulled"}, {day.Add(2 * time.Hour), time.Time{}, "silent"}}
	if fmt.Sprint(flaps) != fmt.Sprint(want) || got == nil || *got != m {
		t.Errorf("got %v, %v", flaps, got)
	}
	// It is down in another way, and was not back in between.
	h.down("0-1", "beta", "pulled", day.Add(150*time.Minute))
	if flaps, _ = h.of("0-1", "beta", "", 0); fmt.Sprint(flaps) != fmt.Sprint(want) {
		t.Errorf("of one outage: %v", flaps)
	}
	// An agent that begins while it is down sees it come back.
	h.back("0-1", "beta", day.Add(3*time.Hour))
	if flaps, _ = h.of("0-1", "beta", "", 0); !flaps[1].Back.Equal(day.Add(3 * time.Hour)) {
		t.Errorf("it did not come back: %v", flaps)
	}
	for what, of := range map[string]func() ([]Flap, *Measurement){
		"another port there": func() ([]Flap, *Measurement) { return h.of("0-1", "beta", "0-1", 40) },
		"another rate":       func() ([]Flap, *Measurement) { return h.of("0-1", "beta", "0-3", 20) },
		"another node":       func() ([]Flap, *Measurement) { return h.of("0-1", "gamma", "0-3", 40) },
		"another port here":  func() ([]Flap, *Measurement) { return h.of("0-3", "beta", "0-3", 40) },
	} {
		if _, got := of(); got != nil {
			t.Errorf("a cable with %s has the measurement %v", what, got)
		}
	}
	h.forget("beta")
	if err := h.Save(); err != nil {
		t.Fatal(err)
	}
	if flaps, m := openHistory(t, path).of("0-1", "beta", "", 0); flaps != nil || m != nil {
		t.Errorf("a node that was forgotten is remembered: %v, %v", flaps, m)
	}
}

func TestTheHistoryIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.json")
	h := openHistory(t, path)
	long := strings.Repeat("é", 10000)
	for i := range 1000 {
		port, at := fmt.Sprintf("0-%x", i%2+1), day.Add(time.Duration(i)*time.Second)
		h.down(port, "beta", long, at)
		h.back(port, "beta", at.Add(time.Millisecond))
	}
	if flaps, _ := h.of("0-1", "beta", "", 0); len(flaps) != maxFlaps || !flaps[maxFlaps-1].Down.Equal(day.Add(998*time.Second)) || len(flaps[0].Reason) > maxFlapReason {
		t.Errorf("%d flaps, the last at %v", len(flaps), flaps[len(flaps)-1].Down)
	}
	// A machine with one port, into which a new node is plugged every day.
	for i := range 2 * maxHistories {
		h.down("0-5", fmt.Sprint("n", i), "x", day.Add(time.Duration(i)*time.Hour))
	}
	if len(h.list) != maxHistories {
		t.Errorf("%d ends", len(h.list))
	}
	if flaps, _ := h.of("0-5", fmt.Sprint("n", 2*maxHistories-1), "", 0); len(flaps) != 1 {
		t.Error("the newest is not remembered")
	}
	if err := h.Save(); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Size() > maxHistoryFile/4 || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
}

func TestAHistoryThatCannotBeReadIsBegunAnewAndANewerOneIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.json")
	for _, broken := range []string{"", "{", `{"schema":1,"ends":[{"port":1}]}`, "\x00", `{"schema":1,"ends":7}`} {
		if err := os.WriteFile(path, []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		h := openHistory(t, path)
		h.down("0-1", "beta", "x", day)
		if err := h.Save(); err != nil {
			t.Errorf("%q: %v", broken, err)
		}
		if flaps, _ := openHistory(t, path).of("0-1", "beta", "", 0); len(flaps) != 1 {
			t.Errorf("%q: not begun anew", broken)
		}
	}
	// What it holds may be of a shape that nobody here knows.
	newer := []byte(`{"schema":2,"ends":{"a":[]}}`)
	if err := os.WriteFile(path, newer, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenHistory(path, nil); !fault.Is(err, fault.StateTooNew) || fault.As(err).Where != path {
		t.Errorf("a newer one: %v", err)
	}
	if data, err := os.ReadFile(path); err != nil || !bytes.Equal(data, newer) {
		t.Errorf("the newer file was changed: %s, %v", data, err)
	}
	if err := os.Truncate(path, maxHistoryFile+1); err != nil {
		t.Fatal(err)
	}
	if h := openHistory(t, path); len(h.list) != 0 {
		t.Error("a file that is too large was read")
	}
}

func TestAHistoryThatCannotBeWrittenIsTriedAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "gone")
	path := filepath.Join(dir, "history.json")
	h := openHistory(t, path)
	h.down("0-1", "beta", "x", day)
	if err := h.Save(); !fault.Is(err, fault.FileIO) {
		t.Errorf("a directory that is not there: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := h.Save(); err != nil {
		t.Fatal(err)
	}
	if flaps, _ := openHistory(t, path).of("0-1", "beta", "", 0); len(flaps) != 1 {
		t.Error("what could not be written at first is lost")
	}
}

func FuzzHistory(f *testing.F) {
	f.Add([]byte(`{"schema":1,"ends":[{"port":"0-1","peer":"beta","flaps":[{"down":"2026-05-04T12:00:00Z","reason":"x"}],"measured":{"a_to_b":1,"at":"2026-05-04T12:00:00Z"},"used":"2026-05-04T12:00:00Z"}]}`))
	f.Add([]byte(`{"schema":9}`))
	f.Add([]byte(`null`))
	f.Add([]byte(`{"schema":1,"ends":[{},{"port":"a","peer":"b"},{"port":"a","peer":"b"},{"port":"a","peer":"c","measured":{"negotiated_gbps":-1}}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := parseHistory(data)
		if err != nil && list != nil || len(list) > maxHistories {
			t.Fatalf("%d ends and %v", len(list), err)
		}
		h := &History{path: filepath.Join(t.TempDir(), "h"), list: list}
		for _, r := range list {
			if len(r.Flaps) > maxFlaps || r.Port == "" || r.Peer == "" {
				t.Fatalf("an impossible end: %+v", r)
			}
			// What was read can be lived with.
			h.down(r.Port, r.Peer, "x", day)
			h.back(r.Port, r.Peer, day)
			if _, m := h.of(r.Port, r.Peer, "", 0); m != nil {
				_ = m.Proto()
			}
		}
	})
}

func TestBothEndsTellOfOneFlapOnce(t *testing.T) {
	at := func(s int) *timestamppb.Timestamp { return timestamppb.New(day.Add(time.Duration(s) * time.Second)) }
	reports := map[string][]*peerv1.LinkReport{
		"a": {{Port: "0-1", LocalUuid: uuidA, RemoteUuid: uuidB, Present: true, FlapHistory: []*tbclusterv1.LinkFlap{
			{DownAt: at(0), BackAt: at(5), Reason: "pulled"},
			{DownAt: at(100), Reason: "pulled"},
			{DownAt: at(500), BackAt: at(501), Reason: "only alpha saw it"},
		}}},
		"b": {{Port: "0-2", LocalUuid: uuidB, RemoteUuid: uuidA, Present: true, FlapHistory: []*tbclusterv1.LinkFlap{
			{DownAt: at(-50), BackAt: at(-40), Reason: "only beta saw it"},
			{DownAt: at(2), BackAt: at(7), Reason: "pulled"},
			{DownAt: at(99), BackAt: at(120), Reason: "pulled"},
		}}},
	}
	nodes := []NodeInfo{{ID: "a", Name: "alpha", Up: true}, {ID: "b", Name: "beta", Up: true}}
	l := Assemble("a", nodes, reports)
	if len(l) != 1 {
		t.Fatalf("%d links", len(l))
	}
	var got []string
	for _, f := range l[0].FlapHistory {
		back := "never"
		if f.BackAt != nil {
			back = fmt.Sprint(f.BackAt.AsTime().Sub(day))
		}
		got = append(got, fmt.Sprintf("%v %s %s", f.DownAt.AsTime().Sub(day), back, strings.Join(f.SeenBy, "+")))
	}
	want := []string{"-50s -40s beta", "0s 7s alpha+beta", "1m39s never alpha+beta", "8m20s 8m21s alpha"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	// A pure function: what was handed in is as it was.
	if len(reports["a"][0].FlapHistory[0].SeenBy) != 0 || !reports["a"][0].FlapHistory[0].BackAt.AsTime().Equal(day.Add(5*time.Second)) {
		t.Error("the reports were changed")
	}
}

func TestTheNewerMeasurementCounts(t *testing.T) {
	m := func(rate uint64, s int) *tbclusterv1.LinkMeasurement {
		return &tbclusterv1.LinkMeasurement{AToBBytesPerSecond: rate, BToABytesPerSecond: rate + 1, MeasuredAt: timestamppb.New(day.Add(time.Duration(s) * time.Second))}
	}
	for _, x := range []struct {
		a, b *tbclusterv1.LinkMeasurement
		want uint64
	}{{nil, nil, 0}, {m(7, 0), nil, 7}, {nil, m(8, 0), 8}, {m(7, 5), m(8, 4), 7}, {m(7, 4), m(8, 5), 8}} {
		l := Assemble("a", []NodeInfo{{ID: "a", Up: true}, {ID: "b", Up: true}}, map[string][]*peerv1.LinkReport{
			"a": {{Port: "0-1", LocalUuid: uuidA, RemoteUuid: uuidB, Present: true, Measurement: x.a}},
			"b": {{Port: "0-2", LocalUuid: uuidB, RemoteUuid: uuidA, Present: true, Measurement: x.b}},
		})[0]
		if l.MeasuredBytesPerSecond != x.want || (l.Measurement == nil) != (x.want == 0) {
			t.Errorf("of %v and %v: %v", x.a, x.b, l.Measurement)
		}
	}
}

func TestWhatNobodyCanHaveMeasuredIsRefused(t *testing.T) {
	for what, p := range map[string]*tbclusterv1.LinkMeasurement{
		"nothing":             nil,
		"no time":             {AToBBytesPerSecond: 1, Duration: durationpb.New(time.Second)},
		"a time that is none": {MeasuredAt: &timestamppb.Timestamp{Seconds: 1 << 62}, Duration: durationpb.New(time.Second)},
		"a petabyte a second": {AToBBytesPerSecond: 2e15, MeasuredAt: timestamppb.New(day), Duration: durationpb.New(time.Second)},
		"a negative rate":     {NegotiatedGbps: -1, MeasuredAt: timestamppb.New(day), Duration: durationpb.New(time.Second)},
	} {
		if m, err := MeasurementOf(p); err == nil {
			t.Errorf("%s: got %+v", what, m)
		}
	}
}
