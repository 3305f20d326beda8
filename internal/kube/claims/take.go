package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/reconcile"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// noStock is the reason of a claim that waits for a sandbox.
const noStock fault.Reason = "NO_STOCK"

// atOnce is how many sandboxes a claim takes at once, maxRefused with how many refusals it gives up for a pass: what is in the way
// is likely to be in the way of all.
const (
	atOnce     = 8
	maxRefused = 3
)

// errTaken: somebody else has the sandbox by now.
var errTaken = fmt.Errorf("it was taken by another claim: %w", errdefs.ErrConflict)

// take takes sandboxes out of the pool, and makes those that it does not have. Its error is what keeps it from that.
func (p *pass) take(ctx context.Context, n int) error {
	known, err := p.check(ctx)
	if err != nil {
		return err
	}
	var refused error // why the API server lets the claim have none of some
	if !onlyFresh(p.claim) {
		// A sandbox that was lost to somebody else, or is refused, is made up for by the next.
		for tried := map[types.UID]bool{}; n > 0 && len(tried) < maxRefused; {
			chosen, err := p.choose(ctx, known, n, tried)
			if err != nil {
				return err
			}
			if len(chosen) == 0 {
				break
			}
			got, why, err := p.takeAll(ctx, known, chosen)
			if err != nil {
				return err
			}
			for uid, err := range why {
				tried[uid], refused = true, err
			}
			n -= got
		}
	}
	if n <= 0 {
		return nil
	}
	if refused != nil && !creates(p.claim) {
		return refused
	}
	if !creates(p.claim) {
		return fault.New(errdefs.ErrUnavailable, noStock, "SandboxSet %s has no sandbox that could be taken: waiting for %d", known.set.Name, n)
	}
	return p.create(ctx, known, n)
}

// choose finds sandboxes of the pool that are not in but, the best first, and reserves them.
func (p *pass) choose(ctx context.Context, known *checked, n int, but map[types.UID]bool) ([]*v1alpha1.Sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	page, err := p.Sandboxes.List(ctx, store.ListOptions{Namespace: known.set.Namespace, Labels: labels.SelectorFromSet(labels.Set{agentsv1alpha1.LabelSandboxSet: known.set.Name})})
	if err != nil {
		return nil, err
	}
	tried := p.tried[store.KeyOf(p.claim)]
	var pool []*v1alpha1.Sandbox
	worth := map[*v1alpha1.Sandbox][]int{}
	for _, sb := range page.Items {
		_, reserved := p.reserved[sb.UID]
		near, usable := p.reach(known, sb.Status.Node)
		if reserved || !usable || but[sb.UID] || !takable(known.set, sb) || !p.suits(known, sb) {
			continue
		}
		pool = append(pool, sb)
		worth[sb] = []int{
			rank(slices.Contains(tried, sb.Name)), rank(sets.Available(sb)), rank(sb.Labels[agentsv1alpha1.LabelRevision] == known.revision), near,
		}
	}
	slices.SortStableFunc(pool, func(a, b *v1alpha1.Sandbox) int {
		return cmp.Or(slices.Compare(worth[b], worth[a]), a.CreationTimestamp.Compare(b.CreationTimestamp.Time))
	})
	pool = pool[:min(len(pool), n)]
	for _, sb := range pool {
		p.reserved[sb.UID] = struct{}{}
	}
	return pool, nil
}

// takable says whether a sandbox is the set's, and as it was made: one that has a volume or an end of its own was used.
func takable(set *agentsv1alpha1.SandboxSet, sb *v1alpha1.Sandbox) bool {
	return sets.InPool(set, sb) && sets.Takable(sb)
}

// suits says whether a sandbox, which may be of an older revision than the set is now or was made when its Namespace was another
// tenant's, can be given what the claim asks for.
func (p *pass) suits(known *checked, sb *v1alpha1.Sandbox) bool {
	if sb.Spec.TenantID != "" && sb.Spec.TenantID != known.tenant {
		return false
	}
	if sb.Labels[agentsv1alpha1.LabelRevision] == known.revision || sb.Spec.Template == nil {
		return true
	}
	if len(p.claim.Spec.DynamicVolumesMount) > 0 && !slices.Contains(sb.Spec.Runtimes, agentsv1alpha1.RuntimeCSI) {
		return false
	}
	return fits(p.claim, sb.Name, sb.Spec.Template) == nil
}

// reach says whether all volumes can be used from a node, and how many are near to it. Where a sandbox will be that has no
// node yet is not known: it may be tried.
func (p *pass) reach(known *checked, node string) (near int, usable bool) {
	if node == "" || len(known.places) == 0 {
		return 0, true
	}
	labels, there := p.Nodes.Labels(node)
	if !there {
		return 0, false
	}
	for _, place := range known.places {
		if place.Reach != nil && !place.Reach.Has(node, labels) {
			return 0, false
		}
		if domain := labels[v1alpha1.DefaultTopologyKey]; domain != "" && slices.Contains(place.Domains, domain) {
			near++
		}
	}
	return near, true
}

func rank(is bool) int {
	if is {
		return 1
	}
	return 0
}

