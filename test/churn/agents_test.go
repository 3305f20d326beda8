package churn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/certificates"
)

// fleet are the agents of all nodes. They speak the real protocol, each with its node's certificate, and have mounts in
// memory alone. They know of Pods what the API server says, all of it at once, so that an agent never has a Pod that another
// has by then.
type fleet struct {
	*testing.T
	address string
	faulty  atomic.Bool
	calls   atomic.Int64

	mu     sync.Mutex // guards all below, and the agents
	dice   *rand.Rand
	agents map[string]*agent
	// pods are those that exist, by UID.
	pods map[types.UID]*corev1.Pod
	// published says of anchors that ran whether kubelet has their volume mounted, first has the Namespace that had a volume
	// first which is no tenant's.
	published map[types.UID]bool
	first     map[string]string
	wrong     []string
}

// agent is one node's. The fleet's lock guards it.
type agent struct {
	agentv1.UnimplementedAgentServiceServer
	fleet *fleet
	node  string
	port  int32

	boot      int
	down      bool
	sandboxes map[string]*agentv1.SandboxState
	prepared  map[string]int // how many use each volume
	// anchored counts the mounts of each claim that comes by an anchor, claims has the claim of a volume's key.
	anchored map[types.NamespacedName]int
	claims   map[string]types.NamespacedName
	streams  map[chan *agentv1.InventoryUpdate]struct{}
	// fences are the newest epochs and generations that were seen, by sandbox and target.
	epoch       int64
	generations map[string]int64
	mounts      uint64
}

func newFleet(t *testing.T, dice *rand.Rand) *fleet {
	return &fleet{T: t, address: address(t), dice: dice, agents: map[string]*agent{}, pods: map[types.UID]*corev1.Pod{},
		published: map[types.UID]bool{}, first: map[string]string{}}
}

// add starts a node's agent.
func (f *fleet) add(node string, authority *certificates.Authority) *agent {
	f.Helper()
	key := must(identity.NewKey())
	issued := must(authority.Agent(node, key.Public()))
	own := &tls.Certificate{Certificate: issued.Chain, PrivateKey: key}
	config := identity.Credentials{Certificate: func() (*tls.Certificate, error) { return own, nil }, Bundle: authority.Bundle}.AgentServer()
	listener := must(net.Listen("tcp", net.JoinHostPort(f.address, "0")))
	a := &agent{fleet: f, node: node, port: int32(listener.Addr().(*net.TCPAddr).Port)}
	a.reset()
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(config)),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: agentv1.KeepAlive / 2, PermitWithoutStream: true}))
	agentv1.RegisterAgentServiceServer(server, a)
	go func() { _ = server.Serve(listener) }()
	f.Cleanup(server.Stop)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.agents[node] = a
	return a
}

// reset is a boot: mounts and journal are gone.
func (a *agent) reset() {
	a.boot++
	a.sandboxes, a.prepared, a.generations = map[string]*agentv1.SandboxState{}, map[string]int{}, map[string]int64{}
	a.anchored, a.claims = map[types.NamespacedName]int{}, map[string]types.NamespacedName{}
	a.cut()
}

// cut ends the streams.
func (a *agent) cut() {
	for s := range a.streams {
		close(s)
	}
	a.streams = map[chan *agentv1.InventoryUpdate]struct{}{}
}

// setDown cuts an agent off or has it answer again; boot says that the node was started anew meanwhile.
func (f *fleet) setDown(node string, down, boot bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.agents[node]
	if boot {
		a.reset()
	}
	if a.down = down; down {
		a.cut()
	}
}

// see takes note of a Pod as it is now.
func (f *fleet) see(pod *corev1.Pod, gone bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !gone {
		f.pods[pod.UID] = pod
		f.publish(pod)
	} else {
		delete(f.pods, pod.UID)
		delete(f.published, pod.UID)
	}
	a := f.agents[pod.Spec.NodeName]
	if a == nil {
		return
	}
	for uid, s := range a.sandboxes {
		if s.GetWorkload().GetPod().GetUid() != string(pod.UID) {
			continue
		}
		if gone {
			a.forget(uid)
			continue
		}
		runs := running(pod)
		for _, m := range s.GetVolumes() {
			switch {
			case runs && m.GetPhase() == "Prepared":
				m.Phase, m.Attached = "Mounted", "BeforeStart"
			case !runs && m.GetPhase() == "Mounted":
				m.Phase, m.Attached = "Prepared", ""
			}
		}
		if phase := phaseOf(pod); s.Phase != phase {
			s.Phase = phase
			a.changed(uid)
		}
	}
}

