package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/durationpb"

	"tbcluster/agent/root"
	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

type pairOptions struct {
	g              *globals
	code           string
	address        string
	role           string
	list           bool
	revoke         string
	withIntroduced bool
	yes            bool
	as             string
	mapping        string
	newIdentity    bool
	client         string
	out            string
	// given are the flags that stand on the command line, with whatever value,
	// and "" if a code does.
	given map[string]bool
}

func newPairCommand(g *globals) *cobra.Command {
	o := &pairOptions{g: g}
	cmd := &cobra.Command{
		Use:     "pair [CODE]",
		Short:   "Let another node into the cluster, or put one out",
		GroupID: groupCluster,
		Long: `Without a code: shows one and waits until the other node has used it. On the
other node run "tbcluster pair CODE" within two minutes. A code is used once;
after three wrong tries it is void. Nodes that are in the cluster already learn
of the new one by themselves, so a third node pairs once, with any of them.

Whoever pairs on the other side acts on this node as the user who pairs here, or
as the one that --as names; root has to be named. Every other user of the other
node is refused until --map says as whom he acts.

--list shows who is in and who let whom in. --revoke puts a node or client out
for good: its connections end, and every node learns of it. Its machine comes back
only as a new node: run --new-identity there, which takes it out of every cluster,
and pair it again. A machine that lost its state is a new node already; --revoke
takes the old one off the lists.

--client NAME makes a file with which a program on a machine that is no node, a
laptop say, uses the gRPC API of this node over the network, as docs/clients.md
shows. Whoever has the file has its role: viewer, unless --role says otherwise.` + exitHelpAnd(map[int]string{fault.ExitPrecondition: "the name is taken; this node is in another cluster, or in use"}, fault.NoAgent, fault.PairingFailed, fault.NotPaired, fault.Denied, fault.UserUnmapped, fault.NodeUnknown, fault.NodeAmbiguous, fault.NodeInUse, fault.NodeDown, fault.Connection, fault.FileIO, fault.Timeout, fault.Interrupted),
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.given = map[string]bool{}
			cmd.Flags().Visit(func(f *pflag.Flag) { o.given[f.Name] = true })
			if len(args) == 1 {
				o.code, o.given[""] = args[0], true
			}
			return runPair(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.address, "address", "", "where the node with the code is (host or host:port), if it is not found by itself")
	f.StringVar(&o.role, "role", "admin", "what the new node or client may do: viewer, operator or admin (a client: viewer if not given)")
	f.BoolVar(&o.newIdentity, "new-identity", false, "make this machine a new node in no cluster")
	f.StringVar(&o.client, "client", "", "let in a program on another machine by this name, and write what it needs to a file")
	f.StringVarP(&o.out, "out", "O", "", "with --client: the file to write (default NAME.pem); \"-\" is standard output")
	f.StringVar(&o.as, "as", sudoUser(g), "local user as whom the person who pairs on the other side acts here (not given: you)")
	f.StringVar(&o.mapping, "map", "", "NODE/USER=LOCAL: that user of that node acts here as LOCAL; NODE/USER= takes it back")
	f.BoolVar(&o.list, "list", false, "list who is in the cluster and who let whom in")
	f.StringVar(&o.revoke, "revoke", "", "put this node or client out")
	f.BoolVar(&o.withIntroduced, "with-introduced", false, "with --revoke: also every node that it let in")
	f.BoolVarP(&o.yes, "yes", "y", false, "with --revoke and --new-identity: do not ask")
	completeFlag(cmd, "revoke", complete(g, -1, nodeNames))
	completeFlag(cmd, "role", cobra.FixedCompletions([]string{"viewer", "operator", "admin"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// sudoUser is who ran sudo, where somebody did: the person, not root.
func sudoUser(g *globals) string {
	if os.Geteuid() != 0 {
		return ""
	}
	return g.getenv("SUDO_USER")
}

// roles are the words for roles.
var roles = map[string]tbv1.Role{
	"viewer": tbv1.Role_ROLE_VIEWER, "operator": tbv1.Role_ROLE_OPERATOR, "admin": tbv1.Role_ROLE_ADMIN,
}

// pairActions are the flags of which each is something to do of its own; "" is a
// code to use.
var pairActions = []string{"", "list", "revoke", "map", "client", "new-identity"}

// pairValues are the flags that mean nothing without a value, and what it is: a
// script whose variable is empty must not get what it did not ask for, least of
// all a code.
var pairValues = []struct{ flag, value string }{
	{"revoke", "the name or ID of a node or client"}, {"client", "a name for the client"}, {"map", "NODE/USER=LOCAL"},
	{"as", "the name of a local user"}, {"address", "a host"}, {"out", "a file"},
}

// pairBelongs says with which actions a flag means something; "show" is to show
// a code.
var pairBelongs = []struct {
	flag string
	to   []string
	why  string
	fix  string
}{
	{"out", []string{"client"}, "--out belongs to --client", "name the client: --client NAME"},
	{"address", []string{""}, "--address needs a code", "give the code that the other node shows"},
	{"with-introduced", []string{"revoke"}, "--with-introduced belongs to --revoke", "name the node to put out: --revoke NODE --with-introduced"},
	{"yes", []string{"revoke", "new-identity"}, "--yes belongs to --revoke and --new-identity", "leave it out: nothing else asks"},
	{"role", []string{"show", "client"}, "--role belongs to showing a code and to --client", "the node that shows the code says what the new one may do: `tbcluster pair --role viewer` there"},
	{"as", []string{"show", "", "client"}, "--as belongs to pairing and to --client", "leave it out"},
}

// clientName is what the agent takes too: here it is checked before a file is named
// after it.
var clientName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// check refuses a command line that says too much, or says something empty.
func (o *pairOptions) check() error {
	action := "show"
	for _, a := range pairActions {
		switch {
		case !o.given[a]:
		case action != "show":
			return fault.Newf(fault.Usage, "run one after the other", "a code, --list, --revoke, --map, --client and --new-identity do not go together")
		default:
			action = a
		}
	}
	if o.given[""] && o.code == "" {
		return fault.Newf(fault.Usage, "give the code that the other node shows; without one, leave the argument out", "the code is empty")
	}
	for _, v := range pairValues {
		f := map[string]string{"revoke": o.revoke, "client": o.client, "map": o.mapping, "as": o.as, "address": o.address, "out": o.out}[v.flag]
		if o.given[v.flag] && f == "" {
			return fault.Newf(fault.Usage, "give it a value, or leave it out", "--%s needs %s", v.flag, v.value)
		}
	}
	if o.given["client"] && !clientName.MatchString(o.client) {
		shown := o.client
		if len(shown) > 80 {
			shown = shown[:80] + "…"
		}
		return fault.Newf(fault.Usage, "use 1 to 63 of a-z, 0-9 and \"-\"", "%q is no name of a client", shown)
	}
	for _, b := range pairBelongs {
		if o.given[b.flag] && !slices.Contains(b.to, action) {
			return fault.Newf(fault.Usage, b.fix, "%s", b.why)
		}
	}
	for _, f := range []struct {
		flag string
		on   bool
	}{{"list", o.list}, {"new-identity", o.newIdentity}} {
		if o.given[f.flag] && !f.on {
			return fault.Newf(fault.Usage, "leave it out", "--%s=false is no choice", f.flag)
		}
	}
	if _, ok := roles[o.role]; !ok {
		return fault.Newf(fault.Usage, "use viewer, operator or admin", "no role is called %q", o.role)
	}
	return nil
}

func runPair(ctx context.Context, o *pairOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	role := roles[o.role]
	var mapping *tbv1.MapRequest
	if o.mapping != "" {
		var err error
		if mapping, err = parseMapping(o.mapping); err != nil {
			return err
		}
	}
	c, err := connect(ctx, o.g)
	if err != nil {
		return err
	}
	defer c.close()
	switch {
	case mapping != nil:
		return pairMap(ctx, o, c, mapping)
	case o.list:
		return pairList(ctx, o, c)
	case o.revoke != "":
		return pairRevoke(ctx, o, c)
	case o.code != "":
		return pairJoin(ctx, o, c)
	case o.newIdentity:
		return pairNewIdentity(ctx, o, c)
	case o.client != "":
		return pairClient(ctx, o, c, role)
	}
	return pairOpen(ctx, o, c, role)
}

// pairEventJSON is one line of `tbcluster pair -o json`.
type pairEventJSON struct {
	Code         string      `json:"code,omitempty"`
	ExpiresAt    *time.Time  `json:"expires_at,omitempty"`
	WrongTryFrom string      `json:"wrong_try_from,omitempty"`
	Joined       *memberJSON `json:"joined,omitempty"`
}

// pairOpen shows a code and waits until it was used.
func pairOpen(ctx context.Context, o *pairOptions, c *client, role tbv1.Role) error {
	member, err := openCode(ctx, c, role, o.as, func(ev *tbv1.OpenResponse) {
		if o.g.json() {
			out := pairEventJSON{WrongTryFrom: ev.GetWrongTryFrom()}
			if code := ev.GetCode(); code != nil {
				out.Code, out.ExpiresAt = code.GetCode(), timeJSON(code.GetExpiresAt())
			}
			if m := ev.GetJoined(); m != nil {
				j := toMemberJSON(m)
				out.Joined = &j
			}
			o.g.printf("%s\n", compactJSON(out))
			return
		}
		switch {
		case ev.GetCode() != nil:
			o.g.printf("on the other node run:  tbcluster pair %s\n", plain(ev.GetCode().GetCode()))
			if t := ev.GetCode().GetExpiresAt(); t != nil {
				o.g.printf("the code is good once, until %s; Ctrl-C takes it back\n", t.AsTime().Local().Format(time.TimeOnly))
			}
		case ev.GetWrongTryFrom() != "":
			o.g.notef("a wrong code came from %s", plain(ev.GetWrongTryFrom()))
		}
	})
	if err != nil {
		if ctx.Err() != nil {
			return fault.New(fault.Interrupted, "the code was taken back: nobody can use it any more", nil, "")
		}
		return err
	}
	if !o.g.json() {
		o.g.printf("%s is in the cluster (%s)\n", plain(member.GetName()), plain(member.GetNodeId()))
	}
	return nil
}

// openCode opens a code, tells each event, and returns who joined. Whoever does
// acts here as the local user as; empty means the asker.
func openCode(ctx context.Context, c *client, role tbv1.Role, as string, each func(*tbv1.OpenResponse)) (*tbv1.Member, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := vouch(ctx, c, as); err != nil {
		return nil, err
	}
	stream, err := c.pairing.Open(ctx, &tbv1.OpenRequest{Lifetime: durationpb.New(2 * time.Minute), Role: role, LocalUser: as})
	if err != nil {
		return nil, err
	}
	for {
		ev, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, fault.New(fault.PairingFailed, "nobody used the code in time", nil, "run `tbcluster pair` again for a new one")
		}
		if err != nil {
			return nil, err
		}
		each(ev)
		if m := ev.GetJoined(); m != nil {
			return m, nil
		}
	}
}

// joinedJSON is `tbcluster pair CODE -o json`.
type joinedJSON struct {
	Peer    memberJSON   `json:"peer"`
	Members []memberJSON `json:"members"`
}

// vouch has root say to the root half itself that people of other nodes may act
// as a user: it does not take the agent's word for what root wants.
func vouch(ctx context.Context, c *client, local string) error {
	if os.Geteuid() != 0 || local == "" {
		return nil
	}
	return root.Vouch(ctx, filepath.Dir(c.endpoint.path), local)
}

// waitUnsaid is how long a person waits without being told what for.
const waitUnsaid = 2 * time.Second

// waiting says what is waited for once that has lasted, until done is called.
func waiting(g *globals, what string) (done func()) {
	over := make(chan struct{})
	var said sync.WaitGroup
	said.Go(func() {
		select {
		case <-over:
		case <-time.After(waitUnsaid):
			g.notef("%s", what)
		}
	})
	return func() {
		close(over)
		said.Wait()
	}
}

func pairJoin(ctx context.Context, o *pairOptions, c *client) error {
	if err := vouch(ctx, c, o.as); err != nil {
		return err
	}
	what := "looking for the node that shows this code, and pairing with it"
	if o.address != "" {
		what = "pairing with " + o.address
	}
	found := waiting(o.g, what)
	resp, err := c.pairing.Join(ctx, &tbv1.JoinRequest{Code: o.code, Address: o.address, LocalUser: o.as})
	found()
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, joinedJSON{toMemberJSON(resp.GetPeer()), mapped(resp.GetMembers(), toMemberJSON)})
		return nil
	}
	var names []string
	for _, m := range resp.GetMembers() {
		if !m.GetRevoked() {
			names = append(names, plain(m.GetName()))
		}
	}
	o.g.printf("paired with %s (%s)\n", plain(resp.GetPeer().GetName()), plain(resp.GetPeer().GetNodeId()))
	o.g.printf("in the cluster now: %s\n", strings.Join(names, ", "))
	return nil
}

// parseMapping reads "NODE/USER=LOCAL".
func parseMapping(s string) (*tbv1.MapRequest, error) {
	who, local, ok := strings.Cut(s, "=")
	node, user, ok2 := strings.Cut(who, "/")
	if !ok || !ok2 || node == "" || user == "" || strings.ContainsAny(user+local, "/=") {
		return nil, fault.Newf(fault.Usage, "tbcluster pair --map beta/ada=ada", "%q is not of the form NODE/USER=LOCAL", s)
	}
	return &tbv1.MapRequest{Node: node, User: user, LocalUser: local}, nil
}

// unknownNode returns a fault where no node that is in the cluster has that name or
// ID, or one that begins so.
func unknownNode(ctx context.Context, c *client, name string) error {
	resp, err := c.pairing.List(ctx, &tbv1.PairingServiceListRequest{})
	if err != nil {
		return nil // there is something to say already
	}
	var names []string
	for _, m := range resp.GetMembers() {
		switch {
		case m.GetClient() || m.GetRevoked():
		case m.GetName() == name, m.GetNodeId() == name, len(name) >= 4 && strings.HasPrefix(m.GetNodeId(), strings.ToUpper(name)):
			return nil
		default:
			names = append(names, m.GetName())
		}
	}
	return fault.Newf(fault.NodeUnknown, "the nodes are "+strings.Join(names, ", "), "no node is called %q", name).With("node", name)
}

// mappingsJSON is `tbcluster pair --map -o json`.
type mappingsJSON struct {
	Mappings []string `json:"mappings"`
}

func pairMap(ctx context.Context, o *pairOptions, c *client, req *tbv1.MapRequest) error {
	if err := vouch(ctx, c, req.LocalUser); err != nil {
		// The node comes first in what was typed, so it is named first too.
		return cmp.Or(unknownNode(ctx, c, req.Node), err)
	}
	resp, err := c.pairing.Map(ctx, req)
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, mappingsJSON{texts(resp.GetMappings())})
		return nil
	}
	for _, m := range resp.GetMappings() {
		o.g.printf("%s\n", plain(m))
	}
	if len(resp.GetMappings()) == 0 {
		o.g.printf("no user of another node is mapped here\n")
	}
	return nil
}

