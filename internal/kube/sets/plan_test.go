package sets

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// member is a sandbox of a revision. state is a(vailable), p(ending), t(erminating), r(emoving), l(ost with its node), o(ver), u(sed),
// f(ree again after it was used) or d(oomed to lose its data, and running); age is how long ago it was made.
func member(state byte, revision string, age int) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%c%s%d", state, revision, age), Labels: map[string]string{agentsv1alpha1.LabelRevision: revision},
		CreationTimestamp: metav1.NewTime(time.Unix(int64(1000-age), 0))}}
	switch state {
	case 'u', 'f':
		sb.Generation = 2
		if state == 'u' {
			sb.Spec.DynamicVolumes = []v1alpha1.DynamicVolume{{Target: "/data"}}
		}
		fallthrough
	case 'a', 'd':
		sb.Status.Phase = v1alpha1.SandboxRunning
		sb.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue}}
		if state == 'd' {
			sb.Status.Conditions = append(sb.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionVolumeClaimsBound, Reason: scheduler.ReasonClaimTerminating})
		}
	case 't':
		sb.DeletionTimestamp = &metav1.Time{}
	case 'l':
		sb.Status.Phase = v1alpha1.SandboxLost
	case 'o':
		sb.Status.Phase = v1alpha1.SandboxFailed
	case 'r':
		return removed(sb)
	}
	return sb
}

func of(tenant v1alpha1.TenantID, sb *v1alpha1.Sandbox) *v1alpha1.Sandbox {
	sb.Spec.TenantID = tenant
	return sb
}

// removed is a sandbox whose removal has begun.
func removed(sb *v1alpha1.Sandbox) *v1alpha1.Sandbox {
	sb.Annotations = map[string]string{agentsv1alpha1.AnnotationRemoving: "true"}
	return sb
}

func namesOf(all []*v1alpha1.Sandbox) (names []string) {
	for _, sb := range all {
		names = append(names, sb.Name)
	}
	return names
}

func TestDecide(t *testing.T) {
	one, none, half := ptr.To(intstr.FromInt32(1)), ptr.To(intstr.FromInt32(0)), ptr.To(intstr.FromString("50%"))
	for _, tc := range []struct {
		name          string
		replicas      int32
		scale, update *intstr.IntOrString
		pool          []*v1alpha1.Sandbox
		create        int
		remove        []string
		replace       []string
	}{
		{"empty", 3, nil, nil, nil, 3, nil, nil},
		{"empty, bounded", 3, one, nil, nil, 1, nil, nil},
		{"one is on its way", 3, one, nil, []*v1alpha1.Sandbox{member('p', "new", 1)}, 0, nil, nil},
		{"one has come", 3, one, nil, []*v1alpha1.Sandbox{member('a', "new", 1)}, 1, nil, nil},
		{"what is being deleted does not count", 1, nil, nil, []*v1alpha1.Sandbox{member('t', "new", 1)}, 1, nil, nil},
		{"down: what does not run, then old ones, then young ones", 1, nil, nil,
			[]*v1alpha1.Sandbox{member('a', "new", 9), member('a', "new", 1), member('a', "old", 8), member('p', "new", 2), member('p', "old", 3)}, 0, []string{"pold3", "pnew2", "aold8", "anew1"}, nil},
		{"down, bounded", 0, one, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('a', "new", 2)}, 0, []string{"anew1"}, nil},
		{"a removal that began is finished before it is made up for", 2, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('r', "new", 2)}, 0, []string{"rnew2"}, nil},
		{"a removal that began of one that has ended", 2, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), removed(member('o', "new", 2))}, 1, []string{"onew2"}, nil},
		{"down, bounded, and a removal began", 0, one, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('r', "new", 2)}, 0, []string{"rnew2"}, nil},
		{"down, bounded, and one is going", 0, one, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('t', "new", 2)}, 0, nil, nil},
		{"a new revision", 2, nil, half, []*v1alpha1.Sandbox{member('a', "old", 1), member('a', "old", 2)}, 0, []string{"aold1"}, nil},
		{"a new revision, and one is missing", 2, nil, half, []*v1alpha1.Sandbox{member('a', "old", 1), member('p', "new", 2)}, 0, nil, nil},
		{"old ones that do not run go first", 2, nil, one, []*v1alpha1.Sandbox{member('a', "old", 1), member('p', "old", 2)}, 0, []string{"pold2"}, nil},
		{"old ones that do not run go also while some are missing: they hold the places of what may be on its way", 5, one, nil,
			[]*v1alpha1.Sandbox{member('p', "old", 1)}, 0, []string{"pold1"}, nil},
		{"while some are missing those that run stay", 5, nil, one, []*v1alpha1.Sandbox{member('a', "old", 1), member('p', "old", 2), member('p', "old", 3)}, 2, []string{"pold2"}, nil},
		{"some are missing, and no old one is to be replaced", 5, one, none, []*v1alpha1.Sandbox{member('p', "old", 1)}, 0, nil, nil},
		{"a new revision, and nothing may be missing", 2, nil, none, []*v1alpha1.Sandbox{member('a', "old", 1), member('p', "old", 2)}, 0, nil, nil},
		{"one was lost with its node, and comes again", 2, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('l', "new", 2)}, 0, nil, nil},
		{"one is used by somebody who has not claimed it", 2, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('u', "new", 2)}, 0, nil, nil},
		{"down: first what nobody can be given", 1, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('u', "new", 2)}, 0, []string{"unew2"}, nil},
		{"one is used by somebody who has not claimed it, and others are missing: nothing of it is on its way", 3, one, nil,
			[]*v1alpha1.Sandbox{member('u', "new", 1)}, 1, nil, nil},
		{"a new revision ends nothing that somebody uses", 2, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('u', "old", 2)}, 0, nil, nil},
		{"the Namespace is another tenant's now", 2, nil, nil, []*v1alpha1.Sandbox{of("alice", member('a', "new", 1)), of("bob", member('a', "new", 2))}, 0, []string{"anew2"}, nil},
		{"one was used, and runs still", 2, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('f', "new", 2)}, 0, nil, []string{"fnew2"}},
		{"a claim of one was deleted, and it runs still", 2, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('d', "new", 2)}, 0, nil, []string{"dnew2"}},
		{"one has ended", 2, nil, nil, []*v1alpha1.Sandbox{member('a', "new", 1), member('o', "new", 2)}, 1, nil, []string{"onew2"}},
	} {
		p := look(tc.pool, "new", "alice").decide(&agentsv1alpha1.SandboxSetSpec{Replicas: tc.replicas,
			ScaleStrategy: agentsv1alpha1.ScaleStrategy{MaxUnavailable: tc.scale}, UpdateStrategy: agentsv1alpha1.UpdateStrategy{MaxUnavailable: tc.update}})
		if p.create != tc.create || !slices.Equal(namesOf(p.remove), tc.remove) || !slices.Equal(namesOf(p.replace), tc.replace) {
			t.Errorf("%s: create %d, remove %v, replace %v", tc.name, p.create, namesOf(p.remove), namesOf(p.replace))
		}
	}
}

