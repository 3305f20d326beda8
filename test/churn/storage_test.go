package churn

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
)

// mostLeft is how many claims of sandboxes that are gone are left before somebody clears up.
const mostLeft = 30

// claimOf says what a claim is to the ledger: made for a sandbox, and that one gone. The lock is held.
func (l *ledger) claimOf(pvc *corev1.PersistentVolumeClaim) (own, left bool) {
	of := l.madeFor(pvc)
	return of != "" && !forVolume(pvc) && pvc.DeletionTimestamp == nil, l.sandboxes[of] == nil
}

// pickPVCs are the claims that fit, in an order by the dice.
func (w *world) pickPVCs(fits func(pvc *corev1.PersistentVolumeClaim, left bool) bool) []*corev1.PersistentVolumeClaim {
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	var all []*corev1.PersistentVolumeClaim
	for _, pvc := range w.ledger.pvcs {
		if own, left := w.ledger.claimOf(pvc); own && fits(pvc, left) {
			all = append(all, pvc)
		}
	}
	slices.SortFunc(all, func(a, b *corev1.PersistentVolumeClaim) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	w.dice.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// deletePVC is somebody who deletes a sandbox's claim under it, or clears up what was kept of those that are gone.
func (w *world) deletePVC() {
	all := w.pickPVCs(func(_ *corev1.PersistentVolumeClaim, left bool) bool { return left })
	if len(all) > mostLeft {
		w.count("times claims were cleared up")
		all = all[:10]
	} else if all = w.pickPVCs(func(*corev1.PersistentVolumeClaim, bool) bool { return true }); len(all) > 0 {
		w.count("claims of sandboxes deleted")
		all = all[:1]
	}
	for _, pvc := range all {
		w.dropPVC(pvc)
	}
}

func (w *world) dropPVC(pvc *corev1.PersistentVolumeClaim) {
	w.ledger.hands(pvc.UID)
	w.tolerated("delete a claim", w.client.CoreV1().PersistentVolumeClaims(pvc.Namespace).Delete(w.ctx, pvc.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pvc.UID))}))
}

// adoptPVC is somebody who lets the next sandbox of a name have what was kept of the last.
func (w *world) adoptPVC() {
	all := w.pickPVCs(func(pvc *corev1.PersistentVolumeClaim, left bool) bool {
		return left && strings.HasPrefix(pvc.Name, "own-d") && pvc.Labels[v1alpha1.LabelAdopt] == ""
	})
	if len(all) == 0 {
		return
	}
	w.count("claims taken over")
	pvc := all[0]
	_, err := w.client.CoreV1().PersistentVolumeClaims(pvc.Namespace).Patch(w.ctx, pvc.Name, types.MergePatchType, must(json.Marshal(fields{"metadata": fields{
		"uid": pvc.UID, "resourceVersion": pvc.ResourceVersion, "labels": fields{v1alpha1.LabelAdopt: strings.TrimPrefix(pvc.Name, "own-")}}})), metav1.PatchOptions{})
	w.tolerated("let a claim be taken over", err)
}

// unblock deletes what was kept of sandboxes whose name another has that may not have it.
func (w *world) unblock() {
	w.Helper()
	owners := map[types.NamespacedName]types.UID{}
	for _, sb := range all[*v1alpha1.Sandbox](w, "sandbox") {
		owners[types.NamespacedName{Namespace: sb.Namespace, Name: "own-" + sb.Name}] = sb.UID
	}
	for _, pvc := range all[*corev1.PersistentVolumeClaim](w, "pvc") {
		owner, has := owners[types.NamespacedName{Namespace: pvc.Namespace, Name: pvc.Name}]
		if has && w.ledger.madeFor(pvc) != owner && pvc.Labels[v1alpha1.LabelAdopt] == "" {
			w.dropPVC(pvc)
		}
	}
}

// changePolicy is a user who has a sandbox's claims kept, or not any more.
func (w *world) changePolicy() {
	sb := pick(w, w.ledger.sandboxes, func(sb *v1alpha1.Sandbox) bool { return len(sb.Spec.VolumeClaimTemplates) > 0 && !sets.Removing(sb) })
	if sb == nil {
		return
	}
	w.count("changes of retention")
	to := v1alpha1.RetentionRetain
	if sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted() == to {
		to = v1alpha1.RetentionDelete
	}
	w.patch("sandbox", sb.Namespace, sb.Name, fields{"metadata": fields{"uid": sb.UID, "resourceVersion": sb.ResourceVersion, "annotations": fields{annotationPolicy: to}},
		"spec": fields{"persistentVolumeClaimRetentionPolicy": fields{"whenDeleted": to}}})
}

// updateInPlace is a user who changes image and resources of a sandbox that he has.
func (w *world) updateInPlace() {
	sb := pick(w, w.ledger.sandboxes, func(sb *v1alpha1.Sandbox) bool {
		owner := metav1.GetControllerOf(sb)
		if owner == nil {
			return sb.Spec.Template != nil
		}
		c := w.ledger.claims[owner.UID]
		return c != nil && final(c)
	})
	if sb == nil {
		return
	}
	w.count("updates in place")
	containers := sb.DeepCopy().Spec.Template.Spec.Containers
	if w.dice.IntN(3) > 0 {
		containers[0].Image = fmt.Sprint("busybox:own-", w.step)
	}
	if w.dice.IntN(2) == 0 {
		containers[0].Resources.Requests = w.requests()
	}
	w.patch("sandbox", sb.Namespace, sb.Name, fields{"metadata": fields{"uid": sb.UID, "resourceVersion": sb.ResourceVersion},
		"spec": fields{"template": fields{"spec": fields{"containers": containers}}}})
}

// requests are what a container may ask for instead of what its template has.
func (w *world) requests() corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(int64(10+w.dice.IntN(20)), resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(int64(16+w.dice.IntN(16))<<20, resource.BinarySI)}
}
