package claims

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/reconcile"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Store has the claims.
type Store interface {
	store.Objects[*agentsv1alpha1.SandboxClaim]
	// DeleteClaim deletes a claim and leaves its sandboxes.
	DeleteClaim(ctx context.Context, key store.Key, pre store.Preconditions) error
}

// Volumes knows the PersistentVolumes.
type Volumes interface {
	Check(ctx context.Context, w scheduler.Wish) (volumes.Place, error)
	Changes(ctx context.Context) iter.Seq[scheduler.VolumeRef]
}

// Keeper keeps volumes from being deleted while sandboxes use them.
type Keeper interface {
	// Expect has volumes held that a sandbox is about to get, and Forgo ends that for one that did not get them.
	Expect(ctx context.Context, sb *v1alpha1.Sandbox, volumes []v1alpha1.DynamicVolume)
	Forgo(sb *v1alpha1.Sandbox)
}

// Nodes knows the labels of nodes; false when there is no such node.
type Nodes interface {
	Labels(node string) (map[string]string, bool)
}

// Events tells people what happens to an object. Calls do not block.
type Events interface {
	About(object runtime.Object, eventType, reason, message string)
}

// Options are what the controller works with. All but Workers and Metrics are required.
type Options struct {
	Sandboxes store.Sandboxes
	Sets      store.Reader[*agentsv1alpha1.SandboxSet]
	Claims    Store
	Volumes   Volumes
	Keeper    Keeper
	Nodes     Nodes
	// Tenant is the tenant of a Namespace; empty for none.
	Tenant func(ctx context.Context, namespace string) (string, error)
	// Fresh is shared by all that write sandboxes of sets.
	Fresh  *reconcile.Fresh
	Events Events
	Clock  clock.WithTicker
	Log    *slog.Logger
	// Workers is how many claims are looked at at once; 16 when zero.
	Workers int
	// Metrics gets the controller's metrics.
	Metrics prometheus.Registerer
}

// Claims works on all claims.
type Claims struct {
	Options
	loop    *reconcile.Loop
	metrics *metrics

	mu sync.Mutex // guards what is below
	// waiting are the claims that wait for a sandbox or a volume, with what they wait for.
	waiting map[store.Key]*agentsv1alpha1.SandboxClaimSpec
	// reserved are the sandboxes that a claim of ours is just taking.
	reserved map[types.UID]struct{}
	// tried are sandboxes whose taking had no answer, by claim: they are tried first.
	tried map[store.Key][]string
	// seen is when a claim that is not over was first seen, more exactly than its status has it.
	seen map[store.Key]time.Time
	// behind is since when a claim's status does not say how far it is.
	behind map[store.Key]time.Time
}

// quiet is how long a status need not say how far a claim is that is well under way: a warm sandbox is claimed in less, and what
// a watch of the status has to do with it would only be in the way.
const quiet = 250 * time.Millisecond

// Every write to the API server has a step before and after it.
var steps = failpoint.Steps("claim", []string{"take", "create", "delete", "status", "orphan", "expire"})

// New makes Claims. Start it once, with Run.
func New(o Options) *Claims {
	if o.Workers == 0 {
		o.Workers = 16
	}
	c := &Claims{Options: o, waiting: map[store.Key]*agentsv1alpha1.SandboxClaimSpec{}, reserved: map[types.UID]struct{}{}, tried: map[store.Key][]string{},
		behind: map[store.Key]time.Time{}, seen: map[store.Key]time.Time{}, metrics: newMetrics(o.Metrics)}
	c.loop = reconcile.New(reconcile.Options{Name: "SandboxClaim", Workers: o.Workers, Clock: o.Clock, Log: o.Log, Do: c.reconcile})
	return c
}

// Run works until ctx ends.
func (c *Claims) Run(ctx context.Context) {
	var running sync.WaitGroup
	running.Go(func() {
		reconcile.Follow(ctx, c.Claims, func(claim *agentsv1alpha1.SandboxClaim) { c.loop.Add(store.KeyOf(claim)) })
	})
	running.Go(func() { reconcile.Follow(ctx, c.Sandboxes, c.sandboxChanged) })
	running.Go(func() {
		for ref := range c.Volumes.Changes(ctx) {
			c.wake(func(_ store.Key, spec *agentsv1alpha1.SandboxClaimSpec) bool {
				return slices.ContainsFunc(spec.DynamicVolumesMount, func(m agentsv1alpha1.DynamicVolumeMount) bool { return m.PVName == ref.Source })
			})
		}
	})
	running.Go(func() { c.loop.Run(ctx) })
	running.Wait()
}

// sandboxChanged has the claim of a sandbox looked at, or those that may take it.
func (c *Claims) sandboxChanged(sb *v1alpha1.Sandbox) {
	if name := sb.Labels[agentsv1alpha1.LabelClaimName]; name != "" {
		c.loop.Add(store.Key{Namespace: sb.Namespace, Name: name})
	} else if set := sb.Labels[agentsv1alpha1.LabelSandboxSet]; set != "" && sb.DeletionTimestamp == nil {
		c.wake(func(key store.Key, spec *agentsv1alpha1.SandboxClaimSpec) bool {
			return key.Namespace == sb.Namespace && spec.TemplateName == set
		})
	}
}

