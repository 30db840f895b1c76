package supervise

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
	"tbcluster/host"
	"tbcluster/instance/spec"
)

// Config is what a Manager needs.
type Config struct {
	NodeID string
	// Dir is where records are kept: owned/ in it.
	Dir      string
	Adapters []spec.Adapter
	Local    *LocalRanks
	Nodes    Nodes
	Copier   Copier
	// Activity may be nil.
	Activity Activity
	// NameTaken tells whether another node owns an instance of that name; may be
	// nil.
	NameTaken func(name string) bool
	// Change is told each new state of an instance, in order for each instance;
	// Removed when its record is gone. They must not block, and may call List and
	// Get only. Both may be nil.
	Change  func(Instance)
	Removed func(instanceID string)
	Times   Times
	Log     *slog.Logger
}

// Manager owns the instances whose rank 0 is on this node. It must be closed;
// instances live on.
type Manager struct {
	c      Config
	store  store
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	placing sync.Mutex // one Place at a time: names and request IDs
	mu      sync.Mutex
	all     map[string]*instance
}

// NewManager reads the records in c.Dir and takes up the instances that still
// run. Records that cannot be read are in the error; the Manager works without
// them.
func NewManager(c Config) (*Manager, error) {
	c.Times = c.Times.withDefaults()
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Change == nil {
		c.Change = func(Instance) {}
	}
	if c.Removed == nil {
		c.Removed = func(string) {}
	}
	st, err := newStore(filepath.Join(c.Dir, "owned"))
	if err != nil {
		return nil, err
	}
	m := &Manager{c: c, store: st, all: map[string]*instance{}}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	err = st.load(func(id string, data []byte) error {
		var rec record
		if err := json.Unmarshal(data, &rec); err != nil {
			return err
		}
		if rec.ID != id || m.adapter(rec.Request.Engine) == nil {
			return fmt.Errorf("it is of %q with engine %q", rec.ID, rec.Request.Engine)
		}
		if rec.State == Ready {
			rec.State, rec.Reason, rec.Since = Degraded, "its agent was started again and has not checked it yet", time.Now()
		}
		m.all[id] = newInstance(m, rec)
		return nil
	})
	c.Local.setClaims(m.Claims, func(id string) bool { return m.all[id] != nil })
	for _, i := range m.all {
		if !i.rec.State.Over() || len(i.rec.Unreleased) > 0 {
			m.wg.Go(func() { i.resume(m.ctx) })
		}
	}
	return m, err
}

// Close stops supervising. Instances are left alone.
func (m *Manager) Close() {
	m.cancel()
	m.wg.Wait()
}

func (m *Manager) adapter(name string) spec.Adapter {
	for _, a := range m.c.Adapters {
		if a.Name() == name {
			return a
		}
	}
	return nil
}

// Claims reports whether this node owns an instance and has not ended it.
func (m *Manager) Claims(id string) bool {
	m.mu.Lock()
	i := m.all[id]
	m.mu.Unlock()
	return i != nil && !i.view().State.Over()
}

// List returns the instances of this node by name.
func (m *Manager) List() []Instance {
	m.mu.Lock()
	all := make([]*instance, 0, len(m.all))
	for _, i := range m.all {
		all = append(all, i)
	}
	m.mu.Unlock()
	out := make([]Instance, 0, len(all))
	for _, i := range all {
		out = append(out, i.view())
	}
	slices.SortFunc(out, func(a, b Instance) int { return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.ID, b.ID)) })
	return out
}

// Get returns the instance of that name, ID or beginning of an ID. Faults:
// InstanceUnknown, InstanceAmbiguous.
func (m *Manager) Get(name string) (Instance, error) {
	return Find(name, m.List())
}

// leastID is how much of an ID must be given.
const leastID = 4

// Find returns the instance that a person means among those of the cluster.
func Find(name string, all []Instance) (Instance, error) {
	tests := []func(i Instance) bool{
		func(i Instance) bool { return i.ID == name },
		func(i Instance) bool { return i.Name == name },
		func(i Instance) bool { return len(name) >= leastID && strings.HasPrefix(i.ID, name) },
	}
	for _, fits := range tests {
		var hits []Instance
		for _, i := range all {
			if fits(i) {
				hits = append(hits, i)
			}
		}
		switch len(hits) {
		case 0:
		case 1:
			return hits[0], nil
		default:
			var ids []string
			for _, i := range hits {
				ids = append(ids, i.ID)
			}
			return Instance{}, &fault.Fault{Reason: fault.InstanceAmbiguous, What: fmt.Sprintf("several instances fit %q", name), Why: strings.Join(ids, ", "), Fix: "name one by its ID"}
		}
	}
	return Instance{}, fault.Newf(fault.InstanceUnknown, "`tbcluster ps` lists them", "there is no instance %q", name)
}

