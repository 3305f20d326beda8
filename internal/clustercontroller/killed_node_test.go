//go:build failpoint

package clustercontroller_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// nodeAgent plays the agent of the one node. It outlives the controllers that command it, and refuses an old leader's
// commands as the real one does.
type nodeAgent struct {
	agentv1.UnimplementedAgentServiceServer

	mu        sync.Mutex // guards all below
	epoch     int64
	sandboxes map[string]*agentv1.SandboxState
	running   map[string]bool // the Pods, by UID, whose container runs
	streams   map[chan *agentv1.InventoryUpdate]struct{}
	mounts    uint64
}

func newNodeAgent() *nodeAgent {
	return &nodeAgent{sandboxes: map[string]*agentv1.SandboxState{}, running: map[string]bool{}, streams: map[chan *agentv1.InventoryUpdate]struct{}{}}
}

// fence refuses what an older leader than the newest one commands. The lock is held.
func (a *nodeAgent) fence(epoch int64) error {
	if epoch < a.epoch {
		return fault.ToGRPC(fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand, "epoch %d is older than %d", epoch, a.epoch))
	}
	a.epoch = epoch
	return nil
}

// changed tells the streams of a sandbox. The lock is held.
func (a *nodeAgent) changed(uid string) {
	s := a.sandboxes[uid]
	if s == nil {
		s = &agentv1.SandboxState{Uid: uid, Removed: true}
	}
	for stream := range a.streams {
		stream <- &agentv1.InventoryUpdate{Node: nodeName, Sandboxes: []*agentv1.SandboxState{proto.CloneOf(s)}}
	}
}

func (a *nodeAgent) Inventory(in *agentv1.InventoryRequest, stream grpc.ServerStreamingServer[agentv1.InventoryUpdate]) error {
	updates := make(chan *agentv1.InventoryUpdate, 10_000)
	a.mu.Lock()
	if err := a.fence(in.GetEpoch()); err != nil {
		a.mu.Unlock()
		return err
	}
	full := &agentv1.InventoryUpdate{Node: nodeName, Full: true, InstanceId: "one", EpochSeen: a.epoch,
		Capabilities: []string{agentv1.CapabilityDynamicVolumes, agentv1.CapabilityPods}}
	for _, uid := range slices.Sorted(maps.Keys(a.sandboxes)) {
		full.Sandboxes = append(full.Sandboxes, proto.CloneOf(a.sandboxes[uid]))
	}
	updates <- full
	a.streams[updates] = struct{}{}
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.streams, updates)
	}()
	for {
		select {
		case u := <-updates:
			if err := stream.Send(u); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (a *nodeAgent) Attach(_ context.Context, in *agentv1.AttachRequest) (*agentv1.AttachResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.fence(in.GetCommand().GetEpoch()); err != nil {
		return nil, err
	}
	uid, pod := in.GetCommand().GetSandboxUid(), in.GetWorkload().GetPod()
	runs := a.running[pod.GetUid()]
	if !runs && in.GetWhen() != agentv1.When_AT_CREATE {
		return nil, fault.ToGRPC(fault.New(errdefs.ErrFailedPrecondition, fault.SandboxNotRunning, "the container does not run"))
	}
	s := a.sandboxes[uid]
	if s == nil || s.GetWorkload().GetPod().GetUid() != pod.GetUid() {
		s = &agentv1.SandboxState{Uid: uid, Namespace: pod.GetNamespace(), Name: pod.GetName(), Workload: in.GetWorkload(), ContainerId: "c-" + pod.GetUid(), Phase: "Stopped"}
		if runs {
			s.Phase = "Running"
		}
		a.sandboxes[uid] = s
	}
	for _, m := range s.GetVolumes() {
		if m.GetTarget() != in.GetTarget() {
			continue
		}
		if m.GetEntryHash() != in.GetEntryHash() {
			return nil, fault.ToGRPC(fault.New(errdefs.ErrAlreadyExists, fault.TargetInUse, "another volume is there"))
		}
		return &agentv1.AttachResponse{Record: proto.CloneOf(m), AlreadyMounted: true}, nil
	}
	a.mounts++
	m := &agentv1.MountRecord{Target: in.GetTarget(), EntryHash: in.GetEntryHash(), OperationId: in.GetCommand().GetOperationId(), MountId: a.mounts,
		VolumeKey: in.GetVolumeKey(), Phase: "Prepared", Kind: in.GetKind(), Path: "Direct", LimitEnforcement: "None"}
	if runs {
		m.Phase, m.Attached = "Mounted", "Live"
	}
	s.Volumes = append(s.Volumes, m)
	a.changed(uid)
	return &agentv1.AttachResponse{Record: proto.CloneOf(m)}, nil
}

func (a *nodeAgent) Detach(_ context.Context, in *agentv1.DetachRequest) (*agentv1.DetachResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.fence(in.GetCommand().GetEpoch()); err != nil {
		return nil, err
	}
	uid := in.GetCommand().GetSandboxUid()
	s := a.sandboxes[uid]
	before := len(s.GetVolumes())
	if s != nil {
		s.Volumes = slices.DeleteFunc(s.Volumes, func(m *agentv1.MountRecord) bool { return m.GetTarget() == in.GetTarget() })
	}
	if len(s.GetVolumes()) == before {
		return &agentv1.DetachResponse{Result: agentv1.DetachResponse_ABSENT}, nil
	}
	a.changed(uid)
	return &agentv1.DetachResponse{Result: agentv1.DetachResponse_DETACHED}, nil
}

func (a *nodeAgent) DeleteSandbox(_ context.Context, in *agentv1.DeleteSandboxRequest) (*agentv1.DeleteSandboxResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.fence(in.GetCommand().GetEpoch()); err != nil {
		return nil, err
	}
	delete(a.sandboxes, in.GetCommand().GetSandboxUid())
	a.changed(in.GetCommand().GetSandboxUid())
	return &agentv1.DeleteSandboxResponse{}, nil
}

// podRuns has the container of a Pod run, with what was prepared for it.
func (a *nodeAgent) podRuns(pod string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.running[pod] {
		return
	}
	a.running[pod] = true
	for uid, s := range a.sandboxes {
		if s.GetWorkload().GetPod().GetUid() != pod {
			continue
		}
		s.Phase = "Running"
		for _, m := range s.GetVolumes() {
			m.Phase, m.Attached = "Mounted", "BeforeStart"
		}
		a.changed(uid)
	}
}

// podGone is the Pod's end on the node, and that of what was attached to it.
func (a *nodeAgent) podGone(pod string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.running, pod)
	for uid, s := range a.sandboxes {
		if s.GetWorkload().GetPod().GetUid() == pod {
			delete(a.sandboxes, uid)
			a.changed(uid)
		}
	}
}

// state has a line for each sandbox of a Namespace that the node has something of.
func (a *nodeAgent) state(namespace string) (lines []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.sandboxes {
		pod := s.GetWorkload().GetPod()
		if pod.GetNamespace() != namespace {
			continue
		}
		var mounts []string
		for _, m := range s.GetVolumes() {
			mounts = append(mounts, m.GetTarget()+"="+m.GetPhase())
		}
		slices.Sort(mounts)
		lines = append(lines, fmt.Sprintf("node: %s %s %v", pod.GetName(), s.GetPhase(), mounts))
	}
	return lines
}
