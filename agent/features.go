package agent

import (
	"fmt"
	"slices"
	"strings"

	"tbcluster/api/fault"
	"tbcluster/mesh/identity"
)

// What this version can do that the previous minor one cannot. A node tells the
// others at the beginning of a stream; they do not ask it for what it lacks, and
// say so to whoever wants it.
const (
	// featureForward: nodes pass packets on, and say so in their state.
	featureForward = "forward"
	// featureRanges: who refuses an address says what range is in the way, and
	// claims tell the largest MTU.
	featureRanges = "ranges"
	// featureBench: a link can be measured.
	featureBench = "bench"
)

// features are those of this build. The tests build a program of the previous
// version by -ldflags "-X tbcluster/agent.features=".
var features = featureForward + "," + featureRanges + "," + featureBench

// has reports whether this build can do something.
func has(feature string) bool { return slices.Contains(featureList(), feature) }

func featureList() []string {
	if features == "" {
		return nil
	}
	return strings.Split(features, ",")
}

// methodFeatures are the calls that the previous version does not know.
var methodFeatures = map[string]string{
	"/tbcluster.v1.LinkService/Bench": featureBench,
}

// canAnswer returns a fault if a node's version does not know a call.
func (a *Agent) canAnswer(node, method string) error {
	feature, ok := methodFeatures[method]
	if !ok {
		return nil
	}
	v, ok := a.member.Node(identity.NodeID(node))
	if !ok || !v.Met || slices.Contains(v.Features, feature) {
		return nil // or the call itself says what is wrong
	}
	name := a.nodeName(node)
	f := fault.Newf(fault.Unsupported, fmt.Sprintf("install tbcluster %s on %s", a.opt.Version, name), "ask %s for %s", name, method[strings.LastIndex(method, "/")+1:])
	f.Why = fmt.Sprintf("it runs tbcluster %s, which cannot do that", v.Version)
	return f.At(name)
}
