package main

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

// The shapes of -o json. They are written out by hand, and not derived from
// the API's messages, so that they change only when somebody means to change
// them. docs/json.md describes them; a test compares the two. Fields are added,
// never renamed or removed. Lists are never null.

type stateJSON struct {
	Cluster   string         `json:"cluster"`
	Self      string         `json:"self"`
	Revision  uint64         `json:"revision"`
	Nodes     []nodeJSON     `json:"nodes"`
	Links     []linkJSON     `json:"links"`
	Transfers []transferJSON `json:"transfers"`
	Instances []instanceJSON `json:"instances"`
	Models    []modelJSON    `json:"models"`
	Findings  []findingJSON  `json:"findings"`
}

type nodeJSON struct {
	Name          string       `json:"name"`
	ID            string       `json:"id"`
	State         string       `json:"state"`
	Reason        string       `json:"reason"`
	StateSince    *time.Time   `json:"state_since"`
	Self          bool         `json:"self"`
	Role          string       `json:"role"`
	OS            string       `json:"os"`
	OSVersion     string       `json:"os_version"`
	Arch          string       `json:"arch"`
	Version       string       `json:"version"`
	Memory        memoryJSON   `json:"memory"`
	DiskFreeBytes uint64       `json:"disk_free_bytes"`
	CPUs          uint32       `json:"cpus"`
	NodeAddress   string       `json:"node_address"`
	Gateway       string       `json:"gateway"`
	Metrics       string       `json:"metrics"`
	RTTUs         uint64       `json:"rtt_us"`
	ControlPath   string       `json:"control_path"`
	Privileged    bool         `json:"privileged"`
	BootID        string       `json:"boot_id"`
	StartedAt     *time.Time   `json:"started_at"`
	Engines       []engineJSON `json:"engines"`
}

type memoryJSON struct {
	TotalBytes     uint64 `json:"total_bytes"`
	AvailableBytes uint64 `json:"available_bytes"`
}

type engineJSON struct {
	Name      string `json:"name"`
	Available bool   `json:"available"`
	Version   string `json:"version"`
	Path      string `json:"path"`
	Reason    string `json:"reason"`
}

type linkJSON struct {
	ID             string       `json:"id"`
	A              *linkEndJSON `json:"a"`
	B              *linkEndJSON `json:"b"`
	State          string       `json:"state"`
	Evidence       string       `json:"evidence"`
	Reason         string       `json:"reason"`
	Obstacle       string       `json:"obstacle"`
	StateSince     *time.Time   `json:"state_since"`
	NegotiatedGbps float64      `json:"negotiated_gbps"`
	CapableGbps    float64      `json:"capable_gbps"`
	Lanes          uint32       `json:"lanes"`
	Paths          []pathJSON   `json:"paths"`
	RTTUs          uint64       `json:"rtt_us"`
	MeasuredRate   uint64       `json:"measured_bytes_per_second"`
	Flaps          uint32       `json:"flaps"`
	ATxBytes       uint64       `json:"a_tx_bytes"`
	ARxBytes       uint64       `json:"a_rx_bytes"`
	Errors         uint64       `json:"errors"`
	Hops           uint32       `json:"hops"`
	Measurement    *measureJSON `json:"measurement"`
	FlapHistory    []flapJSON   `json:"flap_history"`
}

type measureJSON struct {
	AToB           uint64     `json:"a_to_b_bytes_per_second"`
	BToA           uint64     `json:"b_to_a_bytes_per_second"`
	RTTUs          uint64     `json:"rtt_us"`
	MeasuredAt     *time.Time `json:"measured_at"`
	Seconds        float64    `json:"seconds"`
	NegotiatedGbps float64    `json:"negotiated_gbps"`
	Shared         bool       `json:"shared"`
}

type flapJSON struct {
	DownAt *time.Time `json:"down_at"`
	BackAt *time.Time `json:"back_at"`
	Reason string     `json:"reason"`
	SeenBy []string   `json:"seen_by"`
}

type linkEndJSON struct {
	Node      string `json:"node"`
	NodeID    string `json:"node_id"`
	Port      string `json:"port"`
	Interface string `json:"interface"`
	Address   string `json:"address"`
	MTU       uint32 `json:"mtu"`
	TxBytes   uint64 `json:"tx_bytes"`
	RxBytes   uint64 `json:"rx_bytes"`
	TxErrors  uint64 `json:"tx_errors"`
	RxErrors  uint64 `json:"rx_errors"`
	TxDropped uint64 `json:"tx_dropped"`
	RxDropped uint64 `json:"rx_dropped"`
}

