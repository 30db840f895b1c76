// Package fault is the one type for errors that a person sees: what failed,
// where, why, and what to do about it. Its table of reasons gives each the gRPC
// code it travels under and the exit code that the command line ends with.
//
// An error that is no Fault is a bug of ours and is shown as one. Package fault
// imports nothing of ours, so every package may return its errors.
package fault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sort"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Domain is the domain of our ErrorInfo details.
const Domain = "tbcluster"

// Reason names a kind of failure, in UPPER_SNAKE.
type Reason string

// The reasons. Table gives code, exit code and meaning of each.
const (
	Usage             Reason = "USAGE"
	NoAgent           Reason = "NO_AGENT"
	NodeUnknown       Reason = "NODE_UNKNOWN"
	NodeAmbiguous     Reason = "NODE_AMBIGUOUS"
	NodeDown          Reason = "NODE_DOWN"
	NodeInUse         Reason = "NODE_IN_USE"
	LinkUnknown       Reason = "LINK_UNKNOWN"
	NotPaired         Reason = "NOT_PAIRED"
	PairingFailed     Reason = "PAIRING_FAILED"
	ModelUnknown      Reason = "MODEL_UNKNOWN"
	ModelAmbiguous    Reason = "MODEL_AMBIGUOUS"
	ModelBroken       Reason = "MODEL_BROKEN"
	ModelIncomplete   Reason = "MODEL_INCOMPLETE"
	ModelInUse        Reason = "MODEL_IN_USE"
	EngineMissing     Reason = "ENGINE_MISSING"
	EngineMismatch    Reason = "ENGINE_MISMATCH"
	EngineFailed      Reason = "ENGINE_FAILED"
	DoesNotFit        Reason = "DOES_NOT_FIT"
	InstanceUnknown   Reason = "INSTANCE_UNKNOWN"
	InstanceAmbiguous Reason = "INSTANCE_AMBIGUOUS"
	InstanceExists    Reason = "INSTANCE_EXISTS"
	InstanceNotReady  Reason = "INSTANCE_NOT_READY"
	TransferUnknown   Reason = "TRANSFER_UNKNOWN"
	PlanStale         Reason = "PLAN_STALE"
	PortInUse         Reason = "PORT_IN_USE"
	RanksInsecure     Reason = "RANKS_INSECURE"
	StillRunning      Reason = "STILL_RUNNING"
	Denied            Reason = "DENIED"
	UserUnmapped      Reason = "USER_UNMAPPED"
	NoPermission      Reason = "NO_PERMISSION"
	FileMissing       Reason = "FILE_MISSING"
	FileIO            Reason = "FILE_IO"
	FileDenied        Reason = "FILE_DENIED"
	FileEscapes       Reason = "FILE_ESCAPES"
	FileUnsupported   Reason = "FILE_UNSUPPORTED"
	DiskFull          Reason = "DISK_FULL"
	Vanished          Reason = "VANISHED"
	Partial           Reason = "PARTIAL"
	Corrupt           Reason = "CORRUPT"
	Connection        Reason = "CONNECTION"
	Protocol          Reason = "PROTOCOL"
	Timeout           Reason = "TIMEOUT"
	Interrupted       Reason = "INTERRUPTED"
	ConfigInvalid     Reason = "CONFIG_INVALID"
	StateTooNew       Reason = "STATE_TOO_NEW"
	LabFailed         Reason = "LAB_FAILED"
	Unsupported       Reason = "UNSUPPORTED"
	Internal          Reason = "INTERNAL"
)

// Entry is a row of Table.
type Entry struct {
	Code    codes.Code
	Exit    int
	Meaning string // completes "the command ends so when …"
}