func running(pod *corev1.Pod) bool {
	return pod != nil && pod.Status.Phase == corev1.PodRunning && len(pod.Status.ContainerStatuses) > 0 && pod.Status.ContainerStatuses[0].State.Running != nil
}

func phaseOf(pod *corev1.Pod) string {
	if running(pod) {
		return "Running"
	}
	return "Stopped"
}

// forget drops all that there is of a sandbox.
func (a *agent) forget(uid string) {
	for _, m := range slices.Clone(a.sandboxes[uid].GetVolumes()) {
		a.drop(uid, m)
	}
	delete(a.sandboxes, uid)
	a.changed(uid)
}

func (a *agent) drop(uid string, m *agentv1.MountRecord) {
	s := a.sandboxes[uid]
	s.Volumes = slices.DeleteFunc(s.Volumes, func(o *agentv1.MountRecord) bool { return o == m })
	key := m.GetVolumeKey()
	if claim, is := a.claims[key]; is {
		a.countAnchored(claim, -1)
	}
	if a.prepared[key]--; a.prepared[key] <= 0 {
		delete(a.prepared, key)
		a.tell(&agentv1.InventoryUpdate{Node: a.node, Prepared: []*agentv1.PreparedVolume{{VolumeKey: key, Removed: true}}})
	}
}

func (a *agent) changed(uid string) {
	s := a.sandboxes[uid]
	if s == nil {
		s = &agentv1.SandboxState{Uid: uid, Removed: true}
	}
	a.tell(&agentv1.InventoryUpdate{Node: a.node, Sandboxes: []*agentv1.SandboxState{proto.CloneOf(s)}})
}

func (a *agent) tell(u *agentv1.InventoryUpdate) {
	for s := range a.streams {
		select {
		case s <- u:
		default: // nobody reads: a cut makes it read everything anew
			close(s)
			delete(a.streams, s)
		}
	}
}

// Inventory implements agentv1.AgentServiceServer.
func (a *agent) Inventory(r *agentv1.InventoryRequest, stream agentv1.AgentService_InventoryServer) error {
	f := a.fleet
	f.mu.Lock()
	if a.down {
		f.mu.Unlock()
		return fault.ToGRPC(unavailable("the agent is away"))
	}
	a.epoch = max(a.epoch, r.GetEpoch())
	full := &agentv1.InventoryUpdate{Node: a.node, Full: true, BootId: fmt.Sprint("boot-", a.boot), InstanceId: a.node, EpochSeen: a.epoch,
		Capabilities: []string{agentv1.CapabilityDynamicVolumes, agentv1.CapabilityPods}}
	for _, s := range a.sandboxes {
		full.Sandboxes = append(full.Sandboxes, proto.CloneOf(s))
		full.MountCount += int64(len(s.GetVolumes()))
	}
	for key := range a.prepared {
		full.Prepared = append(full.Prepared, &agentv1.PreparedVolume{VolumeKey: key})
	}
	updates := make(chan *agentv1.InventoryUpdate, 1000)
	a.streams[updates] = struct{}{}
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(a.streams, updates)
	}()
	beat := time.NewTicker(5 * time.Second)
	defer beat.Stop()
	for u := full; ; {
		if err := stream.Send(u); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-beat.C:
			u = &agentv1.InventoryUpdate{Node: a.node}
		case next, open := <-updates:
			if !open {
				return fault.ToGRPC(unavailable("the connection is lost"))
			}
			u = next
		}
	}
}

func unavailable(why string) error {
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "injected: %s", why)
}

