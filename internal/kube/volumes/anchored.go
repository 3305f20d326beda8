package volumes

import (
	"context"
	"slices"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/anchors"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// pathAnchor is the value of the annotation that asks for an anchor.
const pathAnchor = "anchor"

// byAnchor says why a volume is mounted by kubelet for an anchor; empty for what the agents get themselves.
func (v *Volumes) byAnchor(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) string {
	if v.options.Anchors == nil {
		return ""
	}
	plugin := pluginOf(pv)
	switch {
	case plugin == "":
		return "" // kubelet mounts nothing for it
	case isOnePods(pv):
		return "its access mode is ReadWriteOncePod, which kubelet keeps"
	case claim != nil && claim.Annotations[v1alpha1.AnnotationPath] == pathAnchor:
		return "its claim asks for it (annotation " + v1alpha1.AnnotationPath + ")"
	case pv.Spec.StorageClassName != "" && v.class(pv.Spec.StorageClassName).GetAnnotations()[v1alpha1.AnnotationPath] == pathAnchor:
		return "its StorageClass asks for it (annotation " + v1alpha1.AnnotationPath + ")"
	case pv.Spec.CSI != nil && !slices.Contains(v.options.DirectDrivers, pv.Spec.CSI.Driver):
		return "its CSI driver is none that the agents call"
	case pv.Spec.CSI != nil && v.needsAttach(pv.Spec.CSI.Driver):
		return "its CSI driver has volumes attached to nodes (attachRequired), which Kubernetes does for Pods only: it does not belong among those that the agents call"
	case pv.Spec.CSI == nil && !hasPath(pv):
		return "kubelet has its driver"
	}
	return ""
}

// needsAttach says whether a CSI driver's volumes have to be attached to a node before they can be published there. One that
// says nothing of itself, as there is no CSIDriver object, is what the operator takes it for.
func (v *Volumes) needsAttach(driver string) bool {
	if v.drivers == nil {
		return false
	}
	d, err := v.drivers.Get(driver)
	return err == nil && (d.Spec.AttachRequired == nil || *d.Spec.AttachRequired)
}

// pluginOf is kubelet's name of the plugin that mounts a volume for Pods; empty for those of which kubelet mounts nothing
// (hostPath), or that are not known.
func pluginOf(pv *corev1.PersistentVolume) string {
	switch s := pv.Spec.PersistentVolumeSource; {
	case s.CSI != nil:
		return "kubernetes.io/csi"
	case s.NFS != nil:
		return "kubernetes.io/nfs"
	case s.ISCSI != nil:
		return "kubernetes.io/iscsi"
	case s.FC != nil:
		return "kubernetes.io/fc"
	case s.Local != nil:
		return "kubernetes.io/local-volume"
	}
	return ""
}

// hasPath says whether a volume is a path on its nodes, which needs nobody to mount it.
func hasPath(pv *corev1.PersistentVolume) bool {
	return pv.Spec.Local != nil || pv.Spec.HostPath != nil
}

// isOnePods says whether a volume is for one Pod alone.
func isOnePods(pv *corev1.PersistentVolume) bool {
	return slices.Contains(pv.Spec.AccessModes, corev1.ReadWriteOncePod)
}

// class is a StorageClass, an empty one where it is not there.
func (v *Volumes) class(name string) *storagev1.StorageClass {
	if v.classes != nil {
		if c, err := v.classes.Get(name); err == nil {
			return c
		}
	}
	return &storagev1.StorageClass{}
}

// waitsForConsumer says whether an unbound claim is bound when a Pod uses it, which an anchor can be.
func (v *Volumes) waitsForConsumer(claim *corev1.PersistentVolumeClaim) bool {
	if v.options.Anchors == nil || claim.Spec.StorageClassName == nil {
		return false
	}
	mode := v.class(*claim.Spec.StorageClassName).VolumeBindingMode
	return mode != nil && *mode == storagev1.VolumeBindingWaitForFirstConsumer
}

// anchorable refuses what an anchor is of no use for.
func (f *found) anchorable(w scheduler.Wish) error {
	if err := f.writable(w); err != nil {
		return err
	}
	return fits(f.pv, w.Volume.SizeLimit)
}

// mountedReadOnly says whether kubelet has to mount a volume read-only.
func mountedReadOnly(pv *corev1.PersistentVolume) bool {
	return isReadOnly(pv) || !slices.ContainsFunc(pv.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool { return m != corev1.ReadOnlyMany })
}

// bind has a claim bound that waits for its first consumer: by an anchor, on the sandbox's node.
func (v *Volumes) bind(ctx context.Context, f *found, w scheduler.Wish, node string) (*found, error) {
	want := anchors.Want{Claim: f.claim, Node: node}
	if slices.Contains(f.claim.Spec.AccessModes, corev1.ReadWriteOncePod) {
		want.Sandbox = string(w.Sandbox.UID)
	}
	if err := v.selectable(ctx, f.claim, node); err != nil {
		return nil, err
	}
	w.Wait(notBound("claim %s/%s waits for its first consumer, a Pod of ours on node %s, and for its provisioner to make a volume: what keeps it is in its Events",
		f.claim.Namespace, f.claim.Name, node))
	if _, err := v.anchor(ctx, want); err != nil {
		return nil, err
	}
	// It runs, so the claim is bound; the watches tell of that later.
	claim, err := v.client.CoreV1().PersistentVolumeClaims(f.claim.Namespace).Get(ctx, f.claim.Name, metav1.GetOptions{})
	if err != nil {
		return nil, unanswered(ctx, err, "read", name(claimRef(f.claim.Namespace, f.claim.Name)))
	}
	if claim.Spec.VolumeName == "" {
		return nil, notBound("claim %s/%s is not bound though a Pod that has it runs: it is tried again", claim.Namespace, claim.Name)
	}
	pv, err := v.client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return nil, unanswered(ctx, err, "read", "PersistentVolume "+claim.Spec.VolumeName)
	}
	bound := &found{claim: claim, pv: pv}
	if err := bound.belongs(); err != nil {
		return nil, err
	}
	if err := v.check(bound, w); err != nil {
		return nil, err
	}
	return bound, nil
}

