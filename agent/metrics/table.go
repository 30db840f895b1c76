package metrics

import (
	"fmt"
	"strings"
)

// Kind is what a metric's number does.
type Kind string

// The kinds.
const (
	Gauge   Kind = "gauge"   // goes up and down
	Counter Kind = "counter" // grows, and begins anew when who counts does
)

// Metric describes one metric.
type Metric struct {
	Name   string
	Kind   Kind
	Labels []string
	Help   string
}

// The names of metrics.
const (
	nodes           = "tbcluster_nodes"
	nodeUp          = "tbcluster_node_up"
	nodeInfo        = "tbcluster_node_info"
	nodeMemory      = "tbcluster_node_memory_bytes"
	nodeAvailable   = "tbcluster_node_memory_available_bytes"
	nodeBudget      = "tbcluster_node_memory_budget_bytes"
	nodeDisk        = "tbcluster_node_disk_free_bytes"
	nodeRTT         = "tbcluster_node_rtt_seconds"
	links           = "tbcluster_links"
	linkProven      = "tbcluster_link_proven"
	linkNegotiated  = "tbcluster_link_negotiated_bits_per_second"
	linkCapable     = "tbcluster_link_capable_bits_per_second"
	linkMeasured    = "tbcluster_link_measured_bytes_per_second"
	linkRTT         = "tbcluster_link_rtt_seconds"
	linkFlaps       = "tbcluster_link_flaps_total"
	linkErrors      = "tbcluster_link_errors_total"
	linkSent        = "tbcluster_link_bytes_total"
	transfers       = "tbcluster_transfers"
	transferRate    = "tbcluster_transfer_bytes_per_second"
	transfersEnded  = "tbcluster_transfers_ended_total"
	transferBytes   = "tbcluster_transfer_bytes_total"
	instances       = "tbcluster_instances"
	instanceTokens  = "tbcluster_instance_tokens_per_second"
	instanceRestart = "tbcluster_instance_restarts"
	findings        = "tbcluster_findings"
	agentInfo       = "tbcluster_agent_info"
	agentStart      = "tbcluster_agent_start_time_seconds"
	agentPrivileged = "tbcluster_agent_privileged"
	agentRevision   = "tbcluster_agent_state_revision"
	leftOut         = "tbcluster_metrics_left_out"
)

var (
	ofNode = []string{"node"}
	ofLink = []string{"node_a", "port_a", "node_b", "port_b"}
)

// All describes every metric of ours, in the order of the documentation. The
// agent's process says those of package client_golang too: go_* and process_*.
var All = []Metric{
	{nodes, Gauge, []string{"state"}, "Nodes of the cluster, by state: up, suspect, down, unknown."},
	{nodeUp, Gauge, ofNode, "1 while the node is up."},
	{nodeInfo, Gauge, []string{"node", "os", "arch", "version"}, "1; system and version of the node."},
	{nodeMemory, Gauge, ofNode, "Memory of the node."},
	{nodeAvailable, Gauge, ofNode, "Memory that is free there, in steps of 64 MiB."},
	{nodeBudget, Gauge, ofNode, "Memory that engines may still take there."},
	{nodeDisk, Gauge, ofNode, "Free space where the node keeps models."},
	{nodeRTT, Gauge, ofNode, "Round trip from the asked node to this one on the control channel."},
	{links, Gauge, []string{"state"}, "Links, by state: cabled, addressed, proven, down."},
	{linkProven, Gauge, ofLink, "1 while packets go both ways over the cable."},
	{linkNegotiated, Gauge, ofLink, "Rate to which the cable has trained."},
	{linkCapable, Gauge, ofLink, "Rate that both ends could do."},
	{linkMeasured, Gauge, ofLink, "Rate that was measured last; not there before it was."},
	{linkRTT, Gauge, ofLink, "Round trip of the link's probe."},
	{linkFlaps, Counter, ofLink, "How often the link went down and came back."},
	{linkErrors, Counter, ofLink, "Errors of the interfaces at both ends."},
	{linkSent, Counter, append(append([]string{}, ofLink...), "direction"), "Bytes over the interface at the first end; direction is a_to_b or b_to_a."},
	{transfers, Gauge, []string{"state"}, "Transfers that are listed, by state: scanning, connecting, copying, syncing, paused, done, failed, cancelled. Those that ended are listed for an hour."},
	{transferRate, Gauge, nil, "Rate of all transfers that run, together."},
	{transfersEnded, Counter, []string{"state"}, "Transfers asked for on this node that ended since its agent started: done, failed, cancelled."},
	{transferBytes, Counter, nil, "Bytes that transfers asked for on this node have sent since its agent started; what was there already is not counted."},
	{instances, Gauge, []string{"state", "engine"}, "Instances, by state (planned, copying, starting, loading, warming, ready, degraded, stopping, stopped, failed) and engine. Of an engine only states that some instance has."},
	{instanceTokens, Gauge, nil, "Tokens per second of all instances, together."},
	{instanceRestart, Gauge, nil, "Restarts of all instances that are listed, together."},
	{findings, Gauge, []string{"code", "severity"}, "What `tbcluster doctor` finds in the cluster, by code and severity. A code that this version does not know is \"other\"."},
	{agentInfo, Gauge, []string{"node", "version"}, "1; the node that was asked."},
	{agentStart, Gauge, nil, "When its agent started, seconds since 1970."},
	{agentPrivileged, Gauge, nil, "1 if it may change addresses."},
	{agentRevision, Counter, nil, "Changes of the cluster's state that it has seen."},
	{leftOut, Gauge, nil, "Nodes and links of which nothing is said: past 256 and 2048."},
}

// Table is the documentation of all metrics, in Markdown.
func Table() string {
	var b strings.Builder
	b.WriteString("| metric | kind | labels | meaning |\n|---|---|---|---|\n")
	for _, m := range All {
		quoted := make([]string, len(m.Labels))
		for i, l := range m.Labels {
			quoted[i] = "`" + l + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.Name, m.Kind, strings.Join(quoted, ", "), m.Help)
	}
	return b.String()
}