// enter begins a command: the lock is held when there is no error.
func (a *agent) enter(target string, c *agentv1.Command) error {
	f := a.fleet
	f.calls.Add(1)
	f.mu.Lock()
	err := func() error {
		if a.down || f.faulty.Load() && f.dice.IntN(30) == 0 {
			return unavailable("the agent is away")
		}
		if c.GetEpoch() < a.epoch {
			return fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand, "epoch %d is old: %d was seen", c.GetEpoch(), a.epoch)
		}
		a.epoch = c.GetEpoch()
		key := c.GetSandboxUid() + " " + target
		if c.GetGeneration() < a.generations[key] {
			return fault.New(errdefs.ErrFailedPrecondition, fault.StaleCommand, "generation %d is old", c.GetGeneration())
		}
		a.generations[key] = c.GetGeneration()
		return nil
	}()
	if err != nil {
		f.mu.Unlock()
		return fault.ToGRPC(err)
	}
	return nil
}

// answered loses some answers, whatever was done.
func answered[T any](f *fleet, v T, err error) (T, error) {
	if f.faulty.Load() && f.dice.IntN(30) == 0 {
		var none T
		return none, fault.ToGRPC(unavailable("the answer is lost"))
	}
	return v, fault.ToGRPC(err)
}

// Attach implements agentv1.AgentServiceServer.
func (a *agent) Attach(_ context.Context, in *agentv1.AttachRequest) (*agentv1.AttachResponse, error) {
	if err := a.enter(in.GetTarget(), in.GetCommand()); err != nil {
		return nil, err
	}
	defer a.fleet.mu.Unlock()
	out, err := a.attach(in)
	return answered(a.fleet, out, err)
}

func (a *agent) attach(in *agentv1.AttachRequest) (*agentv1.AttachResponse, error) {
	f, uid, workload := a.fleet, in.GetCommand().GetSandboxUid(), in.GetWorkload().GetPod()
	if workload == nil {
		f.fail("node %s: sandbox %s is to get a volume without being a Pod", a.node, uid)
		return nil, errors.New("no Pod")
	}
	pod := f.pods[types.UID(workload.GetUid())]
	switch {
	case pod == nil || pod.Spec.NodeName == "":
		// It is gone, or not seen here yet: an agent on a node sees it before the API server does.
		return nil, unavailable("there is no Pod " + workload.GetUid())
	case pod.Spec.NodeName != a.node:
		f.fail("node %s: sandbox %s is to get a volume in Pod %s, which is on node %s", a.node, uid, pod.Name, pod.Spec.NodeName)
	case !ownedBy(pod, types.UID(uid)):
		f.fail("node %s: sandbox %s is to get a volume in Pod %s, which is another's", a.node, uid, pod.Name)
	}
	f.entitled(in, pod)
	prepares := !running(pod)
	if prepares && in.GetWhen() != agentv1.When_AT_CREATE {
		return nil, unavailable("the container of Pod " + pod.Name + " is not seen to run yet")
	}
	for _, other := range f.agents {
		for _, m := range other.sandboxes[uid].GetVolumes() {
			if other != a && m.GetPhase() == "Mounted" {
				f.fail("sandbox %s has %s on node %s, and is given %s on node %s", uid, m.GetTarget(), other.node, in.GetTarget(), a.node)
			}
		}
	}
	if of := in.GetAnchor(); of != nil {
		if err := a.fromAnchor(of); err != nil {
			return nil, err
		}
	}
	s := a.sandboxes[uid]
	if of := s.GetWorkload().GetPod().GetUid(); s != nil && of != workload.GetUid() {
		return nil, fault.New(errdefs.ErrUnavailable, fault.OperationPending, "the sandbox is still Pod %s", of)
	}
	if s == nil {
		s = &agentv1.SandboxState{Uid: uid, Workload: in.GetWorkload(), ContainerId: "c-" + workload.GetUid(), Phase: phaseOf(pod)}
		a.sandboxes[uid] = s
	}
	if m := mountAt(s, in.GetTarget()); m != nil {
		if m.GetEntryHash() != in.GetEntryHash() {
			return nil, fault.New(errdefs.ErrAlreadyExists, fault.TargetInUse, "another volume is at %s", in.GetTarget())
		}
		return &agentv1.AttachResponse{Record: proto.CloneOf(m), AlreadyMounted: true}, nil
	}
	a.mounts++
	m := &agentv1.MountRecord{Target: in.GetTarget(), EntryHash: in.GetEntryHash(), OperationId: in.GetCommand().GetOperationId(), MountId: a.mounts,
		VolumeKey: in.GetVolumeKey(), Phase: "Mounted", Kind: in.GetKind(), Attached: "Live", Path: "Direct", LimitEnforcement: "None"}
	if of := in.GetAnchor(); of != nil {
		claim := types.NamespacedName{Namespace: of.GetPodNamespace(), Name: of.GetClaim()}
		m.Path, a.claims[m.GetVolumeKey()] = "Anchor", claim
		a.countAnchored(claim, 1)
	}
	if prepares {
		m.Phase, m.Attached = "Prepared", ""
	}
	s.Volumes = append(s.Volumes, m)
	if a.prepared[m.GetVolumeKey()]++; a.prepared[m.GetVolumeKey()] == 1 {
		a.tell(&agentv1.InventoryUpdate{Node: a.node, Prepared: []*agentv1.PreparedVolume{{VolumeKey: m.GetVolumeKey()}}})
	}
	a.changed(uid)
	return &agentv1.AttachResponse{Record: proto.CloneOf(m)}, nil
}