type pathJSON struct {
	Transport   string `json:"transport"`
	Device      string `json:"device"`
	Interface   string `json:"interface"`
	Address     string `json:"address"`
	PeerAddress string `json:"peer_address"`
}

type transferJSON struct {
	ID             string             `json:"id"`
	Sources        []string           `json:"sources"`
	Destination    string             `json:"destination"`
	State          string             `json:"state"`
	TotalBytes     uint64             `json:"total_bytes"`
	DoneBytes      uint64             `json:"done_bytes"`
	SkippedBytes   uint64             `json:"skipped_bytes"`
	TotalFiles     uint64             `json:"total_files"`
	DoneFiles      uint64             `json:"done_files"`
	SkippedFiles   uint64             `json:"skipped_files"`
	BytesPerSecond uint64             `json:"bytes_per_second"`
	ETASeconds     *float64           `json:"eta_seconds"`
	Links          []transferLinkJSON `json:"links"`
	Error          *faultJSON         `json:"error"`
	Warnings       []string           `json:"warnings"`
	User           string             `json:"user"`
	StartedAt      *time.Time         `json:"started_at"`
	FinishedAt     *time.Time         `json:"finished_at"`
}

type transferLinkJSON struct {
	LinkID         string `json:"link_id"`
	Interface      string `json:"interface"`
	Transport      string `json:"transport"`
	Bytes          uint64 `json:"bytes"`
	BytesPerSecond uint64 `json:"bytes_per_second"`
	Kind           string `json:"kind"`
}

type instanceJSON struct {
	ID              string     `json:"id"`
	Name            string     `json:"name"`
	Model           string     `json:"model"`
	ModelID         string     `json:"model_id"`
	Engine          string     `json:"engine"`
	State           string     `json:"state"`
	Reason          string     `json:"reason"`
	StateSince      *time.Time `json:"state_since"`
	StepsDone       uint32     `json:"steps_done"`
	StepsTotal      uint32     `json:"steps_total"`
	Ranks           []rankJSON `json:"ranks"`
	OwnerNodeID     string     `json:"owner_node_id"`
	ServedNames     []string   `json:"served_names"`
	ContextTokens   uint32     `json:"context_tokens"`
	TokensPerSecond float64    `json:"tokens_per_second"`
	PlannedBytes    uint64     `json:"planned_bytes"`
	Restarts        uint32     `json:"restarts"`
	User            string     `json:"user"`
	CreatedAt       *time.Time `json:"created_at"`
	Error           *faultJSON `json:"error"`
}

type rankJSON struct {
	Index      uint32   `json:"index"`
	Node       string   `json:"node"`
	NodeID     string   `json:"node_id"`
	PID        uint32   `json:"pid"`
	State      string   `json:"state"`
	Role       string   `json:"role"`
	ExitStatus string   `json:"exit_status"`
	LastLines  []string `json:"last_lines"`
	Listens    []string `json:"listens"`
}

type modelJSON struct {
	Name          string          `json:"name"`
	ID            string          `json:"id"`
	Format        string          `json:"format"`
	Quant         string          `json:"quant"`
	Architecture  string          `json:"architecture"`
	SizeBytes     uint64          `json:"size_bytes"`
	Layers        uint32          `json:"layers"`
	ContextTokens uint32          `json:"context_tokens"`
	Copies        []modelCopyJSON `json:"copies"`
}

type modelCopyJSON struct {
	Node     string `json:"node"`
	NodeID   string `json:"node_id"`
	Path     string `json:"path"`
	Tree     string `json:"tree"`
	Complete bool   `json:"complete"`
	Reason   string `json:"reason"`
}

type findingJSON struct {
	Code     string     `json:"code"`
	Severity string     `json:"severity"`
	Node     string     `json:"node"`
	NodeID   string     `json:"node_id"`
	Subject  string     `json:"subject"`
	Title    string     `json:"title"`
	Meaning  string     `json:"meaning"`
	Fix      string     `json:"fix"`
	Evidence string     `json:"evidence"`
	Since    *time.Time `json:"since"`
}

type planJSON struct {
	PlanID       string           `json:"plan_id"`
	Model        *modelJSON       `json:"model"`
	Choice       *planOptionJSON  `json:"choice"`
	Alternatives []planOptionJSON `json:"alternatives"`
}

