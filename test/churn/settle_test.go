package churn

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// settle waits until all is as wished.
func (w *world) settle(what string) {
	w.Helper()
	var wrong []string
	if !testenv.Poll(settled, func() bool {
		w.hold()
		wrong = w.unsettled()
		return len(wrong) == 0
	}) {
		w.tail()
		w.Fatalf("%s: after %v it is not so:\n%s", what, settled, strings.Join(wrong[:min(len(wrong), 30)], "\n"))
	}
}

// all lists the objects of a watched kind.
func all[T metav1.Object](w *world, kind string) []T {
	w.Helper()
	list := must(w.objects.Resource(watched[kind].resource).List(w.ctx, metav1.ListOptions{}))
	var objects []T
	for _, o := range list.Items {
		object := watched[kind].empty()
		must("", runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, object))
		objects = append(objects, object.(T))
	}
	return objects
}

// unsettled is what is not as wished.
func (w *world) unsettled() (wrong []string) {
	w.Helper()
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	for _, s := range all[*agentsv1alpha1.SandboxSet](w, "set") {
		st := s.Status
		if n := s.Spec.Replicas; st.ObservedGeneration != s.Generation || st.Replicas != n || st.AvailableReplicas != n || st.UpdatedAvailableReplicas != n {
			say("set %s: generation %d, %d replicas; status %d: %d, %d available, %d of them updated; %v", s.Name, s.Generation, n, st.ObservedGeneration, st.Replicas, st.AvailableReplicas,
				st.UpdatedAvailableReplicas, words(st.Conditions))
		}
	}
	claims := map[types.UID]*agentsv1alpha1.SandboxClaim{}
	for _, c := range all[*agentsv1alpha1.SandboxClaim](w, "claim") {
		claims[c.UID] = c
		if !final(c) || c.DeletionTimestamp != nil || c.Spec.TTLAfterCompleted != nil {
			say("claim %s: %s, %v, ttl %v", c.Name, c.Status.Phase, words(c.Status.Conditions), c.Spec.TTLAfterCompleted)
		}
	}
	pods := map[types.NamespacedName]*corev1.Pod{}
	listed := all[*corev1.Pod](w, "pod")
	for _, p := range listed {
		pods[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}] = p
	}
	w.unanchored(listed, say)
	bound := map[string]string{}
	for _, pv := range all[*corev1.PersistentVolume](w, "pv") {
		if pv.Spec.ClaimRef != nil {
			bound[pv.Name] = pv.Spec.ClaimRef.Namespace
		}
	}
	sandboxes := map[types.UID]bool{}
	for _, sb := range all[*v1alpha1.Sandbox](w, "sandbox") {
		sandboxes[sb.UID] = true
		pod := pods[types.NamespacedName{Namespace: sb.Namespace, Name: sb.Name}]
		owner := metav1.GetControllerOf(sb)
		switch {
		case sb.DeletionTimestamp != nil:
			say("sandbox %s is being deleted: %s %s", sb.Name, sb.Status.Reason, sb.Status.Message)
		case sb.Spec.ShutdownTime != nil:
			say("sandbox %s waits for its shutdown at %v", sb.Name, sb.Spec.ShutdownTime)
		case sb.Status.Phase != v1alpha1.SandboxRunning:
			say("sandbox %s is %s: %s %s", sb.Name, sb.Status.Phase, sb.Status.Reason, sb.Status.Message)
		case pod == nil || !ownedBy(pod, sb.UID) || !running(pod) || pod.DeletionTimestamp != nil:
			say("sandbox %s is Running without a Pod of its own that runs", sb.Name)
		case sb.Status.Node != pod.Spec.NodeName:
			say("sandbox %s is on %s by its status, its Pod on %s", sb.Name, sb.Status.Node, pod.Spec.NodeName)
		case formOf(pod) != form(&sb.Spec.Template.Spec.Containers[0]) || meta.IsStatusConditionFalse(sb.Status.Conditions, v1alpha1.ConditionUpdated):
			say("sandbox %s is to run as %s, its Pod runs as %q: %v", sb.Name, form(&sb.Spec.Template.Spec.Containers[0]), formOf(pod), words(sb.Status.Conditions))
		case owner != nil && owner.Kind == "SandboxClaim" && (claims[owner.UID] == nil || !slices.Contains(claims[owner.UID].Status.SandboxNames, sb.Name)):
			say("sandbox %s has a claim that was not given it", sb.Name)
		default:
			var want []string
			for _, v := range sb.Spec.DynamicVolumes {
				if has, is := bound[v.Source]; v.VolumeType == v1alpha1.VolumeTypePVC || drives[v.Source].reaches(sb, v.Mode) && (!is || has == sb.Namespace) {
					want = append(want, string(v.Target))
				}
			}
			slices.Sort(want)
			if got := w.fleet.mounted(sb.UID); !slices.Equal(got, want) {
				say("sandbox %s has volumes at %v, wants them at %v", sb.Name, got, want)
			}
			if len(want) == len(sb.Spec.DynamicVolumes) && !meta.IsStatusConditionTrue(sb.Status.Conditions, v1alpha1.ConditionReady) {
				say("sandbox %s is not ready: %v", sb.Name, words(sb.Status.Conditions))
			}
		}
	}
	for _, p := range pods {
		if _, is := anchorOf(p); is {
			continue
		}
		if owner := metav1.GetControllerOf(p); owner == nil || !sandboxes[owner.UID] {
			say("Pod %s has no sandbox", p.Name)
		}
	}
	for _, pvc := range all[*corev1.PersistentVolumeClaim](w, "pvc") {
		// One that somebody deleted under its sandbox stays as long as the Pod does.
		if of := w.ledger.madeFor(pvc); !isShared(pvc) && !sandboxes[of] && !w.ledger.keeps(pvc) {
			say("claim %s of sandbox %q, which is gone: deleted %v, %v", pvc.Name, of, pvc.DeletionTimestamp, pvc.Finalizers)
		}
	}
	return wrong
}