// takeAll takes sandboxes that are reserved, and says how many it got, and why it may not have some. Those that somebody else has
// taken are no error.
func (p *pass) takeAll(ctx context.Context, known *checked, chosen []*v1alpha1.Sandbox) (got int, refused map[types.UID]error, err error) {
	errs := make([]error, len(chosen))
	forEach(len(chosen), func(i int) {
		errs[i] = p.takeOne(ctx, known, chosen[i])
	})
	refused = map[types.UID]error{}
	free := false
	p.mu.Lock()
	for i, sb := range chosen {
		delete(p.reserved, sb.UID)
		err := errs[i]
		free = free || err != nil
		switch {
		case err == nil:
			got++
		case reconcile.Open(err):
			key := store.KeyOf(p.claim)
			p.tried[key] = append(p.tried[key], sb.Name)
		case errors.Is(err, errTaken), errdefs.IsNotFound(err):
			errs[i] = nil
		case fault.IsPermanent(err):
			refused[sb.UID], errs[i] = err, nil
		}
	}
	p.mu.Unlock()
	if free {
		p.freed(known.set)
	}
	return got, refused, errors.Join(errs...)
}

// freed has the other claims looked at that wait for a sandbox of a set: they may have passed over one as it was reserved.
func (p *pass) freed(set *agentsv1alpha1.SandboxSet) {
	own := store.KeyOf(p.claim)
	p.wake(func(key store.Key, spec *agentsv1alpha1.SandboxClaimSpec) bool {
		return key != own && key.Namespace == set.Namespace && spec.TemplateName == set.Name
	})
}

func (p *pass) takeOne(ctx context.Context, known *checked, sb *v1alpha1.Sandbox) error {
	volumes := entries(p.claim)
	var holding sync.WaitGroup
	if len(volumes) > 0 {
		holding.Go(func() { p.Keeper.Expect(ctx, sb, volumes) })
	}
	steps("take", false)
	_, err := p.Sandboxes.UpdateSpec(ctx, store.KeyOf(sb), store.Preconditions{UID: sb.UID}, func(o *v1alpha1.Sandbox) error {
		if !takable(known.set, o) {
			return errTaken
		}
		apply(p.claim, o)
		if o.Spec.TenantID == "" {
			o.Spec.TenantID = known.tenant // it was made before its Namespace was somebody's
		}
		if len(o.Spec.VolumeClaimTemplates) > 0 {
			// What the set says by now: that is no revision, and who has the sandbox counts on it.
			o.Spec.PersistentVolumeClaimRetentionPolicy = known.set.Spec.PersistentVolumeClaimRetentionPolicy.DeepCopy()
		}
		return nil
	})
	steps("take", true)
	holding.Wait()
	if err != nil {
		if len(volumes) > 0 {
			p.Keeper.Forgo(sb)
		}
		return p.Fresh.Wrote(err)
	}
	p.Log.Info("took a sandbox", "claim", store.KeyOf(p.claim).String(), "sandbox", sb.Name, "phase", sb.Status.Phase, "node", sb.Status.Node, "tenant", sb.Spec.TenantID)
	p.Events.About(p.claim, corev1.EventTypeNormal, "SandboxTaken", "took sandbox "+sb.Name)
	return nil
}

// create makes sandboxes that are the claim's from the first write on.
func (p *pass) create(ctx context.Context, known *checked, n int) error {
	var names []string
	for i := 0; len(names) < n; i++ {
		name := nameOf(known.set.Name, p.claim.UID, i)
		if there, err := p.Sandboxes.Get(ctx, store.Key{Namespace: known.set.Namespace, Name: name}); err == nil || !errdefs.IsNotFound(err) {
			if err != nil {
				return err
			}
			if there.DeletionTimestamp == nil && !slices.ContainsFunc(p.taken, func(sb *v1alpha1.Sandbox) bool { return sb.UID == there.UID }) && owner(there) == p.claim.UID {
				return fmt.Errorf("sandbox %s was made for the claim just now: %w", name, errdefs.ErrConflict)
			}
			continue
		}
		names = append(names, name)
	}
	errs := make([]error, len(names))
	forEach(len(names), func(i int) { errs[i] = p.createOne(ctx, known, names[i]) })
	return errors.Join(errs...)
}

func (p *pass) createOne(ctx context.Context, known *checked, name string) error {
	sb := sets.NewSandbox(known.set, name, known.revision)
	var nodes []*corev1.NodeSelector
	for _, place := range known.places {
		nodes = append(nodes, place.Nodes)
	}
	tailor(p.claim, sb, nodes)
	apply(p.claim, sb)
	steps("create", false)
	sb, err := p.Sandboxes.Create(ctx, sb)
	steps("create", true)
	if errdefs.IsAlreadyExists(err) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrConflict) // the next pass sees whose it is
	}
	if err != nil {
		return p.Fresh.Wrote(err)
	}
	p.Log.Info("made a sandbox for a claim", "claim", store.KeyOf(p.claim).String(), "sandbox", sb.Name)
	p.Events.About(p.claim, corev1.EventTypeNormal, "SandboxCreated", "made sandbox "+sb.Name+", as SandboxSet "+known.set.Name+" had none to take")
	return nil
}

// forEach calls do for 0 to n-1, some at once, and returns when all have returned.
func forEach(n int, do func(i int)) {
	places := make(chan struct{}, atOnce)
	var running sync.WaitGroup
	for i := range n {
		places <- struct{}{}
		running.Go(func() {
			defer func() { <-places }()
			do(i)
		})
	}
	running.Wait()
}
