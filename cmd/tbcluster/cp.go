package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/proto"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
	"tbcluster/lab"
	"tbcluster/transfer"
)

type cpOptions struct {
	g           *globals
	sources     []string
	destination string
	model       string
	modelNode   string
	dryRun      bool
	filters     []string
	bwlimit     string
	copyLinks   bool
	checksum    bool
	maxCables   uint32
	transport   string
	xattrs      bool
	delete, yes bool
	progress    string
	jsonEvents  bool
	quiet       bool
}

func newCpCommand(g *globals) *cobra.Command {
	o := &cpOptions{g: g}
	cmd := &cobra.Command{
		Use:     "cp SRC... DST",
		Short:   "Copy files between nodes over the cables",
		GroupID: groupModels,
		Long: `Copies files and directories. A path with a colon before its first slash is on
another node (beta:models/x.gguf); ./a:b is not. A path that does not begin with
/ starts from your home on the other node, and from where you are on this one.
As with rsync, dir/ means what is in dir, and dir means dir itself; directories
need no -r. "tbcluster cp --model MODEL NODE:" copies a model by its name, from a
node that has it to where the other node keeps models.

Every byte is verified on the way, always. The final name appears only when the
file is complete, verified and on disk; a copy that was cut off goes on where it
was when you run the same command again, and one that is complete copies nothing
and says so.

Bytes go over every proven cable between the two nodes at once. The last line
says how much went over each; "LAN" there means that no cable was proven for a
while.` +
			exitHelp(fault.NodeUnknown, fault.NodeAmbiguous, fault.NodeDown, fault.NotPaired, fault.UserUnmapped, fault.ModelUnknown,
				fault.FileMissing, fault.FileIO, fault.FileDenied, fault.FileEscapes, fault.FileUnsupported, fault.DiskFull,
				fault.Vanished, fault.Partial, fault.Corrupt, fault.Connection, fault.Protocol, fault.Timeout, fault.Interrupted),
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.setArgs(args); err != nil {
				return err
			}
			return runCp(cmd.Context(), o)
		},
	}
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, toComplete string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if strings.ContainsAny(toComplete, "/:") {
			return nil, cobra.ShellCompDirectiveDefault
		}
		var out []cobra.Completion
		for _, n := range completionState(cmd.Context(), g).GetNodes() {
			out = append(out, cobra.CompletionWithDesc(n.GetName()+":", nodeStateWord(n.GetState())))
		}
		return out, cobra.ShellCompDirectiveNoSpace
	}
	f := cmd.Flags()
	f.BoolVarP(&o.dryRun, "dry-run", "n", false, "only say what would be copied")
	f.Var(&filterFlag{&o.filters, "+"}, "include", "copy what matches, though a later --exclude says no (rsync's patterns and order)")
	f.Var(&filterFlag{&o.filters, "-"}, "exclude", "leave out what matches")
	f.StringVar(&o.bwlimit, "bwlimit", "", "most bytes a second, like 500M or 1.5G (decimal)")
	f.BoolVarP(&o.copyLinks, "copy-links", "L", false, "copy what symlinks point to instead of the links")
	f.BoolVarP(&o.checksum, "checksum", "c", false, "compare by content, not by size and time")
	f.Uint32Var(&o.maxCables, "max-cables", 0, "use at most this many cables; 0 means all")
	f.StringVar(&o.transport, "transport", "auto", "auto or tcp (rdma is not in this version: it is refused)")
	f.BoolVarP(&o.xattrs, "xattrs", "X", false, "copy extended attributes (not in this version: it is refused)")
	f.BoolVar(&o.delete, "delete", false, "delete at the destination what the source does not have; names it and asks (not in this version: it is refused)")
	f.BoolVarP(&o.yes, "yes", "y", false, "with --delete: do not ask")
	f.StringVar(&o.progress, "progress", "auto", "auto, plain (lines) or none")
	f.BoolVar(&o.jsonEvents, "json", false, "the same as -o json: one event a line")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "print errors only")
	f.StringVar(&o.model, "model", "", "copy this model from whichever node has it, to where the node keeps models")
	completeFlag(cmd, "model", complete(g, -1, modelNames))
	completeFlag(cmd, "transport", cobra.FixedCompletions([]string{"auto", "tcp", "rdma"}, cobra.ShellCompDirectiveNoFileComp))
	completeFlag(cmd, "progress", cobra.FixedCompletions([]string{"auto", "plain", "none"}, cobra.ShellCompDirectiveNoFileComp))
	// What fingers type after years of scp and rsync: both are always on.
	for name, short := range map[string]string{"recursive": "r", "archive": "a"} {
		f.BoolP(name, short, true, "always on")
		if err := f.MarkHidden(name); err != nil {
			panic(err) // the flag is declared in the line above
		}
	}
	return cmd
}

