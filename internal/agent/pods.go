package agent

import (
	"context"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
)

// podState is what is held of a sandbox that is a container of a Pod, beside what is held of every sandbox. Its fields are
// guarded by the sandbox's mutex.
type podState struct {
	journal.Pod
	// container is what containerd said of it last.
	container pods.Container
	// refusal is why nothing may be attached to that container; nil if it may.
	refusal error
	// looking: a look at it is under way; again: another is due after it.
	looking, again bool
	// forceAfter is when its deletion detaches what is busy.
	forceAfter time.Time
}

func (p *podState) ref() pods.Ref { return pods.Ref{PodUID: p.UID, Container: p.Pod.Container} }

func (s *sandbox) isPod() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pod != nil
}

// podIdentity is the Pod that has the sandbox's container.
func (s *sandbox) podIdentity() (journal.Pod, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pod == nil {
		return journal.Pod{}, false
	}
	return s.pod.Pod, true
}

// takesVolume says why a volume may not be attached at a target of a Pod's container, as far as that is known.
func (s *sandbox) takesVolume(target string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.pod == nil:
		return nil
	case s.pod.Gone:
		return s.podGone()
	case s.container == nil || !hasTask(*s.container):
		return nil
	case s.pod.refusal != nil:
		return s.pod.refusal
	}
	if over := s.pod.container.Facts.SharedOver(target); over != "" {
		return fault.New(errdefs.ErrFailedPrecondition, fault.Reason(mount.ReasonTargetShared),
			"%s of Pod %s/%s lies on the mount %s, which is Bidirectional: the volume would appear on the host and in other Pods", target, s.pod.Namespace, s.pod.Name, over)
	}
	return nil
}

// podGone is the error of who wants a Pod that the node has no more. The caller holds mu.
func (s *sandbox) podGone() error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.PodGone, "Pod %s/%s (%s) of sandbox %s is gone from this node", s.pod.Namespace, s.pod.Name, s.pod.UID, s.uid)
}

// refusal says why nothing may be attached to a container.
func (a *Agent) refusal(p journal.Pod, c pods.Container) error {
	privileged := ""
	switch {
	case c.Facts.Runtime != pods.RuntimeRunc:
		return fault.New(errdefs.ErrFailedPrecondition, fault.RuntimeUnsupported,
			"container %s of Pod %s/%s has the runtime %s, whose containers have no mount namespace on this kernel to attach to: only %s is supported",
			p.Container, p.Namespace, p.Name, c.Facts.Runtime, pods.RuntimeRunc)
	case c.Facts.UserNamespace:
		// mount.Attributes.IDMap could give the volume to the container's users, where its filesystem can.
		return fault.New(errdefs.ErrFailedPrecondition, fault.PodUserNamespace,
			"container %s of Pod %s/%s has a user namespace of its own, to whose users the files of a volume would not belong: leave hostUsers: false out of the Pod",
			p.Container, p.Namespace, p.Name)
	case a.config.PrivilegedPods:
		return nil
	case c.Facts.SysAdmin:
		privileged = "has CAP_SYS_ADMIN"
	case c.Facts.HostPID:
		privileged = "has the host's PID namespace"
	default:
		return nil
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.PodPrivileged,
		"container %s of Pod %s/%s %s, so that it could change a read-only volume or keep one that is detached; take that from it, or have the operator set pods.allowPrivileged",
		p.Container, p.Namespace, p.Name, privileged)
}

// notAPod fails for a sandbox that is a container of a Pod, in calls that are for containers of the agent's own.
func (a *Agent) notAPod(uid string) error {
	record, _ := a.journal.Sandbox(uid)
	if record.Pod.UID == "" {
		return nil
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.InvalidRequest,
		"sandbox %s is container %s of Pod %s/%s, which kubelet runs: this agent only attaches volumes to it", uid, record.Pod.Container, record.Pod.Namespace, record.Pod.Name)
}

func podsOff() error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.FeatureDisabled, "this node's agent does not attach volumes to Pods: its configuration has pods.enabled off")
}