// membersJSON is `tbcluster pair --list -o json`.
type membersJSON struct {
	Members []memberJSON `json:"members"`
}

func pairList(ctx context.Context, o *pairOptions, c *client) error {
	resp, err := c.pairing.List(ctx, &tbv1.PairingServiceListRequest{})
	if err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, membersJSON{mapped(resp.GetMembers(), toMemberJSON)})
		return nil
	}
	writeMembers(o.g.out, resp.GetMembers())
	return nil
}

// writeMembers prints members with who let them in, by name where it is known.
func writeMembers(w io.Writer, members []*tbv1.Member) {
	names := map[string]string{}
	for _, m := range members {
		names[m.GetNodeId()] = m.GetName()
	}
	t := newTable("NODE", "ROLE", "LET IN BY", "WHEN", "ID")
	for _, m := range members {
		by := m.GetIntroducedBy()
		switch {
		case by == "":
			by = "(founder)"
		case names[by] != "":
			by = names[by]
		}
		when := "-"
		if m.GetIntroducedAt() != nil {
			when = m.GetIntroducedAt().AsTime().Local().Format("2006-01-02 15:04")
		}
		role := roleWord(m.GetRole())
		if m.GetClient() {
			role += " (client)"
		}
		if m.GetRevoked() {
			role = "put out"
		}
		t.add(m.GetName(), role, by, when, m.GetNodeId())
	}
	t.write(w)
}