type planOptionJSON struct {
	Engine   string         `json:"engine"`
	Feasible bool           `json:"feasible"`
	Reason   string         `json:"reason"`
	Score    float64        `json:"score"`
	Ranks    []planRankJSON `json:"ranks"`
}

type planRankJSON struct {
	Node        string `json:"node"`
	NodeID      string `json:"node_id"`
	Role        string `json:"role"`
	Layers      uint32 `json:"layers"`
	NeedBytes   uint64 `json:"need_bytes"`
	BudgetBytes uint64 `json:"budget_bytes"`
	MustCopy    bool   `json:"must_copy"`
}

type memberJSON struct {
	Name         string     `json:"name"`
	NodeID       string     `json:"node_id"`
	Role         string     `json:"role"`
	IntroducedBy string     `json:"introduced_by"`
	IntroducedAt *time.Time `json:"introduced_at"`
	Revoked      bool       `json:"revoked"`
	Client       bool       `json:"client"`
}

type pingWayJSON struct {
	Kind      string `json:"kind"`
	Interface string `json:"interface"`
	Address   string `json:"address"`
	RTTUs     uint64 `json:"rtt_us"`
	Used      bool   `json:"used"`
	LinkID    string `json:"link_id"`
	Error     string `json:"error"`
}

type logLineJSON struct {
	Time *time.Time `json:"time"`
	Node string     `json:"node"`
	Rank uint32     `json:"rank"`
	Text string     `json:"text"`
}

// mapped returns f of every element; never nil, so that it prints as [].
func mapped[T, U any](in []T, f func(T) U) []U {
	out := make([]U, 0, len(in))
	for _, v := range in {
		out = append(out, f(v))
	}
	return out
}

// texts returns in, or an empty list instead of nil.
func texts(in []string) []string {
	if in == nil {
		return []string{}
	}
	return in
}

// timeJSON returns the time in UTC, nil when it is not set.
func timeJSON(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	v := t.AsTime()
	return &v
}

func toStateJSON(s *tbv1.ClusterState) stateJSON {
	return stateJSON{
		Cluster:   s.GetClusterName(),
		Self:      s.GetSelfNodeId(),
		Revision:  s.GetRevision(),
		Nodes:     mapped(s.GetNodes(), toNodeJSON),
		Links:     mapped(s.GetLinks(), toLinkJSON),
		Transfers: mapped(s.GetTransfers(), toTransferJSON),
		Instances: mapped(s.GetInstances(), toInstanceJSON),
		Models:    mapped(s.GetModels(), toModelJSON),
		Findings:  mapped(s.GetFindings(), toFindingJSON),
	}
}

func toNodeJSON(n *tbv1.Node) nodeJSON {
	return nodeJSON{
		Name: n.GetName(), ID: n.GetId(), State: nodeStateWord(n.GetState()), Reason: n.GetReason(),
		StateSince: timeJSON(n.GetStateSince()), Self: n.GetSelf(), Role: roleWord(n.GetRole()),
		OS: n.GetOs(), OSVersion: n.GetOsVersion(), Arch: n.GetArch(), Version: n.GetVersion(),
		Memory:        memoryJSON{n.GetMemory().GetTotalBytes(), n.GetMemory().GetAvailableBytes()},
		DiskFreeBytes: n.GetDiskFreeBytes(), CPUs: n.GetCpuCount(), NodeAddress: n.GetNodeAddress(),
		Gateway: n.GetGatewayAddress(), Metrics: n.GetMetricsAddress(), RTTUs: n.GetRttUs(), ControlPath: n.GetControlPath(),
		Privileged: n.GetPrivileged(), BootID: n.GetBootId(), StartedAt: timeJSON(n.GetStartedAt()),
		Engines: mapped(n.GetEngines(), toEngineJSON),
	}
}

func toEngineJSON(e *tbv1.Engine) engineJSON {
	return engineJSON{e.GetName(), e.GetAvailable(), e.GetVersion(), e.GetPath(), e.GetReason()}
}

