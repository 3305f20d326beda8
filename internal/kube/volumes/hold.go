package volumes

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

var _ scheduler.Keeper = (*Volumes)(nil)

// The steps before and after the writes: of holding a volume, and of claiming one.
const (
	stepHold  = "hold"
	stepLetGo = "let-go"
	stepClaim = "claim"
	// of withdrawing a claim
	stepWithdraw = "withdraw"
)

var steps = failpoint.Steps("volume", []string{stepHold, stepLetGo, stepClaim, stepWithdraw})

// ownPatch is our last patch of an object, which counts until the watch has told of it.
type ownPatch struct {
	uid     types.UID
	version string
	held    bool
}

// Hold implements scheduler.Keeper.
func (v *Volumes) Hold(ctx context.Context, ref scheduler.VolumeRef) error {
	release, err := v.turn(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	o, err := v.object(ctx, ref, true)
	if err != nil {
		return err
	}
	if v.held(ref, o) {
		return nil
	}
	if o.GetDeletionTimestamp() != nil {
		return beingDeleted(ref)
	}
	err = v.patch(ctx, ref, o, true)
	switch {
	case apierrors.IsNotFound(err):
		return missing(ref)
	case apierrors.IsInvalid(err) && apierrors.HasStatusCause(err, metav1.CauseTypeForbidden):
		// What is on its way out takes no new finalizer; the watch has not told of that yet.
		return beingDeleted(ref)
	case apierrors.IsInvalid(err), apierrors.IsConflict(err):
		return fault.New(errdefs.ErrConflict, fault.Conflict, "%s is not the one any more that was meant, but a later one of its name: it is tried again: %w", name(ref), err)
	}
	return unanswered(ctx, err, "write", name(ref))
}

// LetGo implements scheduler.Keeper.
func (v *Volumes) LetGo(ctx context.Context, ref scheduler.VolumeRef, unused func() bool) error {
	release, err := v.turn(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	o, err := v.object(ctx, ref, false)
	for {
		switch {
		case errdefs.IsNotFound(err):
			return nil
		case err != nil:
			return err
		case !v.held(ref, o) || !unused():
			return nil
		}
		// Only as we know it: that somebody asked for its deletion meanwhile may have come with another leader, for whom it is in
		// use, and this would be the end of it.
		if err = v.patch(ctx, ref, o, false); apierrors.IsNotFound(err) || apierrors.IsInvalid(err) {
			return nil // it is gone; what has its name now was not held
		} else if !apierrors.IsConflict(err) {
			return unanswered(ctx, err, "write", name(ref))
		}
		if o, err = v.fresh(ctx, ref); err == nil && !slices.Contains(o.GetFinalizers(), v1alpha1.FinalizerInUse) {
			return nil
		}
	}
}

// fresh asks the API server for a claim or PersistentVolume.
func (v *Volumes) fresh(ctx context.Context, ref scheduler.VolumeRef) (o metav1.Object, err error) {
	if ref.Type == v1alpha1.VolumeTypePVC {
		o, err = v.client.CoreV1().PersistentVolumeClaims(ref.Namespace).Get(ctx, ref.Source, metav1.GetOptions{})
	} else {
		o, err = v.client.CoreV1().PersistentVolumes().Get(ctx, ref.Source, metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil, missing(ref)
	}
	return o, unanswered(ctx, err, "read", name(ref))
}

// IsHeld implements scheduler.Keeper.
func (v *Volumes) IsHeld(ref scheduler.VolumeRef) bool {
	o, err := v.object(context.Background(), ref, false)
	return err == nil && v.held(ref, o)
}

// Held implements scheduler.Keeper.
func (v *Volumes) Held() []scheduler.VolumeRef {
	var refs []scheduler.VolumeRef
	claims, _ := v.claims.List(labels.Everything()) // it is a read from memory
	for _, c := range claims {
		if ref := claimRef(c.Namespace, c.Name); v.held(ref, c) {
			refs = append(refs, ref)
		}
	}
	if v.options.Anchors != nil {
		// Should somebody have taken the finalizer away, its anchors go all the same.
		known := make(map[scheduler.VolumeRef]bool, len(refs))
		for _, ref := range refs {
			known[ref] = true
		}
		for _, c := range v.options.Anchors.Claims() {
			if ref := claimRef(c.Namespace, c.Name); !known[ref] {
				known[ref] = true
				refs = append(refs, ref)
			}
		}
	}
	volumes, _ := v.volumes.List(labels.Everything())
	for _, pv := range volumes {
		if ref := volumeRef(pv.Name); v.held(ref, pv) {
			refs = append(refs, ref)
		}
	}
	return refs
}

// About implements scheduler.Keeper.
func (v *Volumes) About(ref scheduler.VolumeRef) (other scheduler.VolumeRef, volumeKey string) {
	pvName := ref.Source
	var claim *corev1.PersistentVolumeClaim
	if ref.Type == v1alpha1.VolumeTypePVC {
		var err error
		if claim, err = v.claims.PersistentVolumeClaims(ref.Namespace).Get(ref.Source); err != nil || claim.Spec.VolumeName == "" {
			return scheduler.VolumeRef{}, ""
		}
		pvName = claim.Spec.VolumeName
		other = volumeRef(pvName)
	}
	pv, err := v.volumes.Get(pvName)
	if err != nil {
		return other, ""
	}
	if c := pv.Spec.ClaimRef; c != nil && ref.Type == v1alpha1.VolumeTypePV {
		other = claimRef(c.Namespace, c.Name)
		claim, _ = v.claims.PersistentVolumeClaims(c.Namespace).Get(c.Name)
	}
	return other, v.keyOf(claim, pv)
}

// object is a claim or PersistentVolume. ask says whether the API server may be asked.
func (v *Volumes) object(ctx context.Context, ref scheduler.VolumeRef, ask bool) (metav1.Object, error) {
	if ref.Type == v1alpha1.VolumeTypePVC {
		return v.claim(ctx, ref.Namespace, ref.Source, ask)
	}
	return v.volume(ctx, ref.Source, ask)
}

// held says whether an object as the watch has told it has our finalizer, or will by our last patch.
func (v *Volumes) held(ref scheduler.VolumeRef, o metav1.Object) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if own, ok := v.own[ref]; ok && own.uid == o.GetUID() && older(o.GetResourceVersion(), own.version) {
		return own.held
	}
	return slices.Contains(o.GetFinalizers(), v1alpha1.FinalizerInUse)
}

// versionOf is the resourceVersion of an object as it is known: by our own last patch, where that is newer.
func (v *Volumes) versionOf(ref scheduler.VolumeRef, o metav1.Object) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	if own, ok := v.own[ref]; ok && own.uid == o.GetUID() && older(o.GetResourceVersion(), own.version) {
		return own.version
	}
	return o.GetResourceVersion()
}

// seen forgets our last patch of an object once the watch has told of it, or that the object is gone.
func (v *Volumes) seen(ref scheduler.VolumeRef, o metav1.Object, gone bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if own, ok := v.own[ref]; ok && (gone || own.uid != o.GetUID() || !older(o.GetResourceVersion(), own.version)) {
		delete(v.own, ref)
	}
}

func older(a, b string) bool {
	n, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && n < 0
}

// patch puts our finalizer on an object, or takes it away, and touches no other. A strategic merge takes the list for a
// set, so that a patch that is repeated changes nothing; the UID makes it one of that object and of no later one of its name.
// What takes it away holds for the object as it is known alone (resourceVersion).
func (v *Volumes) patch(ctx context.Context, ref scheduler.VolumeRef, known metav1.Object, hold bool) error {
	uid := known.GetUID()
	change := map[string]any{"uid": uid}
	if hold {
		change["finalizers"] = []string{v1alpha1.FinalizerInUse}
	} else {
		change["$deleteFromPrimitiveList/finalizers"] = []string{v1alpha1.FinalizerInUse}
		change["resourceVersion"] = v.versionOf(ref, known)
	}
	data, err := json.Marshal(map[string]any{"metadata": change})
	if err != nil {
		return err
	}
	step := stepHold
	if !hold {
		step = stepLetGo
	}
	var o metav1.Object
	if err := failpoint.Step(steps, step, func() (err error) {
		if ref.Type == v1alpha1.VolumeTypePVC {
			o, err = v.client.CoreV1().PersistentVolumeClaims(ref.Namespace).Patch(ctx, ref.Source, types.StrategicMergePatchType, data, metav1.PatchOptions{})
		} else {
			o, err = v.client.CoreV1().PersistentVolumes().Patch(ctx, ref.Source, types.StrategicMergePatchType, data, metav1.PatchOptions{})
		}
		return err
	}); err != nil {
		return err
	}
	v.mu.Lock()
	v.own[ref] = ownPatch{uid: uid, version: o.GetResourceVersion(), held: hold}
	v.mu.Unlock()
	// The watch may have told of it before; of an object that is gone it tells nothing more.
	if now, err := v.object(ctx, ref, false); err != nil {
		v.seen(ref, o, errdefs.IsNotFound(err) && !hold)
	} else {
		v.seen(ref, now, false)
	}
	return nil
}

// turn waits until nobody else holds a volume or lets it go, and returns how to end one's own turn.
func (v *Volumes) turn(ctx context.Context, ref scheduler.VolumeRef) (release func(), err error) {
	for {
		v.mu.Lock()
		busy := v.turns[ref]
		if busy == nil {
			mine := make(chan struct{})
			v.turns[ref] = mine
			v.mu.Unlock()
			return func() {
				v.mu.Lock()
				defer v.mu.Unlock()
				delete(v.turns, ref)
				close(mine)
			}, nil
		}
		v.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, fault.New(errdefs.ErrUnavailable, store.Unavailable, "%s is being written by another operation: %w", name(ref), context.Cause(ctx))
		}
	}
}

