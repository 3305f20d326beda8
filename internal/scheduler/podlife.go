package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// podTimeout bounds a write to the API server about a Pod; admission webhooks may take up to 30 s.
const podTimeout = time.Minute

// reasonPodTerminating is the reason of a sandbox whose Pod is being deleted, though nobody asked us for that.
const reasonPodTerminating = "PodTerminating"

// reasonPodBackOff is the reason of a sandbox whose Pod is made again later, as it was lost several times.
const reasonPodBackOff = "PodBackOff"

// steadyAfter is how long a Pod has to run for its end not to count with those before it, as for kubelet's containers.
const steadyAfter = 10 * time.Minute

// podLifecycle is lifecycle for a sandbox that is a Pod. Kubernetes places it, starts it and restarts its containers;
// node, stage and phase are read off the Pod. What is ordered is the Pod itself, if it is the sandbox's own.
func (p *pass) podLifecycle(ctx context.Context) error {
	st := &p.a.status
	p.stage = stageIdle
	if p.Pods == nil {
		p.stage = stageAbsent
		p.pendPod(fault.New(errdefs.ErrFailedPrecondition, fault.PodsUnavailable,
			"this sandbox is a Pod, and there are none without Kubernetes: name an image instead"))
		return nil
	}
	if isOver(st.Phase) {
		p.podIsOver()
		return nil
	}
	pod, err := p.Pods.Get(p.sb)
	if err != nil {
		p.unseen = true
		return nil
	}
	if p.sb.Spec.PodRef != nil {
		if pod, err = p.adopted(ctx, pod); err != nil || isOver(st.Phase) {
			return err
		}
		if pod == nil {
			p.stage, p.atRest = stageAbsent, true
			p.pendPod(fault.New(errdefs.ErrNotFound, fault.PodNotFound, "there is no Pod %s in Namespace %s: the sandbox waits for it", p.sb.Spec.PodRef.Name, p.sb.Namespace))
			return nil
		}
	}
	if err := p.protect(ctx); err != nil {
		return err
	}
	p.notePod(pod)
	p.seePod(pod)
	p.seeClaims()
	p.seeUpdate()
	if p.sb.Spec.Template != nil {
		p.orderPod(pod)
	}
	return nil
}

// adopted is the Pod of podRef, which is held to its UID from the first time on that it is seen, unless it is on its way
// out by then. When it is gone the sandbox has failed: whoever has the name now is not followed.
func (p *pass) adopted(ctx context.Context, pod *Pod) (*Pod, error) {
	ref := p.sb.Spec.PodRef
	if ref.UID == "" && pod != nil && pod.Deleting {
		pod = nil
	}
	if ref.UID == "" && pod != nil {
		if err := p.updateSpec(ctx, func(o *v1alpha1.Sandbox) error {
			if o.Spec.PodRef.UID == "" {
				o.Spec.PodRef.UID = pod.UID
			}
			if !slices.Contains(o.Finalizers, v1alpha1.FinalizerVolumes) {
				o.Finalizers = append(o.Finalizers, v1alpha1.FinalizerVolumes)
			}
			return nil
		}); err != nil {
			return nil, err
		}
		ref = p.sb.Spec.PodRef
	}
	if ref.UID == "" || pod != nil && pod.UID == ref.UID {
		return pod, nil
	}
	// What is known in memory may be from before the Pod was made.
	pod, err := p.Pods.Read(ctx, p.sb)
	if err != nil || pod != nil && pod.UID == ref.UID {
		return pod, err
	}
	gone := fault.New(errdefs.ErrFailedPrecondition, fault.PodGone, "Pod %s (UID %s) is gone: create another sandbox for another Pod", ref.Name, ref.UID)
	if pod != nil {
		gone = fault.New(errdefs.ErrFailedPrecondition, fault.PodGone,
			"Pod %s is not the one that is meant any more: its UID is %s and not %s, and a successor is not followed; create another sandbox for it", ref.Name, pod.UID, ref.UID)
	}
	p.endPod(v1alpha1.SandboxFailed, string(fault.PodGone), gone.Error())
	p.podIsOver()
	return nil, nil
}

// podIsOver: nothing more comes of the sandbox, and nothing of its volumes is to stay on the node.
func (p *pass) podIsOver() {
	p.atRest, p.unmount = true, true
	p.loadNode()
	switch {
	case p.state == nil:
		p.stage = stageAbsent
	case p.agent.connected && p.agent.pods:
		p.stage = stageHeld
	default:
		p.stage, p.unmount = stageIdle, false
	}
}

