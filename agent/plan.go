package agent

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"tbcluster/api/fault"
	v1 "tbcluster/api/tbcluster/v1"
	"tbcluster/instance/catalogue"
	"tbcluster/instance/plan"
	"tbcluster/instance/spec"
)

// planned is a plan with what it rests on.
type planned struct {
	plan  plan.Plan
	model *v1.Model
	spec  spec.Model
}

// makePlan works out where a model fits, from the cluster's state alone: any
// node comes to the same plan from the same state.
func (a *Agent) makePlan(p *v1.Placement) (planned, error) {
	if p == nil {
		return planned{}, fault.Newf(fault.Usage, "name a model", "nothing is asked for").With("field", "placement")
	}
	m, err := a.findModel(p.Model)
	if err != nil {
		return planned{}, err
	}
	full, err := a.specOf(m)
	if err != nil {
		return planned{}, err
	}
	s, _ := a.board.get()
	in := plan.Input{Model: full, Request: plan.Request{Engine: p.Engine, MinRanks: int(p.MinRanks), Context: int(p.ContextTokens),
		Insecure: p.InsecureRanks, CopyMissing: p.CopyMissing}}
	for _, name := range p.Nodes {
		n, err := a.findNode(name)
		if err != nil {
			return planned{}, err
		}
		in.Request.Nodes = append(in.Request.Nodes, n.Id)
	}
	var engines []string
	for _, ad := range a.ranks.adapters {
		t := ad.Traits()
		in.Engines, engines = append(in.Engines, t), append(engines, t.Name)
	}
	if p.Engine != "" && !slices.Contains(engines, p.Engine) {
		return planned{}, fault.Newf(fault.Usage, "the engines are "+strings.Join(engines, ", "), "no engine is called %q", p.Engine).With("field", "engine")
	}
	for _, c := range m.Copies {
		in.Copies = append(in.Copies, spec.Copy{NodeID: c.NodeId, Path: c.Path, Tree: c.Tree, Complete: c.Complete, Reason: c.Reason})
	}
	for _, n := range s.Nodes {
		pn := plan.Node{ID: n.Id, Name: n.Name, Up: n.State == v1.NodeState_NODE_STATE_UP, Reason: n.Reason,
			MemoryBudget: n.Memory.GetBudgetBytes(), MemoryTotal: n.Memory.GetTotalBytes(), CanClose: n.Privileged}
		for _, e := range n.Engines {
			pn.Engines = append(pn.Engines, spec.Engine{Name: e.Name, Available: e.Available, Version: e.Version, Path: e.Path, Reason: e.Reason})
		}
		in.Nodes = append(in.Nodes, pn)
	}
	for _, l := range s.Links {
		if l.A == nil || l.B == nil || l.B.NodeId == "" {
			continue
		}
		in.Links = append(in.Links, plan.Link{ID: l.Id, A: l.A.NodeId, B: l.B.NodeId, Proven: l.State == v1.LinkState_LINK_STATE_PROVEN, Gbps: l.NegotiatedGbps})
	}
	return planned{plan.Make(in), m, full}, nil
}

// planNow is makePlan; but before a model is said to be missing, the nodes look
// at their disks again: what was copied or downloaded a moment ago is not on
// everybody's list yet.
func (a *Agent) planNow(ctx context.Context, p *v1.Placement) (planned, error) {
	out, err := a.makePlan(p)
	if lacking := fault.Is(err, fault.ModelUnknown) || fault.Is(err, fault.ModelBroken) || err == nil && out.plan.Choice == nil; !lacking {
		return out, err
	}
	a.lookForModels(ctx)
	return a.makePlan(p)
}

// lookForModels has every node that is up look at its disk, and waits until
// this node knows what they found, but not for long.
func (a *Agent) lookForModels(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	s, _ := a.board.get()
	var all sync.WaitGroup
	for _, n := range s.Nodes {
		if n.State != v1.NodeState_NODE_STATE_UP {
			continue
		}
		all.Go(func() {
			r := &v1.ScanResponse{}
			var err error
			if n.Id == a.id() {
				err = a.models.scan(ctx)
				r.Models = a.models.own()
			} else {
				err = a.ask(ctx, n.Id, "/tbcluster.v1.ModelService/Scan", &v1.ScanRequest{}, r)
			}
			if err == nil {
				err = a.models.shown(ctx, n.Id, func() []*v1.Model { return r.Models })
			}
			if err != nil { // the plan rests on what is known, then
				a.log.Debug("look for models", "node", n.Name, "error", err)
			}
		})
	}
	all.Wait()
}

// specOf returns what plans need to know of a model, from any node that has it.
func (a *Agent) specOf(m *v1.Model) (spec.Model, error) {
	if f, ok := a.models.local(m.Id); ok && f.Copy.Complete {
		f.Model.Name = m.Name
		return f.Model, nil
	}
	known := a.knownNow()
	for _, c := range m.Copies {
		for id, raw := range known[c.NodeId].models.GetSpecs() {
			if id != m.Id && !provisional(id) && !provisional(m.Id) {
				continue
			}
			var out spec.Model
			if json.Unmarshal(raw, &out) == nil && out.Name == m.Name && out.SizeBytes == m.SizeBytes {
				return out, nil
			}
		}
	}
	reason := "no node says what is in it"
	for _, c := range m.Copies {
		if c.Reason != "" {
			reason = c.NodeName + ": " + c.Reason
		}
	}
	f := fault.Newf(fault.ModelBroken, "copy or download it anew", "%s cannot be used", m.Name).With("model", m.Name)
	f.Why = reason
	return spec.Model{}, f
}

// specs are this node's models as plans need them, by ID.
func (m *models) specs() map[string][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string][]byte{}
	for _, f := range m.found {
		if raw, err := json.Marshal(f.Model); err == nil && f.Copy.Complete {
			out[f.Model.ID] = raw
		}
	}
	return out
}

// instanceServer places models on engines.
type instanceServer struct {
	v1.UnimplementedInstanceServiceServer
	a *Agent
}

// Plan says what Place would do.
func (s *instanceServer) Plan(ctx context.Context, q *v1.PlanRequest) (*v1.PlanResponse, error) {
	p, err := s.a.planNow(ctx, q.Placement)
	if err != nil {
		return nil, err
	}
	out := &v1.PlanResponse{PlanId: p.plan.ID, Model: p.model}
	if p.plan.Choice != nil {
		out.Choice = optionView(*p.plan.Choice)
	}
	for _, o := range p.plan.Alternatives {
		out.Alternatives = append(out.Alternatives, optionView(o))
	}
	return out, nil
}

func optionView(o plan.Option) *v1.PlanOption {
	out := &v1.PlanOption{Engine: o.Engine, Feasible: o.Feasible, Reason: o.Reason, Score: o.Score}
	for _, r := range o.Ranks {
		out.Ranks = append(out.Ranks, &v1.PlanRank{NodeId: r.NodeID, NodeName: r.NodeName, Role: r.Role, Layers: uint32(r.Layers),
			NeedBytes: r.NeedBytes, BudgetBytes: r.BudgetBytes, MustCopy: r.MustCopy})
	}
	return out
}

// servedNames are the names by which the gateway finds an instance of a model.
func servedNames(m *v1.Model) []string {
	names := []string{m.Name}
	for _, n := range catalogue.Names(catalogue.Model{Model: spec.Model{Name: m.Name, Quant: m.Quant}}) {
		if !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names
}
