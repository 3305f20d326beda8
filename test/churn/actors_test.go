package churn

import (
	"cmp"
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

const (
	// mostClaims bounds the claims that there are at once, directs the sandboxes that are nobody's.
	mostClaims = 40
	directs    = 8
	// labelForeign is on what somebody else makes.
	labelForeign = "churn.example.com/foreign"
)

// actions are what may happen at a step, each as often as its weight says.
var actions = []struct {
	weight int
	do     func(*world)
}{
	{24, (*world).makeClaim},
	{14, (*world).deleteClaim},
	{5, (*world).scaleSet},
	{1, (*world).changeTemplate},
	{8, (*world).deleteSandbox},
	{13, (*world).losePod},
	{7, (*world).directSandbox},
	{9, (*world).changeVolumes},
	{12, (*world).writeOnTop},
	{3, (*world).foreignPVC},
	{2, (*world).deletePVC},
	{2, (*world).adoptPVC},
	{3, (*world).changePolicy},
	{4, (*world).updateInPlace},
	{2, (*world).disturbNode},
	{1, (*world).killController},
}

func (w *world) act() {
	all := 0
	for _, a := range actions {
		all += a.weight
	}
	n := w.dice.IntN(all)
	for _, a := range actions {
		if n -= a.weight; n < 0 {
			a.do(w)
			return
		}
	}
}

// tolerated are the errors that an action may meet, as all that it is about may have changed.
func (w *world) tolerated(what string, err error) {
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsTooManyRequests(err) || w.ctx.Err() != nil {
		return
	}
	w.Errorf("%s: %v", what, err)
}

func sorted[T cmp.Ordered](all iter.Seq[T]) []T { return slices.Sorted(all) }

// pick picks one of what the ledger has, in the order of names.
func pick[T metav1.Object](w *world, of map[types.UID]T, fits func(T) bool) (one T) {
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	var all []T
	for _, o := range of {
		if o.GetDeletionTimestamp() == nil && (fits == nil || fits(o)) {
			all = append(all, o)
		}
	}
	if len(all) == 0 {
		return one
	}
	slices.SortFunc(all, func(a, b T) int {
		return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
	})
	return all[w.dice.IntN(len(all))]
}

func (w *world) pickSet() types.NamespacedName { return w.sets[w.dice.IntN(len(w.sets))] }

func (w *world) makeClaim() {
	w.ledger.mu.Lock()
	n := len(w.ledger.claims)
	w.ledger.mu.Unlock()
	if n >= mostClaims {
		w.deleteClaim()
		return
	}
	set := w.pickSet()
	c := &agentsv1alpha1.SandboxClaim{Spec: agentsv1alpha1.SandboxClaimSpec{TemplateName: set.Name, Replicas: ptr.To(int32(1 + w.dice.IntN(3))),
		ClaimTimeout: &metav1.Duration{Duration: time.Duration(5+w.dice.IntN(25)) * time.Second}}}
	c.Namespace, c.Name = set.Namespace, fmt.Sprint("c", w.step)
	c.Spec.CreateOnNoStock = ptr.To(w.dice.IntN(3) > 0)
	for i := range w.dice.IntN(4) {
		d := w.pickDrive(set.Namespace)
		if w.dice.IntN(15) == 0 {
			d = drive{name: "missing"}
		}
		if !slices.ContainsFunc(c.Spec.DynamicVolumesMount, func(m agentsv1alpha1.DynamicVolumeMount) bool { return m.PVName == d.name }) {
			c.Spec.DynamicVolumesMount = append(c.Spec.DynamicVolumesMount, agentsv1alpha1.DynamicVolumeMount{
				PVName: d.name, MountPath: v1alpha1.Target(fmt.Sprint("/data/", i)), ReadOnly: w.mode(d, set.Namespace) == v1alpha1.VolumeModeReadOnly})
		}
	}
	if w.dice.IntN(3) == 0 {
		c.Spec.Labels, c.Spec.Annotations = map[string]string{"churn.example.com/claimed": c.Name}, map[string]string{"churn.example.com/claimed": c.Name}
	}
	if dice := w.dice.IntN(12); dice < 4 {
		w.count("claims with inplaceUpdate")
		c.Spec.InplaceUpdate = &agentsv1alpha1.InplaceUpdate{}
		if dice < 3 {
			c.Spec.InplaceUpdate.Image = v1alpha1.Image(fmt.Sprint("busybox:claimed-", w.step))
		}
		if dice > 1 {
			c.Spec.InplaceUpdate.Resources = &corev1.ResourceRequirements{Requests: w.requests()}
		}
	}
	switch w.dice.IntN(8) {
	case 0:
		c.Spec.TTLAfterCompleted = &metav1.Duration{Duration: time.Duration(1+w.dice.IntN(10)) * time.Second}
	case 1:
		if *c.Spec.CreateOnNoStock {
			c.Spec.EnvVars = map[string]string{"STEP": fmt.Sprint(w.step)}
		}
	case 2:
		c.Spec.ShutdownTime = &metav1.Time{Time: time.Now().Add(time.Duration(5+w.dice.IntN(30)) * time.Second)}
	}
	w.count("claims")
	w.tolerated("make a claim", w.create("claim", "SandboxClaim", agentsv1alpha1.GroupVersion.String(), c))
}

func (w *world) delete(kind string, o metav1.Object) {
	w.count(kind + " deletions")
	w.ledger.hands(o.GetUID())
	err := w.objects.Resource(watched[kind].resource).Namespace(o.GetNamespace()).Delete(w.ctx, o.GetName(), metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(o.GetUID()))})
	w.tolerated("delete a "+kind, err)
}

