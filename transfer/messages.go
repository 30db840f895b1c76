package transfer

import (
	"tbcluster/transfer/manifest"
	"tbcluster/transfer/transport"
)

// protocolVersion of the control stream and of wire together.
const protocolVersion = 1

// kind of a control message.
type kind string

// What the coordinator says to a worker. Those marked with "note" have no
// answer.
const (
	kHello      kind = "hello"      // helloIn → helloOut, first of all
	kScan       kind = "scan"       // source: scanIn → scanOut, with kEntries before
	kEntries    kind = "entries"    // note, both ways: entriesNote
	kPrepare    kind = "prepare"    // destination: prepareIn → prepareOut
	kDigest     kind = "digest"     // both: filesNote → digestOut
	kDecide     kind = "decide"     // destination: filesNote (the same already) → decideOut, with kWant before
	kWant       kind = "want"       // note: wantNote, destination to source
	kStart      kind = "start"      // source: startIn → nothing
	kListen     kind = "listen"     // destination: listenIn → listenOut
	kConnect    kind = "connect"    // source: connectIn → nothing
	kDisconnect kind = "disconnect" // note, both: pathNote
	kPause      kind = "pause"      // note, source: pauseNote
	kComplete   kind = "complete"   // destination: nothing → nothing
	kStop       kind = "stop"       // both: nothing → nothing, files are closed and unlocked after it
)

// What a worker says.
const (
	kProblem  kind = "problem"  // note: problemNote, one file is not copied
	kFatal    kind = "fatal"    // note: problemNote, nothing more can be done
	kFinish   kind = "finish"   // note, source, handed to the destination: filesNote
	kDrop     kind = "drop"     // note, source, handed to the destination: filesNote
	kSent     kind = "sent"     // note: everything was sent and answered
	kPathDown kind = "pathDown" // note, source: pathNote
	kCount    kind = "count"    // note: countNote, at most five a second
)

type helloIn struct {
	Version  int    `json:"version"`
	Transfer string `json:"transfer"`
	Session  uint64 `json:"session"`
	NodeID   string `json:"node_id"`
	NodeName string `json:"node_name"`
}

type helloOut struct {
	Version int            `json:"version"`
	Hash    transport.Hash `json:"hash"`
	Home    string         `json:"home"`
}

type place struct {
	Path []byte `json:"path"`
	Dir  []byte `json:"dir,omitempty"`
}

type scanIn struct {
	Places    []place  `json:"places"`
	First     int      `json:"first"`
	FirstRoot int      `json:"first_root"`
	Filters   []string `json:"filters,omitempty"`
	CopyLinks bool     `json:"copy_links,omitempty"`
}

type scanOut struct {
	Roots []manifest.Root `json:"roots"`
	Next  int             `json:"next"` // index after the last entry
}

type entriesNote struct {
	Entries []manifest.Entry `json:"entries"`
}

type prepareIn struct {
	Place place `json:"place"`
	// Roots of all sources, by number.
	Roots []manifest.Root `json:"roots"`
	// Here tells which roots are on this very node.
	Here     []bool `json:"here"`
	DryRun   bool   `json:"dry_run,omitempty"`
	Checksum bool   `json:"checksum,omitempty"`
	MakePath bool   `json:"make_path,omitempty"`
}

type prepareOut struct {
	// Resolved destination: the final name of a single file, else the
	// directory that everything goes into.
	Resolved []byte `json:"resolved"`
	// Compare lists files to be compared by digest.
	Compare []int `json:"compare,omitempty"`
}

type filesNote struct {
	Files []int `json:"files"`
}

type digestOut struct {
	Digests [][]byte `json:"digests"` // nil for what could not be read
}

type decideOut struct {
	TotalBytes   uint64   `json:"total_bytes"`
	TotalFiles   uint64   `json:"total_files"`
	SkippedBytes uint64   `json:"skipped_bytes"`
	SkippedFiles uint64   `json:"skipped_files"`
	Lines        [][]byte `json:"lines,omitempty"`
}

type want struct {
	File int `json:"f"`
	// Have is a bitmap of the chunks that are there, lowest bit first.
	Have []byte `json:"have,omitempty"`
}

type wantNote struct {
	Want []want `json:"want"`
}

type startIn struct {
	Limit uint64 `json:"limit,omitempty"`
}

type listenIn struct {
	Path      int              `json:"path"`
	Transport string           `json:"transport"`
	Interface string           `json:"interface,omitempty"`
	Addr      string           `json:"addr"`
	Peers     []transport.Hash `json:"peers"`
}

type listenOut struct {
	Port uint16 `json:"port"`
}

type connectIn struct {
	Path      int            `json:"path"`
	Transport string         `json:"transport"`
	Interface string         `json:"interface,omitempty"`
	Local     string         `json:"local"`
	Remote    string         `json:"remote"`
	Port      uint16         `json:"port"`
	Peer      transport.Hash `json:"peer"`
	Conns     int            `json:"conns"`
}

type pathNote struct {
	Path int    `json:"path"`
	Why  string `json:"why,omitempty"`
}

type pauseNote struct {
	Paused bool `json:"paused"`
}

type problemNote struct {
	Fault *failure `json:"fault"`
}

type countNote struct {
	// Sent bytes by path, from the source.
	Sent map[int]uint64 `json:"sent,omitempty"`
	// From the destination: bytes verified and written, files under their
	// final names.
	Bytes uint64 `json:"bytes,omitempty"`
	Files uint64 `json:"files,omitempty"`
}
