package sets

import (
	"slices"

	"k8s.io/apimachinery/pkg/util/intstr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

const (
	// maxBurst bounds the creations and the deletions of one pass, whatever the set allows.
	maxBurst = 200
	// defaultUpdate is updateStrategy.maxUnavailable when it is left out.
	defaultUpdate = "20%"
)

// view is a pool, sorted by what can be done with each sandbox.
type view struct {
	revision, tenant string
	// live are those that are wanted or may come to be, of which available can be claimed at once; over has ended, lost a claim
	// of its own under it, or was used and is not any more; terminating is being deleted. The removal of removing has begun: it
	// has to be finished, as they are not what they were.
	live, over, terminating, removing []*v1alpha1.Sandbox
	available, updated                int
	updatedAvailable                  int
}

// look sorts the pool of a set that has a revision, in the Namespace of a tenant.
func look(pool []*v1alpha1.Sandbox, revision, tenant string) view {
	v := view{revision: revision, tenant: tenant}
	for _, sb := range pool {
		switch {
		case sb.DeletionTimestamp != nil:
			v.terminating = append(v.terminating, sb)
			continue
		case Removing(sb):
			v.removing = append(v.removing, sb)
			continue
		case Over(sb), Doomed(sb) != nil, Used(sb) && !inUse(sb):
			v.over = append(v.over, sb)
			continue
		}
		v.live = append(v.live, sb)
		available, updated := claimable(sb), !v.old(sb)
		if available {
			v.available++
		}
		if updated {
			v.updated++
		}
		if available && updated {
			v.updatedAvailable++
		}
	}
	return v
}

// claimable says whether a sandbox of the pool can be claimed at once.
func claimable(sb *v1alpha1.Sandbox) bool { return Available(sb) && Takable(sb) }

// old says whether a sandbox is not as one that is made now: it is of an older revision, or of who had the Namespace before.
func (v view) old(sb *v1alpha1.Sandbox) bool {
	return sb.Labels[agentsv1alpha1.LabelRevision] != v.revision || sb.Spec.TenantID != "" && sb.Spec.TenantID != v.tenant
}

// plan is what one pass does.
type plan struct {
	create int
	// remove are sandboxes that are one too many or of an older revision, replace such as have ended, lost a claim or were used.
	remove, replace []*v1alpha1.Sandbox
}

// decide says what is to be done. It never asks for more than the set's bounds allow.
func (v view) decide(spec *agentsv1alpha1.SandboxSetSpec) plan {
	var p plan
	wanted := int(spec.Replicas)
	onTheWay := max(limit(spec.ScaleStrategy.MaxUnavailable, max(wanted, len(v.live)), "100%"), 1)
	going := len(v.terminating) + len(v.removing)
	mayDelete := min(max(onTheWay-going, 0), maxBurst)

	p.replace = v.over[:min(len(v.over), mayDelete)]
	mayDelete -= len(p.replace)

	mayUpdate := limit(spec.UpdateStrategy.MaxUnavailable, wanted, defaultUpdate)
	switch missing := wanted - len(v.live); {
	case missing > 0:
		pending := len(slices.DeleteFunc(slices.Clone(v.live), func(sb *v1alpha1.Sandbox) bool { return claimable(sb) || inUse(sb) }))
		// Those that still run are in the place of others until they are removed, which may have to wait (pass.replace) or fail.
		there := len(slices.DeleteFunc(slices.Concat(v.over, v.removing), Over))
		p.create = min(max(missing-there, 0), max(onTheWay-pending, 0), maxBurst)
		// Old ones that do not run may never do: they would hold the places of those that are to be made.
		p.remove = v.outdated(mayDelete, mayUpdate-going, 0)
	case missing < 0:
		p.remove = v.inOrder()[:min(-missing, mayDelete)]
	default:
		p.remove = v.outdated(mayDelete, mayUpdate-going, mayUpdate-(wanted-v.available))
	}
	p.remove = slices.Concat(v.removing, p.remove)
	return p
}

// outdated are live sandboxes of an older revision that go now: no more than either bound, and no more than spare that run.
func (v view) outdated(mayDelete, mayUpdate, spare int) (those []*v1alpha1.Sandbox) {
	for _, sb := range v.inOrder() {
		if len(those) >= min(mayDelete, mayUpdate) {
			break
		}
		if !v.old(sb) || inUse(sb) { // what somebody has in it is not ended for a template
			continue
		}
		if claimable(sb) {
			if spare <= 0 {
				continue
			}
			spare--
		}
		those = append(those, sb)
	}
	return those
}

// inOrder are the live sandboxes, those that are missed least first: not available, of an older revision, young.
func (v view) inOrder() []*v1alpha1.Sandbox {
	all := slices.Clone(v.live)
	slices.SortStableFunc(all, func(a, b *v1alpha1.Sandbox) int {
		for _, c := range []int{
			rank(claimable(a)) - rank(claimable(b)),
			rank(!v.old(a)) - rank(!v.old(b)),
			b.CreationTimestamp.Compare(a.CreationTimestamp.Time),
		} {
			if c != 0 {
				return c
			}
		}
		return 0
	})
	return all
}

func rank(is bool) int {
	if is {
		return 1
	}
	return 0
}

// limit is a bound in sandboxes.
func limit(l *intstr.IntOrString, of int, otherwise string) int {
	d := intstr.FromString(otherwise)
	if l == nil {
		l = &d
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(l, of, true)
	if err != nil { // the API server's rule lets none in
		n, _ = intstr.GetScaledValueFromIntOrPercent(&d, of, true)
	}
	return n
}
