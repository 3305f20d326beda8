package volumes

import (
	"slices"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// LabelShared, with the value "true" on a claim or PersistentVolume, lets others than its tenant use it read-only.
const LabelShared = "sandbox.flux.io/shared"

// allowed checks that the sandbox may use the volume, and in that mode. anchored says that there are anchors.
func (f *found) allowed(w scheduler.Wish, anchored bool) error {
	tenant, readOnly := w.Sandbox.Spec.TenantID, w.Volume.Mode == v1alpha1.VolumeModeReadOnly
	if f.claim != nil {
		about := "claim " + f.claim.Namespace + "/" + f.claim.Name
		if err := serves(about, f.claim.Labels, tenant, readOnly); err != nil {
			return err
		}
		if err := permits(about, f.claim.Spec.AccessModes, readOnly, anchored); err != nil {
			return err
		}
	}
	if f.pv == nil {
		return nil
	}
	about := "PersistentVolume " + f.pv.Name
	if err := serves(about, f.pv.Labels, tenant, readOnly); err != nil {
		return err
	}
	if f.claim == nil && f.pv.Labels[LabelShared] == "true" && !readOnly && !f.ofTenant(tenant) {
		return fault.New(errdefs.ErrPermissionDenied, fault.ModeDenied, "%s is shared read-only (label %s): ask for mode ro, or let the operator label it with its tenant", about, LabelShared)
	}
	return permits(about, f.pv.Spec.AccessModes, readOnly, anchored)
}

// meantFor says whether a PersistentVolume that no claim has is known to be for the sandbox all the same, by its labels. Any
// other has to be its namespace's first: who comes next would have the same data.
func (f *found) meantFor(w scheduler.Wish) bool {
	return f.ofTenant(w.Sandbox.Spec.TenantID) || f.pv.Labels[LabelShared] == "true"
}

// ofTenant says whether a PersistentVolume is labelled with a tenant.
func (f *found) ofTenant(tenant string) bool {
	return tenant != "" && f.pv.Labels[v1alpha1.LabelTenantID] == tenant
}

// permits is the rule of the access modes (see the package comment).
func permits(what string, modes []corev1.PersistentVolumeAccessMode, readOnly, anchored bool) error {
	switch {
	case slices.Contains(modes, corev1.ReadWriteOncePod) && anchored:
	case slices.Contains(modes, corev1.ReadWriteOncePod):
		return fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
			"%s has access mode ReadWriteOncePod, which is for one Pod alone, and nothing keeps Pods and sandboxes apart in this version: use a claim with ReadWriteOnce, or mount it in a Pod", what)
	case !readOnly && !slices.Contains(modes, corev1.ReadWriteOnce) && !slices.Contains(modes, corev1.ReadWriteMany):
		return fault.New(errdefs.ErrPermissionDenied, fault.ModeDenied, "%s has access modes %v only: ask for mode ro", what, modes)
	}
	return nil
}

// serves is the rule of the labels. What has an owner serves its tenant; what is shared, all others read-only.
func serves(what string, labels map[string]string, tenant string, readOnly bool) error {
	owner, shared := labels[v1alpha1.LabelTenantID], labels[LabelShared] == "true"
	switch {
	case owner == "" && !shared, owner == tenant:
		return nil
	case !shared:
		return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
			"%s is tenant %q's, and the sandbox is tenant %q's: use a volume of your own, or let the operator share it (label %s)", what, owner, tenant, LabelShared)
	case !readOnly:
		return fault.New(errdefs.ErrPermissionDenied, fault.ModeDenied, "%s is shared with tenant %q read-only: ask for mode ro", what, tenant)
	}
	return nil
}