// Exit codes of the command line. Those from 10 to 30 and 130 are rsync's.
const (
	ExitOK           = 0
	ExitUsage        = 1
	ExitNoAgent      = 2
	ExitUnknown      = 3
	ExitDenied       = 4
	ExitPrecondition = 5
	ExitFailed       = 6
	ExitNodeDown     = 7
	ExitSocket       = 10
	ExitFileIO       = 11
	ExitProtocol     = 12
	ExitPartial      = 23
	ExitVanished     = 24
	ExitTimeout      = 30
	ExitInternal     = 70
	ExitInterrupted  = 130
)

// Table has one row for each reason.
var Table = map[Reason]Entry{
	Usage:             {codes.InvalidArgument, ExitUsage, "the command line or a request is not right"},
	NoAgent:           {codes.Unavailable, ExitNoAgent, "no agent answers"},
	NodeUnknown:       {codes.NotFound, ExitUnknown, "no node has that name"},
	NodeAmbiguous:     {codes.InvalidArgument, ExitUnknown, "several nodes fit the name"},
	NodeDown:          {codes.Unavailable, ExitNodeDown, "a node that is needed is down"},
	NodeInUse:         {codes.FailedPrecondition, ExitPrecondition, "the node is up or in use"},
	LinkUnknown:       {codes.NotFound, ExitUnknown, "no cable fits the name"},
	NotPaired:         {codes.Unauthenticated, ExitDenied, "the nodes have not paired"},
	PairingFailed:     {codes.FailedPrecondition, ExitDenied, "the code was wrong, used or expired"},
	ModelUnknown:      {codes.NotFound, ExitUnknown, "no node has that model"},
	ModelAmbiguous:    {codes.InvalidArgument, ExitUnknown, "several models fit the name"},
	ModelBroken:       {codes.FailedPrecondition, ExitPrecondition, "the model's files are truncated or corrupt"},
	ModelIncomplete:   {codes.FailedPrecondition, ExitPrecondition, "files of the model are missing where they are needed"},
	ModelInUse:        {codes.FailedPrecondition, ExitPrecondition, "an instance uses the model"},
	EngineMissing:     {codes.FailedPrecondition, ExitPrecondition, "the engine is not installed where it is needed"},
	EngineMismatch:    {codes.FailedPrecondition, ExitPrecondition, "the engine's builds differ between the nodes"},
	EngineFailed:      {codes.Aborted, ExitFailed, "the engine ended or did not answer"},
	DoesNotFit:        {codes.ResourceExhausted, ExitPrecondition, "the model fits nowhere that is allowed"},
	InstanceUnknown:   {codes.NotFound, ExitUnknown, "no instance has that name"},
	InstanceAmbiguous: {codes.InvalidArgument, ExitUnknown, "several instances fit the name"},
	InstanceExists:    {codes.AlreadyExists, ExitPrecondition, "an instance of that name exists"},
	InstanceNotReady:  {codes.FailedPrecondition, ExitPrecondition, "the instance is not ready"},
	TransferUnknown:   {codes.NotFound, ExitUnknown, "no transfer has that ID"},
	PlanStale:         {codes.FailedPrecondition, ExitPrecondition, "the world has changed since the plan"},
	PortInUse:         {codes.FailedPrecondition, ExitPrecondition, "a port is in use"},
	RanksInsecure:     {codes.FailedPrecondition, ExitPrecondition, "the ports of the ranks cannot be closed to the LAN"},
	StillRunning:      {codes.FailedPrecondition, ExitPrecondition, "instances or transfers are still running"},
	Denied:            {codes.PermissionDenied, ExitDenied, "the user or node may not do that"},
	UserUnmapped:      {codes.PermissionDenied, ExitDenied, "the user is mapped to no user on the other node"},
	NoPermission:      {codes.PermissionDenied, ExitDenied, "the agent has no right to change the machine"},
	FileMissing:       {codes.NotFound, ExitPartial, "a file does not exist"},
	FileIO:            {codes.Aborted, ExitFileIO, "a file could not be read or written"},
	FileDenied:        {codes.PermissionDenied, ExitFileIO, "the user may not read or write a file"},
	FileEscapes:       {codes.InvalidArgument, ExitPartial, "a path leads out of where it belongs"},
	FileUnsupported:   {codes.InvalidArgument, ExitPartial, "a kind of file that is not copied"},
	DiskFull:          {codes.ResourceExhausted, ExitFileIO, "the disk is full"},
	Vanished:          {codes.Aborted, ExitVanished, "a source file vanished or changed while it was read"},
	Partial:           {codes.Aborted, ExitPartial, "not everything was done"},
	Corrupt:           {codes.DataLoss, ExitProtocol, "what arrived was not what was sent, three times"},
	Connection:        {codes.Unavailable, ExitSocket, "a connection failed"},
	Protocol:          {codes.Internal, ExitProtocol, "the other side broke the protocol"},
	Timeout:           {codes.DeadlineExceeded, ExitTimeout, "something took too long"},
	Interrupted:       {codes.Canceled, ExitInterrupted, "the command was interrupted"},
	ConfigInvalid:     {codes.InvalidArgument, ExitUsage, "the configuration file is not right"},
	StateTooNew:       {codes.FailedPrecondition, ExitPrecondition, "the state on disk is of a newer version"},
	LabFailed:         {codes.FailedPrecondition, ExitPrecondition, "the virtual cluster could not be made or changed"},
	Unsupported:       {codes.Unimplemented, ExitPrecondition, "this system or version cannot do that"},
	Internal:          {codes.Internal, ExitInternal, "there is a bug in tbcluster"},
}

