package volumes

import (
	"context"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// found is a volume that its sandbox may use as it wishes.
type found struct {
	claim *corev1.PersistentVolumeClaim // nil for a PersistentVolume that no claim has
	pv    *corev1.PersistentVolume
	// unbound says that the claim waits for its first consumer, which an anchor can be: there is no pv.
	unbound bool
}

// Locate implements scheduler.Resolver.
func (v *Volumes) Locate(w scheduler.Wish) (scheduler.Location, error) {
	f, err := v.find(context.Background(), w, false)
	if err != nil {
		return scheduler.Location{}, err
	}
	return v.location(f, w.TopologyKey), nil
}

// Resolve implements scheduler.Resolver.
func (v *Volumes) Resolve(ctx context.Context, w scheduler.Wish, node string) (*scheduler.ResolvedVolume, error) {
	f, err := v.find(ctx, w, true)
	if err == nil && f.unbound {
		f, err = v.bind(ctx, f, w, node)
	}
	if err != nil {
		return nil, err
	}
	if f.claim == nil && (v.byAnchor(nil, f.pv) != "" || !f.meantFor(w)) {
		if f, err = v.claimFor(ctx, f, w); err != nil {
			return nil, err
		}
	}
	r := &scheduler.ResolvedVolume{Location: v.location(f, w.TopologyKey), PVName: f.pv.Name}
	if f.claim != nil {
		r.PVCName = f.claim.Name
	}
	if why := v.byAnchor(f.claim, f.pv); why != "" {
		r.Path, r.PathReason = v1alpha1.VolumePathAnchor, why
		r.SetSource, r.Unusable, err = v.anchored(ctx, f, w, node)
	} else {
		r.Path, r.SetSource, err = v.source(ctx, f)
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (v *Volumes) location(f *found, topologyKey string) scheduler.Location {
	if f.pv == nil {
		return scheduler.Location{} // it comes to be where its first user is
	}
	return scheduler.Location{Domains: domains(f.pv, topologyKey), VolumeKey: v.keyOf(f.claim, f.pv), Reach: reach(f.pv)}
}

// find is the volume that is wished for, or why there is none. ask says whether the API server may be asked.
func (v *Volumes) find(ctx context.Context, w scheduler.Wish, ask bool) (f *found, err error) {
	f = &found{}
	switch w.Volume.VolumeType {
	case v1alpha1.VolumeTypePVC:
		err = v.ofClaim(ctx, f, w, ask)
	case v1alpha1.VolumeTypePV:
		err = v.named(ctx, f, w, ask)
	default:
		err = fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
			"volumes of type %s are not available in this cluster: use local, pvc or pv", w.Volume.VolumeType)
	}
	if err != nil {
		return nil, err
	}
	return f, v.check(f, w)
}

// check refuses a volume that the sandbox cannot use as it wishes.
func (v *Volumes) check(f *found, w scheduler.Wish) error {
	if err := f.usable(); err != nil {
		return err
	}
	if err := f.allowed(w, v.options.Anchors != nil); err != nil {
		return err
	}
	return v.supported(f, w)
}

// ofClaim finds the volume of a claim of the sandbox's namespace.
func (v *Volumes) ofClaim(ctx context.Context, f *found, w scheduler.Wish, ask bool) (err error) {
	if f.claim, err = v.claim(ctx, w.Sandbox.Namespace, w.Volume.Source, ask); err != nil {
		return err
	}
	about := "claim " + f.claim.Namespace + "/" + f.claim.Name
	if f.claim.Spec.VolumeName == "" && v.waitsForConsumer(f.claim) {
		f.unbound = true
		return nil
	}
	if f.claim.Spec.VolumeName == "" || f.claim.Status.Phase != corev1.ClaimBound {
		return notBound("%s is %s: it is tried again once it is bound; if its StorageClass waits for the first consumer, a Pod has to use it first",
			about, orPending(f.claim.Status.Phase))
	}
	if f.pv, err = v.volume(ctx, f.claim.Spec.VolumeName, ask); err != nil {
		return err
	}
	return f.belongs()
}

// belongs refuses a volume that is not its claim's, whatever that says.
func (f *found) belongs() error {
	about := "claim " + f.claim.Namespace + "/" + f.claim.Name
	switch ref := f.pv.Spec.ClaimRef; {
	case ref != nil && (ref.Namespace != f.claim.Namespace || ref.Name != f.claim.Name):
		return fault.New(errdefs.ErrPermissionDenied, fault.SourceDenied,
			"%s names PersistentVolume %s, which is bound to another claim: use a claim of its own", about, f.pv.Name)
	case ref == nil || ref.UID != f.claim.UID:
		// The news of the two come in any order.
		return notBound("%s names PersistentVolume %s, which is not bound to it, or was to an earlier claim of its name: it is tried again", about, f.pv.Name)
	}
	return nil
}

// named finds a PersistentVolume by its name.
func (v *Volumes) named(ctx context.Context, f *found, w scheduler.Wish, ask bool) (err error) {
	if f.pv, err = v.volume(ctx, w.Volume.Source, ask); err != nil {
		return err
	}
	ref := f.pv.Spec.ClaimRef
	if ref == nil {
		return nil
	}
	if ref.Namespace != w.Sandbox.Namespace {
		return v.boundElsewhere(f.pv, w)
	}
	if f.claim, err = v.claim(ctx, ref.Namespace, ref.Name, ask); err != nil {
		return err
	}
	if f.claim.UID != ref.UID {
		return notBound("PersistentVolume %s is reserved for claim %s/%s, and not bound to it: it is tried again", f.pv.Name, ref.Namespace, ref.Name)
	}
	return nil
}

func notBound(format string, args ...any) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.VolumeNotBound, format, args...)
}

func orPending(p corev1.PersistentVolumeClaimPhase) string {
	if p == "" || p == corev1.ClaimBound {
		p = corev1.ClaimPending
	}
	return string(p)
}

// usable refuses what is on its way out, or can be mounted by nobody but kubelet.
func (f *found) usable() error {
	switch {
	case f.claim != nil && f.claim.DeletionTimestamp != nil:
		return beingDeleted(claimRef(f.claim.Namespace, f.claim.Name))
	case f.unbound && f.claim.Spec.VolumeMode != nil && *f.claim.Spec.VolumeMode == corev1.PersistentVolumeBlock:
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "claim %s/%s is for a block device: use one with volumeMode Filesystem", f.claim.Namespace, f.claim.Name)
	case f.unbound:
		return nil
	case f.pv.DeletionTimestamp != nil:
		return beingDeleted(volumeRef(f.pv.Name))
	case f.pv.Status.Phase == corev1.VolumeReleased, f.pv.Status.Phase == corev1.VolumeFailed:
		return notBound("PersistentVolume %s is %s, it has data of a claim that is gone: its administrator has to free it (remove its claimRef)", f.pv.Name, f.pv.Status.Phase)
	case f.pv.Spec.VolumeMode != nil && *f.pv.Spec.VolumeMode == corev1.PersistentVolumeBlock:
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "PersistentVolume %s is a block device: use one with volumeMode Filesystem", f.pv.Name)
	}
	return nil
}
