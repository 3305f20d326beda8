package scheduler

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// The phases of an agent's SandboxState.
const (
	stateCreated    = "Created"
	stateRunning    = "Running"
	stateStopped    = "Stopped"
	stateRestarting = "Restarting"
)

// stage is what can be done about a sandbox's volumes at this moment.
type stage int

const (
	// stageIdle: nothing, as the node is not heard of or a command about the sandbox is under way.
	stageIdle stage = iota
	// stageAbsent: there is nothing on a node, so nothing is mounted and nothing can be.
	stageAbsent
	// stageHeld: there is no task to attach to; what is there can be detached.
	stageHeld
	// stageBringUp: the task is created. All volumes are attached before it starts.
	stageBringUp
	// stageRunning: volumes come and go.
	stageRunning
)

// pass is one look at a sandbox.
type pass struct {
	*Scheduler
	a   *actor
	sb  *v1alpha1.Sandbox
	now time.Time

	runtime  *SSGRuntime
	key      SubSandboxGroupKey
	set      settings
	volumes  *VolumeManager
	entries  []*entry
	agent    agentView
	state    *agentv1.SandboxState
	stage    stage
	workload workload
	// unreachable: the agent is away for longer than it may be. away is why.
	unreachable bool
	// atRest: the sandbox is paused or over, and nothing is mounted.
	atRest bool
	// finalize: nothing of the sandbox is left, so that it may go.
	finalize bool
	// again is when to look again; zero for never.
	again time.Time
}

// reconcile takes a sandbox a step nearer to what is wished. It is called again whenever anything about the
// sandbox changes, and never waits for an agent.
func (s *Scheduler) reconcile(ctx context.Context, key store.Key) {
	sb := s.cache.get(key)
	if sb == nil {
		s.forget(key, "")
		return
	}
	s.forget(key, sb.UID)
	p := &pass{Scheduler: s, a: s.actor(sb), sb: sb, now: s.Clock.Now()}
	if err := p.run(ctx); err != nil && ctx.Err() == nil {
		if errdefs.IsNotFound(err) {
			return // gone: the store will say so
		}
		p.a.failures++
		s.Logger.Warn("cannot write the sandbox", "sandbox", key.String(), "error", err)
		p.lookAt(p.now.Add(retryDelay(p.a.failures)))
	} else {
		p.a.failures = 0
	}
	if !p.again.IsZero() {
		s.queue.addAt(item{key: key}, p.again)
	}
}

func (p *pass) run(ctx context.Context) error {
	p.load()
	for _, r := range p.a.takeInbox() {
		p.absorb(r)
	}
	// What is detached leaves the spec first, so that nobody finds it without a row and wants it mounted.
	if err := p.editSpec(ctx, false); err != nil {
		return err
	}
	p.load()
	if err := p.lifecycle(ctx); err != nil {
		return err
	}
	p.volumes.plan(p)
	p.advance()
	p.compose()
	if err := p.writeStatus(ctx, nil); err != nil {
		return err
	}
	if err := p.editSpec(ctx, true); err != nil {
		return err
	}
	if p.finalize {
		return p.release(ctx)
	}
	return nil
}

// load reads all that the pass decides on.
func (p *pass) load() {
	p.runtime, p.key = p.runtimeOf(p.sb)
	p.set, p.volumes = settings{}, p.withoutGroup
	if p.runtime != nil {
		p.set, p.volumes = p.runtime.settings(), p.runtime.VolMgr
	}
	p.workload = workloadOf(&p.sb.Spec, &p.set.template)
	p.entries = entriesOf(p.sb, p.set.policy, p.Resolver)
	p.loadNode()
}

func (p *pass) loadNode() {
	p.agent, p.state = agentView{}, nil
	if p.a.status.Node != "" {
		p.agent = p.registry.agent(p.a.status.Node)
		p.state = p.registry.state(p.a.status.Node, p.a.uid)
	}
}

