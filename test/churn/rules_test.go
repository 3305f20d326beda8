package churn

import (
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// history feeds a ledger, an object after the other.
type history struct {
	*ledger
	version uint64
}

// gone is the last state of an object that is deleted.
type gone struct{ metav1.Object }

func (h *history) add(o metav1.Object) {
	last, isGone := o.(gone)
	if isGone {
		o = last.Object
	}
	kind := "sandbox"
	switch o.(type) {
	case *agentsv1alpha1.SandboxSet:
		kind = "set"
	case *agentsv1alpha1.SandboxClaim:
		kind = "claim"
	case *corev1.Pod:
		kind = "pod"
	case *corev1.PersistentVolumeClaim:
		kind = "pvc"
	case *corev1.PersistentVolume:
		kind = "pv"
	}
	h.version++
	o.SetResourceVersion(strconv.FormatUint(h.version, 10))
	h.ledger.add(event{version: h.version, kind: kind, gone: isGone, object: o})
}

func named(name, ownerKind, owner string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name)}
	if owner != "" {
		m.OwnerReferences = []metav1.OwnerReference{{Kind: ownerKind, Name: owner, UID: types.UID("uid-" + owner), Controller: ptr.To(true)}}
	}
	return m
}

func sandboxOf(name, kind, owner string) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{ObjectMeta: named(name, kind, owner)}
}

func setOf(generation, observed int64, replicas int32) *agentsv1alpha1.SandboxSet {
	set := &agentsv1alpha1.SandboxSet{ObjectMeta: named("set", "", "")}
	set.Generation, set.Status.ObservedGeneration, set.Spec.Replicas = generation, observed, replicas
	return set
}

func claimOf(name string, phase agentsv1alpha1.SandboxClaimPhase) *agentsv1alpha1.SandboxClaim {
	c := &agentsv1alpha1.SandboxClaim{ObjectMeta: named(name, "", "")}
	c.Status.Phase = phase
	return c
}

func podOf(name, sandbox, pvc string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: named(name, "Sandbox", sandbox)}
	if pvc != "" {
		pod.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: pvc}}}}
	}
	return pod
}

func pvcOf(name, sandbox string) *corev1.PersistentVolumeClaim {
	pvc := &corev1.PersistentVolumeClaim{ObjectMeta: named(name, "", "")}
	if sandbox != "" {
		pvc.Labels = map[string]string{v1alpha1.LabelSandboxUID: "uid-" + sandbox}
	}
	return pvc
}

func with[T metav1.Object](o T, change func(T)) T {
	change(o)
	return o
}

// stateful is a sandbox of a set, with claims of its own.
func stateful(whenDeleted, whenScaled v1alpha1.RetentionPolicy, changes ...func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	sb := sandboxOf("s1", "SandboxSet", "set")
	sb.Spec.VolumeClaimTemplates, sb.Spec.PersistentVolumeClaimRetentionPolicy = claimTemplates(), retention(whenDeleted, whenScaled)
	for _, change := range changes {
		change(sb)
	}
	return sb
}

func deleted(o metav1.Object) { o.SetDeletionTimestamp(&metav1.Time{Time: time.Unix(1, 0)}) }

func ends[T metav1.Object](o T) T { return with(o, func(o T) { deleted(o) }) }

func removing(sb *v1alpha1.Sandbox) {
	sb.Annotations = map[string]string{agentsv1alpha1.AnnotationRemoving: "true"}
}

// pvOf is a drive's PersistentVolume, or another one, bound to a claim.
func pvOf(name, namespace, pvc string) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{ObjectMeta: named(name, "", ""),
		Spec: corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{Namespace: namespace, Name: pvc, UID: types.UID("uid-" + pvc)}}}
}

// mounts is a sandbox in a Namespace with a drive.
func mounts(name, namespace, drive string, mode v1alpha1.VolumeMode) *v1alpha1.Sandbox {
	sb := sandboxOf(name, "", "")
	sb.Namespace, sb.Spec.TenantID = namespace, tenantOf(namespace)
	sb.Status.Volumes = []v1alpha1.VolumeStatus{{VolumeType: v1alpha1.VolumeTypePV, Source: drive, Mode: mode, Phase: v1alpha1.VolumeMounted}}
	return sb
}

// asks is a claim that gives a sandbox something, takes the sandbox that has it, runs its Pod.
func asks(spec agentsv1alpha1.SandboxClaimSpec, phase agentsv1alpha1.SandboxClaimPhase) *agentsv1alpha1.SandboxClaim {
	c := claimOf("c1", phase)
	c.Spec, c.Status.SandboxNames = spec, []string{"s1"}
	return c
}

func takes(image string) *v1alpha1.Sandbox {
	sb := sandboxOf("s1", "SandboxClaim", "c1")
	sb.Spec.Template = ptr.To(template())
	sb.Spec.Template.Spec.Containers[0].Image = image
	return sb
}

func runs(image, inFact string) *corev1.Pod {
	pod := podOf("p1", "s1", "")
	pod.Spec = template().Spec
	pod.Spec.Containers[0].Image = image
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Image: inFact, Resources: &pod.Spec.Containers[0].Resources, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}}
	return pod
}