func toLinkJSON(l *tbv1.Link) linkJSON {
	return linkJSON{
		ID: l.GetId(), A: toLinkEndJSON(l.GetA()), B: toLinkEndJSON(l.GetB()),
		State: linkStateWord(l.GetState()), Evidence: l.GetEvidence(), Reason: l.GetReason(),
		Obstacle: obstacleWord(l.GetObstacle()), StateSince: timeJSON(l.GetStateSince()), NegotiatedGbps: l.GetNegotiatedGbps(),
		CapableGbps: l.GetCapableGbps(), Lanes: l.GetLanes(), Paths: mapped(l.GetPaths(), toPathJSON),
		RTTUs: l.GetRttUs(), MeasuredRate: l.GetMeasuredBytesPerSecond(), Flaps: l.GetFlaps(),
		ATxBytes: l.GetATxBytes(), ARxBytes: l.GetARxBytes(), Errors: l.GetErrors(),
		Hops: l.GetHops(), Measurement: toMeasureJSON(l.GetMeasurement()), FlapHistory: mapped(l.GetFlapHistory(), toFlapJSON),
	}
}

func toMeasureJSON(m *tbv1.LinkMeasurement) *measureJSON {
	if m == nil {
		return nil
	}
	return &measureJSON{m.GetAToBBytesPerSecond(), m.GetBToABytesPerSecond(), m.GetRttUs(), timeJSON(m.GetMeasuredAt()),
		m.GetDuration().AsDuration().Seconds(), m.GetNegotiatedGbps(), m.GetShared()}
}

func toFlapJSON(f *tbv1.LinkFlap) flapJSON {
	return flapJSON{timeJSON(f.GetDownAt()), timeJSON(f.GetBackAt()), f.GetReason(), texts(f.GetSeenBy())}
}

func toLinkEndJSON(e *tbv1.LinkEnd) *linkEndJSON {
	if e == nil {
		return nil
	}
	return &linkEndJSON{e.GetNodeName(), e.GetNodeId(), e.GetPort(), e.GetInterface(), e.GetAddress(), e.GetMtu(),
		e.GetTxBytes(), e.GetRxBytes(), e.GetTxErrors(), e.GetRxErrors(), e.GetTxDropped(), e.GetRxDropped()}
}

func toPathJSON(p *tbv1.Path) pathJSON {
	return pathJSON{p.GetTransport(), p.GetDevice(), p.GetInterface(), p.GetAddress(), p.GetPeerAddress()}
}

func toTransferJSON(t *tbv1.Transfer) transferJSON {
	out := transferJSON{
		ID: t.GetId(), Sources: texts(t.GetSources()), Destination: t.GetDestination(),
		State: transferStateWord(t.GetState()), TotalBytes: t.GetTotalBytes(), DoneBytes: t.GetDoneBytes(),
		SkippedBytes: t.GetSkippedBytes(), TotalFiles: t.GetTotalFiles(), DoneFiles: t.GetDoneFiles(),
		SkippedFiles: t.GetSkippedFiles(), BytesPerSecond: t.GetBytesPerSecond(),
		Links:    mapped(t.GetLinks(), func(l *tbv1.LinkProgress) transferLinkJSON { return toTransferLinkJSON(t, l) }),
		Warnings: texts(t.GetWarnings()), User: t.GetUser(),
		StartedAt: timeJSON(t.GetStartedAt()), FinishedAt: timeJSON(t.GetFinishedAt()),
	}
	if t.GetEta() != nil {
		s := t.GetEta().AsDuration().Seconds()
		out.ETASeconds = &s
	}
	if f := t.GetError(); f != nil {
		out.Error = toFailureJSON(f)
	}
	return out
}

func toTransferLinkJSON(t *tbv1.Transfer, l *tbv1.LinkProgress) transferLinkJSON {
	return transferLinkJSON{l.GetLinkId(), l.GetInterface(), l.GetTransport(), l.GetBytes(), l.GetBytesPerSecond(), wayKind(t, l)}
}

func toFailureJSON(f *tbv1.Failure) *faultJSON {
	return &faultJSON{Reason: f.GetReason(), What: f.GetWhat(), Where: f.GetWhere(), Why: f.GetWhy(), Fix: f.GetFix(), ExitCode: int(f.GetExitCode())}
}

func toInstanceJSON(i *tbv1.Instance) instanceJSON {
	out := instanceJSON{
		ID: i.GetId(), Name: i.GetName(), Model: i.GetModel(), ModelID: i.GetModelId(), Engine: i.GetEngine(),
		State: instanceStateWord(i.GetState()), Reason: i.GetReason(), StateSince: timeJSON(i.GetStateSince()),
		StepsDone: i.GetStepsDone(), StepsTotal: i.GetStepsTotal(), Ranks: mapped(i.GetRanks(), toRankJSON),
		OwnerNodeID: i.GetOwnerNodeId(), ServedNames: texts(i.GetServedNames()), ContextTokens: i.GetContextTokens(),
		TokensPerSecond: i.GetTokensPerSecond(), PlannedBytes: i.GetPlannedBytes(), Restarts: i.GetRestarts(),
		User: i.GetUser(), CreatedAt: timeJSON(i.GetCreatedAt()),
	}
	if f := i.GetError(); f != nil {
		out.Error = toFailureJSON(f)
	}
	return out
}

