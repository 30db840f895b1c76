package main

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"tbcluster/api/fault"
	tbv1 "tbcluster/api/tbcluster/v1"
)

func instance(state tbv1.InstanceState) *tbv1.Instance {
	return &tbv1.Instance{Id: "i-1", Name: "smol", State: state, Ranks: []*tbv1.Rank{{NodeName: "beta"}}}
}

// instances returns a channel with these, closed behind them.
func instances(list ...*tbv1.Instance) chan *tbv1.Instance {
	c := make(chan *tbv1.Instance, len(list))
	for _, i := range list {
		c <- i
	}
	close(c)
	return c
}

func TestPlaceFollowsUntilReady(t *testing.T) {
	loading := instance(tbv1.InstanceState_INSTANCE_STATE_LOADING)
	loading.StepsDone, loading.StepsTotal = 3, 30
	d := startDouble(t, &agentDouble{instances: instances(
		instance(tbv1.InstanceState_INSTANCE_STATE_STARTING), loading, loading, instance(tbv1.InstanceState_INSTANCE_STATE_READY))})
	r := tb(t, d, "place", "smollm2", "--node", "beta,gamma", "--node", "delta", "--context", "2048", "--ranks", "2", "--name", "smol", "--engine", "llamacpp", "--copy", "--engine-arg=-v", "--insecure-ranks", "--plan", "p-1")
	r.wantCode(t, 0)
	var steps []string
	for _, l := range strings.Split(strings.TrimSpace(r.out), "\n") {
		if _, s, ok := strings.Cut(l, " s  "); ok {
			steps = append(steps, s)
		}
	}
	if want := []string{"starting on beta", "loading 3 of 30 on beta", "ready on beta"}; !slices.Equal(steps, want) {
		t.Errorf("steps are %q, want %q", steps, want)
	}
	if !strings.Contains(r.out, `try: tbcluster chat smol "Hello"`) {
		t.Errorf("no word of what to do next:\n%s", r.out)
	}
	got := request[*tbv1.PlaceRequest](t, d)
	want := &tbv1.PlaceRequest{RequestId: got.GetRequestId(), PlanId: "p-1", Placement: &tbv1.Placement{Model: "smollm2", Nodes: []string{"beta", "gamma", "delta"},
		Engine: "llamacpp", MinRanks: 2, ContextTokens: 2048, Name: "smol", InsecureRanks: true, EngineArgs: []string{"-v"}, CopyMissing: true}}
	if got.GetRequestId() == "" || got.String() != want.String() {
		t.Errorf("asked for %v, want %v", got, want)
	}
}

func TestPlaceThatFailsQuotesTheEngine(t *testing.T) {
	failed := instance(tbv1.InstanceState_INSTANCE_STATE_FAILED)
	failed.Reason = "rank 0 on beta ended before it was ready"
	failed.Ranks = []*tbv1.Rank{{Index: 0, NodeName: "beta", ExitStatus: "exit 1", LastLines: []string{"invalid magic characters", "exiting"}}}
	d := startDouble(t, &agentDouble{instances: instances(failed)})
	r := tb(t, d, "place", "smollm2")
	r.wantCode(t, fault.ExitFailed)
	golden(t, "place-failed.txt", r.err)
}

func TestPlaceThatFailsSaysWhatToDoAndEndsWithItsCode(t *testing.T) {
	failed := instance(tbv1.InstanceState_INSTANCE_STATE_FAILED)
	failed.Reason = "copy to beta:/home/ada: 98.4 MB needed and 64.5 MB free there"
	failed.Error = &tbv1.Failure{Reason: string(fault.DiskFull), What: "instance smol failed", Why: failed.Reason, Fix: "free 34 MB on beta", ExitCode: fault.ExitFileIO}
	d := startDouble(t, &agentDouble{instances: instances(failed)})
	r := tb(t, d, "place", "smollm2")
	r.wantCode(t, fault.ExitFileIO)
	if !strings.Contains(r.err, "64.5 MB free there") || !strings.Contains(r.err, "do:    free 34 MB on beta\n") {
		t.Errorf("said:\n%s", r.err)
	}
}

func TestCtrlCLeavesTheInstanceRunningAndSaysSo(t *testing.T) {
	d := startDouble(t, &agentDouble{instances: make(chan *tbv1.Instance)})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		d.instances <- instance(tbv1.InstanceState_INSTANCE_STATE_LOADING)
		cancel()
	}()
	r := tbIn(ctx, d, "", "place", "smollm2")
	r.wantCode(t, 130)
	if !strings.Contains(r.err, "smol, which goes on") || !strings.Contains(r.err, "tbcluster stop smol") {
		t.Errorf("said:\n%s", r.err)
	}
	for _, c := range d.calls {
		if _, ok := c.(*tbv1.StopInstanceRequest); ok {
			t.Error("the instance was stopped")
		}
	}
}

func TestDetachedPlaceReturnsAtOnce(t *testing.T) {
	d := startDouble(t, &agentDouble{instances: make(chan *tbv1.Instance)})
	r := tb(t, d, "place", "smollm2", "--detach")
	r.wantCode(t, 0)
	if !strings.Contains(r.out, "smol is planned") {
		t.Errorf("said %q", r.out)
	}
}