// seePod takes node, stage and phase from the Pod; nil when there is none.
func (p *pass) seePod(pod *Pod) {
	st := &p.a.status
	p.pod = pod
	switch p.a.done {
	case verbEnsureClaims: // of which the Pod tells nothing
	case verbUpdatePod:
		if pod == nil || !pod.Outdated {
			p.a.done = ""
		}
	case verbDeletePod, verbKillPod:
		if pod == nil {
			p.a.done = "" // it is seen
		}
	default:
		if pod != nil {
			p.a.done = ""
		}
	}
	node := ""
	if pod != nil {
		node = pod.Node
	}
	if node == "" && st.Node != "" && p.registry.agent(st.Node).connected && len(p.registry.state(st.Node, p.a.uid).GetVolumes()) > 0 {
		node = st.Node // what the former Pod has left there goes first
	}
	st.Node = node
	p.loadNode()
	if of := p.state.GetWorkload().GetPod().GetUid(); pod == nil || pod.Node == "" || of != "" && of != string(pod.UID) {
		// What is there is of a former Pod.
		if p.unmount = slices.ContainsFunc(p.state.GetVolumes(), func(m *agentv1.MountRecord) bool { return !leaving(m) }); !p.unmount {
			p.state = nil
		}
	}
	p.stage = p.podStage()
	p.showPod()
}

// podStage is what can be done about the volumes.
func (p *pass) podStage() stage {
	switch {
	case p.a.status.Node == "":
		p.atRest = true
		return stageAbsent
	case p.agent.connected && !p.agent.pods:
		p.unmount = false
		p.off = fault.New(errdefs.ErrFailedPrecondition, fault.VersionSkew,
			"the agent of node %s lacks the capability %q, so it attaches nothing to Pods: update it", p.a.status.Node, agentv1.CapabilityPods)
		return p.noStage()
	case !p.agent.connected && !p.agent.known && p.isReady():
		p.unmount = false
		p.off = fault.New(errdefs.ErrUnavailable, fault.NoAgent,
			"node %s, where the Pod is, has no agent: let a Pod of the agents' DaemonSet run there", p.a.status.Node)
		return p.noStage()
	case !p.agent.connected:
		p.unmount = false
		if due := p.agent.changed.Add(agentGrace); p.now.Before(due) {
			p.lookAt(due)
		} else if p.unreachable = p.isReady(); !p.unreachable {
			p.lookAt(p.now.Add(agentGrace))
		}
		return stageIdle
	case p.pod == nil || p.pod.Node == "" || p.pod.Deleting || podEnded(p.pod.Phase):
		p.atRest = true
		return stageHeld
	case p.unmount:
		return stageHeld
	case p.pod.Container == "":
		p.off = fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest,
			"Pod %s does not have the container that is to get the volumes: look at podRef.container, or the annotation %s of the Pod", p.pod.Name, v1alpha1.AnnotationContainer)
		return stageHeld
	case p.podRuns():
		return stageRunning
	}
	return stageBringUp
}

// noStage is the stage where the agent cannot be asked about Pods. What it has attached before, it has still.
func (p *pass) noStage() stage {
	for _, v := range p.a.volumes {
		if v.row != nil && v.row.Phase == v1alpha1.VolumeMounted {
			return stageIdle
		}
	}
	return stageAbsent
}

// podRuns says whether the container runs. The agent hears of it before the API server does.
func (p *pass) podRuns() bool {
	if p.state != nil {
		return p.state.GetPhase() == stateRunning
	}
	return p.pod.Running
}

func podEnded(phase corev1.PodPhase) bool {
	return phase == corev1.PodSucceeded || phase == corev1.PodFailed
}

