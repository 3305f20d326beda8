package churn

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
)

// annotationPolicy is on a sandbox whose retention policy somebody changed, with what he wrote to whenDeleted.
const annotationPolicy = "churn.example.com/when-deleted"

// hands notes that somebody deletes an object, before he does.
func (l *ledger) hands(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byHand[uid] = true
}

// policy: whenDeleted is changed by whoever has the sandbox, or by the set that removes it, to whenScaled.
func (l *ledger) policy(before, sb *v1alpha1.Sandbox) {
	l.policies[sb.UID] = sb.Spec.PersistentVolumeClaimRetentionPolicy.Deleted()
	if before == nil {
		return
	}
	owner, now := metav1.GetControllerOf(sb), sb.Spec.PersistentVolumeClaimRetentionPolicy
	switch was := before.Spec.PersistentVolumeClaimRetentionPolicy; {
	case was.Deleted() == now.Deleted():
	case sets.Removing(sb) && owner != nil && owner.Kind == "SandboxSet" && now.Deleted() == now.Scaled():
	case sb.Annotations[annotationPolicy] == string(now.Deleted()):
	default:
		l.fail("whenDeleted of sandbox %s (version %s) was %s and is %s, which nobody asked for", sb.Name, sb.ResourceVersion, was.Deleted(), now.Deleted())
	}
}

// ends: a set removes no sandbox before what becomes of its claims is whenScaled.
func (l *ledger) ends(sb *v1alpha1.Sandbox) {
	if l.over[sb.UID] {
		return
	}
	l.over[sb.UID] = true
	owner, policy := metav1.GetControllerOf(sb), sb.Spec.PersistentVolumeClaimRetentionPolicy
	if owner == nil || len(sb.Spec.VolumeClaimTemplates) == 0 || l.byHand[sb.UID] || policy.Deleted() == policy.Scaled() {
		return
	}
	if p := l.sets[owner.UID]; p != nil && p.set.DeletionTimestamp == nil {
		l.fail("set %s removed sandbox %s (version %s) with whenDeleted %s, and whenScaled is %s", owner.Name, sb.Name, sb.ResourceVersion, policy.Deleted(), policy.Scaled())
	}
}

// madeFor is whose a claim is: the sandbox's that its label or its owner tells.
func (l *ledger) madeFor(pvc *corev1.PersistentVolumeClaim) types.UID {
	if uid := pvc.Labels[v1alpha1.LabelSandboxUID]; uid != "" {
		return types.UID(uid)
	}
	if owner := metav1.GetControllerOf(pvc); owner != nil {
		return owner.UID
	}
	return ""
}

// pvc: whose it is never changes, but where somebody lets another sandbox of the name take it over; and it is deleted by whom
// it may be deleted.
func (l *ledger) pvc(pvc *corev1.PersistentVolumeClaim, gone bool) {
	if gone || pvc.DeletionTimestamp != nil {
		l.pvcEnds(pvc)
	}
	name := types.NamespacedName{Namespace: pvc.Namespace, Name: pvc.Name}
	if gone {
		delete(l.made, pvc.UID)
		if now := l.pvcs[name]; now != nil && now.UID == pvc.UID {
			delete(l.pvcs, name)
		}
		return
	}
	l.pvcs[name] = pvc
	of := l.madeFor(pvc)
	if was, known := l.made[pvc.UID]; known && was != of && !adopted(pvc) {
		l.fail("claim %s (version %s) was made for %q, and is %q's now", pvc.Name, pvc.ResourceVersion, was, of)
	}
	l.made[pvc.UID] = of
}

// adopted says whether somebody lets the sandbox of a name have a claim that was not made for it.
func adopted(pvc *corev1.PersistentVolumeClaim) bool {
	return pvc.Labels[v1alpha1.LabelAdopt] != "" && pvc.Labels[v1alpha1.LabelAdopt] == pvc.Labels[v1alpha1.LabelSandbox]
}

// wasBound says whether a claim ever had a volume.
func (l *ledger) wasBound(pvc *corev1.PersistentVolumeClaim) bool {
	return pvc.Status.Phase == corev1.ClaimBound || slices.Contains(slices.Collect(maps.Values(l.bound)), pvc.UID)
}