func (w *world) deleteClaim() {
	if c := pick(w, w.ledger.claims, nil); c != nil {
		w.delete("claim", c)
	}
}

func (w *world) deleteSandbox() {
	if sb := pick(w, w.ledger.sandboxes, nil); sb != nil {
		w.delete("sandbox", sb)
	}
}

func (w *world) patch(kind, namespace, name string, patch any) {
	_, err := w.objects.Resource(watched[kind].resource).Namespace(namespace).Patch(w.ctx, name, types.MergePatchType, must(json.Marshal(patch)), metav1.PatchOptions{})
	w.tolerated("patch "+kind+" "+name, err)
}

type fields = map[string]any

func (w *world) scaleSet() {
	w.count("scalings")
	set := w.pickSet()
	w.patch("set", set.Namespace, set.Name, fields{"spec": fields{"replicas": 10 + w.dice.IntN(25)}})
}

func (w *world) changeTemplate() {
	w.count("new templates")
	set, t := w.pickSet(), template()
	t.Spec.Containers[0].Image = fmt.Sprint("busybox:", w.step)
	if set.Name == "stateful" {
		mountOwn(&t)
	}
	w.patch("set", set.Namespace, set.Name, fields{"spec": fields{"template": fields{"spec": fields{"containers": t.Spec.Containers}}}})
}

// losePod has a Pod end in one of the ways in which Pods do.
func (w *world) losePod() {
	pod := pick(w, w.ledger.pods, nil)
	if pod == nil {
		return
	}
	w.count("Pods lost")
	pods, same := w.client.CoreV1().Pods(pod.Namespace), metav1.NewUIDPreconditions(string(pod.UID))
	var err error
	switch w.dice.IntN(4) {
	case 0:
		err = pods.Delete(w.ctx, pod.Name, metav1.DeleteOptions{Preconditions: same})
	case 1:
		err = pods.Delete(w.ctx, pod.Name, metav1.DeleteOptions{Preconditions: same, GracePeriodSeconds: ptr.To(int64(0))})
	case 2:
		err = pods.EvictV1(w.ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod.Name}, DeleteOptions: &metav1.DeleteOptions{Preconditions: same}})
	case 3: // kubelet evicts
		_, err = pods.Patch(w.ctx, pod.Name, types.MergePatchType, must(json.Marshal(fields{"metadata": fields{"uid": pod.UID},
			"status": fields{"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory", "containerStatuses": []any{}}})), metav1.PatchOptions{}, "status")
	}
	w.tolerated("lose a Pod", err)
}

// directSandbox makes or deletes a sandbox that is no set's, of a name that comes again and again, and its claim's with it.
func (w *world) directSandbox() {
	namespace, name := w.home(), fmt.Sprint("d", w.dice.IntN(directs))
	if sb := pick(w, w.ledger.sandboxes, func(sb *v1alpha1.Sandbox) bool { return sb.Namespace == namespace && sb.Name == name }); sb != nil {
		w.delete("sandbox", sb)
	}
	w.count("sandboxes of their own")
	sb := &v1alpha1.Sandbox{Spec: v1alpha1.SandboxSpec{Template: ptr.To(template()), VolumeClaimTemplates: claimTemplates()}}
	sb.Namespace, sb.Name = namespace, name
	mountOwn(sb.Spec.Template)
	if w.dice.IntN(3) == 0 {
		sb.Spec.PersistentVolumeClaimRetentionPolicy = retention(v1alpha1.RetentionRetain, v1alpha1.RetentionRetain)
	}
	w.tolerated("make a sandbox", w.create("sandbox", "Sandbox", v1alpha1.GroupVersion.String(), sb))
}