// showPod makes the status say what the Pod's does.
func (p *pass) showPod() {
	st, pod := &p.a.status, p.pod
	if pod == nil {
		st.ContainerID = ""
		p.pendPod(p.a.lifeErr)
		return
	}
	st.ContainerID, st.Restarts, st.ExitCode = pod.ContainerID, pod.Restarts, pod.ExitCode
	if !pod.StartedAt.IsZero() {
		started := seconds(pod.StartedAt)
		st.StartTime = &started
	}
	if pod.Node != "" {
		p.condition(v1alpha1.ConditionScheduled, true, "PodScheduled", "the Pod has a node")
	} else {
		p.condition(v1alpha1.ConditionScheduled, false, cmp.Or(pod.Reason, "PodPending"), pod.Message)
	}
	switch {
	case podEnded(pod.Phase) && !pod.Deleting && !p.isRebuilt(): // that it is deleted ends it as well, and says nothing
		phase, reason := v1alpha1.SandboxSucceeded, "Completed"
		if pod.Phase == corev1.PodFailed {
			phase, reason = v1alpha1.SandboxFailed, "PodFailed"
		}
		p.endPod(phase, cmp.Or(pod.Reason, reason), pod.Message)
		p.podIsOver()
		return
	case p.onDeadNode(pod):
		st.Phase, st.Reason, st.Message = v1alpha1.SandboxLost, string(fault.NodeDead), "node "+pod.Node+" does not run any more; the Pod is made again elsewhere"
		return
	case pod.Phase == corev1.PodRunning:
		if st.Phase != v1alpha1.SandboxRunning {
			p.log("running", "node", st.Node, "pod", pod.UID)
			p.event(p.sb, EventNormal, "Started", "the Pod runs")
		}
		st.Phase, st.Reason, st.Message = v1alpha1.SandboxRunning, pod.Reason, pod.Message
	case pod.Phase == corev1.PodUnknown && st.Phase == v1alpha1.SandboxRunning:
		st.Reason, st.Message = cmp.Or(pod.Reason, "PodUnknown"), pod.Message
	default:
		st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, pod.Reason, pod.Message
		// The scheduler of Kubernetes names no claim, nor what a claim lacks.
		if c := meta.FindStatusCondition(st.Conditions, v1alpha1.ConditionVolumeClaimsBound); pod.Reason == corev1.PodReasonUnschedulable && c != nil && c.Reason == ReasonClaimPending {
			st.Message += "; " + c.Message
		}
	}
	switch err := p.a.lifeErr; {
	case err != nil:
		st.Reason, st.Message = string(fault.ReasonOf(err)), err.Error()
	case pod.Deleting && p.sb.Spec.PodRef != nil:
		st.Reason, st.Message = reasonPodTerminating, "the Pod is being deleted; the sandbox ends with it"
	case pod.Deleting && p.sb.Spec.Paused:
		st.Reason, st.Message = "", ""
	case pod.Deleting:
		st.Reason, st.Message = reasonPodTerminating, "the Pod is being deleted; it is made again when it is gone"
	case p.unreachable && st.Reason == "" && len(p.entries) > 0:
		st.Reason, st.Message = string(fault.AgentUnavailable), "the agent of node "+st.Node+" cannot be reached"
	}
}

// pendPod makes the sandbox wait for its Pod; err is why there is none, nil if it only has to be made.
func (p *pass) pendPod(err error) {
	st := &p.a.status
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, "", ""
	if err != nil {
		st.Reason, st.Message = string(fault.ReasonOf(err)), err.Error()
	}
	p.condition(v1alpha1.ConditionScheduled, false, cmp.Or(st.Reason, "NoPod"), cmp.Or(st.Message, "the Pod is not there yet"))
}

// endPod makes the sandbox over.
func (p *pass) endPod(phase v1alpha1.SandboxPhase, reason, message string) {
	st := &p.a.status
	st.Phase, st.Reason, st.Message = phase, reason, message
	kind := EventNormal
	if phase == v1alpha1.SandboxFailed {
		kind = EventWarning
	}
	p.log("is over", "phase", phase, "reason", reason)
	p.event(p.sb, kind, string(phase), cmp.Or(message, "the Pod ended"))
}

// isRebuilt says whether the Pod is made again after it ended: it is ours, and its restart policy says that it never
// ends, or its conditions that it did not end by itself; so somebody, as kubelet when it evicts, has ended it.
func (p *pass) isRebuilt() bool {
	t := p.sb.Spec.Template
	return t != nil && p.pod.Phase == corev1.PodFailed && (p.pod.Disrupted || t.Spec.RestartPolicy == "" || t.Spec.RestartPolicy == corev1.RestartPolicyAlways)
}

