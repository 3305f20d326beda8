package sets

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilrand "k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/utils/clock"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/reconcile"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Events tells people what happens to an object. Calls do not block.
type Events interface {
	About(object runtime.Object, eventType, reason, message string)
}

// Options are what the controller works with. All but Workers and Metrics are required.
type Options struct {
	Sandboxes store.Sandboxes
	Sets      store.Objects[*agentsv1alpha1.SandboxSet]
	// Tenant is the tenant of a Namespace; empty for none.
	Tenant func(ctx context.Context, namespace string) (string, error)
	// Fresh is shared by all that write sandboxes of sets.
	Fresh *reconcile.Fresh
	// Leads asks the API server whether this process leads still; its error says that it does not, or that nobody knows.
	Leads  func(context.Context) error
	Events Events
	Clock  clock.WithTicker
	Log    *slog.Logger
	// Workers is how many sets are looked at at once; 4 when zero.
	Workers int
	// Metrics gets the controller's metrics.
	Metrics prometheus.Registerer
}

// Sets keeps the pools of all sets.
type Sets struct {
	Options
	loop *reconcile.Loop

	mu sync.Mutex // guards what is below
	// memories are what is remembered of each set. They may be lost.
	memories map[store.Key]*memory
}

// memory is what the passes over one set remember. One pass at a time uses it.
type memory struct {
	uid types.UID
	// unanswered are names under which a sandbox may have been made.
	unanswered []string
	// replaced counts sandboxes that ended, since the set was last whole; the next is not replaced before due.
	replaced int
	due      time.Time
}

// refillAfter is how long a claimed sandbox may be missing before the pool is looked at, unless something else has it looked at. A
// Pod that starts is a load on node and API server, which the claim is to have to itself; and of several claims that come at
// once each would cost a pass and a status.
const refillAfter = 250 * time.Millisecond

// The pauses before a sandbox that ended is replaced.
const (
	firstReplacement = time.Second
	maxReplacement   = 5 * time.Minute
)

// Every write to the API server has a step before and after it.
var steps = failpoint.Steps("set", []string{"create", "retain", "delete", "status"})

// New makes Sets. Start it once, with Run.
func New(o Options) *Sets {
	if o.Workers == 0 {
		o.Workers = 4
	}
	if o.Metrics != nil {
		o.Metrics.MustRegister(newPoolMetrics(o.Sets))
	}
	s := &Sets{Options: o, memories: map[store.Key]*memory{}}
	s.loop = reconcile.New(reconcile.Options{Name: "SandboxSet", Workers: o.Workers, Clock: o.Clock, Log: o.Log, Do: s.reconcile})
	return s
}

// Run works until ctx ends.
func (s *Sets) Run(ctx context.Context) {
	var running sync.WaitGroup
	running.Go(func() {
		reconcile.Follow(ctx, s.Sets, func(set *agentsv1alpha1.SandboxSet) { s.loop.Add(store.KeyOf(set)) })
	})
	running.Go(func() {
		reconcile.Follow(ctx, s.Sandboxes, func(sb *v1alpha1.Sandbox) {
			key := store.Key{Namespace: sb.Namespace, Name: sb.Labels[agentsv1alpha1.LabelSandboxSet]}
			if by := metav1.GetControllerOf(sb); by != nil && by.Kind == setGVK.Kind && by.Name != key.Name {
				s.loop.Add(store.Key{Namespace: sb.Namespace, Name: by.Name}) // the label was taken away, or changed
			}
			switch {
			case key.Name == "":
			case sb.Labels[agentsv1alpha1.LabelClaimName] != "": // it is missing now
				s.loop.AddAfter(key, refillAfter)
			default:
				s.loop.Add(key)
			}
		})
	})
	running.Go(func() { s.loop.Run(ctx) })
	running.Wait()
}

