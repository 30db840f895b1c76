package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

func copying(done uint64) *tbv1.Transfer {
	return &tbv1.Transfer{Id: "cp-1", Sources: []string{"alpha:models/x.gguf"}, Destination: "beta:/home/ada/models/x.gguf",
		State: tbv1.TransferState_TRANSFER_STATE_COPYING, TotalBytes: 2_000_000_000, DoneBytes: done, TotalFiles: 5, DoneFiles: 2,
		BytesPerSecond: 3_100_000_000, Eta: durationpb.New(41 * time.Second), StartedAt: noon,
		Links: []*tbv1.LinkProgress{
			{LinkId: "l-1", Interface: "thunderbolt0", Bytes: done / 2, BytesPerSecond: 1_600_000_000, Transport: "tcp"},
			{LinkId: "l-2", Interface: "thunderbolt1", Bytes: done / 2, BytesPerSecond: 1_500_000_000, Transport: "tcp"},
		}}
}

func copied() *tbv1.Transfer {
	t := copying(2_000_000_000)
	t.State, t.DoneFiles, t.Eta, t.BytesPerSecond = tbv1.TransferState_TRANSFER_STATE_DONE, 5, nil, 0
	t.FinishedAt = timestamppb.New(noon.AsTime().Add(800 * time.Millisecond))
	t.SkippedFiles, t.SkippedBytes = 1, 1000
	return t
}

func events(list ...*tbv1.Transfer) []*tbv1.WatchTransferResponse {
	return mapped(list, func(t *tbv1.Transfer) *tbv1.WatchTransferResponse {
		return &tbv1.WatchTransferResponse{Transfer: t}
	})
}

func TestCpSaysWhatItDidAndOverWhichCables(t *testing.T) {
	d := startDouble(t, &agentDouble{transfers: events(copying(600_000_000), copied())})
	r := tb(t, d, "cp", "alpha:models/x.gguf", "beta:models/")
	r.wantCode(t, 0)
	golden(t, "cp.txt", r.out)
	if !strings.HasPrefix(r.err, "alpha:models/x.gguf -> beta:/home/ada/models/x.gguf\n") {
		t.Errorf("where it goes is not the first thing that is said:\n%s", r.err)
	}
}

// The destination that was asked for is a directory, or one that does not exist.
func TestCpSaysWhereItGoesOnceThatIsKnown(t *testing.T) {
	asked := copying(0)
	asked.State, asked.Destination = tbv1.TransferState_TRANSFER_STATE_SCANNING, "beta:models"
	failed := copying(0)
	failed.State, failed.Destination = tbv1.TransferState_TRANSFER_STATE_FAILED, "beta:models"
	failed.Error = &tbv1.Failure{Reason: string(fault.FileMissing), What: "copy x.gguf"}
	const title = "alpha:models/x.gguf -> beta:/home/ada/models/x.gguf\n"
	for name, c := range map[string]struct {
		args []string
		seen []*tbv1.Transfer
		want string // what begins with the title
	}{
		"a copy":           {nil, []*tbv1.Transfer{asked, copying(5), copied()}, title},
		"nothing to copy":  {nil, []*tbv1.Transfer{asked, copied()}, title},
		"a dry run":        {[]string{"-n"}, []*tbv1.Transfer{asked, copied()}, title},
		"one that is none": {nil, []*tbv1.Transfer{asked, failed}, ""},
	} {
		d := startDouble(t, &agentDouble{transfers: events(c.seen...)})
		r := tb(t, d, append([]string{"cp", "a", "beta:models"}, c.args...)...)
		if strings.Count(r.err, "->") != strings.Count(c.want, "->") || !strings.Contains(r.err, c.want) {
			t.Errorf("%s: standard error is\n%s", name, r.err)
		}
	}
	// In a dry run it stands before the list.
	var both bytes.Buffer
	v := newCopyView(&cpOptions{g: &globals{out: &both, errOut: &both}, dryRun: true, progress: "auto"})
	v.paint(asked)
	v.keep([]string{"copy 4096 bytes a"})
	v.paint(copied())
	if got := both.String(); !strings.HasSuffix(got, title+"copy 4096 bytes a\n") {
		t.Errorf("a dry run prints\n%s", got)
	}
}

