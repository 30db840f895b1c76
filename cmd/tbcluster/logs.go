package main

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type logsOptions struct {
	g        *globals
	instance string
	agent    bool
	rank     int
	follow   bool
	since    string
	now      func() time.Time
}

func newLogsCommand(g *globals) *cobra.Command {
	o := &logsOptions{g: g, now: time.Now}
	cmd := &cobra.Command{
		Use:     "logs INSTANCE | logs --agent",
		Short:   "Show what an instance's ranks, or the agent, wrote",
		GroupID: groupHelp,
		Long: `Shows the logs of an instance's ranks from all its nodes, each line with its
rank and node, or with --agent the log of the agent that answers. Without
--since: the last 200 lines. The logs of an instance that has ended stay until
it is removed.` + exitHelp(fault.InstanceUnknown, fault.InstanceAmbiguous, fault.NodeDown, fault.Denied, fault.Interrupted),
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: complete(g, 1, instanceNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				o.instance = args[0]
			}
			return runLogs(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.agent, "agent", false, "the agent's own log")
	f.IntVar(&o.rank, "rank", -1, "only this rank")
	f.BoolVarP(&o.follow, "follow", "f", false, "go on as lines appear, until you stop it")
	f.StringVar(&o.since, "since", "", "only lines since then: a span like 10m or 2h, or a time like 2026-05-04T12:00:00Z")
	return cmd
}

// parseSince reads the value of --since: a span back from now, or a time.
func parseSince(s string, now time.Time) (*timestamppb.Timestamp, error) {
	if s == "" {
		return nil, nil
	}
	if d, err := time.ParseDuration(s); err == nil {
		if d < 0 {
			d = -d
		}
		return timestamppb.New(now.Add(-d)), nil
	}
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04:05", "2006-01-02 15:04:05", "2006-01-02T15:04", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, s, now.Location()); err == nil {
			return timestamppb.New(t), nil
		}
	}
	return nil, fault.Newf(fault.Usage, "give a span like 10m or 2h, or a time like 2026-05-04T12:00:00Z", "--since %s is neither a span nor a time", s)
}

func runLogs(ctx context.Context, o *logsOptions) error {
	if o.agent == (o.instance != "") {
		return fault.Newf(fault.Usage, "`tbcluster ps --all` lists the instances", "name one instance, or say --agent")
	}
	if o.agent && o.rank >= 0 {
		return fault.Newf(fault.Usage, "leave --rank out", "an agent has no ranks")
	}
	since, err := parseSince(o.since, o.now())
	if err != nil {
		return err
	}
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	next, err := openLogs(ctx, c, o, since)
	if err != nil {
		return err
	}
	for {
		line, err := next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		writeLogLine(o, line)
	}
}

// openLogs returns what gives one line after the other.
func openLogs(ctx context.Context, c *client, o *logsOptions, since *timestamppb.Timestamp) (func() (*tbv1.LogLine, error), error) {
	if o.agent {
		s, err := c.node.Logs(ctx, &tbv1.NodeServiceLogsRequest{Follow: o.follow, Since: since})
		if err != nil {
			return nil, err
		}
		return func() (*tbv1.LogLine, error) { r, err := s.Recv(); return r.GetLine(), err }, nil
	}
	req := &tbv1.InstanceLogsRequest{Instance: o.instance, Follow: o.follow, Since: since}
	if o.rank >= 0 {
		r := uint32(o.rank)
		req.Rank = &r
	}
	s, err := c.instance.Logs(ctx, req)
	if err != nil {
		return nil, err
	}
	return func() (*tbv1.LogLine, error) { r, err := s.Recv(); return r.GetLine(), err }, nil
}

func writeLogLine(o *logsOptions, l *tbv1.LogLine) {
	if o.g.json() {
		o.g.printf("%s\n", compactJSON(toLogLineJSON(l)))
		return
	}
	stamp := "-"
	if l.GetTime() != nil {
		stamp = l.GetTime().AsTime().In(o.now().Location()).Format("2006-01-02 15:04:05.000")
	}
	text := plain(strings.TrimRight(l.GetText(), "\r\n"))
	if o.agent {
		o.g.printf("%s %s\n", stamp, text)
		return
	}
	o.g.printf("%s %d@%s %s\n", stamp, l.GetRank(), plain(l.GetNodeName()), text)
}