func toRankJSON(r *tbv1.Rank) rankJSON {
	return rankJSON{
		Index: r.GetIndex(), Node: r.GetNodeName(), NodeID: r.GetNodeId(), PID: r.GetPid(),
		State: rankStateWord(r.GetState()), Role: r.GetRole(), ExitStatus: r.GetExitStatus(),
		LastLines: texts(r.GetLastLines()), Listens: texts(r.GetListens()),
	}
}

func toModelJSON(m *tbv1.Model) modelJSON {
	return modelJSON{
		Name: m.GetName(), ID: m.GetId(), Format: m.GetFormat(), Quant: m.GetQuant(), Architecture: m.GetArchitecture(),
		SizeBytes: m.GetSizeBytes(), Layers: m.GetLayers(), ContextTokens: m.GetContextTokens(),
		Copies: mapped(m.GetCopies(), func(c *tbv1.ModelCopy) modelCopyJSON {
			return modelCopyJSON{c.GetNodeName(), c.GetNodeId(), c.GetPath(), c.GetTree(), c.GetComplete(), c.GetReason()}
		}),
	}
}

func toFindingJSON(f *tbv1.Finding) findingJSON {
	return findingJSON{
		Code: f.GetCode(), Severity: severityWord(f.GetSeverity()), Node: f.GetNodeName(), NodeID: f.GetNodeId(),
		Subject: f.GetSubject(), Title: f.GetTitle(), Meaning: f.GetMeaning(), Fix: f.GetFix(),
		Evidence: f.GetEvidence(), Since: timeJSON(f.GetSince()),
	}
}

func toPlanJSON(p *tbv1.PlanResponse) planJSON {
	out := planJSON{PlanID: p.GetPlanId(), Alternatives: mapped(p.GetAlternatives(), toPlanOptionJSON)}
	if p.GetModel() != nil {
		m := toModelJSON(p.GetModel())
		out.Model = &m
	}
	if p.GetChoice() != nil {
		c := toPlanOptionJSON(p.GetChoice())
		out.Choice = &c
	}
	return out
}

func toPlanOptionJSON(o *tbv1.PlanOption) planOptionJSON {
	return planOptionJSON{o.GetEngine(), o.GetFeasible(), o.GetReason(), o.GetScore(),
		mapped(o.GetRanks(), func(r *tbv1.PlanRank) planRankJSON {
			return planRankJSON{r.GetNodeName(), r.GetNodeId(), r.GetRole(), r.GetLayers(), r.GetNeedBytes(), r.GetBudgetBytes(), r.GetMustCopy()}
		})}
}

func toMemberJSON(m *tbv1.Member) memberJSON {
	return memberJSON{m.GetName(), m.GetNodeId(), roleWord(m.GetRole()), m.GetIntroducedBy(), timeJSON(m.GetIntroducedAt()), m.GetRevoked(), m.GetClient()}
}

func toPingWayJSON(w *tbv1.PingWay) pingWayJSON {
	return pingWayJSON{w.GetKind(), w.GetInterface(), w.GetAddress(), w.GetRttUs(), w.GetUsed(), w.GetLinkId(), w.GetError()}
}

func toLogLineJSON(l *tbv1.LogLine) logLineJSON {
	return logLineJSON{timeJSON(l.GetTime()), l.GetNodeName(), l.GetRank(), l.GetText()}
}

// failureFault returns an error that came inside a message as a fault. A reason
// that this version does not know still ends with the code that came with it.
func failureFault(f *tbv1.Failure) *fault.Fault {
	out := &fault.Fault{Reason: fault.Reason(f.GetReason()), What: f.GetWhat(), Where: f.GetWhere(), Why: f.GetWhy(), Fix: f.GetFix()}
	if _, known := fault.Table[out.Reason]; !known {
		for reason, row := range fault.Table {
			if row.Exit == int(f.GetExitCode()) {
				out.Reason = reason
				break
			}
		}
	}
	return out
}