// lookAt asks for another look at a time.
func (p *pass) lookAt(t time.Time) {
	if p.again.IsZero() || t.Before(p.again) {
		p.again = t
	}
}

// lifecycle finds the stage and orders what concerns the sandbox as a whole.
func (p *pass) lifecycle(ctx context.Context) error {
	st := &p.a.status
	if p.sb.DeletionTimestamp != nil {
		p.deleting()
		return nil
	}
	if t := p.sb.Spec.ShutdownTime; t != nil {
		if !p.now.Before(t.Time) {
			return p.Store.Sandboxes().Delete(ctx, p.a.key, store.Preconditions{UID: p.a.uid})
		}
		p.lookAt(t.Time)
	}
	if p.a.moveTo != "" {
		if err := p.settle(ctx, p.a.moveTo); err != nil {
			return err
		}
		p.loadNode()
	}
	if st.Node == "" {
		p.stage = stageAbsent
		if p.sb.Spec.Paused {
			p.paused()
			return nil
		}
		if isOver(st.Phase) {
			return nil
		}
		if err := p.place(ctx); err != nil || st.Node == "" {
			return err
		}
		p.loadNode()
	}
	if !p.agent.connected {
		p.stage = stageIdle
		if p.now.Before(p.agent.changed.Add(agentGrace)) {
			p.lookAt(p.agent.changed.Add(agentGrace))
		} else {
			p.unreachable = p.isReady()
		}
		return nil
	}
	p.findStage()
	switch {
	case isOver(st.Phase):
		p.atRest = true
	case p.sb.Spec.Paused:
		p.pausing()
	default:
		p.bringUp()
	}
	return nil
}

// findStage reads the stage off the inventory.
func (p *pass) findStage() {
	switch {
	case p.state == nil:
		p.stage = stageAbsent
	case p.state.GetPhase() == stateRunning:
		p.stage = stageRunning
	case p.state.GetPhase() == stateCreated:
		p.stage = stageBringUp
	default:
		p.stage = stageHeld
	}
}

// place gives the sandbox a node. The node is in the store before anything is made there: a crash at any
// moment does not make two.
func (p *pass) place(ctx context.Context) error {
	p.mu.Lock()
	p.unplaced[p.a.key] = struct{}{}
	ready := p.isReady()
	p.mu.Unlock()
	if !ready {
		return nil
	}
	if p.runtime == nil {
		p.notPlaced(fault.New(errdefs.ErrNotFound, fault.GroupNotFound,
			"the sandbox group %s/%s has no sub-group %q, or does not exist: create it", p.key.Namespace, p.key.Group, p.key.SubGroup))
		return nil
	}
	if err := p.protect(ctx); err != nil {
		return err
	}
	q := &PlacementRequest{UID: p.a.uid, Requests: p.workload.requests(), Image: p.workload.image, Exclude: p.a.refused}
	p.locate(q)
	node := p.registry.nodeOf(p.a.uid)
	if node != "" {
		// An agent has it already, though the store lost its node: it is not made twice.
		p.registry.place(p.a.uid, placement{node: node, subGroup: p.key, requests: q.Requests, image: q.Image})
	} else {
		decision, err := p.set.engine.Place(q)
		if err != nil {
			p.notPlaced(err)
			p.lookAt(p.now.Add(unplacedRetry))
			return nil
		}
		node = decision.Node
	}
	if err := p.settle(ctx, node); err != nil {
		p.set.undo(p)
		return err
	}
	p.mu.Lock()
	delete(p.unplaced, p.a.key)
	p.mu.Unlock()
	return nil
}

