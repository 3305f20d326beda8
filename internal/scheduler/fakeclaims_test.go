package scheduler

import (
	"context"
	"iter"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// fakeClaims are the claims of one namespace's sandboxes, by name. The test plays the PersistentVolume controller.
type fakeClaims struct {
	signal chan store.Key

	mu      sync.Mutex // guards all below
	claims  map[string]*Claim
	refuse  error // what Ensure answers
	ensures int
	settles int
	// unsettled is what Settle answers.
	unsettled error
	// policies are what Settle was given; settling is called with each.
	policies []v1alpha1.RetentionPolicy
	settling func()
}

func newFakeClaims() *fakeClaims {
	return &fakeClaims{signal: make(chan store.Key, 1000), claims: map[string]*Claim{}}
}

func (f *fakeClaims) orNil() Claims {
	if f == nil {
		return nil
	}
	return f
}

func (f *fakeClaims) Follow(ctx context.Context) iter.Seq[store.Key] {
	return func(yield func(store.Key) bool) {
		for {
			select {
			case <-ctx.Done():
				return
			case key := <-f.signal:
				if !yield(key) {
					return
				}
			}
		}
	}
}

func (f *fakeClaims) Get(sb *v1alpha1.Sandbox) ([]Claim, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []Claim
	for i := range sb.Spec.VolumeClaimTemplates {
		name := v1alpha1.ClaimName(&sb.Spec.VolumeClaimTemplates[i], sb.Name)
		if c := f.claims[name]; c != nil {
			out = append(out, *c)
		} else {
			out = append(out, Claim{Name: name})
		}
	}
	return out, nil
}

func (f *fakeClaims) Ensure(_ context.Context, sb *v1alpha1.Sandbox) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ensures++
	if f.refuse != nil {
		return nil, f.refuse
	}
	var made []string
	keep := sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted() == v1alpha1.RetentionRetain
	for i := range sb.Spec.VolumeClaimTemplates {
		name := v1alpha1.ClaimName(&sb.Spec.VolumeClaimTemplates[i], sb.Name)
		if f.claims[name] == nil {
			f.claims[name] = &Claim{Name: name, Phase: corev1.ClaimPending}
			made = append(made, name)
		}
		f.claims[name].Kept = keep || f.claims[name].Adopted
	}
	f.signal <- store.KeyOf(sb)
	return made, nil
}

func (f *fakeClaims) Settle(_ context.Context, sb *v1alpha1.Sandbox) error {
	f.mu.Lock()
	f.settles++
	f.policies = append(f.policies, sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted())
	settling := f.settling
	f.mu.Unlock()
	if settling != nil {
		settling()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unsettled
}

// change alters a claim, nil for one that is gone, and tells its sandbox.
func (f *fakeClaims) change(sandbox, name string, alter func(*Claim) *Claim) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := alter(f.claims[name]); c != nil {
		f.claims[name] = c
	} else {
		delete(f.claims, name)
	}
	f.signal <- store.Key{Namespace: "default", Name: sandbox}
}

func (f *fakeClaims) with(look func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	look()
}