func (c *Claims) wake(concerns func(store.Key, *agentsv1alpha1.SandboxClaimSpec) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, spec := range c.waiting {
		if concerns(key, spec) {
			c.loop.Add(key)
		}
	}
}

// wait notes that a claim waits, or does not any more.
func (c *Claims) wait(claim *agentsv1alpha1.SandboxClaim, waits bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if waits {
		c.waiting[store.KeyOf(claim)] = &claim.Spec
	} else {
		delete(c.waiting, store.KeyOf(claim))
	}
}

func (c *Claims) forget(key store.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, key)
	delete(c.tried, key)
	delete(c.behind, key)
	delete(c.seen, key)
}

// reconcile looks at one claim.
func (c *Claims) reconcile(ctx context.Context, key store.Key) (again time.Duration, err error) {
	if err := c.Fresh.Ensure(ctx); err != nil {
		return 0, err
	}
	claim, err := c.Claims.Get(ctx, key)
	switch {
	case errdefs.IsNotFound(err), err == nil && claim.DeletionTimestamp != nil:
		c.forget(key)
		return 0, nil
	case err != nil:
		return 0, err
	}
	p := &pass{Claims: c, claim: claim, now: c.Clock.Now()}
	if p.taken, err = c.taken(ctx, claim); err != nil {
		return 0, err
	}
	if isFinal(claim.Status.Phase) {
		c.forget(key)
		told := p.watch(ctx)
		again, err := p.afterwards(ctx)
		return again, errors.Join(told, err)
	}
	c.firstSeen(claim, p.now)
	return p.proceed(ctx)
}

func isFinal(phase agentsv1alpha1.SandboxClaimPhase) bool {
	return phase == agentsv1alpha1.ClaimCompleted || phase == agentsv1alpha1.ClaimFailed
}

// firstSeen is when a claim was first seen, which may have been by the leader before this one.
func (c *Claims) firstSeen(claim *agentsv1alpha1.SandboxClaim, now time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := store.KeyOf(claim)
	if at, known := c.seen[key]; known {
		return at
	}
	if t := claim.Status.StartTime; t != nil {
		now = t.Time
	}
	c.seen[key] = now
	return now
}

// taken are the claim's sandboxes that are not being deleted, the oldest first.
func (c *Claims) taken(ctx context.Context, claim *agentsv1alpha1.SandboxClaim) ([]*v1alpha1.Sandbox, error) {
	page, err := c.Sandboxes.List(ctx, store.ListOptions{Namespace: claim.Namespace, Labels: labels.SelectorFromSet(labels.Set{agentsv1alpha1.LabelClaimName: claim.Name})})
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(page.Items, func(sb *v1alpha1.Sandbox) bool {
		return sb.DeletionTimestamp != nil || !metav1.IsControlledBy(sb, claim)
	}), nil
}

// pass is one look at a claim.
type pass struct {
	*Claims
	claim *agentsv1alpha1.SandboxClaim
	now   time.Time
	taken []*v1alpha1.Sandbox
}

func (p *pass) wanted() int {
	if r := p.claim.Spec.Replicas; r != nil {
		return int(*r)
	}
	return 1
}

// deadline is when the claim is over.
func (p *pass) deadline() time.Time {
	timeout, err := time.ParseDuration(agentsv1alpha1.DefaultClaimTimeout)
	if t := p.claim.Spec.ClaimTimeout; t != nil {
		timeout, err = t.Duration, nil
	}
	start := p.now
	if t := p.claim.Status.StartTime; t != nil {
		start = t.Time
	}
	if err != nil {
		return start
	}
	return start.Add(timeout)
}

// proceed does what is missing, and tells how far it is.
func (p *pass) proceed(ctx context.Context) (again time.Duration, err error) {
	over := !p.now.Before(p.deadline())
	var obstacle error
	missing := p.wanted() - len(p.taken)
	if missing > 0 && !over {
		obstacle = p.take(ctx, missing)
		if p.taken, err = p.Claims.taken(ctx, p.claim); err != nil {
			return 0, err
		}
		missing = p.wanted() - len(p.taken)
	}
	p.wait(p.claim, missing > 0 && !over)
	st, trouble := p.outcome(obstacle, over)
	if left := p.untold(st, trouble || obstacle != nil); left > 0 {
		return left, nil
	}
	if err := p.tell(ctx, st); err != nil {
		return 0, err
	}
	switch reason := fault.ReasonOf(obstacle); {
	case obstacle == nil, errors.As(obstacle, &final{}), reason == noStock, reason == fault.VolumeNotBound, reason == fault.ClaimNotFound:
		return p.until(), nil // a change of what is waited for is heard of
	}
	return p.until(), obstacle
}

// untold says for how long the status need not be written yet; 0 when it is to be.
func (p *pass) untold(st *agentsv1alpha1.SandboxClaimStatus, trouble bool) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := store.KeyOf(p.claim)
	if isFinal(st.Phase) || trouble || equality.Semantic.DeepEqual(&p.claim.Status, st) {
		delete(p.behind, key)
		return 0
	}
	since, is := p.behind[key]
	if !is {
		since = p.now
		p.behind[key] = since
	}
	left := since.Add(quiet).Sub(p.now)
	if left <= 0 {
		delete(p.behind, key)
	}
	return max(left, 0)
}

// until is how long the claim may still take.
func (p *pass) until() time.Duration { return max(p.deadline().Sub(p.now), time.Millisecond) }