func mountAt(s *agentv1.SandboxState, target string) *agentv1.MountRecord {
	for _, m := range s.GetVolumes() {
		if m.GetTarget() == target {
			return m
		}
	}
	return nil
}

// Detach implements agentv1.AgentServiceServer.
func (a *agent) Detach(_ context.Context, in *agentv1.DetachRequest) (*agentv1.DetachResponse, error) {
	if err := a.enter(in.GetTarget(), in.GetCommand()); err != nil {
		return nil, err
	}
	defer a.fleet.mu.Unlock()
	uid := in.GetCommand().GetSandboxUid()
	m := mountAt(a.sandboxes[uid], in.GetTarget())
	if m == nil || in.GetEntryHash() != "" && in.GetEntryHash() != m.GetEntryHash() {
		return answered(a.fleet, &agentv1.DetachResponse{Result: agentv1.DetachResponse_ABSENT}, nil)
	}
	if a.fleet.faulty.Load() && !in.GetForce() && a.fleet.dice.IntN(10) == 0 {
		return &agentv1.DetachResponse{Result: agentv1.DetachResponse_BUSY, Holders: []*agentv1.Holder{{Pid: 1, Command: "sh", Kind: "cwd"}}}, nil
	}
	a.drop(uid, m)
	a.changed(uid)
	return answered(a.fleet, &agentv1.DetachResponse{Result: agentv1.DetachResponse_DETACHED}, nil)
}

// DeleteSandbox implements agentv1.AgentServiceServer.
func (a *agent) DeleteSandbox(_ context.Context, in *agentv1.DeleteSandboxRequest) (*agentv1.DeleteSandboxResponse, error) {
	if err := a.enter("", in.GetCommand()); err != nil {
		return nil, err
	}
	defer a.fleet.mu.Unlock()
	if a.sandboxes[in.GetCommand().GetSandboxUid()] != nil {
		a.forget(in.GetCommand().GetSandboxUid())
	}
	return answered(a.fleet, &agentv1.DeleteSandboxResponse{}, nil)
}

// Probe implements agentv1.AgentServiceServer.
func (a *agent) Probe(context.Context, *agentv1.ProbeRequest) (*agentv1.ProbeResponse, error) {
	return &agentv1.ProbeResponse{}, nil
}

// fail notes that something is wrong. The lock is held.
func (f *fleet) fail(format string, args ...any) {
	f.wrong = append(f.wrong, fmt.Sprintf(format, args...))
}

// broken are the rules that were broken since the last time.
func (f *fleet) broken() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() { f.wrong = nil }()
	return f.wrong
}

// left is what the agents have.
func (f *fleet) left() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []string
	for _, a := range f.agents {
		for uid := range a.sandboxes {
			all = append(all, "sandbox "+uid+" on node "+a.node)
		}
		for key := range a.prepared {
			all = append(all, "volume "+key+" on node "+a.node)
		}
	}
	slices.Sort(all)
	return all
}

// nodes are the names of the nodes, in order.
func (f *fleet) nodes() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.agents))
}

// mounted are the targets that a sandbox has somewhere.
func (f *fleet) mounted(uid types.UID) (targets []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.agents {
		for _, m := range a.sandboxes[string(uid)].GetVolumes() {
			if m.GetPhase() == "Mounted" {
				targets = append(targets, m.GetTarget())
			}
		}
	}
	slices.Sort(targets)
	return targets
}