func TestStopWaitsUntilItHasEnded(t *testing.T) {
	d := startDouble(t, &agentDouble{instances: instances(instance(tbv1.InstanceState_INSTANCE_STATE_READY),
		instance(tbv1.InstanceState_INSTANCE_STATE_STOPPING), instance(tbv1.InstanceState_INSTANCE_STATE_STOPPED))})
	r := tb(t, d, "stop", "smol", "--rm")
	r.wantCode(t, 0)
	if r.out != "smol has ended and is removed\n" || !request[*tbv1.StopInstanceRequest](t, d).GetRemove() {
		t.Errorf("said %q", r.out)
	}
}

// The record may be gone before its last state is seen.
func TestStopOfAnInstanceWhoseWatchEnds(t *testing.T) {
	d := startDouble(t, &agentDouble{instances: instances()})
	r := tb(t, d, "stop", "smol")
	r.wantCode(t, 0)
	if r.out != "smol has ended\n" {
		t.Errorf("said %q", r.out)
	}
}

func thePlan() *tbv1.PlanResponse {
	one := &tbv1.PlanOption{Engine: "llamacpp", Feasible: true, Score: 1, Reason: "fits with 96.1 GiB to spare; nothing has to be copied",
		Ranks: []*tbv1.PlanRank{{NodeName: "alpha", Role: "server", Layers: 30, NeedBytes: 3 << 30, BudgetBytes: 99 << 30}}}
	return &tbv1.PlanResponse{PlanId: "p-1", Choice: one, Model: deskState().Models[0], Alternatives: []*tbv1.PlanOption{
		one,
		{Engine: "llamacpp", Feasible: true, Score: .4, Reason: "works, but half the layers wait for the cable at every token", Ranks: []*tbv1.PlanRank{
			{NodeName: "alpha", Role: "server", Layers: 15, NeedBytes: 2 << 30, BudgetBytes: 99 << 30}, {NodeName: "beta", Role: "rpc", Layers: 15, NeedBytes: 2 << 30, BudgetBytes: 7 << 30, MustCopy: true}}},
		{Engine: "llamacpp", Reason: "beta: needs 3.0 GiB, may use 1.2 GiB", Ranks: []*tbv1.PlanRank{{NodeName: "beta", Role: "server", Layers: 30, NeedBytes: 3 << 30, BudgetBytes: 1 << 30, MustCopy: true}}},
		{Engine: "llamacpp", Reason: "gamma is down", Ranks: []*tbv1.PlanRank{{NodeName: "gamma", Role: "server", BudgetBytes: 7 << 30, MustCopy: true}}},
		{Engine: "vllm", Reason: "not installed on any node"},
	}}
}

func TestPlanShowsEveryAlternativeWithItsReason(t *testing.T) {
	d := startDouble(t, &agentDouble{plan: thePlan()})
	r := tb(t, d, "plan", "smollm2")
	r.wantCode(t, 0)
	golden(t, "plan.txt", r.out)
	r = tb(t, d, "plan", "smollm2", "-o", "json")
	r.wantCode(t, 0)
	golden(t, "plan.json", r.out)
}

func TestPlanThatFitsNowhereIsAnError(t *testing.T) {
	p := thePlan()
	p.Choice, p.Alternatives = nil, p.Alternatives[2:]
	d := startDouble(t, &agentDouble{plan: p})
	r := tb(t, d, "plan", "smollm2")
	r.wantCode(t, fault.ExitPrecondition)
	for _, w := range []string{"fits nowhere", "beta: needs 3.0 GiB, may use 1.2 GiB", "vllm: not installed on any node"} {
		if !strings.Contains(r.err, w) {
			t.Errorf("standard error lacks %q:\n%s", w, r.err)
		}
	}
}

func TestPsHidesWhatHasEnded(t *testing.T) {
	d := startDouble(t, &agentDouble{state: deskState()})
	r := tb(t, d, "ps")
	r.wantCode(t, 0)
	if r.out != "no instance runs; 1 instance ended (tbcluster ps --all)\n" {
		t.Errorf("said %q", r.out)
	}
	var b bytes.Buffer
	writeInstances(&b, deskState().GetInstances(), noon.AsTime())
	golden(t, "ps.txt", b.String())
	if r = tb(t, d, "ps", "--all", "-o", "json"); !strings.Contains(r.out, `"exit_status": "signal 9"`) {
		t.Errorf("printed %s", r.out)
	}
}

func TestFollowingPrintsNothingTwice(t *testing.T) {
	d := startDouble(t, &agentDouble{instances: instances(instance(tbv1.InstanceState_INSTANCE_STATE_WARMING), instance(tbv1.InstanceState_INSTANCE_STATE_READY))})
	c, err := dial(&endpoint{path: d.socket})
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	i, err := followInstance(t.Context(), c, instance(tbv1.InstanceState_INSTANCE_STATE_PLANNED), time.Now(), io.Discard)
	if err != nil || i.GetState() != tbv1.InstanceState_INSTANCE_STATE_READY {
		t.Errorf("ended with %v, %v", i, err)
	}
}
