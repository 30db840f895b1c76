package root

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"

	"github.com/google/renameio/v2"

	"tbcluster/api/fault"
	"tbcluster/host/schema"
	"tbcluster/host/sock"
)

// Resolver finds local users by the system's own means.
type Resolver interface {
	ByUID(ctx context.Context, uid uint32) (User, error)
	ByName(ctx context.Context, name string) (User, error)
}

// people knows as whom somebody acts here: a local asker by his socket, a
// remote one by the file of mappings, which only root's half writes.
type people struct {
	resolve  Resolver
	path     string
	self     uint32   // effective uid of this process
	owners   []string // from the configuration
	founder  uint32   // who installed or started us; 0 for root alone
	peerUID  func(*os.File) (uint32, error)
	guests   *guests // whom to believe; nil for every socket
	canBeAny bool    // whether this process can become any user

	rootWorks bool // Options.RootWorks

	mu   sync.Mutex
	file peopleFile
}

type peopleFile struct {
	Schema   int       `json:"schema"`
	Owners   []string  `json:"owners"`
	Mappings []Mapping `json:"mappings"`
	// Vouched are users for whom root has spoken on its own socket.
	Vouched []string `json:"vouched,omitempty"`
}

const peopleSchema = 1

func (p *people) load() error {
	data, err := os.ReadFile(p.path)
	if errors.Is(err, fs.ErrNotExist) {
		p.file = peopleFile{Schema: peopleSchema}
		return nil
	}
	if err != nil {
		return fault.New(fault.FileIO, "read who may do what", err, "make it readable for root").At(p.path)
	}
	if err := schema.Check(data, peopleSchema, p.path); err != nil {
		return err
	}
	if err := json.Unmarshal(data, &p.file); err != nil {
		return fault.New(fault.FileIO, "read who may do what", err, "remove the file; owners and mappings are then given anew by `tbcluster pair --map`").At(p.path)
	}
	return nil
}

func (p *people) save() error {
	data, err := json.MarshalIndent(p.file, "", "  ")
	if err != nil {
		return err
	}
	return renameio.WriteFile(p.path, append(data, '\n'), 0o600)
}

// local returns the user at the other end of a client's socket.
func (p *people) local(ctx context.Context, socket *os.File) (User, error) {
	if p.guests != nil {
		id, err := sock.ID(socket)
		if err != nil {
			return User{}, fault.New(fault.Denied, "read who asks", err, "")
		}
		if !p.guests.has(id) {
			return User{}, fault.Newf(fault.Denied, "connect anew", "the connection of who asks is none that came by the API socket")
		}
	}
	uid, err := p.peerUID(socket)
	if err != nil {
		return User{}, fault.New(fault.Denied, "read who asks", err, "")
	}
	return p.become(ctx, uid)
}

// become returns the user of that uid, or says why this process cannot act
// for him.
func (p *people) become(ctx context.Context, uid uint32) (User, error) {
	if uid != p.self && !p.canBeAny {
		return User{}, fault.Newf(fault.NoPermission, "ask as the user that the agent runs as, or run the agent as root",
			"act for uid %d: the agent runs as uid %d and cannot become another user", uid, p.self)
	}
	u, err := p.resolve.ByUID(ctx, uid)
	if err != nil {
		return User{}, fault.New(fault.Denied, fmt.Sprintf("act for uid %d: the system does not know that user", uid), err,
			"a user that cannot be resolved is refused rather than run with fewer or other groups")
	}
	return u, nil
}

// remote returns the local user as whom a person of another node acts here.
func (p *people) remote(ctx context.Context, r Remote) (User, error) {
	p.mu.Lock()
	local, found := "", false
	for _, m := range p.file.Mappings {
		if m.Node == r.Node && m.Remote == r.Name {
			local, found = m.Local, true
			break
		}
	}
	if !found && r.Paired {
		for _, m := range p.file.Mappings {
			if m.Node == "*" {
				local, found = m.Local, true
			}
		}
	}
	p.mu.Unlock()
	if !found {
		return User{}, fault.Newf(fault.UserUnmapped,
			fmt.Sprintf("on this node run: tbcluster pair --map NODE/%s=LOCALUSER, with the asking node's name", r.Name),
			"user %s of that node is mapped to no user here", r.Name).With("user", r.Name)
	}
	u, err := p.resolve.ByName(ctx, local)
	if err != nil {
		return User{}, fault.New(fault.Denied, fmt.Sprintf("user %s acts here as %s, whom the system does not know", r.Name, local), err,
			fmt.Sprintf("map him again: tbcluster pair --map NODE/%s=LOCALUSER", r.Name))
	}
	return p.become(ctx, u.UID)
}

// owner reports whether the user at the other end may change things here.
func (p *people) owner(u User) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return u.UID == 0 || u.UID == p.self && p.self != 0 || p.founder != 0 && u.UID == p.founder ||
		slices.Contains(p.owners, u.Name) || slices.Contains(p.file.Owners, u.Name)
}

// setMapping records a mapping, or takes it back with an empty local name.
// Root is nobody's default unless he is named by root.
func (p *people) setMapping(ctx context.Context, by User, m Mapping) error {
	if !p.owner(by) {
		return fault.Newf(fault.Denied, "ask an owner or root", "%s may not map users here", by.Name)
	}
	if m.Local != "" {
		u, err := p.resolve.ByName(ctx, m.Local)
		if err != nil {
			return fault.New(fault.Usage, fmt.Sprintf("map to %s: the system does not know that user", m.Local), err, "name a local user")
		}
		if u.UID != by.UID && by.UID != 0 && by.UID != p.self {
			return fault.Newf(fault.Denied, "ask root to do it", "%s may map people of other nodes to himself only, not to %s", by.Name, m.Local)
		}
		if by.UID == 0 && !p.rootMayMap(u) {
			return fault.Newf(fault.Denied, fmt.Sprintf("as root run the tbcluster command for it (pair --as %[1]s, pair --map NODE/USER=%[1]s), which asks the root half itself; or put %[1]s into owners in the configuration", m.Local),
				"root has not said itself that people of other nodes may act as %s", m.Local)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.file.Mappings = slices.DeleteFunc(p.file.Mappings, func(have Mapping) bool { return have.Node == m.Node && have.Remote == m.Remote })
	if m.Local != "" {
		p.file.Mappings = append(p.file.Mappings, m)
		if m.Node == "*" && !slices.Contains(p.file.Owners, m.Local) {
			p.file.Owners = append(p.file.Owners, m.Local)
		}
	}
	return p.save()
}

func (p *people) mappings() []Mapping {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.file.Mappings)
}