// podWorkload is the sandbox of a request for a container of a Pod, and its tenant.
func (a *Agent) podWorkload(ctx context.Context, uid string, pod *agentv1.PodWorkload, r *agentv1.AttachRequest) (*sandbox, string, error) {
	if a.config.Pods == nil {
		return nil, "", podsOff()
	}
	if pod.GetUid() == "" || pod.GetName() == "" || pod.GetNamespace() == "" || pod.GetContainer() == "" {
		return nil, "", fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "the request's Pod needs a namespace, a name, a UID and a container")
	}
	// A command that is out of date registers nothing. It is asked again when it is its turn.
	if _, err := a.pass(r.GetCommand(), r.GetTarget()); err != nil {
		return nil, "", err
	}
	sb, err := a.registerPod(ctx, uid, journal.Pod{Namespace: pod.GetNamespace(), Name: pod.GetName(), UID: pod.GetUid(),
		Container: pod.GetContainer(), TenantID: r.GetTenantId()})
	if err != nil {
		return nil, "", err
	}
	if err := a.freshPod(ctx, sb); err != nil {
		return nil, "", err
	}
	if err := sb.takesVolume(r.GetTarget()); err != nil {
		return nil, "", err
	}
	p, _ := sb.podIdentity()
	return sb, p.TenantID, nil
}

// registerPod notes which container of which Pod a sandbox is. A sandbox has one Pod after another, never two: the next one
// when the former is gone, or has nothing of ours any more.
func (a *Agent) registerPod(ctx context.Context, uid string, want journal.Pod) (*sandbox, error) {
	sb := a.sandbox(uid)
	if p, ok := sb.podIdentity(); !ok || p.Gone || p.UID != want.UID || p.Container != want.Container {
		release, err := sb.alone(ctx) // nobody reads the former Pod meanwhile
		if err != nil {
			return nil, err
		}
		defer release()
	}
	a.fenceMu.Lock()
	defer a.fenceMu.Unlock()
	if sb.ctx.Err() != nil {
		return nil, context.Cause(sb.ctx)
	}
	record, known := a.journal.Sandbox(uid)
	has := record.Pod
	same := has.UID == want.UID && has.Container == want.Container
	_, own := sb.seen()
	switch {
	case known && record.Desired == journal.DesiredGone:
		return nil, sb.terminating()
	case has.UID == "" && (own || known || len(a.journal.Volumes(uid)) > 0):
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.InvalidRequest, "sandbox %s is a container of this agent's own, not one of Pod %s/%s", uid, want.Namespace, want.Name)
	case same && has.Gone:
		sb.mu.Lock()
		defer sb.mu.Unlock()
		return nil, sb.podGone()
	case same:
		return sb, nil
	case has.UID != "" && !has.Gone && len(a.journal.Volumes(uid)) > 0:
		return nil, fault.New(errdefs.ErrUnavailable, fault.OperationPending,
			"sandbox %s has volumes in container %s of Pod %s/%s (%s) on this node; try again when they are detached or that is gone", uid, has.Container, has.Namespace, has.Name, has.UID)
	}
	ref := pods.Ref{PodUID: want.UID, Container: want.Container}
	if other, ok := a.podAt(ref); ok && other != sb {
		return nil, fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "container %s of Pod %s/%s is sandbox %s already", want.Container, want.Namespace, want.Name, other.uid)
	}
	if err := a.journal.Write(journal.Change{PutSandboxes: []journal.Sandbox{{UID: uid, Pod: want}}}); err != nil {
		return nil, err
	}
	if has.UID != "" {
		a.dropPod(sb)
		sb.see(nil)
	}
	a.holdPod(sb, want)
	return sb, nil
}

// holdPod notes in memory what the journal has of a Pod.
func (a *Agent) holdPod(sb *sandbox, p journal.Pod) {
	sb.mu.Lock()
	sb.pod = &podState{Pod: p}
	ref := sb.pod.ref()
	sb.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if p.Gone {
		delete(a.podIndex, ref)
	} else {
		a.podIndex[ref] = sb
	}
}