// notePod notes that the sandbox's own Pod is gone although nobody here had it deleted. It is made again at once when that
// happens once, and later and later when it goes on.
func (p *pass) notePod(pod *Pod) {
	a, st := p.a, &p.a.status
	switch {
	case p.sb.Spec.Template == nil:
	case pod != nil:
		if a.pod != pod.UID {
			a.pod, a.ranSince = pod.UID, time.Time{}
		}
		if pod.Running && a.ranSince.IsZero() {
			a.ranSince = p.now
		}
	case a.pod == "" && st.Phase != v1alpha1.SandboxRunning: // there was none
	default:
		was := a.pod
		a.pod = ""
		if p.sb.Spec.Paused || was != "" && was == a.counted {
			return
		}
		p.lostPod(was)
		a.rebuild.due = p.now
		if n := a.rebuild.attempts; n > 1 {
			a.rebuild.due = p.now.Add(retryDelay(n - 1))
		}
		p.log("lost its Pod", "pod", was, "attempts", a.rebuild.attempts)
		p.event(p.sb, EventWarning, "PodLost", "Pod "+p.sb.Name+" is gone; it is made again, with the same claims and volumes")
	}
}

// lostPod counts a Pod that was lost. One that had run for long enough is the first again.
func (p *pass) lostPod(uid types.UID) {
	a := p.a
	if !a.ranSince.IsZero() && !p.now.Before(a.ranSince.Add(steadyAfter)) {
		a.rebuild = retry{}
	}
	a.counted, a.ranSince = uid, time.Time{}
	a.rebuild.failed(p.now)
}

// orderPod makes the sandbox's own Pod, or has it go.
func (p *pass) orderPod(pod *Pod) {
	a := p.a
	switch {
	case pod != nil && !isOver(a.status.Phase) && p.onDeadNode(pod):
		p.killPod(pod)
	case p.sb.Spec.Paused && pod == nil:
		if a.life == nil {
			p.paused()
		}
	case p.sb.Spec.Paused:
		if p.stage > stageHeld {
			p.stage = stageHeld // nothing new comes into a Pod that is to go
		}
		p.deletePod(pod)
	case pod == nil:
		if p.now.Before(a.rebuild.due) {
			p.lookAt(a.rebuild.due)
			a.status.Reason, a.status.Message = reasonPodBackOff, fmt.Sprintf("the Pod was lost %d times in a row; it is made again after a while", a.rebuild.attempts)
			return
		}
		sb, claims := p.sb, p.ensureClaims(p.sb)
		p.orderOfPod(verbCreatePod, func(ctx context.Context) error {
			if err := claims(ctx); err != nil {
				return err
			}
			return p.Pods.Create(ctx, sb)
		})
	case podEnded(pod.Phase) && !isOver(a.status.Phase):
		if !pod.Deleting && a.counted != pod.UID {
			p.lostPod(pod.UID)
			p.event(p.sb, EventWarning, cmp.Or(pod.Reason, "PodFailed"), cmp.Or(pod.Message, "the Pod failed")+"; it is made again")
		}
		p.deletePod(pod)
	case p.orderClaims(pod):
	case pod.Outdated && !pod.Deleting && !podEnded(pod.Phase):
		sb := p.sb
		p.orderOfPod(verbUpdatePod, func(ctx context.Context) error { return p.Pods.Update(ctx, sb, pod.UID) })
	case pod.Running:
		a.lifeErr, a.lifeRetry = nil, retry{}
	}
}

// seeUpdate makes the status say whether the Pod has what the template was changed to.
func (p *pass) seeUpdate() {
	pod, told := p.pod, meta.FindStatusCondition(p.a.status.Conditions, v1alpha1.ConditionUpdated) != nil
	switch {
	case p.sb.Spec.Template == nil, pod == nil && !told, pod != nil && !told && !pod.Outdated && !pod.Updated:
	case pod == nil:
		p.condition(v1alpha1.ConditionUpdated, false, "NoPod", "the next Pod has it")
	case pod.Outdated && p.a.lifeErr != nil:
		p.condition(v1alpha1.ConditionUpdated, false, string(fault.ReasonOf(p.a.lifeErr)), p.a.lifeErr.Error())
	case pod.Outdated:
		p.condition(v1alpha1.ConditionUpdated, false, "Outdated", "the Pod does not have what the template was changed to yet")
	case pod.Updating != "":
		p.condition(v1alpha1.ConditionUpdated, false, pod.Updating, cmp.Or(pod.UpdatingMessage, "kubelet has not carried it out yet"))
	default:
		p.condition(v1alpha1.ConditionUpdated, true, "Updated", "the Pod runs with what the template says")
	}
}