// filterFlag collects --include and --exclude in the order in which they stand.
type filterFlag struct {
	list *[]string
	sign string
}

var _ pflag.Value = (*filterFlag)(nil)

func (f *filterFlag) String() string     { return "" }
func (f *filterFlag) Type() string       { return "pattern" }
func (f *filterFlag) Set(v string) error { *f.list = append(*f.list, f.sign+v); return nil }

// setArgs reads the paths, and checks what can be checked without an agent.
func (o *cpOptions) setArgs(args []string) error {
	const usage = "tbcluster cp SRC... DST, or tbcluster cp --model MODEL NODE:"
	if o.model != "" {
		if len(args) != 1 || !strings.HasSuffix(args[0], ":") {
			return fault.Newf(fault.Usage, usage, "with --model name one node, with a colon")
		}
		o.modelNode = strings.TrimSuffix(args[0], ":")
		return nil
	}
	if len(args) < 2 {
		return fault.Newf(fault.Usage, usage, "name what to copy and where to")
	}
	o.sources, o.destination = args[:len(args)-1], args[len(args)-1]
	for _, a := range args {
		if a == "" {
			return fault.Newf(fault.Usage, "an unset variable in a script often does that", "one of the paths is empty")
		}
	}
	return nil
}

// sizeForm is a number, then a unit that may have a B behind it.
var sizeForm = regexp.MustCompile(`^([0-9]{1,15}(?:\.[0-9]{1,9})?)([kmgt]i?)?b?$`)

// parseBytes reads a size like "500M", "1.5G" or "1000000"; units are decimal,
// with "i" binary ("64MiB").
func parseBytes(s string) (uint64, error) {
	bad := fault.Newf(fault.Usage, "write it like 500M, 1.5G or 64MiB", "%q is no number of bytes", s)
	m := sizeForm.FindStringSubmatch(strings.ToLower(s))
	if m == nil {
		return 0, bad
	}
	v, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		return 0, bad
	}
	v *= map[string]float64{
		"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12,
		"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
	}[m[2]]
	if v >= 1<<63 {
		return 0, bad
	}
	return uint64(v), nil
}

// request returns what the agent is asked for.
func (o *cpOptions) request(e *endpoint) (*tbv1.StartTransferRequest, error) {
	for _, choice := range []struct{ flag, value, allowed string }{
		{"--progress", o.progress, "auto plain none"}, {"--transport", o.transport, "auto tcp rdma"},
	} {
		if !strings.Contains(" "+choice.allowed+" ", " "+choice.value+" ") {
			return nil, fault.Newf(fault.Usage, "use one of: "+choice.allowed, "%s %s is not known", choice.flag, choice.value)
		}
	}
	r := &tbv1.StartTransferRequest{
		RequestId: newRequestID(), Sources: o.sources, Destination: o.destination, DryRun: o.dryRun, Filters: o.filters,
		CopyLinks: o.copyLinks, Checksum: o.checksum, MaxCables: o.maxCables, Transport: o.transport, Xattrs: o.xattrs,
		Delete: o.delete, Model: o.model, ModelNode: o.modelNode,
	}
	if o.bwlimit != "" {
		limit, err := parseBytes(o.bwlimit)
		if err != nil {
			return nil, err
		}
		r.LimitBytesPerSecond = limit
	}
	if !e.foreign {
		wd, err := os.Getwd()
		if err != nil {
			return nil, fault.New(fault.FileIO, "find the working directory", err, "cd to a directory that exists")
		}
		r.WorkingDirectory = wd
	}
	return r, nil
}

func runCp(ctx context.Context, o *cpOptions) error {
	if o.jsonEvents {
		o.g.output = "json"
	}
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	req, err := o.request(c.endpoint)
	if err != nil {
		return err
	}
	if o.delete && !o.dryRun && !o.yes {
		if err := confirmDelete(ctx, o, c, req); err != nil {
			return err
		}
	}
	_, err = followCopy(ctx, c, req, newCopyView(o))
	return o.ofTheLab(c.endpoint, err)
}