// Fault is an error for people. What is required; the rest may be empty.
type Fault struct {
	Reason Reason
	What   string // what failed, as a statement: "cannot copy models/x.gguf to beta"
	Where  string // node, file, rank: "beta:/home/ada/models"
	Why    string // the cause, in its own words: "no space left on device"
	Fix    string // what to do: "free 94 MB there, or choose another directory"
	// Meta goes into ErrorInfo: node, rank, path, field, …
	Meta map[string]string
	// Err is the error behind it; may be nil.
	Err error
}

// New returns a Fault. What is a statement ("no node is called gamma") or what
// was being done, beginning with the verb ("copy x to beta"), which becomes
// "cannot copy x to beta". Why is taken from err when err is not nil.
func New(r Reason, what string, err error, fix string) *Fault {
	f := &Fault{Reason: r, What: statement(what), Fix: fix, Err: err}
	if err != nil {
		f.Why = err.Error()
	}
	return f
}

// Newf returns a Fault with a formatted What, as New takes it.
func Newf(r Reason, fix, format string, args ...any) *Fault {
	return &Fault{Reason: r, What: statement(fmt.Sprintf(format, args...)), Fix: fix}
}

// At returns a copy of f with Where set: f may be somebody else's too.
func (f *Fault) At(where string) *Fault {
	c := *f
	c.Where = where
	return &c
}

// With returns a copy of f with one more piece of metadata.
func (f *Fault) With(key, value string) *Fault {
	c := *f
	c.Meta = maps.Clone(f.Meta)
	if c.Meta == nil {
		c.Meta = map[string]string{}
	}
	c.Meta[key] = value
	return &c
}

// Error returns "what (where): why".
func (f *Fault) Error() string {
	var b strings.Builder
	b.WriteString(f.What)
	if f.Where != "" {
		fmt.Fprintf(&b, " (%s)", f.Where)
	}
	if f.Why != "" {
		fmt.Fprintf(&b, ": %s", f.Why)
	}
	return b.String()
}

// Unwrap returns the error behind it.
func (f *Fault) Unwrap() error { return f.Err }

// Exit returns the exit code of the command line for it.
func (f *Fault) Exit() int {
	if e, ok := Table[f.Reason]; ok {
		return e.Exit
	}
	return ExitInternal
}

// As returns the Fault in err's chain, or nil.
func As(err error) *Fault {
	var f *Fault
	if errors.As(err, &f) {
		return f
	}
	return nil
}

