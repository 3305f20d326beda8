package grpcapitest

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"sync"

	"github.com/google/uuid"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/follow"
	"github.com/flux-sandbox/flux-sandbox/internal/store/parts"
)

// Pools keeps SandboxSets and SandboxClaims in memory, and plays the API server and the controller of claims.
type Pools struct {
	Sets   *Objects[*agentsv1alpha1.SandboxSet]
	Claims *Objects[*agentsv1alpha1.SandboxClaim]

	mu    sync.Mutex // guards fates
	fates map[string]ClaimFate
}

// ClaimFate is what becomes of a claim. The zero value is success.
type ClaimFate struct {
	// Refuse is what the API server says of it.
	Refuse error
	// Hold leaves it Claiming.
	Hold bool
	// Reason and Message make it fail.
	Reason  fault.Reason
	Message string
	// Claimed is how many sandboxes it is given, if not all.
	Claimed int32
}

// NewPools makes pools with nothing in them.
func NewPools() *Pools {
	p := &Pools{Sets: newObjects(parts.Sets), Claims: newObjects(parts.Claims), fates: map[string]ClaimFate{}}
	p.Claims.admit = func(claim *agentsv1alpha1.SandboxClaim) error {
		if claim.Spec.Replicas == nil {
			claim.Spec.Replicas = ptr.To[int32](1)
		}
		fate := p.fate(claim.Spec.TemplateName)
		if fate.Refuse == nil {
			claim.Status = fate.status(claim)
		}
		return fate.Refuse
	}
	return p
}

// API is what a server is given of them.
func (p *Pools) API() (*grpcapi.Pools, error) {
	return &grpcapi.Pools{Sets: p.Sets, Claims: p.Claims}, nil
}

// Set decides the fate of claims of a set, of those that are there as well.
func (p *Pools) Set(set string, fate ClaimFate) {
	p.mu.Lock()
	p.fates[set] = fate
	p.mu.Unlock()
	page, _ := p.Claims.List(context.Background(), store.ListOptions{})
	for _, claim := range page.Items {
		if claim.Spec.TemplateName == set {
			_, _ = p.Claims.UpdateStatus(context.Background(), store.KeyOf(claim), store.Preconditions{}, func(c *agentsv1alpha1.SandboxClaim) error {
				c.Status = fate.status(c)
				return nil
			})
		}
	}
}

func (p *Pools) fate(set string) ClaimFate {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.fates[set]
}

func (f ClaimFate) status(claim *agentsv1alpha1.SandboxClaim) agentsv1alpha1.SandboxClaimStatus {
	st := agentsv1alpha1.SandboxClaimStatus{Phase: agentsv1alpha1.ClaimCompleted, ClaimedReplicas: cmp.Or(f.Claimed, *claim.Spec.Replicas)}
	is := metav1.Condition{Type: agentsv1alpha1.ClaimClaimed, Status: metav1.ConditionTrue, Reason: "Claimed", Message: "every sandbox runs, with all volumes",
		LastTransitionTime: metav1.NewTime(Epoch)}
	switch {
	case f.Hold:
		st.Phase, st.ClaimedReplicas = agentsv1alpha1.ClaimClaiming, 0
		is.Status, is.Reason, is.Message = metav1.ConditionFalse, "StartingSandbox", "0 of 1 sandboxes are claimed; it is Pending"
	case f.Reason != "":
		st.Phase, st.ClaimedReplicas = agentsv1alpha1.ClaimFailed, 0
		is.Status, is.Reason, is.Message = metav1.ConditionFalse, string(f.Reason), f.Message
	case f.Claimed != 0:
		count := fmt.Sprintf("%d of %d sandboxes are claimed", f.Claimed, *claim.Spec.Replicas)
		is.Status, is.Reason, is.Message = metav1.ConditionFalse, "StartingSandbox", count+"; the time is over (claimTimeout): it is Pending"
		meta.SetStatusCondition(&st.Conditions, metav1.Condition{Type: agentsv1alpha1.ClaimPartially, Status: metav1.ConditionTrue, Reason: "ClaimTimeout",
			Message: count + " in time", LastTransitionTime: metav1.NewTime(Epoch)})
	}
	meta.SetStatusCondition(&st.Conditions, is)
	for i := range st.ClaimedReplicas {
		st.SandboxNames = append(st.SandboxNames, fmt.Sprintf("%s-%d", claim.Spec.TemplateName, i))
	}
	return st
}

// Objects is a store.Objects in memory.
type Objects[T store.Object] struct {
	kind parts.Kind[T]
	// admit may change an object that is made, or refuse it; nil does neither.
	admit func(T) error
	hub   follow.Hub[T]

	mu      sync.Mutex // guards what follows
	objects map[store.Key]T
	version int
}

var _ store.Objects[*agentsv1alpha1.SandboxSet] = (*Objects[*agentsv1alpha1.SandboxSet])(nil)

func newObjects[T store.Object](kind parts.Kind[T]) *Objects[T] {
	return &Objects[T]{kind: kind, objects: map[store.Key]T{}}
}

