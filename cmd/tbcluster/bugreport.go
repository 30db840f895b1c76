package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/agent/config"
	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type bugreportOptions struct {
	g    *globals
	file string
	yes  bool
	now  func() time.Time
}

func newBugreportCommand(g *globals) *cobra.Command {
	o := &bugreportOptions{g: g, now: time.Now}
	cmd := &cobra.Command{
		Use:     "bugreport",
		Short:   "Collect what is needed to find a fault, in one archive",
		GroupID: groupHelp,
		Long: `Collects versions, the cluster's state, findings, the last day of the agent's log,
the last lines of each instance, what was changed on the machine, and the
settings, into one archive in this directory. It lists what goes in first, and on
a terminal asks.

Keys, codes, user names and prompts are taken out; names of nodes and models, and
addresses, stay. Look into it before you send it: it is plain text. It can be
made without an agent too, with what there is then.` + exitHelpAlone(fault.FileIO, fault.DiskFull, fault.Interrupted),
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return runBugreport(cmd.Context(), o) },
	}
	cmd.Flags().StringVar(&o.file, "file", "", "where to write it, else tbcluster-bugreport-TIME.tar.gz here")
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	return cmd
}

// reportPart is one file of a report.
type reportPart struct {
	name    string
	meaning string
	data    []byte
}

// bugreportJSON is `tbcluster bugreport -o json`.
type bugreportJSON struct {
	File  string           `json:"file"`
	Parts []reportPartJSON `json:"parts"`
}

type reportPartJSON struct {
	Name    string `json:"name"`
	Meaning string `json:"meaning"`
	Bytes   int    `json:"bytes"`
}

// Limits of a report, so that it can be sent by mail.
const (
	reportLogSpan  = 24 * time.Hour
	reportLogBytes = 4 << 20
	reportPatience = 10 * time.Second // for each thing that is asked
)

func runBugreport(ctx context.Context, o *bugreportOptions) error {
	parts := collect(ctx, o)
	if ctx.Err() != nil {
		return fault.FromStatus(ctx.Err())
	}
	list := o.g.out
	if o.g.json() {
		list = o.g.errOut
	}
	fmt.Fprintln(list, "the archive holds:")
	for _, p := range parts {
		fmt.Fprintf(list, "  %-28s %9s  %s\n", plain(p.name), bytesText(uint64(len(p.data))), p.meaning)
	}
	if !o.yes && isTerminal(o.g.in) {
		if err := confirm(ctx, o.g, "write it?", "--yes"); err != nil {
			return err
		}
	}
	stamp := o.now().Format("20060102-150405")
	file := o.file
	if file == "" {
		file = "tbcluster-bugreport-" + stamp + ".tar.gz"
	}
	if err := writeArchive(file, "tbcluster-bugreport-"+stamp, parts, o.now()); err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, bugreportJSON{file, mapped(parts, func(p reportPart) reportPartJSON {
			return reportPartJSON{p.name, p.meaning, len(p.data)}
		})})
		return nil
	}
	o.g.printf("written: %s\n", plain(file))
	return nil
}

// collect gathers the parts. What cannot be had is said in a part of its own.
func collect(ctx context.Context, o *bugreportOptions) []reportPart {
	r := &reporter{o: o, hide: newRedactor(systemUsers(o.g.getenv))}
	r.raw("version.txt", "versions of the program and of the system",
		fmt.Appendf(nil, "tbcluster %s\n%s %s/%s\n%s\n", buildVersion(), runtime.Version(), runtime.GOOS, runtime.GOARCH, systemVersion()))
	r.settings()
	c, err := connect(ctx, o.g)
	if err != nil {
		r.problem("the agent", err)
		return r.done()
	}
	defer c.close()
	r.cluster(ctx, c)
	r.agentLog(ctx, c)
	return r.done()
}

// reporter builds the parts of a report.
type reporter struct {
	o        *bugreportOptions
	hide     *redactor
	parts    []reportPart
	problems []string
}

func (r *reporter) raw(name, meaning string, data []byte) {
	r.parts = append(r.parts, reportPart{name, meaning, data})
}

func (r *reporter) text(name, meaning, text string) { r.raw(name, meaning, []byte(r.hide.text(text))) }

func (r *reporter) problem(what string, err error) {
	r.problems = append(r.problems, fmt.Sprintf("%s: %v", what, err))
}

func (r *reporter) done() []reportPart {
	if len(r.problems) > 0 {
		r.text("problems.txt", "what could not be collected, and why", strings.Join(r.problems, "\n")+"\n")
	}
	return r.parts
}

func (r *reporter) settings() {
	path := configPath(r.o.g, "")
	c, err := config.Load(path)
	if err != nil {
		r.problem("the settings", err)
		return
	}
	r.hide.users(c.Owners...)
	var b bytes.Buffer
	fmt.Fprintf(&b, "# %s\n", path)
	writeConfig(&b, c)
	r.text("config.toml", "the settings, API keys left out", b.String())
}