// Is reports whether err's chain holds a Fault of that reason.
func Is(err error, r Reason) bool {
	f := As(err)
	return f != nil && f.Reason == r
}

// GRPCStatus makes a Fault travel as a gRPC status with ErrorInfo.
func (f *Fault) GRPCStatus() *status.Status {
	e, ok := Table[f.Reason]
	if !ok {
		e = Table[Internal]
	}
	// Names of files may hold any bytes, and details that are no UTF-8 are lost
	// whole.
	clean := func(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
	st := status.New(e.Code, clean(f.Error()))
	meta := map[string]string{}
	for k, v := range f.Meta {
		meta[clean(k)] = clean(v)
	}
	meta["what"] = clean(f.What)
	for k, v := range map[string]string{"where": f.Where, "why": f.Why, "fix": f.Fix} {
		delete(meta, k)
		if v != "" {
			meta[k] = clean(v)
		}
	}
	if d, err := st.WithDetails(&errdetails.ErrorInfo{Reason: clean(string(f.Reason)), Domain: Domain, Metadata: meta}); err == nil {
		return d
	}
	return st
}

// FromStatus turns what came back from a call into a Fault again. An error
// that carries none of our details becomes a Fault by its code: Unavailable is
// NoAgent, DeadlineExceeded Timeout, Canceled Interrupted, else Internal.
func FromStatus(err error) *Fault {
	if err == nil {
		return nil
	}
	if f := As(err); f != nil {
		return f
	}
	st, ok := status.FromError(err)
	if !ok {
		switch {
		case errors.Is(err, context.Canceled):
			return New(Interrupted, "interrupted", nil, "")
		case errors.Is(err, context.DeadlineExceeded):
			return New(Timeout, "no answer in time", nil, "try again; `tbcluster doctor` says what is wrong")
		}
		return New(Internal, "unexpected error", err, "this is a bug: `tbcluster bugreport` collects what we need")
	}
	for _, d := range st.Details() {
		info, ok := d.(*errdetails.ErrorInfo)
		if !ok || info.GetDomain() != Domain {
			continue
		}
		f := &Fault{Reason: Reason(info.GetReason()), Err: err}
		for k, v := range info.GetMetadata() {
			switch k {
			case "what":
				f.What = v
			case "where":
				f.Where = v
			case "why":
				f.Why = v
			case "fix":
				f.Fix = v
			default:
				f = f.With(k, v)
			}
		}
		return f
	}
	r := Internal
	switch st.Code() {
	case codes.Unavailable:
		r = NoAgent
	case codes.DeadlineExceeded:
		r = Timeout
	case codes.Canceled:
		r = Interrupted
	case codes.InvalidArgument:
		r = Usage
	case codes.PermissionDenied, codes.Unauthenticated:
		r = Denied
	case codes.Unimplemented:
		r = Unsupported
	}
	what := st.Message()
	if r == Interrupted {
		what = "interrupted"
	}
	return &Fault{Reason: r, What: what, Err: err}
}

// ExitTable returns the exit codes of the given reasons in words, one line
// each, for the EXIT STATUS of a help text; 0, 1 and 70 are always there.
func ExitTable(reasons ...Reason) string {
	byExit := map[int][]string{ExitOK: {"it did what was asked"}}
	seen := map[Reason]bool{}
	for _, r := range append([]Reason{Usage, Internal}, reasons...) {
		e, ok := Table[r]
		if !ok || seen[r] {
			continue
		}
		seen[r] = true
		byExit[e.Exit] = append(byExit[e.Exit], e.Meaning)
	}
	var exits []int
	for e := range byExit {
		exits = append(exits, e)
	}
	sort.Ints(exits)
	var b strings.Builder
	for _, e := range exits {
		sort.Strings(byExit[e])
		fmt.Fprintf(&b, "  %-4d %s\n", e, strings.Join(byExit[e], "; "))
	}
	return b.String()
}