func clone[T store.Object](o T) T { return o.DeepCopyObject().(T) }

// Get implements store.Reader.
func (o *Objects[T]) Get(_ context.Context, key store.Key) (T, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	object, ok := o.objects[key]
	if !ok {
		return object, o.kind.NotFound(key)
	}
	return clone(object), nil
}

// GetByUID implements store.Reader.
func (o *Objects[T]) GetByUID(_ context.Context, uid types.UID) (T, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, object := range o.objects {
		if object.GetUID() == uid {
			return clone(object), nil
		}
	}
	var none T
	return none, o.kind.NotFoundUID(uid)
}

// List implements store.Reader.
func (o *Objects[T]) List(_ context.Context, options store.ListOptions) (store.Page[T], error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return store.Pick(options, func(f func(iter.Seq[T])) { f(maps.Values(o.objects)) })
}

// Follow implements store.Follower.
func (o *Objects[T]) Follow(ctx context.Context, keys ...store.Key) iter.Seq[store.Event[T]] {
	return o.hub.Follow(ctx, keys, func(f func(iter.Seq[T])) {
		o.mu.Lock()
		defer o.mu.Unlock()
		f(func(yield func(T) bool) {
			for key, object := range o.objects {
				if (len(keys) == 0 || slices.Contains(keys, key)) && !yield(object) {
					return
				}
			}
		})
	})
}

// Create implements store.Writer.
func (o *Objects[T]) Create(_ context.Context, object T) (T, error) {
	key, made := store.KeyOf(object), clone(object)
	made.SetUID(types.UID(uuid.NewString()))
	made.SetGeneration(1)
	made.SetCreationTimestamp(metav1.NewTime(Epoch))
	made.GetObjectKind().SetGroupVersionKind(o.kind.GVK)
	if o.admit != nil {
		if err := o.admit(made); err != nil {
			return made, err
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if _, there := o.objects[key]; there {
		return made, o.kind.Exists(key)
	}
	o.keep(key, made)
	return clone(made), nil
}

func (o *Objects[T]) keep(key store.Key, object T) {
	o.version++
	object.SetResourceVersion(strconv.Itoa(o.version))
	o.objects[key] = object
	o.hub.Changed(object)
}

// UpdateSpec implements store.Writer.
func (o *Objects[T]) UpdateSpec(_ context.Context, key store.Key, pre store.Preconditions, change func(T) error) (T, error) {
	return o.update(key, pre, change, o.kind.TakeSpec)
}

// UpdateStatus implements store.Writer.
func (o *Objects[T]) UpdateStatus(_ context.Context, key store.Key, pre store.Preconditions, change func(T) error) (T, error) {
	return o.update(key, pre, change, o.kind.TakeStatus)
}

func (o *Objects[T]) update(key store.Key, pre store.Preconditions, change func(T) error, take func(to, from T)) (T, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	now, err := o.meant(key, pre)
	if err != nil {
		return now, err
	}
	wanted, next := clone(now), clone(now)
	if err := change(wanted); err != nil {
		return now, err
	}
	take(next, wanted)
	o.keep(key, next)
	return clone(next), nil
}

// Delete implements store.Writer.
func (o *Objects[T]) Delete(_ context.Context, key store.Key, pre store.Preconditions) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	now, err := o.meant(key, pre)
	if err != nil {
		return err
	}
	delete(o.objects, key)
	o.hub.Deleted(now)
	return nil
}

func (o *Objects[T]) meant(key store.Key, pre store.Preconditions) (T, error) {
	now, there := o.objects[key]
	switch {
	case !there:
		return now, o.kind.NotFound(key)
	case pre.UID != "" && pre.UID != now.GetUID():
		return now, o.kind.Replaced(key, pre.UID, now.GetUID())
	case pre.ResourceVersion != "" && pre.ResourceVersion != now.GetResourceVersion():
		return now, o.kind.Changed(key, pre.ResourceVersion, now.GetResourceVersion())
	}
	return now, nil
}

// MustSet makes a SandboxSet with so many sandboxes, all available.
func (e *Env) MustSet(name string, replicas int32) *agentsv1alpha1.SandboxSet {
	e.t.Helper()
	made, err := e.Pools.Sets.Create(e.t.Context(), &agentsv1alpha1.SandboxSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: grpcapi.DefaultNamespace, Name: name},
		Spec:       agentsv1alpha1.SandboxSetSpec{Replicas: replicas, Runtimes: []agentsv1alpha1.Runtime{{Name: agentsv1alpha1.RuntimeCSI}}},
		Status: agentsv1alpha1.SandboxSetStatus{Replicas: replicas, AvailableReplicas: replicas, UpdatedReplicas: replicas, UpdatedAvailableReplicas: replicas,
			UpdateRevision: "5f3759df", Conditions: []metav1.Condition{{Type: agentsv1alpha1.SetReady, Status: metav1.ConditionTrue, Reason: "Ready",
				LastTransitionTime: metav1.NewTime(Epoch)}}},
	})
	must(e.t, err)
	return made
}