// settle writes the sandbox's node, before anything is made there.
func (p *pass) settle(ctx context.Context, node string) error {
	st := &p.a.status
	old, before := *st.DeepCopy(), p.a.written.Node
	st.Node, st.Phase, st.Reason, st.Message = node, v1alpha1.SandboxPending, "", ""
	p.condition(v1alpha1.ConditionScheduled, true, "Placed", "the sandbox has a node")
	p.stage = stageAbsent
	p.volumes.plan(p)
	p.compose()
	if err := p.writeStatus(ctx, func(o *v1alpha1.Sandbox) error {
		if have := o.Status.Node; have != before && have != node {
			return fault.New(errdefs.ErrConflict, fault.Conflict, "sandbox %s is on node %q already", p.a.key, have)
		}
		return nil
	}); err != nil {
		p.a.status = old
		return err
	}
	p.a.moveTo = ""
	p.log("placed", "node", node)
	p.event(p.sb, EventNormal, "Scheduled", "placed on node "+node)
	return nil
}

// undo gives back what was reserved for the sandbox.
func (s settings) undo(p *pass) {
	if s.engine != nil {
		s.engine.Undo(p.a.uid)
	}
}

// locate adds what is known of where the sandbox's volumes are.
func (p *pass) locate(q *PlacementRequest) {
	if p.Resolver == nil {
		return
	}
	for _, e := range p.entries {
		if e.invalid != nil || e.VolumeType == v1alpha1.VolumeTypeLocal {
			continue
		}
		domains, key := p.Resolver.Locate(p.sb, &e.DynamicVolume)
		q.VolumeDomains = append(q.VolumeDomains, domains...)
		if key != "" {
			q.VolumeKeys = append(q.VolumeKeys, key)
		}
	}
}

func (p *pass) notPlaced(err error) {
	st := &p.a.status
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, string(fault.ReasonOf(err)), err.Error()
	p.condition(v1alpha1.ConditionScheduled, false, st.Reason, st.Message)
}

// protect puts our finalizer on the sandbox, so that it cannot go while a node has something of it.
func (p *pass) protect(ctx context.Context) error {
	if slices.Contains(p.sb.Finalizers, v1alpha1.FinalizerVolumes) {
		return nil
	}
	return p.updateSpec(ctx, func(o *v1alpha1.Sandbox) error {
		if !slices.Contains(o.Finalizers, v1alpha1.FinalizerVolumes) {
			o.Finalizers = append(o.Finalizers, v1alpha1.FinalizerVolumes)
		}
		return nil
	})
}

// release takes our finalizer off. The sandbox goes, unless somebody else holds it.
func (p *pass) release(ctx context.Context) error {
	return p.updateSpec(ctx, func(o *v1alpha1.Sandbox) error {
		o.Finalizers = slices.DeleteFunc(o.Finalizers, func(f string) bool { return f == v1alpha1.FinalizerVolumes })
		return nil
	})
}

func (p *pass) updateSpec(ctx context.Context, change func(*v1alpha1.Sandbox) error) error {
	o, err := p.Store.Sandboxes().UpdateSpec(ctx, p.a.key, store.Preconditions{UID: p.a.uid}, change)
	if err != nil {
		return err
	}
	p.sb = o
	p.cache.renew(o)
	return nil
}

var (
	errSandboxGone = errors.New("the sandbox is being deleted")
	errTooLong     = errors.New("the agent did not answer in time")
	errNotWanted   = errors.New("the volume is no longer wanted")
	errPausing     = errors.New("the sandbox is being paused")
)

// deleting has the agent remove everything, then lets the sandbox go.
func (p *pass) deleting() {
	a := p.a
	a.status.Phase, a.status.Reason, a.status.Message = v1alpha1.SandboxTerminating, "", ""
	p.stage = stageIdle
	a.cancelVolumes(errSandboxGone)
	if !slices.Contains(p.sb.Finalizers, v1alpha1.FinalizerVolumes) {
		return
	}
	if a.status.Node == "" || a.gone {
		p.finalize = true
		return
	}
	if a.life != nil && a.life.verb != verbDelete {
		a.life.cancel(errSandboxGone)
		return
	}
	if a.life != nil || !p.agent.connected || p.waits() {
		if a.lifeErr != nil {
			a.status.Reason, a.status.Message = string(fault.ReasonOf(a.lifeErr)), a.lifeErr.Error()
		}
		return
	}
	p.order(verbDelete)
}