func TestCpNamesTheLabWhereAFileIsMissing(t *testing.T) {
	missing := copying(0)
	missing.State = tbv1.TransferState_TRANSFER_STATE_FAILED
	missing.Error = &tbv1.Failure{Reason: string(fault.FileMissing), What: "cannot read /root/README.md", Where: "alpha:/root/README.md", Why: "no such file or directory", Fix: "check the name"}
	err := failureFault(missing.GetError())
	o := &cpOptions{sources: []string{"README.md"}}
	in := &endpoint{in: &labNode{"desk", "alpha"}}
	f := fault.As(o.ofTheLab(in, err))
	for _, want := range []string{"README.md is looked up on node alpha of the lab \"desk\", which has files of its own", "tbcluster lab exec --name desk alpha -- tee", "--bind HOST:NODE"} {
		if !strings.Contains(f.Why+f.Fix, want) {
			t.Errorf("no %q in\n%s\n%s", want, f.Why, f.Fix)
		}
	}
	if f.Reason != fault.FileMissing || f.Where != "alpha:/root/README.md" {
		t.Errorf("it is another error: %+v", f)
	}
	elsewhere := &cpOptions{sources: []string{"beta:README.md"}}
	for what, got := range map[string]error{
		"an agent of this machine": o.ofTheLab(&endpoint{}, err),
		"a path of another node":   elsewhere.ofTheLab(in, err),
		"a file missing elsewhere": o.ofTheLab(&endpoint{in: &labNode{"desk", "beta"}}, err),
		"another error":            o.ofTheLab(in, fault.Newf(fault.FileDenied, "let the user read it", "read")),
		"none":                     o.ofTheLab(in, nil),
	} {
		if f := fault.As(got); f != nil && strings.Contains(f.Why+f.Fix, "lab") {
			t.Errorf("%s: %+v", what, f)
		}
	}
}

func TestProgressLines(t *testing.T) {
	waiting := copying(0)
	waiting.State = tbv1.TransferState_TRANSFER_STATE_SYNCING
	text := strings.Join(append(progressLines(copying(1_220_000_000)), progressLines(waiting)...), "\n") + "\n"
	golden(t, "progress.txt", text)
}

func TestEachWayOfBytesIsNamed(t *testing.T) {
	two := &tbv1.Transfer{SourceNodeId: "AAAA-1", DestinationNodeId: "BBBB-2"}
	one := &tbv1.Transfer{SourceNodeId: "AAAA-1", DestinationNodeId: "AAAA-1"}
	for _, c := range []struct {
		t          *tbv1.Transfer
		l          *tbv1.LinkProgress
		text, kind string
	}{
		{two, &tbv1.LinkProgress{LinkId: "l-1", Interface: "thunderbolt0", Transport: "tcp", Kind: "cable"}, "cable thunderbolt0 (tcp)", "cable"},
		{two, &tbv1.LinkProgress{Interface: "eth0", Transport: "tcp", Kind: "lan"}, "LAN eth0 (tcp)", "lan"},
		{two, &tbv1.LinkProgress{Transport: "tcp", Kind: "lan"}, "LAN (tcp)", "lan"},
		{one, &tbv1.LinkProgress{Transport: "tcp", Kind: "loopback"}, "loopback (one node)", "loopback"},
		// Of several sources one is here and one is not.
		{one, &tbv1.LinkProgress{Interface: "eth0", Transport: "tcp", Kind: "lan"}, "LAN eth0 (tcp)", "lan"},
		// Agents that do not say the kind, and no interface of a LAN.
		{two, &tbv1.LinkProgress{LinkId: "l-1", Interface: "thunderbolt0", Transport: "tcp"}, "cable thunderbolt0 (tcp)", "cable"},
		{two, &tbv1.LinkProgress{Transport: "tcp"}, "LAN (tcp)", "lan"},
		{one, &tbv1.LinkProgress{Transport: "tcp"}, "loopback (one node)", "loopback"},
	} {
		if text, kind := wayText(c.t, c.l), toTransferLinkJSON(c.t, c.l).Kind; text != c.text || kind != c.kind {
			t.Errorf("%v is %q, kind %q; want %q, %q", c.l, text, kind, c.text, c.kind)
		}
	}
}