// Whatever a pool is like, a pass keeps to the bounds, and passes come to an end.
func TestDecideKeepsToItsBoundsAndEnds(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	dice := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		replicas := dice.IntN(12)
		scale, update := dice.IntN(5), dice.IntN(5)
		spec := &agentsv1alpha1.SandboxSetSpec{Replicas: int32(replicas),
			ScaleStrategy: agentsv1alpha1.ScaleStrategy{MaxUnavailable: ptr.To(intstr.FromInt(scale))}, UpdateStrategy: agentsv1alpha1.UpdateStrategy{MaxUnavailable: ptr.To(intstr.FromInt(update))}}
		var pool []*v1alpha1.Sandbox
		for i := range dice.IntN(20) {
			pool = append(pool, member("aaptofdr"[dice.IntN(8)], []string{"old", "new"}[dice.IntN(2)], i))
		}
		for step := 0; ; step++ {
			if step > 500 {
				t.Fatalf("no end: replicas %d, scale %d, update %d", replicas, scale, update)
			}
			v := look(pool, "new", "alice")
			p := v.decide(spec)
			onTheWay := max(scale, 1)
			if p.create > 0 && p.create+len(v.live)-v.available > onTheWay || p.create+len(v.live) > replicas && p.create > 0 {
				t.Fatalf("creates %d of %d, %d live, %d available", p.create, replicas, len(v.live), v.available)
			}
			if running := len(slices.DeleteFunc(slices.Concat(v.over, v.removing), Over)); p.create > 0 && p.create+len(v.live)+running > replicas {
				t.Fatalf("creates %d of %d, %d live, %d to be replaced or removed that run", p.create, replicas, len(v.live), running)
			}
			if n := len(p.remove) + len(p.replace); n > len(v.removing) && n+len(v.terminating) > onTheWay {
				t.Fatalf("removes %d with %d on their way out, of %d", n, len(v.terminating), onTheWay)
			}
			if len(v.live) == replicas {
				running := v.available
				for _, sb := range p.remove {
					if Available(sb) {
						running--
					}
				}
				if running < v.available && replicas-running > update {
					t.Fatalf("%d of %d would run, with %d to be missing at most", running, replicas, update)
				}
			}
			if p.create+len(p.remove)+len(p.replace)+len(v.terminating)+len(v.live)-v.available == 0 {
				if len(v.live) != replicas || update > 0 && v.updated != replicas {
					t.Fatalf("it ends with %d of %d, %d of the new revision", len(v.live), replicas, v.updated)
				}
				break
			}
			// What was ordered happens: the deleted are gone, the pending run, but for those of a template that does not work.
			gone := slices.Concat(p.remove, p.replace, v.terminating)
			pool = slices.DeleteFunc(pool, func(sb *v1alpha1.Sandbox) bool { return slices.Contains(gone, sb) })
			for i, sb := range pool {
				if sb.Status.Phase == "" && (update == 0 || !v.old(sb)) {
					pool[i] = member('a', sb.Labels[agentsv1alpha1.LabelRevision], 0)
				}
			}
			for range p.create {
				pool = append(pool, member('p', "new", 0))
			}
		}
	}
}