// waits says whether the next command about the sandbox as a whole has to wait after a failure.
func (p *pass) waits() bool {
	if p.sb.Generation != p.a.lifeGeneration {
		return false // the spec changed: that may have been the cause
	}
	if p.now.Before(p.a.lifeRetry.due) {
		p.lookAt(p.a.lifeRetry.due)
		return true
	}
	return false
}

// pausing stops the process and has the agent detach everything.
func (p *pass) pausing() {
	stopped := p.state == nil || p.state.GetPhase() == stateStopped &&
		!slices.ContainsFunc(p.state.GetVolumes(), func(m *agentv1.MountRecord) bool { return m.GetPhase() == recordMounted })
	if stopped && p.a.life == nil {
		p.paused()
		return
	}
	p.stage = stageIdle
	p.a.cancelVolumes(errPausing)
	if p.a.life != nil {
		if p.a.life.verb != verbStop {
			p.a.life.cancel(errPausing)
		}
		return
	}
	if !p.waits() {
		p.order(verbStop)
	}
}

func (p *pass) paused() {
	st := &p.a.status
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxPaused, "", ""
	p.a.lifeErr, p.a.lifeRetry = nil, retry{}
	p.atRest = true
}

// bringUp takes the sandbox towards a running process: created, volumes attached, started.
func (p *pass) bringUp() {
	st := &p.a.status
	if p.stage == stageRunning || p.state.GetPhase() == stateRestarting {
		p.a.endedSince = time.Time{}
		p.running()
		return
	}
	if p.stage == stageBringUp {
		if p.late() {
			return
		}
		if st.Phase == v1alpha1.SandboxRunning || st.Phase == v1alpha1.SandboxLost {
			st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, "", ""
		}
		return
	}
	if phase, reason := p.outcome(); phase != "" {
		st.Phase, st.Reason, st.Message = phase, reason, ""
		if phase != v1alpha1.SandboxLost {
			st.Message = p.state.GetMessage()
			p.registry.unplace(p.a.uid)
			p.retryUnplaced()
			p.event(p.sb, EventNormal, string(phase), "the process ended")
		}
		p.atRest = true
		return
	}
	if p.a.life != nil {
		return
	}
	if p.ran() && p.state != nil {
		// Its own agent restarts it, or says that it does not.
		if p.a.endedSince.IsZero() {
			p.a.endedSince = p.now
		}
		if due := p.a.endedSince.Add(restartGrace); p.now.Before(due) {
			p.lookAt(due)
			return
		}
	}
	if !p.waits() {
		p.order(verbCreate)
	}
}

func (p *pass) running() {
	st := &p.a.status
	p.a.lifeErr, p.a.lifeRetry, p.a.refused = nil, retry{}, nil
	if st.Phase != v1alpha1.SandboxRunning {
		p.log("running", "node", st.Node)
		p.event(p.sb, EventNormal, "Started", "the process runs")
	}
	st.Phase, st.Reason, st.Message = v1alpha1.SandboxRunning, "", ""
	if p.state.GetPhase() != stateRestarting {
		return
	}
	st.Reason, st.Message = stateRestarting, p.state.GetMessage()
	if reason := p.state.GetReason(); st.Message != "" && reason == strings.ToUpper(reason) {
		// The restart itself fails, for a volume or whatever. The reasons of an exit are in CamelCase.
		st.Phase, st.Reason = v1alpha1.SandboxPending, reason
		return
	}
	for _, m := range p.state.GetVolumes() {
		if m.GetPhase() == recordFailed {
			st.Phase, st.Reason, st.Message = v1alpha1.SandboxPending, m.GetReason(), m.GetTarget()+": "+m.GetMessage()
			return
		}
	}
}

