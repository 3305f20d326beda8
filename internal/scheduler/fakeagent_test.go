package scheduler

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// fakeAgent is an agent in memory: it keeps sandboxes and mounts, streams its inventory, and fails as told.
type fakeAgent struct {
	agentv1.AgentServiceClient // what the scheduler does not call

	node string
	now  func() *timestamppb.Timestamp

	mu           sync.Mutex // guards all below
	capabilities []string
	sandboxes    map[string]*agentv1.SandboxState
	streams      map[chan *agentv1.InventoryUpdate]context.CancelCauseFunc
	down         bool
	calls        []string
	commands     []*agentv1.Command
	creates      []*agentv1.CreateSandboxRequest
	attaches     []*agentv1.AttachRequest
	// faults are errors, per "verb target" or "verb", each for one call; hang blocks until the call's context ends.
	faults map[string][]error
	hang   map[string]bool
	// busy targets refuse an unforced detach; lazy ones leave something behind when forced.
	busy    map[string][]*agentv1.Holder
	lazy    map[string]bool
	release map[string]bool
	seen    map[string]int64
	mounts  uint64
	// running are the Pods, by UID, whose container runs.
	running map[string]bool
	// prepared are the keys of volumes that it has ready.
	prepared []string
	detaches []*agentv1.DetachRequest
	// begun, if set, is called between the message that tells of an attach that is under way and its answer, which is told by
	// no message then.
	begun func()
}

func newFakeAgent(node string, now func() *timestamppb.Timestamp) *fakeAgent {
	return &fakeAgent{
		node:         node,
		now:          now,
		capabilities: []string{CapabilityDynamicVolumes, agentv1.CapabilityPods},
		sandboxes:    map[string]*agentv1.SandboxState{},
		streams:      map[chan *agentv1.InventoryUpdate]context.CancelCauseFunc{},
		faults:       map[string][]error{},
		hang:         map[string]bool{},
		busy:         map[string][]*agentv1.Holder{},
		lazy:         map[string]bool{},
		release:      map[string]bool{},
		seen:         map[string]int64{},
		running:      map[string]bool{},
	}
}

// enter notes a call and fails it as told. It returns with the lock held when it does not fail.
func (f *fakeAgent) enter(ctx context.Context, verb, target string, c *agentv1.Command) error {
	f.mu.Lock()
	name := strings.TrimSpace(verb + " " + target)
	f.calls = append(f.calls, name)
	f.commands = append(f.commands, c)
	if f.hang[name] {
		f.mu.Unlock()
		<-ctx.Done()
		return ctx.Err()
	}
	for _, key := range []string{name, verb} {
		if errs := f.faults[key]; len(errs) > 0 {
			f.faults[key] = errs[1:]
			f.mu.Unlock()
			return fault.ToGRPC(errs[0])
		}
	}
	if f.down {
		f.mu.Unlock()
		return fault.ToGRPC(fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "connection refused"))
	}
	key := c.GetSandboxUid() + target
	if c.GetGeneration() < f.seen[key] {
		f.mu.Unlock()
		return fault.ToGRPC(fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand, "generation %d is old", c.GetGeneration()))
	}
	f.seen[key] = c.GetGeneration()
	return nil
}

// changed tells the streams of a sandbox. The lock is held.
func (f *fakeAgent) changed(uid string) {
	s := f.sandboxes[uid]
	if s == nil {
		s = &agentv1.SandboxState{Uid: uid, Removed: true}
	}
	f.tell(&agentv1.InventoryUpdate{Node: f.node, Sandboxes: []*agentv1.SandboxState{proto.CloneOf(s)}})
}

func (f *fakeAgent) tell(u *agentv1.InventoryUpdate) {
	for stream := range f.streams {
		stream <- u
	}
}

func (f *fakeAgent) answer(uid string) *agentv1.SandboxState {
	f.changed(uid)
	return proto.CloneOf(f.sandboxes[uid])
}

func (f *fakeAgent) CreateSandbox(ctx context.Context, in *agentv1.CreateSandboxRequest, _ ...grpc.CallOption) (*agentv1.SandboxState, error) {
	if err := f.enter(ctx, "create", "", in.GetCommand()); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	f.creates = append(f.creates, in)
	uid := in.GetCommand().GetSandboxUid()
	if s := f.sandboxes[uid]; s == nil {
		f.sandboxes[uid] = &agentv1.SandboxState{Uid: uid, Namespace: in.GetNamespace(), Name: in.GetName(), ContainerId: "c-" + uid, Phase: stateCreated}
	} else if s.Phase == stateStopped {
		s.Phase, s.ExitCode = stateCreated, nil
	}
	return f.answer(uid), nil
}