// onDeadNode says whether the Pod's node is known not to run any more.
func (p *pass) onDeadNode(pod *Pod) bool {
	return p.sb.Spec.Template != nil && pod.Node != "" && p.Agents.Dead(pod.Node)
}

// killPod takes away a Pod that nobody is left to let end.
func (p *pass) killPod(pod *Pod) {
	if a := p.a; a.counted != pod.UID {
		p.lostPod(pod.UID)
		a.rebuild.due = p.now
	}
	sb := p.sb
	p.orderOfPod(verbKillPod, func(ctx context.Context) error { return p.Pods.Kill(ctx, sb, pod.UID) })
}

func (p *pass) deletePod(pod *Pod) {
	if sb := p.sb; !pod.Deleting {
		p.orderOfPod(verbDeletePod, func(ctx context.Context) error { return p.Pods.Delete(ctx, sb, pod.UID) })
	}
}

// orderOfPod has something done about the Pod, unless something is, or was a moment ago, or has to wait.
func (p *pass) orderOfPod(v verb, do func(context.Context) error) {
	if p.a.life != nil || v == p.a.done && p.late() || p.waits() {
		return
	}
	op := &operation{verb: v, id: newOperationID()}
	p.a.life = op
	p.begin(op, podTimeout, func(ctx context.Context, _ *agentv1.Command) result { return result{err: do(ctx)} })
}

// deletingPod lets the sandbox go when its own Pod is gone, so that its processes end while their volumes are there,
// and the agent has detached what there was. The Pod of podRef stays: there the agent detaches everything, what is busy
// lazily after a while.
func (p *pass) deletingPod(ctx context.Context) error {
	a, st := p.a, &p.a.status
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxTerminating, "", ""
	p.stage = stageIdle
	a.cancelVolumes(errSandboxGone)
	if !slices.Contains(p.sb.Finalizers, v1alpha1.FinalizerVolumes) {
		return nil
	}
	if p.Pods == nil {
		p.finalize = true
		return nil
	}
	pod, err := p.Pods.Get(p.sb)
	if err != nil || a.life != nil {
		return nil
	}
	if a.lifeErr != nil {
		st.Reason, st.Message = string(fault.ReasonOf(a.lifeErr)), a.lifeErr.Error()
	}
	if pod == nil && p.sb.Spec.Template != nil {
		// It may have been made a moment ago.
		if pod, err = p.Pods.Read(ctx, p.sb); err != nil {
			return err
		}
		if pod != nil {
			p.lookAt(p.now.Add(confirmAfter))
		}
	}
	if ref := p.sb.Spec.PodRef; ref != nil && pod != nil && pod.UID != ref.UID {
		pod = nil
	}
	if pod != nil && pod.Node != "" {
		st.Node = pod.Node
	}
	if st.Node == "" {
		st.Node = p.registry.nodeOf(a.uid)
	}
	p.loadNode()
	switch {
	case pod != nil && p.onDeadNode(pod):
		p.killPod(pod)
		return nil
	case pod != nil && p.sb.Spec.Template != nil:
		p.deletePod(pod)
		return nil
	}
	p.detachAll(pod)
	return nil
}

// detachAll has the agent forget the sandbox, with all its volumes, and then lets it go. pod is the Pod that stays; nil
// when it is gone, and with it whatever was attached.
func (p *pass) detachAll(pod *Pod) {
	st := &p.a.status
	switch {
	case st.Node == "" || p.a.gone || p.Agents.Dead(st.Node):
		p.finalize = true
	case p.agent.connected && !p.agent.pods, !p.agent.known && p.isReady():
		p.finalize = true // it never had anything of a Pod
	case !p.agent.connected && pod == nil && p.isReady():
		p.finalize = true // it forgets what it has of a Pod that is gone
	case !p.agent.connected:
		if st.Reason == "" {
			st.Reason, st.Message = string(fault.AgentUnavailable), "the agent of node "+st.Node+" cannot be reached, and has to detach the volumes"
		}
		p.lookAt(p.now.Add(agentGrace))
	case !p.waits():
		p.order(verbDelete)
	}
}