// ofTheLab says of a file that is missing where it was looked for: whoever asks
// the agent of a lab's node may mean a file of the machine that the lab runs on.
func (o *cpOptions) ofTheLab(e *endpoint, err error) error {
	f := fault.As(err)
	if f == nil || f.Reason != fault.FileMissing || e.in == nil || !strings.HasPrefix(f.Where, e.in.node+":") {
		return err
	}
	for _, s := range o.sources {
		if at, perr := transfer.ParseEndpoint(s); perr == nil && at.Node == "" {
			said := *f
			said.Why = fmt.Sprintf("%s is looked up on %s, which has files of its own: %s", s, e.in, f.Why)
			said.Fix = "put it there (" + lab.Command(e.in.lab, "exec "+e.in.node+" -- tee NAME < NAME >/dev/null") + "), or make the lab with " +
				lab.Command(e.in.lab, "up --bind HOST:NODE") + ", which shows a directory of this machine in each node"
			return &said
		}
	}
	return err
}

// confirmDelete names what --delete would delete and asks.
func confirmDelete(ctx context.Context, o *cpOptions, c *client, req *tbv1.StartTransferRequest) error {
	look := *o
	look.dryRun, look.quiet = true, true
	trial := proto.CloneOf(req)
	trial.RequestId, trial.DryRun = newRequestID(), true
	lines, err := dryRun(ctx, &look, c, trial)
	if err != nil {
		return err
	}
	n := 0
	for _, l := range lines {
		if strings.HasPrefix(l, "delete ") {
			n++
			fmt.Fprintln(o.g.errOut, plain(l))
		}
	}
	if n == 0 {
		return nil
	}
	return confirm(ctx, o.g, fmt.Sprintf("delete %s at the destination?", count(n, "path")), "--yes")
}

// dryRun runs a transfer that only says what it would do, and returns that.
func dryRun(ctx context.Context, o *cpOptions, c *client, req *tbv1.StartTransferRequest) ([]string, error) {
	quiet := *o
	quiet.g = &globals{in: o.g.in, out: io.Discard, errOut: o.g.errOut, getenv: o.g.getenv, output: "text"}
	view := newCopyView(&quiet)
	_, err := followCopy(ctx, c, req, view)
	return view.seen, err
}

// followCopy starts the transfer and shows it in view until it ends. When ctx
// ends the transfer is cancelled.
func followCopy(ctx context.Context, c *client, req *tbv1.StartTransferRequest, view *copyView) (*tbv1.Transfer, error) {
	resp, err := c.transfer.Start(ctx, req)
	if err != nil {
		return nil, err
	}
	t := resp.GetTransfer()
	watch, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	stopCancelling := context.AfterFunc(ctx, func() { cancelTransfer(watch, c, t.GetId(), end) })
	defer stopCancelling()

	paint := throttle{gap: 250 * time.Millisecond}
	err = paint.run(watch, func(watch context.Context, show func(func())) error {
		stream, err := c.transfer.Watch(watch, &tbv1.WatchTransferRequest{Id: t.GetId()})
		if err != nil {
			return err
		}
		for {
			ev, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			t = ev.GetTransfer()
			// Lines of a dry run must all be seen, so they are not thinned out.
			view.keep(ev.GetDryRunLines())
			now := t
			show(func() { view.paint(now) })
			if transferEnded(now) {
				return nil
			}
		}
	})
	view.finish()
	switch {
	case ctx.Err() != nil && !(t.GetState() == tbv1.TransferState_TRANSFER_STATE_DONE):
		return t, fault.New(fault.Interrupted, "the copy was cancelled", nil,
			fmt.Sprintf("%s of %s arrived and is kept: run the same command again to go on", bytesText(t.GetDoneBytes()), bytesText(t.GetTotalBytes())))
	case err != nil:
		return t, err
	}
	return t, view.summary(t)
}

// cancelTransfer asks the agent to cancel; the watch then shows the end of it.
// When even that does not come the watch is given up.
func cancelTransfer(ctx context.Context, c *client, id string, giveUp func()) {
	ask, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := c.transfer.Cancel(ask, &tbv1.CancelTransferRequest{Id: id}); err != nil {
		giveUp()
		return
	}
	patience := time.NewTimer(10 * time.Second)
	defer patience.Stop()
	select {
	case <-ctx.Done():
	case <-patience.C:
		giveUp()
	}
}

// transferEnded reports whether a transfer will not change any more.
func transferEnded(t *tbv1.Transfer) bool {
	switch t.GetState() {
	case tbv1.TransferState_TRANSFER_STATE_DONE, tbv1.TransferState_TRANSFER_STATE_FAILED, tbv1.TransferState_TRANSFER_STATE_CANCELLED:
		return true
	}
	return false
}
