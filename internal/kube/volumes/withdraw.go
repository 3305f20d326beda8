package volumes

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/reconcile"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Events tells people what happens to an object. Calls do not block.
type Events interface {
	About(object runtime.Object, eventType, reason, message string)
}

// Withdraw deletes, until ctx ends, the claims that we made for a PersistentVolume and that will never be bound, as another claim
// has got it: of two Namespaces that name a free volume at once, each gets such a claim. Nothing else is deleted, and nothing
// that is bound: no volume is reclaimed by it. Only the leader calls it.
func (v *Volumes) Withdraw(ctx context.Context, events Events, log *slog.Logger) {
	select {
	case <-v.synced:
	case <-ctx.Done():
		return
	}
	loop := reconcile.New(reconcile.Options{Name: "claim for a volume", Clock: clock.RealClock{}, Log: log,
		Do: func(ctx context.Context, key store.Key) (time.Duration, error) {
			return 0, v.withdraw(ctx, key, events, log)
		}})
	changed, stop := v.follow(ctx)
	defer stop()
	// waiting are our claims that are not bound, by the volume that each is for.
	waiting := map[string]map[store.Key]struct{}{}
	look := func(claim *corev1.PersistentVolumeClaim) {
		key, pv := store.KeyOf(claim), claim.Spec.VolumeName
		if !isForVolume(claim) || claim.Status.Phase == corev1.ClaimBound {
			if delete(waiting[pv], key); len(waiting[pv]) == 0 {
				delete(waiting, pv)
			}
			return
		}
		if waiting[pv] == nil {
			waiting[pv] = map[store.Key]struct{}{}
		}
		waiting[pv][key] = struct{}{}
		loop.Add(key)
	}
	known, _ := v.claims.List(labels.SelectorFromSet(claimLabels())) // it is a read from memory
	for _, claim := range known {
		look(claim)
	}
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { loop.Run(ctx) })
	for ref := range reconcile.Changes(ctx, changed) {
		if ref.Type == v1alpha1.VolumeTypePV {
			for key := range waiting[ref.Source] {
				loop.Add(key)
			}
		} else if claim, err := v.claims.PersistentVolumeClaims(ref.Namespace).Get(ref.Source); err == nil {
			look(claim)
		}
	}
}

// withdraw deletes a claim that we made, if another has its volume.
func (v *Volumes) withdraw(ctx context.Context, key store.Key, events Events, log *slog.Logger) error {
	claim, err := v.claims.PersistentVolumeClaims(key.Namespace).Get(key.Name)
	if err != nil {
		return nil // it is gone
	}
	if pv, err := v.volumes.Get(claim.Spec.VolumeName); err != nil || !hasLost(claim, pv) {
		return nil
	}
	// What is told of the two comes in any order. The claim is read first: it is deleted only as it was then, before its volume was
	// found to be another's.
	about := name(claimRef(key.Namespace, key.Name))
	claim, err = v.client.CoreV1().PersistentVolumeClaims(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return unanswered(ctx, err, "read", about)
	}
	pv, err := v.client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err), err == nil && !hasLost(claim, pv):
		return nil
	case err != nil:
		return unanswered(ctx, err, "read", name(volumeRef(claim.Spec.VolumeName)))
	}
	err = failpoint.Step(steps, stepWithdraw, func() error {
		return v.client.CoreV1().PersistentVolumeClaims(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &claim.UID, ResourceVersion: &claim.ResourceVersion}})
	})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return unanswered(ctx, err, "delete", about)
	}
	message := fmt.Sprintf("deleted the claim, which was made for PersistentVolume %s: another claim has it by now", pv.Name)
	log.Info(message, "claim", key.String())
	claim.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("PersistentVolumeClaim"))
	events.About(claim, corev1.EventTypeWarning, "ClaimWithdrawn", message)
	return nil
}

// claimLabels are on every claim that we make for a PersistentVolume.
func claimLabels() map[string]string {
	return map[string]string{"app.kubernetes.io/managed-by": "flux-sandbox-controller", LabelClaimFor: "true"}
}

// isForVolume says whether a claim is one that we made for a PersistentVolume.
func isForVolume(claim *corev1.PersistentVolumeClaim) bool {
	return labels.SelectorFromSet(claimLabels()).Matches(labels.Set(claim.Labels)) && claim.Spec.VolumeName != "" && claim.Name == claimName(claim.Spec.VolumeName)
}

// hasLost says of a claim that we made that its volume is bound to another.
func hasLost(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) bool {
	ref := pv.Spec.ClaimRef
	return isForVolume(claim) && claim.DeletionTimestamp == nil && claim.Status.Phase != corev1.ClaimBound && claim.Annotations[bindCompleted] == "" &&
		ref != nil && ref.UID != "" && ref.UID != claim.UID && pv.Status.Phase == corev1.VolumeBound
}

// bindCompleted is the annotation by which Kubernetes says of a claim that it is bound; memory does not have it.
const bindCompleted = "pv.kubernetes.io/bind-completed"

// boundElsewhere refuses a volume that another namespace has. Which one that is, only a sandbox of the same tenant is told.
func (v *Volumes) boundElsewhere(pv *corev1.PersistentVolume, w scheduler.Wish) error {
	ref, tenant := pv.Spec.ClaimRef, w.Sandbox.Spec.TenantID
	by := "a claim of another namespace than the sandbox's " + w.Sandbox.Namespace
	if tenant != "" && v.options.Tenant != nil && v.options.Tenant(ref.Namespace) == tenant {
		by = fmt.Sprintf("claim %s of namespace %s, and the sandbox is in %s", ref.Name, ref.Namespace, w.Sandbox.Namespace)
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.SourceDenied, "PersistentVolume %s is bound to %s: use a volume that is free, or a claim", pv.Name, by)
}