func TestCpAsksForWhatTheFlagsSay(t *testing.T) {
	d := startDouble(t, &agentDouble{transfers: events(copied())})
	tb(t, d, "cp", "-ra", "-n", "--exclude", "*.tmp", "--include", "*.gguf", "--exclude", "*", "--bwlimit", "1.5G", "-L", "-c", "-X",
		"--max-cables", "2", "--transport", "tcp", "-q", "a", "b", "beta:c").wantCode(t, 0)
	got := request[*tbv1.StartTransferRequest](t, d)
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	want := &tbv1.StartTransferRequest{RequestId: got.GetRequestId(), Sources: []string{"a", "b"}, Destination: "beta:c", DryRun: true,
		Filters: []string{"-*.tmp", "+*.gguf", "-*"}, LimitBytesPerSecond: 1_500_000_000, CopyLinks: true, Checksum: true, Xattrs: true,
		MaxCables: 2, Transport: "tcp", WorkingDirectory: wd}
	if got.GetRequestId() == "" || got.String() != want.String() {
		t.Errorf("asked for\n%v\nwant\n%v", got, want)
	}
}

func TestCpOfAModel(t *testing.T) {
	d := startDouble(t, &agentDouble{transfers: events(copied())})
	tb(t, d, "cp", "--model", "smollm2", "beta:").wantCode(t, 0)
	got := request[*tbv1.StartTransferRequest](t, d)
	if got.GetModel() != "smollm2" || got.GetModelNode() != "beta" || len(got.GetSources()) != 0 {
		t.Errorf("asked for %v", got)
	}
}

func TestCpUsage(t *testing.T) {
	d := startDouble(t, &agentDouble{})
	for _, args := range [][]string{
		{"cp"}, {"cp", "a"}, {"cp", "", "b:"}, {"cp", "--model", "m", "beta"}, {"cp", "--model", "m"},
		{"cp", "a", "b:", "--bwlimit", "fast"}, {"cp", "a", "b:", "--progress", "loud"}, {"cp", "a", "b:", "--transport", "pigeon"},
	} {
		tb(t, d, args...).wantCode(t, fault.ExitUsage)
	}
}

func TestCpEndsWithRsyncsCodes(t *testing.T) {
	for reason, code := range map[fault.Reason]int{fault.DiskFull: 11, fault.FileMissing: 23, fault.Vanished: 24, fault.Connection: 10, fault.Corrupt: 12, fault.Timeout: 30, fault.NodeDown: 7} {
		failed := copying(5)
		failed.State = tbv1.TransferState_TRANSFER_STATE_FAILED
		failed.Error = &tbv1.Failure{Reason: string(reason), What: "copy x.gguf", Where: "beta:/home/ada", Why: "no space left on device", Fix: "free 94 MB there", ExitCode: uint32(code)}
		d := startDouble(t, &agentDouble{transfers: events(failed)})
		r := tb(t, d, "cp", "a", "beta:")
		r.wantCode(t, code)
		if !strings.Contains(r.err, "where: beta:/home/ada\n  why:   no space left on device\n  do:    free 94 MB there\n") {
			t.Errorf("%s: standard error is\n%s", reason, r.err)
		}
	}
	newer := copying(5)
	newer.State = tbv1.TransferState_TRANSFER_STATE_FAILED
	newer.Error = &tbv1.Failure{Reason: "OF_A_LATER_VERSION", What: "copy", ExitCode: 24}
	d := startDouble(t, &agentDouble{transfers: events(newer)})
	tb(t, d, "cp", "a", "beta:").wantCode(t, 24)
}

func TestCpEventsAreJSONLines(t *testing.T) {
	d := startDouble(t, &agentDouble{transfers: events(copying(1), copied())})
	r := tb(t, d, "cp", "a", "beta:", "--json")
	r.wantCode(t, 0)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	var last copyEventJSON
	for _, l := range lines {
		last = copyEventJSON{}
		if err := json.Unmarshal([]byte(l), &last); err != nil {
			t.Fatalf("%v in %q", err, l)
		}
	}
	if last.Transfer.State != "done" || last.Transfer.DoneBytes != 2_000_000_000 || len(last.Transfer.Links) != 2 {
		t.Errorf("the last event is %+v", last)
	}
}

func TestQuietCpSaysNothing(t *testing.T) {
	d := startDouble(t, &agentDouble{transfers: events(copying(1), copied())})
	r := tb(t, d, "cp", "-q", "a", "beta:")
	r.wantCode(t, 0)
	if r.out != "" || r.err != "" {
		t.Errorf("said %q and %q", r.out, r.err)
	}
}