func name(ref scheduler.VolumeRef) string {
	if ref.Type == v1alpha1.VolumeTypePVC {
		return fmt.Sprintf("claim %s/%s", ref.Namespace, ref.Source)
	}
	return "PersistentVolume " + ref.Source
}

func notThere(ref scheduler.VolumeRef) fault.Reason {
	if ref.Type == v1alpha1.VolumeTypePVC {
		return fault.ClaimNotFound
	}
	return fault.VolumeNotFound
}

func missing(ref scheduler.VolumeRef) error {
	return fault.New(errdefs.ErrNotFound, notThere(ref), "%s does not exist: create it; it is tried again", name(ref))
}

func beingDeleted(ref scheduler.VolumeRef) error {
	return fault.New(errdefs.ErrNotFound, notThere(ref),
		"%s is being deleted, and goes when the last sandbox that uses it has detached it: use another", name(ref))
}

// refOf is an object as what is held, nothing for what is neither a claim nor a PersistentVolume.
func refOf(o any) (scheduler.VolumeRef, metav1.Object) {
	switch o := o.(type) {
	case *corev1.PersistentVolumeClaim:
		return claimRef(o.Namespace, o.Name), o
	case *corev1.PersistentVolume:
		return volumeRef(o.Name), o
	}
	return scheduler.VolumeRef{}, nil
}
