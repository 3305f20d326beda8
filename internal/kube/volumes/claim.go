package volumes

import (
	"context"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// LabelClaimFor is on claims that we made for a PersistentVolume that a sandbox names.
const LabelClaimFor = "sandbox.flux.io/claim-for-volume"

// bindTimeout is how long is waited for a claim to be bound.
const bindTimeout = 30 * time.Second

// claimFor has a PersistentVolume that nobody has claimed bound to a claim in the sandbox's namespace: kubelet mounts claims
// only, and Kubernetes binds a volume to one claim only, whoever asks for it at the same time. We never delete it once it is
// bound: its volume's reclaim policy would destroy the data. One that lost its volume to another is withdrawn (withdraw.go).
func (v *Volumes) claimFor(ctx context.Context, f *found, w scheduler.Wish) (*found, error) {
	wait, cancel := context.WithTimeout(ctx, bindTimeout)
	defer cancel()
	changed, stop := v.follow(wait)
	defer stop()
	claim := claimOf(f.pv, w.Sandbox.Namespace)
	about := name(claimRef(claim.Namespace, claim.Name))
	err := failpoint.Step(steps, stepClaim, func() error {
		_, err := v.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Create(ctx, claim, metav1.CreateOptions{})
		return err
	})
	switch {
	case apierrors.IsAlreadyExists(err): // ours, of before; that it is not another's, its volumeName says
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err):
		return nil, fault.New(errdefs.ErrUnavailable, fault.VolumeNotBound, "the API server refuses %s, which PersistentVolume %s needs for a sandbox to use it: %w", about, f.pv.Name, err)
	case err != nil:
		return nil, unanswered(ctx, err, "make", about)
	}
	pending := notBound("PersistentVolume %s is not bound yet to %s, which was made for it: it is tried again", f.pv.Name, about)
	for {
		bound, err := v.find(ctx, w, false)
		if err != nil {
			if fault.ReasonOf(err) != fault.VolumeNotBound && fault.ReasonOf(err) != fault.ClaimNotFound {
				return nil, err
			}
		} else if bound.claim != nil && bound.claim.Status.Phase == corev1.ClaimBound {
			return bound, nil
		}
		w.Wait(pending)
		ref, over := changed.Get()
		if over {
			return nil, pending
		}
		changed.Done(ref)
	}
}

// claimName is the name of the claim that binds a PersistentVolume.
func claimName(pv string) string {
	const most = 253
	if n := "flux-" + pv; len(n) <= most {
		return n
	}
	return pv
}

// claimOf is the claim that binds a PersistentVolume.
func claimOf(pv *corev1.PersistentVolume, namespace string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: claimName(pv.Name), Labels: claimLabels()},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: pv.Spec.AccessModes, StorageClassName: ptr.To(pv.Spec.StorageClassName), VolumeName: pv.Name, VolumeMode: pv.Spec.VolumeMode,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: pv.Spec.Capacity[corev1.ResourceStorage]}},
		},
	}
}