// anchor has an anchor run. The claim is held from before there is one.
func (v *Volumes) anchor(ctx context.Context, want anchors.Want) (anchors.Anchor, error) {
	if err := v.Hold(ctx, claimRef(want.Claim.Namespace, want.Claim.Name)); err != nil {
		return anchors.Anchor{}, err
	}
	return v.options.Anchors.Ensure(ctx, want)
}

// anchored has kubelet mount a volume on a node, and says how the agent gets it. unusable is for an anchor that has not got it.
func (v *Volumes) anchored(ctx context.Context, f *found, w scheduler.Wish, node string) (set func(*agentv1.AttachRequest), unusable func(context.Context), err error) {
	want := anchors.Want{Claim: f.claim, Node: node, ReadOnly: mountedReadOnly(f.pv)}
	if isOnePods(f.pv) {
		want.Sandbox = string(w.Sandbox.UID)
	}
	w.Wait(fault.New(errdefs.ErrUnavailable, fault.AnchorPending, "kubelet has to mount claim %s/%s on node %s for a Pod of ours: what keeps it is in the Pod's Events",
		f.claim.Namespace, f.claim.Name, node))
	a, err := v.anchor(ctx, want)
	if err != nil {
		return nil, nil, err
	}
	source := &agentv1.AnchorSource{PodUid: string(a.UID), PvName: f.pv.Name, PodNamespace: f.claim.Namespace, PodName: a.Name, Claim: f.claim.Name}
	source.Plugin = pluginOf(f.pv)
	if c := f.pv.Spec.CSI; c != nil {
		source.Driver, source.VolumeHandle = c.Driver, c.VolumeHandle
	}
	return func(r *agentv1.AttachRequest) { r.Source = &agentv1.AttachRequest_Anchor{Anchor: source} },
		func(ctx context.Context) { v.options.Anchors.Replace(ctx, want, a) }, nil
}

// Anchor implements scheduler.Keeper.
func (v *Volumes) Anchor(ctx context.Context, ref scheduler.VolumeRef, nodes map[string]types.UID, may func(node string) bool) (left bool, err error) {
	if v.options.Anchors == nil || ref.Type != v1alpha1.VolumeTypePVC {
		return false, nil
	}
	n := anchors.Need{Namespace: ref.Namespace, Name: ref.Source, May: may}
	if claim, err := v.claims.PersistentVolumeClaims(ref.Namespace).Get(ref.Source); err == nil {
		n.Claim = claim
		n.Exclusive = slices.Contains(claim.Spec.AccessModes, corev1.ReadWriteOncePod)
		if pv, err := v.volumes.Get(claim.Spec.VolumeName); err == nil && v.byAnchor(claim, pv) != "" {
			n.Nodes, n.ReadOnly = nodes, mountedReadOnly(pv)
		} else {
			// One that bound it has done its work.
			n.May = func(node string) bool { return claim.Spec.VolumeName == "" && may(node) }
		}
	}
	return v.options.Anchors.Settle(ctx, n)
}