// Place starts an instance and returns it as it stands: its ports, memory and
// files have been checked on every node unless the model must be copied first,
// and nothing is left behind when that failed. The rest is told by Change. The
// same RequestID again returns the same instance. who.Socket is not used after
// Place has returned: it is duplicated where that is needed.
func (m *Manager) Place(ctx context.Context, who host.Asker, r PlaceRequest) (Instance, error) {
	m.placing.Lock()
	defer m.placing.Unlock()
	if r.RequestID != "" {
		for _, i := range m.List() {
			if i.RequestID == r.RequestID {
				return i, nil
			}
		}
	}
	a := m.adapter(r.Engine)
	if a == nil {
		return Instance{}, fault.Newf(fault.Unsupported, "choose another", "engine %q is not known", r.Engine)
	}
	if len(r.Ranks) == 0 || r.Ranks[0].NodeID != m.c.NodeID {
		return Instance{}, fault.Newf(fault.Internal, "", "a placement whose rank 0 is not on this node")
	}
	name, err := m.name(r)
	if err != nil {
		return Instance{}, err
	}
	r.Name = name
	r.Ranks = slices.Clone(r.Ranks)
	if r.Context <= 0 {
		return Instance{}, fault.Newf(fault.Internal, "", "a placement of %s has no context", r.Model.Name)
	}
	if len(r.ServedNames) == 0 {
		r.ServedNames = []string{r.Model.Name}
	}
	rec := record{ID: newID(), Request: r, Person: personOf(who), Secret: newSecret(), State: Planned, Created: time.Now(), Since: time.Now()}
	i := newInstance(m, rec)
	if _, err := a.Describe(i.specRequest()); err != nil {
		return Instance{}, err
	}
	kept, err := keep(who)
	if err != nil {
		return Instance{}, err
	}
	copying := slices.ContainsFunc(r.Ranks, func(p PlacedRank) bool { return p.MustCopy })
	if !copying {
		if err := i.prepare(ctx, kept.asker); err != nil {
			kept.release()
			return Instance{}, err
		}
	}
	if err := m.store.save(rec.ID, i.rec); err != nil {
		i.releaseAll(context.WithoutCancel(ctx), false)
		kept.release()
		return Instance{}, fault.New(fault.FileIO, "keep the record of instance "+name, err, "free some space where the agent keeps its state").At(m.c.Nodes.Name(m.c.NodeID))
	}
	m.mu.Lock()
	m.all[rec.ID] = i
	m.mu.Unlock()
	i.notify()
	m.wg.Go(func() {
		defer kept.release()
		i.launch(m.ctx, kept)
	})
	return i.view(), nil
}

var nameForm = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
var notInName = regexp.MustCompile(`[^a-z0-9._-]+`)

// name returns the name of a new instance: the given one, or one made from the
// model's that is free.
func (m *Manager) name(r PlaceRequest) (string, error) {
	if r.Name != "" {
		if !nameForm.MatchString(r.Name) {
			return "", fault.Newf(fault.Usage, "use up to 63 of a–z, 0–9, '.', '_' and '-', a letter or digit first", "%q cannot be the name of an instance", r.Name).With("field", "name")
		}
		over, taken := m.taken(r.Name)
		if taken {
			return "", fault.Newf(fault.InstanceExists, fmt.Sprintf("choose another name, or `tbcluster stop %s` first", r.Name), "there is an instance %q", r.Name)
		}
		for _, id := range over { // what has ended makes room
			if err := m.remove(id); err != nil {
				return "", err
			}
		}
		return r.Name, nil
	}
	base := r.Model.Name
	if i := strings.LastIndexByte(base, '/'); i >= 0 {
		base = base[i+1:]
	}
	base = strings.Trim(notInName.ReplaceAllString(strings.ToLower(base), "-"), "-._")
	if base = base[:min(len(base), 56)]; base == "" {
		base = "instance"
	}
	for n := 1; ; n++ {
		name := base
		if n > 1 {
			name = fmt.Sprintf("%s-%d", base, n)
		}
		if over, taken := m.taken(name); !taken && len(over) == 0 {
			return name, nil
		}
	}
}