// reconcile looks at one set.
func (s *Sets) reconcile(ctx context.Context, key store.Key) (again time.Duration, err error) {
	if err := s.Fresh.Ensure(ctx); err != nil {
		return 0, err
	}
	set, err := s.Sets.Get(ctx, key)
	switch {
	case errdefs.IsNotFound(err), err == nil && set.DeletionTimestamp != nil:
		s.forget(key)
		return 0, nil
	case err != nil:
		return 0, err
	}
	p := &pass{Sets: s, set: set, memory: s.remember(key, set.UID)}
	if p.revision, err = Revision(set); err != nil {
		return 0, err
	}
	if p.tenant, err = s.Tenant(ctx, set.Namespace); err != nil {
		return 0, err
	}
	if p.pool, err = s.pool(ctx, set); err != nil {
		return 0, err
	}
	done := p.act(ctx)
	if p.late {
		return 0, done
	}
	if p.pool, err = s.pool(ctx, set); err != nil {
		return 0, err
	}
	return p.again, errors.Join(done, p.tell(ctx, done))
}

// pool are the sandboxes that are the set's.
func (s *Sets) pool(ctx context.Context, set *agentsv1alpha1.SandboxSet) ([]*v1alpha1.Sandbox, error) {
	page, err := s.Sandboxes.List(ctx, store.ListOptions{Namespace: set.Namespace, Labels: labels.SelectorFromSet(labels.Set{agentsv1alpha1.LabelSandboxSet: set.Name})})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(page.Items, func(sb *v1alpha1.Sandbox) bool { return !InPool(set, sb) }), nil
}

func (s *Sets) remember(key store.Key, uid types.UID) *memory {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.memories[key]
	if m == nil || m.uid != uid {
		m = &memory{uid: uid}
		s.memories[key] = m
	}
	return m
}

func (s *Sets) forget(key store.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.memories, key)
}

// pass is one look at a set.
type pass struct {
	*Sets
	set      *agentsv1alpha1.SandboxSet
	memory   *memory
	revision string
	tenant   string // that of the Namespace
	pool     []*v1alpha1.Sandbox
	again    time.Duration
	// late says that it may be another leader's to go on, and to tell.
	late bool
}

// act does what the plan says. The first error ends each part of it.
func (p *pass) act(ctx context.Context) error {
	v := look(p.pool, p.revision, p.tenant)
	todo := v.decide(&p.set.Spec)
	if len(v.over) == 0 && v.available >= int(p.set.Spec.Replicas) {
		p.memory.replaced, p.memory.due = 0, time.Time{}
	}
	return errors.Join(p.replace(ctx, todo.replace), p.remove(ctx, todo.remove), p.create(ctx, todo.create))
}

// replace removes sandboxes that have ended or lost a claim, not faster than the pauses allow. What is missing is made by a later pass.
func (p *pass) replace(ctx context.Context, over []*v1alpha1.Sandbox) error {
	if len(over) == 0 {
		return nil
	}
	now := p.Clock.Now()
	if left := p.memory.due.Sub(now); left > 0 {
		p.again = left
		return nil
	}
	p.memory.due = now.Add(min(firstReplacement<<min(p.memory.replaced, 10), maxReplacement))
	p.memory.replaced++
	return p.remove(ctx, over)
}