// pvcEnds: what is to be kept is not deleted but by hand, and nothing is while its sandbox is there.
func (l *ledger) pvcEnds(pvc *corev1.PersistentVolumeClaim) {
	if l.over[pvc.UID] {
		return
	}
	l.over[pvc.UID] = true
	if l.byHand[pvc.UID] || pvc.Labels[labelForeign] != "" {
		return
	}
	of := l.madeFor(pvc)
	switch sb := l.sandboxes[of]; {
	case of == "" && !l.wasBound(pvc): // another Namespace's claim has the PersistentVolume
	case of == "":
		l.fail("claim %s/%s (version %s) was made for no sandbox, and is deleted", pvc.Namespace, pvc.Name, pvc.ResourceVersion)
	case adopted(pvc):
		l.fail("claim %s/%s (version %s) was taken over by a sandbox, and is deleted", pvc.Namespace, pvc.Name, pvc.ResourceVersion)
	case sb != nil && sb.DeletionTimestamp == nil:
		l.fail("claim %s/%s (version %s) is deleted, and its sandbox is there", pvc.Namespace, pvc.Name, pvc.ResourceVersion)
	case l.policies[of] == v1alpha1.RetentionRetain:
		l.fail("claim %s/%s (version %s) is deleted, and was to be kept", pvc.Namespace, pvc.Name, pvc.ResourceVersion)
	}
}

// keeps says whether a claim is to be there without its sandbox.
func (l *ledger) keeps(pvc *corev1.PersistentVolumeClaim) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return adopted(pvc) || l.policies[l.madeFor(pvc)] == v1alpha1.RetentionRetain
}

// pv: it is one claim's in its life, of its tenant, and stays as long as that claim does.
func (l *ledger) pv(pv *corev1.PersistentVolume, gone bool) {
	ref := pv.Spec.ClaimRef
	if gone {
		delete(l.bound, pv.UID)
		if ref == nil {
			return
		}
		if pvc := l.pvcs[types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}]; pvc != nil && pvc.UID == ref.UID && pvc.DeletionTimestamp == nil {
			l.fail("PersistentVolume %s (version %s) is gone, and its claim %s/%s is not", pv.Name, pv.ResourceVersion, pvc.Namespace, pvc.Name)
		}
		return
	}
	if ref == nil || ref.UID == "" {
		return
	}
	if was, known := l.bound[pv.UID]; known && was != ref.UID {
		l.fail("PersistentVolume %s (version %s) was claim %s's, and is %s/%s's (%s) now", pv.Name, pv.ResourceVersion, was, ref.Namespace, ref.Name, ref.UID)
	}
	l.bound[pv.UID] = ref.UID
	if d, is := drives[pv.Name]; is && !d.serves(ref.Namespace, false) {
		l.fail("PersistentVolume %s (version %s) is tenant %q's (shared: %v), and was bound to claim %s/%s", pv.Name, pv.ResourceVersion, d.tenant, d.shared, ref.Namespace, ref.Name)
	}
}

// tenant: a sandbox is its Namespace's tenant's, and has no volume that is not for that tenant.
func (l *ledger) tenant(sb *v1alpha1.Sandbox) {
	if tenant := tenantOf(sb.Namespace); sb.Spec.TenantID != tenant {
		l.fail("sandbox %s/%s (version %s) has tenant %q, and its Namespace %q", sb.Namespace, sb.Name, sb.ResourceVersion, sb.Spec.TenantID, tenant)
	}
	for _, v := range sb.Status.Volumes {
		d, is := drives[v.Source]
		if !is || v.VolumeType != v1alpha1.VolumeTypePV || v.Phase != v1alpha1.VolumeMounted {
			continue
		}
		if !d.serves(sb.Namespace, v.Mode == v1alpha1.VolumeModeReadOnly) {
			l.fail("sandbox %s/%s (version %s) has %s (%s), which is tenant %q's (shared: %v)", sb.Namespace, sb.Name, sb.ResourceVersion, d.name, v.Mode, d.tenant, d.shared)
		}
		if d.tenant != "" || d.shared {
			continue
		}
		if first, known := l.first[d.name]; known && first != sb.Namespace {
			l.fail("sandbox %s/%s (version %s) has %s, which a sandbox in Namespace %s had", sb.Namespace, sb.Name, sb.ResourceVersion, d.name, first)
		}
		l.first[d.name] = sb.Namespace
	}
}