// ran says whether the process that is not there any more was started after what status last saw.
func (p *pass) ran() bool {
	st := &p.a.status
	if st.Phase == v1alpha1.SandboxRunning || st.Phase == v1alpha1.SandboxLost {
		return true
	}
	started := p.state.GetStartedAt()
	// metav1.Time has whole seconds.
	return started != nil && (st.StartTime == nil || started.AsTime().Truncate(time.Second).After(st.StartTime.Time))
}

// outcome is the phase, and its reason, of a sandbox whose process ended and is not to be started again;
// empty when it is.
func (p *pass) outcome() (v1alpha1.SandboxPhase, string) {
	if !p.ran() {
		return "", ""
	}
	policy := p.sb.Spec.RestartPolicy
	known := p.state != nil && p.state.ExitCode != nil
	switch {
	case policy == v1alpha1.RestartNever && !known:
		return v1alpha1.SandboxLost, "ContainerLost"
	case policy == v1alpha1.RestartNever && p.state.GetExitCode() != 0:
		return v1alpha1.SandboxFailed, "ExitCode"
	case policy == v1alpha1.RestartNever, policy == v1alpha1.RestartOnFailure && known && p.state.GetExitCode() == 0:
		return v1alpha1.SandboxSucceeded, "Completed"
	}
	return "", ""
}

// advance starts the process once all its volumes are there.
func (p *pass) advance() {
	if p.stage != stageBringUp || p.a.life != nil {
		return
	}
	for _, e := range p.entries {
		if v := p.a.volumes[e.Target]; !v.lets(e) {
			return
		}
	}
	if !p.waits() {
		p.order(verbStart)
	}
}

// lets says whether a volume lets the process start.
func (v *volumeState) lets(e *entry) bool {
	switch {
	case e.Detach != nil:
		return true // on its way out
	case v == nil || v.op != nil || v.row == nil || v.row.EntryHash != e.hash:
		return false
	case v.row.Phase == v1alpha1.VolumeMounted:
		return true
	}
	return v.row.Phase == v1alpha1.VolumeFailed && isGate(v.row.Reason)
}

// order sends a command about the sandbox as a whole.
func (p *pass) order(v verb) {
	if v == p.a.done && p.late() {
		return
	}
	op := &operation{verb: v, id: newOperationID()}
	p.a.life = op
	sb, client := p.sb, p.agent.Client
	create := p.workload.createRequest(sb, p.key)
	timeout := stopTimeout
	if v == verbCreate {
		timeout = createTimeout
	}
	p.begin(op, timeout, func(ctx context.Context, command *agentv1.Command) result {
		var r result
		switch v {
		case verbCreate:
			create.Command = command
			r.state, r.err = client.CreateSandbox(ctx, create)
		case verbStart:
			r.state, r.err = client.StartSandbox(ctx, &agentv1.StartSandboxRequest{Command: command})
		case verbStop:
			r.state, r.err = client.StopSandbox(ctx, &agentv1.StopSandboxRequest{Command: command})
		case verbDelete:
			_, r.err = client.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Command: command})
		}
		return r
	})
}

// late says whether the inventory may not have told yet what the last command did.
func (p *pass) late() bool {
	if p.now.Before(p.a.doneUntil) {
		p.lookAt(p.a.doneUntil)
		return true
	}
	return false
}

// absorb takes over how an operation ended.
func (p *pass) absorb(r result) {
	outcome := "OK"
	if r.err != nil {
		outcome = string(fault.ReasonOf(r.err))
	}
	p.metrics.operations.WithLabelValues(string(r.op.verb), outcome).Inc()
	if r.op.target != "" {
		p.volumes.absorb(p, r)
		return
	}
	a := p.a
	if a.life != r.op {
		return
	}
	a.life = nil
	if r.err != nil {
		p.lifeFailed(r)
		return
	}
	a.lifeErr, a.lifeRetry.due = nil, time.Time{}
	a.done, a.doneUntil = r.op.verb, p.now.Add(confirmAfter)
	if r.op.verb == verbDelete {
		a.gone = true
		p.registry.dropState(r.op.node, a.uid)
	} else if r.state != nil {
		p.registry.setState(r.op.node, a.uid, r.state, r.op.heard)
	}
	p.log(string(r.op.verb)+" done", "node", r.op.node, "operation", r.op.id, "took", p.now.Sub(r.op.started))
}