func (f *fakeAgent) StartSandbox(ctx context.Context, in *agentv1.StartSandboxRequest, _ ...grpc.CallOption) (*agentv1.SandboxState, error) {
	if err := f.enter(ctx, "start", "", in.GetCommand()); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	uid := in.GetCommand().GetSandboxUid()
	s := f.sandboxes[uid]
	if s == nil {
		return nil, fault.ToGRPC(fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox"))
	}
	s.Phase, s.StartedAt = stateRunning, f.now()
	return f.answer(uid), nil
}

func (f *fakeAgent) StopSandbox(ctx context.Context, in *agentv1.StopSandboxRequest, _ ...grpc.CallOption) (*agentv1.SandboxState, error) {
	if err := f.enter(ctx, "stop", "", in.GetCommand()); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	uid := in.GetCommand().GetSandboxUid()
	s := f.sandboxes[uid]
	if s == nil {
		return nil, fault.ToGRPC(fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox"))
	}
	s.Phase, s.Volumes, s.ExitCode = stateStopped, nil, proto.Int32(137)
	return f.answer(uid), nil
}

func (f *fakeAgent) DeleteSandbox(ctx context.Context, in *agentv1.DeleteSandboxRequest, _ ...grpc.CallOption) (*agentv1.DeleteSandboxResponse, error) {
	if err := f.enter(ctx, "delete", "", in.GetCommand()); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	uid := in.GetCommand().GetSandboxUid()
	delete(f.sandboxes, uid)
	f.changed(uid)
	return &agentv1.DeleteSandboxResponse{}, nil
}

func (f *fakeAgent) Attach(ctx context.Context, in *agentv1.AttachRequest, _ ...grpc.CallOption) (*agentv1.AttachResponse, error) {
	if err := f.enter(ctx, "attach", in.GetTarget(), in.GetCommand()); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	f.attaches = append(f.attaches, in)
	uid := in.GetCommand().GetSandboxUid()
	s := f.sandboxes[uid]
	prepares := false
	if pod := in.GetWorkload().GetPod(); pod != nil {
		prepares = in.GetWhen() == agentv1.When_AT_CREATE && !f.running[pod.GetUid()]
		if !prepares && !f.running[pod.GetUid()] {
			return nil, fault.ToGRPC(fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning, "the container does not run"))
		}
		if of := s.GetWorkload().GetPod().GetUid(); of != pod.GetUid() && len(s.GetVolumes()) > 0 {
			return nil, fault.ToGRPC(fault.New(errdefs.ErrUnavailable, fault.OperationPending, "the sandbox is still Pod %s", of))
		}
		if s == nil || s.GetWorkload().GetPod().GetUid() != pod.GetUid() {
			s = &agentv1.SandboxState{Uid: uid, Workload: in.GetWorkload(), ContainerId: "c-" + pod.GetUid(), Phase: f.podPhase(pod.GetUid())}
			f.sandboxes[uid] = s
		}
	}
	if s == nil {
		return nil, fault.ToGRPC(fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox"))
	}
	if m := f.mount(uid, in.GetTarget()); m != nil {
		if m.GetEntryHash() != in.GetEntryHash() {
			return nil, fault.ToGRPC(fault.New(errdefs.ErrAlreadyExists, fault.TargetInUse, "another volume is there"))
		}
		return &agentv1.AttachResponse{Record: proto.CloneOf(m), AlreadyMounted: true}, nil
	}
	f.mounts++
	m := &agentv1.MountRecord{
		Target: in.GetTarget(), EntryHash: in.GetEntryHash(), OperationId: in.GetCommand().GetOperationId(), MountId: f.mounts,
		VolumeKey: in.GetVolumeKey(), Phase: recordMounted, Kind: in.GetKind(), Attached: "Live", Path: "Local", LimitEnforcement: "None",
	}
	if s.GetPhase() == stateCreated {
		m.Attached = "BeforeStart"
	}
	if prepares {
		m.Phase, m.Attached = recordPrepared, ""
	}
	s.Volumes = append(s.Volumes, m)
	if f.begun != nil {
		answer := proto.CloneOf(m)
		m.Phase = recordAttaching
		f.changed(uid)
		f.begun()
		m.Phase = answer.Phase
		return &agentv1.AttachResponse{Record: answer}, nil
	}
	f.changed(uid)
	return &agentv1.AttachResponse{Record: proto.CloneOf(m)}, nil
}

func (f *fakeAgent) Detach(ctx context.Context, in *agentv1.DetachRequest, _ ...grpc.CallOption) (*agentv1.DetachResponse, error) {
	if err := f.enter(ctx, "detach", in.GetTarget(), in.GetCommand()); err != nil {
		return nil, err
	}
	defer f.mu.Unlock()
	f.detaches = append(f.detaches, in)
	uid, target := in.GetCommand().GetSandboxUid(), in.GetTarget()
	m := f.mount(uid, target)
	if m == nil || in.GetEntryHash() != "" && in.GetEntryHash() != m.GetEntryHash() {
		return &agentv1.DetachResponse{Result: agentv1.DetachResponse_ABSENT}, nil
	}
	if holders := f.busy[target]; len(holders) > 0 && !in.GetForce() {
		return &agentv1.DetachResponse{Result: agentv1.DetachResponse_BUSY, Holders: holders}, nil
	}
	out := &agentv1.DetachResponse{Result: agentv1.DetachResponse_DETACHED}
	switch {
	case f.lazy[target]:
		out.Result = agentv1.DetachResponse_LAZY
		m.Phase, m.DetachState = recordDetaching, "Lazy"
	case f.release[target]:
		out.ReleasePending = true
		m.Phase, m.DetachState = recordDetaching, "ReleasePending"
	default:
		f.drop(uid, target)
	}
	f.changed(uid)
	return out, nil
}

func (f *fakeAgent) mount(uid, target string) *agentv1.MountRecord {
	for _, m := range f.sandboxes[uid].GetVolumes() {
		if m.GetTarget() == target {
			return m
		}
	}
	return nil
}

func (f *fakeAgent) drop(uid, target string) {
	if s := f.sandboxes[uid]; s != nil {
		s.Volumes = slices.DeleteFunc(s.Volumes, func(m *agentv1.MountRecord) bool { return m.GetTarget() == target })
	}
}

func (f *fakeAgent) podPhase(pod string) string {
	if f.running[pod] {
		return stateRunning
	}
	return stateStopped
}

// podRuns has the container of a Pod start or end, with the volumes that are recorded for it.
func (f *fakeAgent) podRuns(pod string, runs bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running[pod] = runs
	for uid, s := range f.sandboxes {
		if s.GetWorkload().GetPod().GetUid() != pod {
			continue
		}
		s.Phase = f.podPhase(pod)
		for _, m := range s.GetVolumes() {
			switch {
			case runs && m.GetPhase() == recordPrepared:
				m.Phase, m.Attached = recordMounted, "BeforeStart"
			case !runs && m.GetPhase() == recordMounted:
				m.Phase, m.Attached = recordPrepared, ""
			}
		}
		f.changed(uid)
	}
}

// podGone is the Pod's end on the node.
func (f *fakeAgent) podGone(pod string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.running, pod)
	for uid, s := range f.sandboxes {
		if s.GetWorkload().GetPod().GetUid() == pod {
			delete(f.sandboxes, uid)
			f.changed(uid)
		}
	}
}

type fakeStream struct {
	grpc.ClientStream
	ctx     context.Context
	updates chan *agentv1.InventoryUpdate
}

func (s *fakeStream) Recv() (*agentv1.InventoryUpdate, error) {
	select {
	case u := <-s.updates:
		return u, nil
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
}

func (f *fakeAgent) Inventory(ctx context.Context, _ *agentv1.InventoryRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[agentv1.InventoryUpdate], error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down {
		return nil, fault.ToGRPC(fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "connection refused"))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	s := &fakeStream{ctx: ctx, updates: make(chan *agentv1.InventoryUpdate, 10_000)}
	full := &agentv1.InventoryUpdate{Node: f.node, Full: true, Capabilities: f.capabilities}
	for _, state := range f.sandboxes {
		full.Sandboxes = append(full.Sandboxes, proto.CloneOf(state))
	}
	for _, key := range f.prepared {
		full.Prepared = append(full.Prepared, &agentv1.PreparedVolume{VolumeKey: key})
	}
	s.updates <- full
	f.streams[s.updates] = cancel
	return s, nil
}

// change alters what the agent has of a sandbox and tells the streams.
func (f *fakeAgent) change(uid string, alter func(*agentv1.SandboxState)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sandboxes[uid] == nil {
		f.sandboxes[uid] = &agentv1.SandboxState{Uid: uid, Phase: stateRunning}
	}
	alter(f.sandboxes[uid])
	f.changed(uid)
}

// prepares makes a volume ready, or releases it.
func (f *fakeAgent) prepares(key string, has bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.prepared = slices.DeleteFunc(f.prepared, func(k string) bool { return k == key })
	if has {
		f.prepared = append(f.prepared, key)
	}
	f.tell(&agentv1.InventoryUpdate{Node: f.node, Prepared: []*agentv1.PreparedVolume{{VolumeKey: key, Removed: !has}}})
}

// with runs a function under the agent's lock.
func (f *fakeAgent) with(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

// setDown cuts the agent off, or lets it be reached again.
func (f *fakeAgent) setDown(down bool) {
	f.with(func() {
		f.down = down
		if down {
			f.cut()
		}
	})
}

// cut ends all streams. The lock is held.
func (f *fakeAgent) cut() {
	for stream, cancel := range f.streams {
		cancel(fmt.Errorf("connection lost"))
		delete(f.streams, stream)
	}
}

// targets are what is mounted in a sandbox.
func (f *fakeAgent) targets(uid string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for _, m := range f.sandboxes[uid].GetVolumes() {
		if m.GetPhase() == recordMounted {
			out = append(out, m.GetTarget())
		}
	}
	slices.Sort(out)
	return out
}

func (f *fakeAgent) phase(uid string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sandboxes[uid].GetPhase()
}

func (f *fakeAgent) has() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.sandboxes))
}

// count is how often a call was made.
func (f *fakeAgent) count(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, c := range f.calls {
		if c == name {
			n++
		}
	}
	return n
}

func (f *fakeAgent) total() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.calls)
}