// What the ledger holds is seen when it is broken, and only then.
func TestRules(t *testing.T) {
	const bySet, byClaim = "SandboxSet", "SandboxClaim"
	const retain, drop, ro, rw = v1alpha1.RetentionRetain, v1alpha1.RetentionDelete, v1alpha1.VolumeModeReadOnly, v1alpha1.VolumeModeReadWrite
	updated := agentsv1alpha1.SandboxClaimSpec{InplaceUpdate: &agentsv1alpha1.InplaceUpdate{Image: "busybox:2"}}
	withEnv := agentsv1alpha1.SandboxClaimSpec{EnvVars: map[string]string{"A": "1"}}
	hasEnv := func(sb *v1alpha1.Sandbox) {
		sb.Spec.Template.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "1"}}
	}
	labelled := agentsv1alpha1.SandboxClaimSpec{Labels: map[string]string{"of": "c1"}}
	for name, c := range map[string]struct {
		states []metav1.Object
		wrong  string // "" for nothing
	}{
		"taken once": {[]metav1.Object{setOf(1, 1, 1), claimOf("c1", ""), sandboxOf("s1", bySet, "set"), sandboxOf("s1", byClaim, "c1")}, ""},
		"two claims": {[]metav1.Object{claimOf("c1", ""), claimOf("c2", ""), sandboxOf("s1", byClaim, "c1"), sandboxOf("s1", byClaim, "c2")}, "was given to claim"},
		"back":       {[]metav1.Object{setOf(1, 1, 1), claimOf("c1", ""), sandboxOf("s1", byClaim, "c1"), sandboxOf("s1", bySet, "set")}, "was given to claim"},
		"nobody's":   {[]metav1.Object{claimOf("c1", ""), sandboxOf("s1", byClaim, "c1"), sandboxOf("s1", "", "")}, "is nobody's"},
		"left":       {[]metav1.Object{sandboxOf("s1", byClaim, "c1"), sandboxOf("s1", "", "")}, ""},
		"one more":   {[]metav1.Object{setOf(1, 1, 1), sandboxOf("s1", bySet, "set"), sandboxOf("s2", bySet, "set")}, "has 2 unclaimed"},
		"scaled":     {[]metav1.Object{setOf(1, 1, 2), setOf(2, 1, 1), sandboxOf("s1", bySet, "set"), sandboxOf("s2", bySet, "set")}, ""},
		"scaled and seen": {[]metav1.Object{setOf(1, 1, 2), setOf(2, 2, 1), sandboxOf("s1", bySet, "set"), sandboxOf("s2", bySet, "set")},
			"has 2 unclaimed"},
		"status back":   {[]metav1.Object{setOf(2, 2, 1), setOf(2, 1, 1)}, "went back from generation 2 to 1"},
		"claim too big": {[]metav1.Object{claimOf("c1", ""), sandboxOf("s1", byClaim, "c1"), sandboxOf("s2", byClaim, "c1")}, "it asked for 1"},
		"not final":     {[]metav1.Object{claimOf("c1", agentsv1alpha1.ClaimFailed), claimOf("c1", agentsv1alpha1.ClaimClaiming)}, "was Failed"},
		"own claim":     {[]metav1.Object{sandboxOf("s1", "", ""), pvcOf("own", "s1"), podOf("p1", "s1", "own")}, ""},
		"foreign claim": {[]metav1.Object{sandboxOf("s1", "", ""), pvcOf("own", "s2"), podOf("p1", "s1", "own")}, "mounts claim own"},
		"claim changes": {[]metav1.Object{pvcOf("own", ""), pvcOf("own", "s1")}, "is \"uid-s1\"'s now"},
		"two Pods":      {[]metav1.Object{sandboxOf("s1", "", ""), podOf("p1", "s1", ""), podOf("p2", "s1", "")}, "at once"},
		"Pod of none":   {[]metav1.Object{podOf("p1", "s1", "")}, "for a sandbox that is gone"},

		"deleted with its sandbox": {[]metav1.Object{stateful(drop, drop), pvcOf("own", "s1"), ends(stateful(drop, drop)), ends(pvcOf("own", "s1"))}, ""},
		"deleted before it":        {[]metav1.Object{stateful(drop, drop), pvcOf("own", "s1"), ends(pvcOf("own", "s1"))}, "and its sandbox is there"},
		"kept":                     {[]metav1.Object{stateful(retain, retain), pvcOf("own", "s1"), ends(stateful(retain, retain)), pvcOf("own", "s1")}, ""},
		"not kept":                 {[]metav1.Object{stateful(retain, retain), pvcOf("own", "s1"), ends(stateful(retain, retain)), ends(pvcOf("own", "s1"))}, "was to be kept"},
		"removed as scaled":        {[]metav1.Object{setOf(1, 1, 1), stateful(drop, retain), stateful(retain, retain, removing), ends(stateful(retain, retain, removing))}, ""},
		"removed as deleted":       {[]metav1.Object{setOf(1, 1, 1), stateful(drop, retain), ends(stateful(drop, retain))}, "removed sandbox s1"},
		"policy changes":           {[]metav1.Object{stateful(drop, retain), stateful(retain, retain)}, "nobody asked for"},
		"policy is changed": {[]metav1.Object{stateful(drop, retain), stateful(retain, retain, func(sb *v1alpha1.Sandbox) {
			sb.Annotations = map[string]string{annotationPolicy: string(retain)}
		})}, ""},
		"taken over": {[]metav1.Object{pvcOf("own", "s1"), with(pvcOf("own", "s2"), func(o *corev1.PersistentVolumeClaim) {
			o.Labels[v1alpha1.LabelAdopt], o.Labels[v1alpha1.LabelSandbox] = "s2", "s2"
		})}, ""},
		"claim for a volume": {[]metav1.Object{with(ends(pvcOf("work-0", "")), func(o *corev1.PersistentVolumeClaim) { o.Status.Phase = corev1.ClaimBound })},
			"made for no sandbox, and is deleted"},
		"claim that lost its volume": {[]metav1.Object{ends(pvcOf("work-0", ""))}, ""},
		"volume is lost":             {[]metav1.Object{pvcOf("own", "s1"), gone{pvOf("pv", "", "own")}}, "is gone, and its claim"},

		"own volume":       {[]metav1.Object{pvOf("owned-0", "churn-a2", "x"), mounts("s1", "churn-a", "owned-0", rw)}, ""},
		"another tenant's": {[]metav1.Object{mounts("s1", "churn-b", "owned-0", ro)}, "has owned-0"},
		"bound to another": {[]metav1.Object{pvOf("owned-0", "churn-b", "x")}, "was bound to claim churn-b/x"},
		"bound anew":       {[]metav1.Object{pvOf("data-0", "churn-a", "x"), pvOf("data-0", "churn-a", "y")}, "was claim uid-x's"},
		"shared":           {[]metav1.Object{mounts("s1", "churn-b", "shared-0", ro), mounts("s2", "churn-a", "shared-0", rw), mounts("s3", "churn-b", "shared-1", ro)}, ""},
		"shared to write":  {[]metav1.Object{mounts("s1", "churn-b", "shared-0", rw)}, "has shared-0 (rw)"},
		"first come":       {[]metav1.Object{mounts("s1", "churn-b", "data-0", rw), mounts("s2", "churn-b", "data-0", ro), mounts("s3", "churn-a", "data-0", ro)}, "which a sandbox in Namespace churn-b had"},
		"tenant of none":   {[]metav1.Object{with(mounts("s1", "churn-b", "data-0", rw), func(sb *v1alpha1.Sandbox) { sb.Spec.TenantID = "a" })}, "has tenant \"a\""},

		"updated":         {[]metav1.Object{asks(updated, ""), takes("busybox:2"), runs("busybox:2", "busybox:2"), asks(updated, agentsv1alpha1.ClaimCompleted)}, ""},
		"not asked to be": {[]metav1.Object{asks(updated, ""), takes("busybox:1")}, "inplaceUpdate makes it busybox:2"},
		"not updated yet": {[]metav1.Object{asks(updated, ""), takes("busybox:2"), runs("busybox:2", "busybox:1"), asks(updated, agentsv1alpha1.ClaimCompleted)}, "never ran as busybox:2"},
		"environment":     {[]metav1.Object{asks(withEnv, ""), with(takes("x"), hasEnv)}, ""},
		"no environment":  {[]metav1.Object{asks(withEnv, ""), takes("x")}, "without its variable A=1"},
		"environment late": {[]metav1.Object{asks(withEnv, ""), sandboxOf("s1", bySet, "set"), with(takes("x"), hasEnv)},
			"was there before it was given to claim c1"},
		"labelled":     {[]metav1.Object{asks(labelled, ""), with(takes("x"), func(sb *v1alpha1.Sandbox) { sb.Labels = map[string]string{"of": "c1"} })}, ""},
		"not labelled": {[]metav1.Object{asks(labelled, ""), takes("x")}, "without its label of=c1"},
	} {
		t.Run(name, func(t *testing.T) {
			h := &history{ledger: newLedger()}
			for _, o := range c.states {
				h.add(o)
			}
			h.flush()
			got := strings.Join(h.broken(), "; ")
			if c.wrong == "" && got != "" || !strings.Contains(got, c.wrong) {
				t.Errorf("broken: %q, want %q", got, c.wrong)
			}
		})
	}
}

// What one watch told is not looked at before the others are past it.
func TestOrder(t *testing.T) {
	l := newLedger()
	l.past = map[string]uint64{"sandbox": 0, "pod": 0}
	l.add(event{version: 2, kind: "pod", object: podOf("p1", "s1", "")})
	if l.seen != 0 {
		t.Fatal("a Pod was looked at before the sandboxes of its time were known")
	}
	l.add(event{version: 1, kind: "sandbox", object: sandboxOf("s1", "", "")})
	l.add(event{version: 3, kind: "sandbox", object: sandboxOf("s2", "", "")})
	if wrong := l.broken(); l.seen != 2 || len(wrong) > 0 {
		t.Errorf("%d states were looked at, want the first two; %v", l.seen, wrong)
	}
}