func TestDryRunPrintsEachLineOnce(t *testing.T) {
	done := copied()
	for name, sent := range map[string][][]string{
		"all at the end": {nil, {"copy 4096 bytes a", "make f/"}},
		"all each time":  {{"copy 4096 bytes a"}, {"copy 4096 bytes a", "make f/"}, {"copy 4096 bytes a", "make f/"}},
		"new ones only":  {{"copy 4096 bytes a"}, {"make f/"}},
	} {
		var evs []*tbv1.WatchTransferResponse
		for i, lines := range sent {
			e := &tbv1.WatchTransferResponse{Transfer: copying(0), DryRunLines: lines}
			if i == len(sent)-1 {
				e.Transfer = done
			}
			evs = append(evs, e)
		}
		d := startDouble(t, &agentDouble{transfers: evs})
		r := tb(t, d, "cp", "-n", "a", "beta:")
		r.wantCode(t, 0)
		if got := r.out[:strings.Index(r.out, "would copy")]; got != "copy 4096 bytes a\nmake f/\n" {
			t.Errorf("%s: printed %q", name, got)
		}
	}
}

func TestCtrlCCancelsTheCopyAndSaysHowToGoOn(t *testing.T) {
	d := startDouble(t, &agentDouble{transfers: events(copying(600_000_000))})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pipe, w := io.Pipe()
	var said bytes.Buffer
	g := &globals{in: eof{}, out: w, errOut: &said, getenv: func(string) string { return "" }, run: "/nonexistent"}
	code := make(chan int, 1)
	go func() {
		code <- run(ctx, g, []string{"cp", "a", "beta:", "--json", "--socket", d.socket})
		w.Close()
	}()
	one := make([]byte, 1)
	if _, err := pipe.Read(one); err != nil { // the first event: it copies
		t.Fatal(err)
	}
	cancel()
	if _, err := io.Copy(io.Discard, pipe); err != nil {
		t.Fatal(err)
	}
	if c := <-code; c != 130 {
		t.Errorf("ended with %d, want 130", c)
	}
	select {
	case <-d.cancelled:
	default:
		t.Error("the agent was not told to cancel")
	}
	if !strings.Contains(said.String(), "600 MB of 2.00 GB arrived and is kept: run the same command again") {
		t.Errorf("said:\n%s", said.String())
	}
}

func TestDeleteNamesWhatGoesAndAsks(t *testing.T) {
	done := copied()
	d := startDouble(t, &agentDouble{transfers: []*tbv1.WatchTransferResponse{{Transfer: done, DryRunLines: []string{"delete old.gguf", "copy 1 bytes new.gguf"}}}})
	r := tb(t, d, "cp", "--delete", "a/", "beta:a/")
	r.wantCode(t, fault.ExitUsage) // nobody can answer
	if !strings.HasPrefix(r.err, "delete old.gguf\n") || strings.Contains(r.err, "copy 1") || !strings.Contains(r.err, "--yes") {
		t.Errorf("said:\n%s", r.err)
	}
	if !request[*tbv1.StartTransferRequest](t, d).GetDryRun() {
		t.Error("more than a dry run was asked for")
	}
	tb(t, d, "cp", "--delete", "--yes", "a/", "beta:a/").wantCode(t, 0)
	if r := request[*tbv1.StartTransferRequest](t, d); r.GetDryRun() || !r.GetDelete() {
		t.Errorf("asked for %v", r)
	}
}

func FuzzParseBytes(f *testing.F) {
	for _, s := range []string{"", "0", "500M", "1.5G", "64MiB", "1e9", "-1", "9999999999T", "NaN", "inf", "0x10", "1 G", "GG"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := parseBytes(s)
		if err != nil && (fault.As(err) == nil || n != 0) {
			t.Errorf("%q: %d, %v", s, n, err)
		}
		if err == nil && n > 1<<63 {
			t.Errorf("%q is %d", s, n)
		}
	})
}

func TestParseBytes(t *testing.T) {
	for s, want := range map[string]uint64{"0": 0, "500M": 500e6, "500MB": 500e6, "1.5G": 1.5e9, "64MiB": 64 << 20, "7k": 7000, "12": 12} {
		if got, err := parseBytes(s); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "fast", "-1", "1Q", "G", "1 G", "0x10", "nan", "inf", "99999999T"} {
		if got, err := parseBytes(s); err == nil {
			t.Errorf("%q was taken for %d", s, got)
		}
	}
}