// changeVolumes is a user who adds a volume to a sandbox that was claimed, or removes one.
func (w *world) changeVolumes() {
	sb := pick(w, w.ledger.sandboxes, func(sb *v1alpha1.Sandbox) bool {
		owner := metav1.GetControllerOf(sb)
		return owner != nil && owner.Kind == "SandboxClaim"
	})
	if sb == nil {
		return
	}
	w.count("changes of volumes")
	volumes := sb.Spec.DynamicVolumes
	if len(volumes) > 0 && w.dice.IntN(2) == 0 {
		volumes = slices.Delete(slices.Clone(volumes), 0, 1)
	} else if w.dice.IntN(4) == 0 {
		volumes = append(slices.Clone(volumes), v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: workClaim(w.dice.IntN(workClaims)),
			Target: v1alpha1.Target(fmt.Sprint("/more/", w.step)), Mode: v1alpha1.VolumeModeReadWrite, OnFailure: v1alpha1.OnFailureKeep})
	} else {
		d := w.pickDrive(sb.Namespace)
		volumes = append(slices.Clone(volumes), v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: d.name, Target: v1alpha1.Target(fmt.Sprint("/more/", w.step)),
			Mode: w.mode(d, sb.Namespace), OnFailure: v1alpha1.OnFailureKeep})
	}
	w.patch("sandbox", sb.Namespace, sb.Name, fields{"metadata": fields{"uid": sb.UID, "resourceVersion": sb.ResourceVersion}, "spec": fields{"dynamicVolumes": volumes}})
}

// writeOnTop is somebody who writes labels and annotations of his own wherever he can.
func (w *world) writeOnTop() {
	w.count("foreign writes")
	mark := fields{"metadata": fields{"annotations": fields{"churn.example.com/step": fmt.Sprint(w.step)}, "labels": fields{"churn.example.com/odd": fmt.Sprint(w.step % 2)}}}
	for range 3 {
		switch w.dice.IntN(5) {
		case 0, 1:
			if o := pick(w, w.ledger.sandboxes, nil); o != nil {
				w.patch("sandbox", o.Namespace, o.Name, mark)
			}
		case 2:
			if o := pick(w, w.ledger.claims, nil); o != nil {
				w.patch("claim", o.Namespace, o.Name, mark)
			}
		case 3:
			set := w.pickSet()
			w.patch("set", set.Namespace, set.Name, mark)
		case 4:
			if o := pick(w, w.ledger.pods, nil); o != nil {
				w.patch("pod", o.Namespace, o.Name, mark)
			}
		}
	}
}

// foreignPVC makes a claim of the name that a sandbox's would have, or deletes it.
func (w *world) foreignPVC() {
	w.count("foreign claims")
	namespace, name := w.home(), fmt.Sprint("own-d", w.dice.IntN(directs))
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labelForeign: "true"}}, Spec: claimSpec()}
	_, err := w.client.CoreV1().PersistentVolumeClaims(namespace).Create(w.ctx, pvc, metav1.CreateOptions{})
	w.tolerated("make a foreign claim", err)
	if err == nil {
		w.later(time.Duration(1+w.dice.IntN(8))*time.Second, func() {
			w.tolerated("delete a foreign claim", w.client.CoreV1().PersistentVolumeClaims(namespace).DeleteCollection(w.ctx, metav1.DeleteOptions{},
				metav1.ListOptions{LabelSelector: labelForeign, FieldSelector: "metadata.name=" + name}))
		})
	}
}

// dropForeign deletes all foreign claims.
func (w *world) dropForeign() {
	for _, h := range homes {
		w.tolerated("delete the foreign claims", w.client.CoreV1().PersistentVolumeClaims(h.namespace).DeleteCollection(w.ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: labelForeign}))
	}
}

// killController kills a replica and has it come again.
func (w *world) killController() {
	r := w.replicas[w.dice.IntN(len(w.replicas))]
	if r.program == nil {
		return
	}
	w.count("controllers killed")
	r.program.Kill()
	r.program = nil
	w.later(time.Duration(w.dice.IntN(4000))*time.Millisecond, func() { w.start(r) })
}

func intOr(n int) intstr.IntOrString { return intstr.FromInt32(int32(n)) }
