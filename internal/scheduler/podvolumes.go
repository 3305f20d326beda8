package scheduler

import (
	"fmt"
	"time"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// ReasonWaitingForContainer is the reason of a Pending volume that is prepared on its Pod's node: the agent attaches it
// when the container is created, before its first instruction.
const ReasonWaitingForContainer = "WAITING_FOR_CONTAINER"

// podWorkload is the Pod as an agent's commands name it.
func (p *pass) podWorkload() *agentv1.Workload {
	w := &agentv1.PodWorkload{Namespace: p.sb.Namespace}
	if p.pod != nil {
		w.Name, w.Uid, w.Container = p.pod.Name, string(p.pod.UID), p.pod.Container
	}
	return &agentv1.Workload{Kind: &agentv1.Workload_Pod{Pod: w}}
}

// workloadThere is what the node has the sandbox's volumes in: of a Pod that was rebuilt, the former one.
func (p *pass) workloadThere() *agentv1.Workload {
	switch {
	case !podBacked(p.sb):
		return containerWorkload
	case p.state.GetWorkload().GetPod() != nil:
		return p.state.GetWorkload()
	}
	return p.podWorkload()
}

// aimAtPod makes an attach one into the Pod: at once if its container runs, else when it is created.
func (p *pass) aimAtPod(op *operation, v *volumeState, request *agentv1.AttachRequest) {
	request.Workload = p.podWorkload()
	op.now = p.stage == stageRunning && !v.atCreate
	phase := stateRunning
	if !op.now {
		request.When, phase = agentv1.When_AT_CREATE, stateStopped
	}
	op.pod = &agentv1.SandboxState{
		Uid: string(p.a.uid), Namespace: p.sb.Namespace, Name: p.sb.Name, Workload: request.Workload, ContainerId: p.pod.ContainerID, Phase: phase,
	}
}

// formerPod deals with an attach that the agent refuses as it still takes the sandbox for a Pod that is gone, or that is
// going, and says whether it does. That is soon over and no failure of the volume, which its entry must not go for.
func (v *volumeState) formerPod(p *pass, err error) bool {
	if reason := fault.ReasonOf(err); reason != fault.OperationPending && reason != fault.PodGone {
		return false
	}
	v.retry.failed(p.now)
	v.retry.attempts = min(v.retry.attempts, formerPodRetries)
	p.lookAt(v.retry.due)
	return true
}

// formerPodRetries bounds the wait between two tries to the third: 4 s.
const formerPodRetries = 2

// prepared deals with a volume that the agent attaches when the Pod's container is created. Should the container run
// and the volume not come, it is asked for.
func (m *VolumeManager) prepared(p *pass, v *volumeState, e *entry) {
	if v.row != nil && v.row.EntryHash == e.hash && v.row.Phase == v1alpha1.VolumeFailed && !m.due(p, v, e) {
		return
	}
	if p.stage != stageRunning {
		v.settleBy = time.Time{}
	} else if !m.settles(p, v) {
		m.attach(p, v, e)
		return
	}
	row := m.rowFor(v, e)
	row.Reason, row.Message = ReasonWaitingForContainer, "the volume is ready on the node and is attached when the container is created"
	row.RequestID, row.OperationID = e.RequestID, v.operationID("attach "+e.hash)
	row.Attempts, row.NextRetryTime, row.DetachState, row.Holders, row.Attached = 0, nil, "", nil, ""
	m.setPhase(p, v, row, v1alpha1.VolumePending)
}

// tellMounted tells of a volume that the agent attached by itself, when its container was created.
func (m *VolumeManager) tellMounted(p *pass, v *volumeState, e *entry) {
	if v.row != nil && v.row.EntryHash == e.hash && v.row.Phase == v1alpha1.VolumePending && v.row.Reason == ReasonWaitingForContainer {
		p.event(p.sb, EventNormal, "VolumeAttached", fmt.Sprintf("%s %s is mounted at %s", e.VolumeType, e.Source, e.Target))
		p.log("volume attached at the start of its container", "target", e.Target, "source", e.Source, "node", p.a.status.Node)
	}
}