// dropPod takes a Pod's container out of the index.
func (a *Agent) dropPod(sb *sandbox) {
	sb.mu.Lock()
	ref := sb.pod.ref()
	sb.mu.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.podIndex[ref] == sb {
		delete(a.podIndex, ref)
	}
}

// podAt is the sandbox that is a container of a Pod.
func (a *Agent) podAt(ref pods.Ref) (*sandbox, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	sb, ok := a.podIndex[ref]
	return sb, ok
}

// freshPod reads the state of a Pod's container, unless its init, which is pinned, is known to live.
func (a *Agent) freshPod(ctx context.Context, sb *sandbox) error {
	if sb.isFresh() {
		return nil
	}
	release, err := sb.alone(ctx)
	if err != nil {
		return err
	}
	defer release()
	if sb.isFresh() { // it was read for another volume meanwhile
		return nil
	}
	if err := a.readPod(ctx, sb); err != nil {
		return err
	}
	sb.mu.Lock()
	refused := sb.pod == nil || sb.pod.refusal != nil
	sb.mu.Unlock()
	if !refused {
		_, _ = sb.enter() // pins its init; who is to attach something asks again, and tells
	}
	return nil
}

// isFresh says whether nothing new is to be read of a sandbox that is a container of a Pod.
func (s *sandbox) isFresh() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pod == nil || s.pod.Gone || s.ctx.Err() != nil || s.process != nil && s.process.Alive()
}

// unchangedPod says whether a Pod's container is the one that is held, and lives; that it was started is noted.
func (a *Agent) unchangedPod(ctx context.Context, sb *sandbox) (bool, error) {
	p, _ := sb.podIdentity()
	found, err := a.config.Pods.Find(ctx, pods.Ref{PodUID: p.UID, Container: p.Container})
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	held := &sb.pod.container
	if !found.Alive || !held.Alive || found.ID != held.ID || found.PID != held.PID {
		return false, nil
	}
	held.Started = found.Started
	return true, nil
}

// readPod brings what is held of a Pod's container together with what containerd has of it. The caller holds the life lock
// alone.
func (a *Agent) readPod(ctx context.Context, sb *sandbox) error {
	p, _ := sb.podIdentity()
	if a.config.Pods == nil {
		return podsOff()
	}
	found, err := a.config.Pods.Find(ctx, pods.Ref{PodUID: p.UID, Container: p.Container})
	switch {
	case err == nil && !found.Alive && sb.isCreating(found.ID):
		return nil // containerd has its task when the hook has ended
	case err == nil:
		return a.adopt(sb, &found, true)
	case !errdefs.IsNotFound(err):
		return err
	}
	there, err := a.config.Pods.Exists(ctx, p.UID)
	switch {
	case err != nil:
		return err
	case !there && p.Seen:
		return a.forgetPod(sb)
	}
	return a.adopt(sb, nil, there)
}

// adopt notes the container that a sandbox has now; nil when there is none. What was mounted in another one waits for this
// one. The caller holds the life lock alone.
func (a *Agent) adopt(sb *sandbox, found *pods.Container, seen bool) error {
	p, _ := sb.podIdentity()
	id := ""
	if found != nil && found.Alive {
		id = found.ID
	}
	next := p
	next.ContainerID, next.Seen = id, p.Seen || seen
	if next != p {
		defer a.changed(sb.uid)
		var change journal.Change
		if id != p.ContainerID {
			var err error
			if change, err = a.waitAgain(sb.uid); err != nil {
				return err
			}
		}
		if err := a.updateSandbox(sb.uid, change, func(s *journal.Sandbox) { s.Pod = next }); err != nil {
			return err
		}
	}
	var c *containers.Container
	if found != nil {
		c = &containers.Container{ID: found.ID, State: containers.Stopped}
		c.UID, c.TenantID = sb.uid, p.TenantID
		if found.Alive {
			c.State, c.PID = containers.Running, found.PID
		}
	}
	sb.see(c)
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.pod.Pod, sb.pod.container, sb.pod.refusal = next, pods.Container{}, nil
	if found != nil {
		sb.pod.container, sb.pod.refusal = *found, a.refusal(p, *found)
	}
	return nil
}