// revokedJSON is `tbcluster pair --revoke -o json`.
type revokedJSON struct {
	Revoked    []memberJSON `json:"revoked"`
	Introduced []memberJSON `json:"introduced"`
}

func pairRevoke(ctx context.Context, o *pairOptions, c *client) error {
	req := &tbv1.RevokeRequest{Node: o.revoke, WithIntroduced: o.withIntroduced, ValidateOnly: true}
	resp, err := c.pairing.Revoke(ctx, req)
	if err != nil {
		return err
	}
	if len(resp.GetRevoked()) == 0 {
		if o.g.json() {
			writeJSON(o.g.out, revokedJSON{mapped(resp.GetRevoked(), toMemberJSON), mapped(resp.GetIntroduced(), toMemberJSON)})
			return nil
		}
		o.g.printf("%s is out already: there is nobody to put out\n", plain(o.revoke))
		return nil
	}
	if !o.yes {
		fmt.Fprintf(o.g.errOut, "would be put out for good: %s\n", memberNames(resp.GetRevoked()))
		if len(resp.GetIntroduced()) > 0 {
			fmt.Fprintf(o.g.errOut, "let in by it, and staying: %s (--with-introduced puts them out too)\n", memberNames(resp.GetIntroduced()))
		}
		if err := confirm(ctx, o.g, fmt.Sprintf("put out %s?", memberNames(resp.GetRevoked())), "--yes"); err != nil {
			return err
		}
	}
	req.ValidateOnly = false
	if resp, err = c.pairing.Revoke(ctx, req); err != nil {
		return err
	}
	if o.g.json() {
		writeJSON(o.g.out, revokedJSON{mapped(resp.GetRevoked(), toMemberJSON), mapped(resp.GetIntroduced(), toMemberJSON)})
		return nil
	}
	o.g.printf("put out: %s\n", memberNames(resp.GetRevoked()))
	return nil
}

func memberNames(members []*tbv1.Member) string {
	var names []string
	for _, m := range members {
		names = append(names, m.GetName())
	}
	return plain(strings.Join(names, ", "))
}