// isShared says whether a claim is for whoever is in its Namespace.
func isShared(o metav1.Object) bool { return forVolume(o) || strings.HasPrefix(o.GetName(), "work-") }

// forVolume says whether a claim was made for a PersistentVolume that a sandbox names, which makes it the Namespace's, and stays.
func forVolume(o metav1.Object) bool { return o.GetLabels()[volumes.LabelClaimFor] != "" }

// reaches says whether a sandbox may have it, and can where it is.
func (d drive) reaches(sb *v1alpha1.Sandbox, mode v1alpha1.VolumeMode) bool {
	return d.serves(sb.Namespace, mode == v1alpha1.VolumeModeReadOnly) && (d.node == "" || d.node == sb.Status.Node)
}

func words(conditions []metav1.Condition) (all []string) {
	for _, c := range conditions {
		if c.Status != metav1.ConditionTrue {
			all = append(all, fmt.Sprintf("%s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message))
		}
	}
	return all
}

// idle waits for quiet, and then holds that the controller writes nothing for a while.
func (w *world) idle() {
	w.Helper()
	var last map[call]int
	if !w.awaitQuiet(func() bool {
		now := writes(since(w.audit.seen(w), nil, controller))
		quiet := last != nil && len(since(now, last, "")) == 0
		last = now
		return quiet
	}) {
		w.tail()
		w.Fatalf("the controller goes on to write though all is as wished: %d writes", total(last))
	}
	before := w.audit.seen(w)
	select {
	case <-time.After(idle):
	case <-w.ctx.Done():
	}
	now := w.audit.seen(w)
	if wrote := writes(since(now, before, controller)); len(wrote) > 0 {
		w.tail()
		w.Errorf("in %v of quiet the controller wrote:\n%s", idle, table(wrote))
	}
	tell(w, "in %v of quiet the controller called:\n%s", idle, table(since(now, before, controller)))
	if wrong := w.unsettled(); len(wrong) > 0 {
		w.Errorf("after %v of quiet it is no longer as wished:\n%s", idle, strings.Join(wrong, "\n"))
	}
}

// awaitQuiet asks every few seconds.
func (w *world) awaitQuiet(quiet func() bool) bool {
	tick := time.NewTicker(3 * time.Second)
	defer tick.Stop()
	for range 10 {
		if quiet() {
			return true
		}
		<-tick.C
	}
	return false
}

// controller is how the controller's user agent begins.
const controller = "flux-sandbox-controller"

func writes(calls map[call]int) map[call]int {
	all := map[call]int{}
	for c, n := range calls {
		if c.writes() {
			all[c] = n
		}
	}
	return all
}

func total(calls map[call]int) (n int) {
	for _, k := range calls {
		n += k
	}
	return n
}

// end deletes all sandboxes, and holds that nothing is left but what is to be kept; and when that is deleted, nothing.
func (w *world) end() {
	w.Helper()
	for _, kind := range []string{"claim", "set", "sandbox"} {
		for _, h := range homes {
			must("", w.objects.Resource(watched[kind].resource).Namespace(h.namespace).DeleteCollection(w.ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
		}
	}
	var kept []*corev1.PersistentVolumeClaim
	w.awaitNothing("all sandboxes are deleted", func(pvc *corev1.PersistentVolumeClaim) bool { return isShared(pvc) || w.ledger.keeps(pvc) })
	for _, pvc := range all[*corev1.PersistentVolumeClaim](w, "pvc") {
		if !forVolume(pvc) {
			kept = append(kept, pvc)
			w.dropPVC(pvc)
		}
	}
	tell(w, "%d claims were kept", len(kept))
	w.awaitNothing("what was kept is deleted", func(pvc *corev1.PersistentVolumeClaim) bool { return forVolume(pvc) })
}

// awaitNothing waits until there is nothing but claims that stay, which nobody uses, and their volumes.
func (w *world) awaitNothing(what string, stays func(*corev1.PersistentVolumeClaim) bool) {
	w.Helper()
	var left []string
	if !testenv.Poll(settled, func() bool {
		w.hold()
		left = w.fleet.left()
		still := func(kind string, o metav1.Object) {
			left = append(left, fmt.Sprint(kind, " ", o.GetNamespace(), "/", o.GetName(), " ", o.GetDeletionTimestamp(), " ", o.GetFinalizers()))
		}
		for kind, k := range watched {
			if kind == "pvc" || kind == "pv" {
				continue
			}
			for _, o := range must(w.objects.Resource(k.resource).List(w.ctx, metav1.ListOptions{})).Items {
				still(kind, &o)
			}
		}
		volumes := map[string]bool{}
		for _, pvc := range all[*corev1.PersistentVolumeClaim](w, "pvc") {
			volumes[pvc.Spec.VolumeName] = true
			if !stays(pvc) || slices.Contains(pvc.Finalizers, v1alpha1.FinalizerInUse) {
				still("claim", pvc)
			}
		}
		for _, pv := range all[*corev1.PersistentVolume](w, "pv") {
			if _, is := drives[pv.Name]; slices.Contains(pv.Finalizers, v1alpha1.FinalizerInUse) || !is && !volumes[pv.Name] {
				still("PersistentVolume", pv)
			}
		}
		return len(left) == 0
	}) {
		w.tail()
		w.Fatalf("%s, and after %v there is left:\n%s", what, settled, strings.Join(left[:min(len(left), 30)], "\n"))
	}
}