// cluster adds the state, findings, changes, and the last lines of instances.
func (r *reporter) cluster(ctx context.Context, c *client) {
	state, err := within(ctx, c.state)
	if err != nil {
		r.problem("the state", err)
		return
	}
	for _, t := range state.GetTransfers() {
		r.hide.users(t.GetUser())
	}
	for _, i := range state.GetInstances() {
		r.hide.users(i.GetUser())
	}
	r.raw("status.json", "nodes, cables, transfers, instances, models", r.hide.json(toStateJSON(state)))

	check, err := within(ctx, func(ctx context.Context) (*tbv1.CheckResponse, error) {
		return c.diagnosis.Check(ctx, &tbv1.CheckRequest{})
	})
	if err != nil {
		r.problem("doctor", err)
	} else {
		r.raw("doctor.json", "findings", r.hide.json(doctorJSON{mapped(check.GetFindings(), toFindingJSON), mapped(check.GetFailures(), toFailureJSON)}))
	}
	changes, err := within(ctx, func(ctx context.Context) (*tbv1.ChangesResponse, error) {
		return c.node.Changes(ctx, &tbv1.ChangesRequest{})
	})
	if err != nil {
		r.problem("changes on the machine", err)
	} else {
		r.text("changes.txt", "what the agent changed here, or would",
			"applied:\n"+strings.Join(changes.GetApplied(), "\n")+"\n\nwanted, but not permitted:\n"+strings.Join(changes.GetCommands(), "\n")+"\n")
	}
	for _, i := range state.GetInstances() {
		r.logs(ctx, fmt.Sprintf("instance-%s.log", fileWord(i.GetName())), "what its ranks wrote last, prompts left out", func(ctx context.Context) (func() (*tbv1.LogLine, error), error) {
			s, err := c.instance.Logs(ctx, &tbv1.InstanceLogsRequest{Instance: i.GetId()})
			if err != nil {
				return nil, err
			}
			return func() (*tbv1.LogLine, error) { v, err := s.Recv(); return v.GetLine(), err }, nil
		})
	}
}

func (r *reporter) agentLog(ctx context.Context, c *client) {
	r.logs(ctx, "agent.log", "the agent's log of the last day", func(ctx context.Context) (func() (*tbv1.LogLine, error), error) {
		s, err := c.node.Logs(ctx, &tbv1.NodeServiceLogsRequest{Since: timestamppb.New(r.o.now().Add(-reportLogSpan))})
		if err != nil {
			return nil, err
		}
		return func() (*tbv1.LogLine, error) { v, err := s.Recv(); return v.GetLine(), err }, nil
	})
}

// logs adds the end of a log.
func (r *reporter) logs(ctx context.Context, name, meaning string, open func(context.Context) (func() (*tbv1.LogLine, error), error)) {
	ctx, cancel := context.WithTimeout(ctx, reportPatience)
	defer cancel()
	next, err := open(ctx)
	var lines []string
	size := 0
	for err == nil {
		var l *tbv1.LogLine
		if l, err = next(); err != nil {
			break
		}
		line := fmt.Sprintf("%s %d@%s %s", l.GetTime().AsTime().UTC().Format(time.RFC3339Nano), l.GetRank(), l.GetNodeName(), r.hide.text(l.GetText()))
		lines = append(lines, line)
		for size += len(line) + 1; size > reportLogBytes; lines = lines[1:] {
			size -= len(lines[0]) + 1
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		r.problem(name, err)
	}
	if len(lines) > 0 {
		r.raw(name, meaning, []byte(strings.Join(lines, "\n")+"\n"))
	}
}

// within calls f with a deadline.
func within[T any](ctx context.Context, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, reportPatience)
	defer cancel()
	return f(ctx)
}

// fileWord returns s as part of a file name.
func fileWord(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_':
			return r
		}
		return '_'
	}, s)
}

// systemVersion returns what /etc/os-release and the kernel say of the system.
func systemVersion() string {
	var out []string
	for _, f := range []string{"/etc/os-release", "/proc/version"} {
		if b, err := os.ReadFile(f); err == nil {
			out = append(out, strings.TrimSpace(string(b)))
		}
	}
	return strings.Join(out, "\n")
}

// writeArchive writes the parts as a tar.gz that only its owner can read. On an
// error nothing is left.
func writeArchive(file, dir string, parts []reportPart, now time.Time) (err error) {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return fault.New(fault.FileIO, "write the archive", err, "choose another place with --file").At(file)
	}
	defer func() {
		if cerr := f.Close(); err == nil && cerr != nil {
			err = fault.New(fault.FileIO, "write the archive", cerr, "free some space, or choose another place with --file").At(file)
		}
		if err != nil {
			_ = os.Remove(file) // the error that counts is the one before
		}
	}()
	zip := gzip.NewWriter(f)
	archive := tar.NewWriter(zip)
	write := func() error {
		for _, p := range parts {
			if err := archive.WriteHeader(&tar.Header{Name: dir + "/" + p.name, Mode: 0o600, Size: int64(len(p.data)), ModTime: now}); err != nil {
				return err
			}
			if _, err := archive.Write(p.data); err != nil {
				return err
			}
		}
		return errors.Join(archive.Close(), zip.Close())
	}
	if err := write(); err != nil {
		return fault.New(fault.FileIO, "write the archive", err, "free some space, or choose another place with --file").At(file)
	}
	return nil
}
