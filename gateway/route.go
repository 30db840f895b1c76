package gateway

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// answers reports whether an instance is asked for by that name.
func (i *Instance) answers(model string) bool {
	return model != "" && (slices.Contains(i.ServedNames, model) || i.Name == model || i.ModelID == model)
}

// ended reports whether nothing is to be expected of an instance any more.
func (i *Instance) ended() bool {
	return i.State == "stopping" || i.State == "stopped" || i.State == "failed"
}

// coming are the instances of other nodes that serve a model and are not ready yet
// as far as is known here: news of another node are a moment old, and who has just
// been told there that one is ready may ask here. Their node knows.
func coming(all []Instance, model, self string) (fit []Instance) {
	for _, in := range all {
		if in.answers(model) && !in.Ready && !in.ended() && in.State != "degraded" && in.OwnerNode != self {
			fit = append(fit, in)
		}
	}
	return fit
}

// notReady is the code of the problem that a model is served, but not yet.
const notReady = "instance_not_ready"

// served is the names under which models are ready, sorted.
func served(all []Instance) (names []string) {
	for i := range all {
		if all[i].Ready {
			names = append(names, all[i].ServedNames...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// candidates is the instances that serve a model and are ready, or why there
// is none.
func candidates(all []Instance, model string) ([]Instance, *problem) {
	if model == "" {
		return nil, &problem{status: http.StatusBadRequest, kind: badRequest, param: "model", code: "model_missing",
			message: "\"model\" is missing; " + servedText(all)}
	}
	var fit []Instance
	var why []string
	for i := range all {
		in := &all[i]
		if !in.answers(model) {
			continue
		}
		if in.Ready {
			fit = append(fit, *in)
			continue
		}
		s := fmt.Sprintf("instance %s on %s is %s", in.Name, nodeName(in), in.State)
		if in.Reason != "" {
			s += ": " + in.Reason
		}
		why = append(why, s)
	}
	switch {
	case len(fit) > 0:
		return fit, nil
	case len(why) > 0:
		return nil, &problem{status: http.StatusServiceUnavailable, kind: unavailable, param: "model", code: notReady, retry: 2,
			message: fmt.Sprintf("the model %q is not ready: %s", model, strings.Join(why, "; "))}
	}
	return nil, &problem{status: http.StatusNotFound, kind: badRequest, param: "model", code: "model_not_found",
		message: fmt.Sprintf("no instance serves the model %q; %s", model, servedText(all))}
}

func servedText(all []Instance) string {
	names := served(all)
	if len(names) == 0 {
		return "nothing is served just now: `tbcluster place MODEL` starts an instance"
	}
	const most = 20
	more := ""
	if len(names) > most {
		more = fmt.Sprintf(" and %d more", len(names)-most)
		names = names[:most]
	}
	return "served are: " + strings.Join(names, ", ") + more
}

func nodeName(i *Instance) string {
	if i.OwnerName != "" {
		return i.OwnerName
	}
	return i.OwnerNode
}

// take picks the instance with the fewest requests under way, among equals the
// one that was taken longest ago, and counts the request as its. Done has to be
// called when its answer has ended.
func (g *Gateway) take(fit []Instance, without map[string]bool) (in *Instance, done func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var best *load
	for i := range fit {
		c := &fit[i]
		if without[c.ID] {
			continue
		}
		l := g.loads[c.ID]
		if l == nil {
			l = &load{}
			g.loads[c.ID] = l
		}
		if best == nil || l.open < best.open || (l.open == best.open && l.last < best.last) {
			in, best = c, l
		}
	}
	if in == nil {
		return nil, nil
	}
	g.turn++
	best.open++
	best.last = g.turn
	id := in.ID
	g.o.Activity(id, 1)
	return in, func() {
		g.mu.Lock()
		best.open--
		g.mu.Unlock()
		g.o.Activity(id, -1)
	}
}

// forget drops the counters of instances that are no more.
func (g *Gateway) forget(all []Instance) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.loads) <= 2*len(all)+16 {
		return
	}
	for id, l := range g.loads {
		if l.open == 0 && !slices.ContainsFunc(all, func(i Instance) bool { return i.ID == id }) {
			delete(g.loads, id)
		}
	}
}