// remove deletes sandboxes that nobody has claimed.
func (p *pass) remove(ctx context.Context, sandboxes []*v1alpha1.Sandbox) error {
	var errs []error
	for _, sb := range sandboxes {
		if err := p.removeOne(ctx, sb); err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (p *pass) removeOne(ctx context.Context, sb *v1alpha1.Sandbox) (err error) {
	// What the set says by now, which may not be what it said when it made the sandbox: it is no revision.
	scaled := p.set.Spec.PersistentVolumeClaimRetentionPolicy.Scaled()
	if scaled != sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted() && len(sb.Spec.VolumeClaimTemplates) > 0 {
		// In one write with the mark: a sandbox that stayed, or was claimed, would keep what is not to be kept, or lose what is.
		steps("retain", false)
		sb, err = p.Sandboxes.UpdateSpec(ctx, store.KeyOf(sb), store.Preconditions{UID: sb.UID}, func(o *v1alpha1.Sandbox) error {
			if !InPool(p.set, o) {
				return errTaken(o)
			}
			if o.DeletionTimestamp != nil {
				return errGone // what becomes of its claims is up to who deleted it
			}
			o.Spec.PersistentVolumeClaimRetentionPolicy = &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: scaled, WhenScaled: scaled}
			if o.Annotations == nil {
				o.Annotations = map[string]string{}
			}
			o.Annotations[agentsv1alpha1.AnnotationRemoving] = "true"
			return nil
		})
		steps("retain", true)
		if err != nil {
			return p.Fresh.Wrote(err)
		}
	}
	steps("delete", false)
	err = p.Sandboxes.Delete(ctx, store.KeyOf(sb), store.Preconditions{UID: sb.UID, ResourceVersion: sb.ResourceVersion})
	steps("delete", true)
	if err != nil {
		return p.Fresh.Wrote(err)
	}
	p.Log.Info("removed an unclaimed sandbox", "set", store.KeyOf(p.set).String(), "sandbox", sb.Name, "phase", sb.Status.Phase)
	p.Events.About(p.set, corev1.EventTypeNormal, "SandboxRemoved", "removed sandbox "+sb.Name)
	return nil
}

// errGone: somebody else deletes the sandbox.
var errGone = fmt.Errorf("it is being deleted: %w", errdefs.ErrNotFound)

func errTaken(sb *v1alpha1.Sandbox) error {
	return fmt.Errorf("sandbox %s/%s was claimed meanwhile: %w", sb.Namespace, sb.Name, errdefs.ErrConflict)
}

// create makes sandboxes, one after another, each after a look at who leads. A creation is the one write here that no version
// guards, so a leader that was suspended, and goes on when another leads, makes the one that it was at and no more.
func (p *pass) create(ctx context.Context, n int) error {
	for range n {
		if err := p.Leads(ctx); err != nil {
			p.late = true
			return fmt.Errorf("make a sandbox for set %s/%s: %w", p.set.Namespace, p.set.Name, err)
		}
		name := p.name()
		if err := p.createOne(ctx, name); err != nil {
			if reconcile.Open(err) {
				p.memory.unanswered = append(p.memory.unanswered, name)
			}
			return err
		}
	}
	return nil
}

// name is that of a sandbox that is to be made: one that may have been made without our knowledge, but was not.
func (p *pass) name() string {
	for len(p.memory.unanswered) > 0 {
		name := p.memory.unanswered[0]
		p.memory.unanswered = p.memory.unanswered[1:]
		if !slices.ContainsFunc(p.pool, func(sb *v1alpha1.Sandbox) bool { return sb.Name == name }) {
			return name
		}
	}
	return p.set.Name + "-" + utilrand.String(agentsv1alpha1.RandomSuffix)
}

func (p *pass) createOne(ctx context.Context, name string) error {
	steps("create", false)
	sb, err := p.Sandboxes.Create(ctx, NewSandbox(p.set, name, p.revision))
	steps("create", true)
	if errdefs.IsAlreadyExists(err) {
		// It is ours, of a write that had no answer, or somebody's: then the next pass has another name.
		there, getErr := p.Sandboxes.Get(ctx, store.Key{Namespace: p.set.Namespace, Name: name})
		if getErr == nil && InPool(p.set, there) {
			return nil
		}
		return fmt.Errorf("make a sandbox for set %s/%s: the name %s is taken: %w", p.set.Namespace, p.set.Name, name, errdefs.ErrConflict)
	}
	if err != nil {
		return p.Fresh.Wrote(err)
	}
	p.Log.Info("made a sandbox", "set", store.KeyOf(p.set).String(), "sandbox", sb.Name, "revision", p.revision)
	p.Events.About(p.set, corev1.EventTypeNormal, "SandboxCreated", "made sandbox "+sb.Name)
	return nil
}

// tell writes the status.
func (p *pass) tell(ctx context.Context, done error) error {
	want := p.status(done)
	if same(&p.set.Status, want) {
		return nil
	}
	if done != nil {
		if was, now := readyOf(&p.set.Status), readyOf(want); was == nil || was.Reason != now.Reason || was.Message != now.Message {
			p.Events.About(p.set, corev1.EventTypeWarning, now.Reason, now.Message)
		}
	}
	steps("status", false)
	_, err := p.Sets.Sets.UpdateStatus(ctx, store.KeyOf(p.set), store.Preconditions{UID: p.set.UID}, func(o *agentsv1alpha1.SandboxSet) error {
		if o.Generation != p.set.Generation {
			return nil // a later pass tells of it
		}
		o.Status = *want
		return nil
	})
	steps("status", true)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}