func (p *pass) lifeFailed(r result) {
	a := p.a
	if errors.Is(r.err, errSandboxGone) || errors.Is(r.err, errPausing) {
		return // abandoned by us
	}
	a.lifeErr, a.lifeGeneration = r.err, r.op.generation
	a.lifeRetry.failed(p.now)
	p.Logger.Warn("the agent could not "+string(r.op.verb)+" the sandbox", "sandbox", a.key.String(), "tenant", p.sb.Spec.TenantID,
		"node", r.op.node, "operation", r.op.id, "reason", fault.ReasonOf(r.err), "error", r.err)
	p.event(p.sb, EventWarning, string(fault.ReasonOf(r.err)), r.err.Error())
	if r.op.verb == verbCreate && fault.ReasonOf(r.err) == fault.NoCapacity && p.registry.state(r.op.node, a.uid) == nil && p.runtime != nil {
		p.replace(r.op.node)
	}
	if p.sb.DeletionTimestamp == nil && !isOver(a.status.Phase) && !p.sb.Spec.Paused {
		a.status.Phase = v1alpha1.SandboxPending
	}
}

// replace moves a sandbox off a node that refused it before it made anything. It stays where it is when there
// is no other.
func (p *pass) replace(node string) {
	a := p.a
	a.refused = append(a.refused, node)
	q := &PlacementRequest{UID: a.uid, Requests: p.workload.requests(), Image: p.workload.image, Exclude: a.refused}
	p.locate(q)
	p.set.engine.Undo(a.uid)
	decision, err := p.set.engine.Place(q)
	if err != nil {
		a.refused = nil // each has refused: all are tried again
		p.registry.place(a.uid, placement{node: node, subGroup: p.key, requests: q.Requests, image: q.Image})
		return
	}
	a.moveTo, a.lifeErr, a.lifeRetry = decision.Node, nil, retry{}
}

// begin sends a command to the sandbox's agent in a goroutine of its own, and has the sandbox looked at again
// when it has ended.
func (p *pass) begin(op *operation, timeout time.Duration, run func(context.Context, *agentv1.Command) result) {
	op.node, op.generation, op.started = p.a.status.Node, p.sb.Generation, p.now
	op.heard = p.registry.heard(op.node, p.a.uid)
	ctx, cancel := context.WithCancelCause(p.base)
	op.cancel = cancel
	command := &agentv1.Command{
		Epoch:       p.Epoch,
		LeaseUid:    p.LeaseUID,
		SandboxUid:  string(p.a.uid),
		Generation:  op.generation,
		OperationId: op.id,
	}
	timer := p.Clock.AfterFunc(timeout, func() { cancel(errTooLong) })
	s, a := p.Scheduler, p.a
	s.commands.Go(func() {
		r := run(ctx, command)
		timer.Stop()
		r.op, r.err = op, commandError(ctx, r.err)
		cancel(nil)
		a.deliver(r)
		s.queue.add(item{key: a.key})
	})
}

// commandError gives an agent's answer its kind and reason, and tells a call that we ended from one that the
// agent did.
func commandError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	cause := context.Cause(ctx)
	switch {
	case cause == nil:
		return fault.FromGRPC(err)
	case errors.Is(cause, errTooLong):
		return fault.New(errdefs.ErrUnavailable, fault.DeadlineExceeded, "%w", cause)
	}
	return cause
}

func (p *pass) log(message string, args ...any) {
	p.Logger.Info("sandbox "+message, append([]any{"sandbox", p.a.key.String(), "uid", p.a.uid, "tenant", p.sb.Spec.TenantID}, args...)...)
}

// seconds is a time as status has it.
func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }
