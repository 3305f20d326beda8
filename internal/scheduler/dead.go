package scheduler

import (
	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

var errNodeDead = fault.New(errdefs.ErrAborted, fault.NodeDead, "the sandbox's node does not run any more")

// nodeDead has the sandboxes of a dead node looked at.
func (s *Scheduler) nodeDead(node string) {
	s.Logger.Warn("the node is known not to run any more: its sandboxes are placed elsewhere", "node", node)
	s.requeue(node, s.cache.onNode(node))
	s.settleHeld()
}

// died deals with a sandbox whose node is dead, and says whether there was anything to do. Nothing is left to stop or to
// detach there; what the node held of it is gone with it, or is collected as an orphan if the node ever comes back.
// A process that is not to be started again is lost; any other sandbox has no node from now on, and is placed anew.
func (p *pass) died() bool {
	st := &p.a.status
	node := st.Node
	if node == "" || isOver(st.Phase) || !p.Agents.Dead(node) {
		return false
	}
	p.a.cancelVolumes(errNodeDead)
	if p.a.life != nil {
		p.a.life.cancel(errNodeDead)
		p.a.life = nil // its answer, if there is one, is nobody's
	}
	p.registry.unplace(p.a.uid)
	p.registry.dropState(node, p.a.uid)
	p.state = nil
	p.a.moveTo, p.a.refused, p.a.lifeErr, p.a.lifeRetry, p.a.done = "", nil, nil, retry{}, ""
	p.log("lost with its node", "node", node)
	p.event(p.sb, EventWarning, string(fault.NodeDead), "node "+node+" does not run any more")
	for _, v := range p.a.volumes {
		if v.row != nil && (v.row.Phase == v1alpha1.VolumeMounted || v.row.Phase == v1alpha1.VolumeAttaching) {
			p.volumes.pend(p, v, *v.row)
		}
	}
	if p.sb.Spec.RestartPolicy == v1alpha1.RestartNever && p.ran() {
		st.Phase, st.Reason, st.Message = v1alpha1.SandboxLost, string(fault.NodeDead), "node "+node+" does not run any more, and the process is not to be started again"
		p.atRest, p.stage = true, stageAbsent
		return true
	}
	st.Node, st.ContainerID = "", ""
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxLost, string(fault.NodeDead), "node "+node+" does not run any more; another is looked for"
	p.condition(v1alpha1.ConditionScheduled, false, st.Reason, st.Message)
	return false
}