// forgetPod forgets the volumes of a Pod that is gone: their mounts went with it. The caller holds the life lock alone.
func (a *Agent) forgetPod(sb *sandbox) error {
	if err := a.updater.forget(a.journal.Volumes(sb.uid)...); err != nil {
		return err
	}
	p, _ := sb.podIdentity()
	p.Gone, p.ContainerID = true, ""
	if err := a.updateSandbox(sb.uid, journal.Change{}, func(s *journal.Sandbox) {
		s.Pod = p
		if s.Desired != journal.DesiredGone { // whose end is another record
			s.DeletedAt = a.config.Clock.Now()
		}
	}); err != nil {
		return err
	}
	a.dropPod(sb)
	sb.see(nil)
	sb.mu.Lock()
	sb.pod.Pod, sb.pod.container, sb.pod.refusal = p, pods.Container{}, nil
	sb.mu.Unlock()
	sb.setTrouble(nil)
	a.log.Info("a Pod is gone, and what was recorded of its volumes forgotten", "sandbox", sb.uid, "namespace", p.Namespace, "pod", p.Name, "podUID", p.UID)
	a.changed(sb.uid)
	return nil
}

// podSandboxState completes the state of a sandbox that is a container of a Pod.
func podSandboxState(sb *sandbox, record journal.Sandbox, out *agentv1.SandboxState) *agentv1.SandboxState {
	p := record.Pod
	out.Workload = &agentv1.Workload{Kind: &agentv1.Workload_Pod{Pod: &agentv1.PodWorkload{Namespace: p.Namespace, Name: p.Name, Uid: p.UID, Container: p.Container}}}
	out.TenantId, out.Phase = p.TenantID, phaseStopped
	out.Removed = p.UID == "" || p.Gone || !record.DeletedAt.IsZero()
	if p.Gone {
		out.Reason = string(fault.PodGone)
	}
	if c, ok := sb.seen(); ok {
		out.ContainerId = c.ID
		if hasTask(c) {
			out.Phase = phaseRunning
		}
	}
	sb.mu.Lock()
	trouble := sb.trouble
	if trouble == nil && sb.pod.refusal != nil && len(out.Volumes) > 0 {
		trouble = sb.pod.refusal
	}
	if sb.pod.container.Alive && !sb.pod.container.Started {
		out.Phase = phaseCreated
	}
	sb.mu.Unlock()
	if trouble != nil {
		out.Reason, out.Message = string(fault.ReasonOf(trouble)), trouble.Error()
	}
	return out
}

// processes are the host PIDs in a sandbox's cgroup.
func (a *Agent) processes(sb *sandbox) []int {
	sb.mu.Lock()
	p := sb.pod
	var c pods.Container
	if p != nil {
		c = p.container
	}
	sb.mu.Unlock()
	switch {
	case p == nil:
		return a.config.Containers.Processes(sb.uid)
	case a.config.Pods == nil || !c.Alive:
		return nil
	}
	return a.config.Pods.Processes(c)
}

// recoverPods reads the containers of Pods that the journal knows.
func (a *Agent) recoverPods(ctx context.Context) error {
	for _, s := range a.journal.Sandboxes() {
		if s.Pod.UID == "" {
			continue
		}
		sb := a.sandbox(s.UID)
		a.holdPod(sb, s.Pod)
		switch {
		case !s.DeletedAt.IsZero():
			a.dropPod(sb)
		case a.config.Pods == nil:
			a.log.Warn("a Pod has volumes of ours, which stay as they are while pods.enabled is off", "sandbox", s.UID, "pod", s.Pod.Namespace+"/"+s.Pod.Name)
		default:
			if err := a.readPod(ctx, sb); err != nil {
				return err
			}
		}
	}
	return nil
}