// taken reports whether a name is in use, and which instances of that name
// have ended.
func (m *Manager) taken(name string) (over []string, taken bool) {
	for _, i := range m.List() {
		if i.Name != name {
			continue
		}
		if !i.State.Over() {
			return nil, true
		}
		over = append(over, i.ID)
	}
	return over, m.c.NameTaken != nil && m.c.NameTaken(name)
}

func newID() string {
	var b [8]byte
	rand.Read(b[:])
	return strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))[:12]
}

func newSecret() string {
	var b [24]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Stop ends an instance and returns it as it stands: stopping, or ended before.
// With remove its record and logs go too once it has ended. Stopping it again
// is no error.
func (m *Manager) Stop(_ context.Context, name string, remove bool) (Instance, error) {
	v, err := m.Get(name)
	if err != nil {
		return Instance{}, err
	}
	m.mu.Lock()
	i := m.all[v.ID]
	m.mu.Unlock()
	if i == nil {
		return v, nil
	}
	if i.askStop(remove) {
		return i.view(), nil
	}
	if !remove {
		return i.view(), nil
	}
	return i.view(), m.remove(v.ID)
}

// remove deletes the record and logs of an instance that has ended.
func (m *Manager) remove(id string) error {
	m.mu.Lock()
	i := m.all[id]
	m.mu.Unlock()
	if i == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(m.ctx, m.c.Times.Request)
	defer cancel()
	// A node that cannot be asked keeps its logs until it learns from us that
	// nobody claims the instance.
	err := i.releaseAll(ctx, true)
	if err != nil && !fault.Is(err, fault.NodeDown) && !fault.Is(err, fault.Timeout) {
		return err
	}
	if err := m.store.remove(id); err != nil {
		return fault.New(fault.FileIO, "remove the record of instance "+i.view().Name, err, "")
	}
	m.mu.Lock()
	delete(m.all, id)
	m.mu.Unlock()
	m.c.Removed(id)
	return nil
}

// LinkDown tells that a cable carries nothing any more: instances of which a
// rank is reached by it are ended. why is for people.
func (m *Manager) LinkDown(linkID, why string) {
	m.c.Local.Link(linkID, false)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, i := range m.all {
		i.tellLink(linkID, why)
	}
}

// LinkUp tells that a cable carries again.
func (m *Manager) LinkUp(linkID string) { m.c.Local.Link(linkID, true) }

// record is what is on disk of an instance.
type record struct {
	ID         string             `json:"id"`
	Request    PlaceRequest       `json:"request"`
	Person     person             `json:"person"`
	Secret     string             `json:"secret"`
	State      State              `json:"state"`
	Reason     string             `json:"reason"`
	FailReason fault.Reason       `json:"fail_reason"`
	Fix        string             `json:"fix"`
	Created    time.Time          `json:"created"`
	Since      time.Time          `json:"since"`
	Ranks      []spec.Rank        `json:"ranks"`    // with ports, once granted
	Statuses   []RankStatus       `json:"statuses"` // last known
	Links      map[int]([]string) `json:"links"`    // by rank
	TokensPerS float64            `json:"tokens_per_second"`
	// Typical is how long a completion of one token takes, within a factor of two.
	Typical     time.Duration `json:"typical_ns,omitempty"`
	StopAsked   bool          `json:"stop_asked"`
	RemoveAsked bool          `json:"remove_asked"`
	// Unreleased are nodes that could not be asked yet to end their ranks.
	Unreleased []string `json:"unreleased,omitempty"`
}

// settle calls ended what has been released on its node.
func (r *record) settle() {
	for k := range r.Statuses {
		if s := &r.Statuses[k]; s.State != RankWaiting {
			s.State, s.PID = RankExited, 0
		}
	}
}

// keptAsker is an Asker whose socket lives as long as we want.
type keptAsker struct {
	asker   host.Asker
	release func()
}

func keep(who host.Asker) (keptAsker, error) {
	if who.Socket == nil {
		return keptAsker{who, func() {}}, nil
	}
	f, err := dup(who.Socket)
	if err != nil {
		return keptAsker{}, fault.New(fault.Internal, "keep the connection of who asked", err, "")
	}
	who.Socket = f
	return keptAsker{who, sync.OnceFunc(func() { _ = f.Close() })}, nil
}
