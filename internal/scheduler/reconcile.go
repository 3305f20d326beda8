package scheduler

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
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

	runtime *SSGRuntime
	key     SubSandboxGroupKey
	set     settings
	volumes *VolumeManager
	entries []*entry
	agent   agentView
	state   *agentv1.SandboxState
	// pod is the Pod of a pod-backed sandbox, nil when there is none.
	pod *Pod
	// unseen: nothing is known yet of its Pods, so that the status says nothing about this generation.
	unseen bool
	// claims are those of its volumeClaimTemplates, as far as they are known.
	claims   []Claim
	stage    stage
	workload workload
	// unreachable: the agent is away for longer than it may be. away is why.
	unreachable bool
	// atRest: the sandbox is paused or over, and nothing is mounted.
	atRest bool
	// unmount: nothing of what the node has of the sandbox's volumes is to stay there, as its Pod is another or none.
	unmount bool
	// off is why the node's agent cannot attach anything to the Pod.
	off error
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
		s.sawUses(key)
		return
	}
	s.forget(key, sb.UID)
	p := &pass{Scheduler: s, a: s.actor(sb), sb: sb, now: s.Clock.Now()}
	err := p.run(ctx)
	p.renewUses()
	if err != nil && ctx.Err() == nil {
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
	p.seeForeign()
	p.load()
	for _, r := range p.a.takeInbox() {
		p.absorb(r)
	}
	// What is detached leaves the spec first, so that nobody finds it without a row and wants it mounted.
	sb := p.sb
	if err := p.editSpec(ctx, false); err != nil {
		return err
	}
	if p.sb != sb {
		p.load()
	} else {
		p.loadNode()
	}
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
	if p.finalize && p.releaseClaims() {
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
		if podBacked(p.sb) {
			return p.deletingPod(ctx)
		}
		p.deleting()
		return nil
	}
	if t := p.sb.Spec.ShutdownTime; t != nil {
		if !p.now.Before(t.Time) {
			return p.Store.Sandboxes().Delete(ctx, p.a.key, store.Preconditions{UID: p.a.uid})
		}
		p.lookAt(t.Time)
	}
	if podBacked(p.sb) {
		return p.podLifecycle(ctx)
	}
	if p.died() {
		return nil
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

func (p *pass) updateSpec(ctx context.Context, change func(*v1alpha1.Sandbox) error) error {
	return p.wrote(p.Store.Sandboxes().UpdateSpec(ctx, p.a.key, store.Preconditions{UID: p.a.uid}, change))
}

// updateSpecLate is updateSpec for a change that is made again if a crash takes it back.
func (p *pass) updateSpecLate(ctx context.Context, change func(*v1alpha1.Sandbox) error) error {
	return p.wrote(store.UpdateSpecLate(ctx, p.Store.Sandboxes(), p.a.key, store.Preconditions{UID: p.a.uid}, change))
}

func (p *pass) wrote(o *v1alpha1.Sandbox, err error) error {
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

func (p *pass) log(message string, args ...any) {
	p.Logger.Info("sandbox "+message, append([]any{"sandbox", p.a.key.String(), "uid", p.a.uid, "tenant", p.sb.Spec.TenantID}, args...)...)
}

// seconds is a time as status has it.
func seconds(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }
