//go:build failpoint

package clustercontroller_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/kube"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

var oneGi = resource.MustParse("1Gi")

// patience bounds what is waited for, on a machine that does much else.
const patience = time.Minute

// points are those of the controller, of which each is to be killed at.
func points() (names []string) {
	for _, name := range failpoint.Names() {
		switch operation, _, _ := strings.Cut(name, "/"); operation {
		case "set", "claim", "claim-template", "pod", "finalizer", "volume":
			names = append(names, name)
		}
	}
	return names
}

// drill is a scenario in a Namespace.
type drill struct {
	*cluster
	*witness
	namespace string
	pools     *kube.Pools
}

func (c *cluster) drill(name string) *drill {
	c.Helper()
	ns := must(c.admin.CoreV1().Namespaces().Create(c.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-"}}, metav1.CreateOptions{}))
	pools := must(kube.OpenPools(c.Context(), c.server.Config(), nil))
	c.Cleanup(pools.Close)
	return &drill{cluster: c, witness: c.witness(ns.Name), namespace: ns.Name, pools: pools}
}

func (d *drill) key(name string) store.Key { return store.Key{Namespace: d.namespace, Name: name} }

func (d *drill) eventually(what string, holds func() bool) {
	d.Helper()
	if !testenv.Poll(patience, func() bool { return d.Failed() || holds() }) || d.Failed() {
		d.witness.check()
		d.Fatalf("in vain waited until %s; there is\n%s", what, cut(d.state(d.namespace)))
	}
}

// cut keeps the begin and the end of each line.
func cut(text string) string {
	var out []string
	for l := range strings.Lines(text) {
		if l = strings.TrimSpace(l); len(l) > 700 {
			l = l[:200] + " … " + l[len(l)-500:]
		}
		out = append(out, l)
	}
	return strings.Join(out, "\n")
}

// set makes a SandboxSet whose sandboxes have a claim of a volume each.
func (d *drill) set(name string, replicas int32, alter func(*agentsv1alpha1.SandboxSetSpec)) {
	d.Helper()
	d.allow(name, int(replicas))
	some := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")}
	set := &agentsv1alpha1.SandboxSet{ObjectMeta: metav1.ObjectMeta{Namespace: d.namespace, Name: name}, Spec: agentsv1alpha1.SandboxSetSpec{
		Replicas: replicas, Runtimes: []agentsv1alpha1.Runtime{{Name: agentsv1alpha1.RuntimeCSI}},
		VolumeClaimTemplates: []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: oneGi}}}}},
		Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox",
			Resources: corev1.ResourceRequirements{Limits: some, Requests: some}, VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}}}}},
	}}
	if alter != nil {
		alter(&set.Spec)
	}
	must(d.pools.Sets().Create(d.Context(), set))
}

func (d *drill) change(name string, change func(*agentsv1alpha1.SandboxSetSpec)) {
	d.Helper()
	must(d.pools.Sets().UpdateSpec(d.Context(), d.key(name), store.Preconditions{}, func(o *agentsv1alpha1.SandboxSet) error {
		change(&o.Spec)
		return nil
	}))
}

// scale gives a set another number of sandboxes, and waits until it has them.
func (d *drill) scale(name string, replicas int32) {
	d.Helper()
	before := must(d.pools.Sets().Get(d.Context(), d.key(name))).Spec.Replicas
	d.allow(name, int(max(before, replicas)))
	d.change(name, func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = replicas })
	d.ready(name)
	d.allow(name, int(replicas))
}

// ready waits until a set is whole, and nothing is on its way out of it.
func (d *drill) ready(name string) {
	d.Helper()
	d.eventually("set "+name+" is whole", func() bool {
		s := must(d.pools.Sets().Get(d.Context(), d.key(name)))
		st, n := s.Status, 0
		for _, sb := range d.list(sandboxesGVR, d.namespace) {
			if owner := metav1.GetControllerOf(&sb); owner != nil && owner.UID == s.UID {
				n++
			}
		}
		return st.ObservedGeneration == s.Generation && st.UpdatedAvailableReplicas == s.Spec.Replicas && st.Replicas == s.Spec.Replicas && n == int(s.Spec.Replicas)
	})
}

func (d *drill) claim(name, set string, replicas int32, alter func(*agentsv1alpha1.SandboxClaimSpec)) {
	d.Helper()
	d.allow(name, int(replicas))
	claim := &agentsv1alpha1.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: d.namespace, Name: name}, Spec: agentsv1alpha1.SandboxClaimSpec{
		TemplateName: set, Replicas: &replicas, ClaimTimeout: &metav1.Duration{Duration: time.Hour}}}
	if alter != nil {
		alter(&claim.Spec)
	}
	must(d.pools.Claims().Create(d.Context(), claim))
}

func (d *drill) changeClaim(name string, change func(*agentsv1alpha1.SandboxClaimSpec)) {
	d.Helper()
	must(d.pools.Claims().UpdateSpec(d.Context(), d.key(name), store.Preconditions{}, func(o *agentsv1alpha1.SandboxClaim) error {
		change(&o.Spec)
		return nil
	}))
}

// status waits until a claim's status is as it is to be.
func (d *drill) status(name, what string, is func(agentsv1alpha1.SandboxClaimStatus) bool) {
	d.Helper()
	d.eventually("claim "+name+" "+what, func() bool { return is(must(d.pools.Claims().Get(d.Context(), d.key(name))).Status) })
}

func (d *drill) completed(name string) {
	d.Helper()
	d.status(name, "is completed", func(st agentsv1alpha1.SandboxClaimStatus) bool { return st.Phase == agentsv1alpha1.ClaimCompleted })
}

// sandboxes waits until there are so many, those that are being deleted, too.
func (d *drill) sandboxes(n int) {
	d.Helper()
	d.eventually(fmt.Sprintf("there are %d sandboxes", n), func() bool { return len(d.list(sandboxesGVR, d.namespace)) == n })
}

// grown is a pool that grows, shrinks, and gets another template. What whenScaled retains is there to the end.
func grown(d *drill) {
	d.witness.kept = func(pvc string) bool { return strings.HasPrefix(pvc, "data-keep-set-") }
	d.set("keep-set", 0, func(s *agentsv1alpha1.SandboxSetSpec) {
		s.PersistentVolumeClaimRetentionPolicy = &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionDelete, WhenScaled: v1alpha1.RetentionRetain}
	})
	d.set("plain-set", 0, func(s *agentsv1alpha1.SandboxSetSpec) {
		s.ScaleStrategy.MaxUnavailable, s.UpdateStrategy.MaxUnavailable = ptr.To(intstr.FromInt32(2)), ptr.To(intstr.FromInt32(1))
	})
	d.scale("plain-set", 5)
	d.scale("keep-set", 3)
	d.scale("plain-set", 3)
	d.scale("keep-set", 1)
	d.require("plain-set", 2)
	d.change("plain-set", func(s *agentsv1alpha1.SandboxSetSpec) { s.Template.Spec.Containers[0].Image = "alpine" })
	d.ready("plain-set")
	d.require("plain-set", 0)
	d.scale("keep-set", 2)
	d.sandboxes(5)
}

// lost is a claim that was made for a PersistentVolume, and another got the volume: it waits until the claim is gone.
func (d *drill) lost(name string) {
	d.Helper()
	api := d.admin.CoreV1().PersistentVolumes()
	pv := must(api.Get(d.Context(), d.pv(name), metav1.GetOptions{}))
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "elsewhere", Name: "flux-" + name, UID: "another"}
	pv = must(api.Update(d.Context(), pv, metav1.UpdateOptions{}))
	pv.Status.Phase = corev1.VolumeBound
	must(api.UpdateStatus(d.Context(), pv, metav1.UpdateOptions{}))
	claims := d.admin.CoreV1().PersistentVolumeClaims(d.namespace)
	must(claims.Create(d.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "flux-" + name, Labels: map[string]string{"app.kubernetes.io/managed-by": "flux-sandbox-controller", volumes.LabelClaimFor: "true"}},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: name, StorageClassName: ptr.To(""), AccessModes: pv.Spec.AccessModes,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: oneGi}}},
	}, metav1.CreateOptions{}))
	d.eventually("the claim without a volume is gone", func() bool {
		_, err := claims.Get(d.Context(), "flux-"+name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
}

// claimed are claims of a warm pool and of an empty one, with volumes, environments, and an update in place. One is deleted.
func claimed(d *drill) {
	shared, alone := d.pv(d.namespace+"-shared"), d.pv(d.namespace+"-alone")
	d.set("warm-set", 3, nil)
	d.set("empty-set", 0, nil)
	d.ready("warm-set")
	d.claim("several", "warm-set", 3, func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.DynamicVolumesMount = []agentsv1alpha1.DynamicVolumeMount{{PVName: shared, MountPath: "/shared", ReadOnly: true}, {PVName: alone, MountPath: "/alone"}}
		s.Labels = map[string]string{"team": "a"}
	})
	d.claim("made", "empty-set", 2, func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.DynamicVolumesMount = []agentsv1alpha1.DynamicVolumeMount{{PVName: shared, MountPath: "/shared", ReadOnly: true}}
		s.EnvVars = map[string]string{"A": "1"}
	})
	d.completed("several")
	d.completed("made")
	d.lost(d.namespace + "-lost")
	d.ready("warm-set")
	d.claim("updated", "warm-set", 1, func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.InplaceUpdate = &agentsv1alpha1.InplaceUpdate{Image: "alpine", Resources: &corev1.ResourceRequirements{
			Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("200m")}, Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("200m")}}}
	})
	d.completed("updated")
	d.ready("warm-set")
	if err := d.pools.Claims().Delete(d.Context(), d.key("several"), store.Preconditions{}); err != nil {
		d.Fatal(err)
	}
	d.sandboxes(3 + 2 + 1)
}

// ended are claims whose time is over: one has a part of what it asked for, and is deleted after a while; one has nothing.
func ended(d *drill) {
	d.set("few-set", 2, nil)
	d.set("none-set", 0, nil)
	d.ready("few-set")
	d.hold(d.namespace)
	d.claim("part", "few-set", 4, nil)
	d.claim("nothing", "none-set", 2, nil)
	d.status("part", "has two of four", func(st agentsv1alpha1.SandboxClaimStatus) bool {
		return st.ClaimedReplicas == 2 && len(st.SandboxNames) == 4
	})
	d.status("nothing", "waits for two", func(st agentsv1alpha1.SandboxClaimStatus) bool { return len(st.SandboxNames) == 2 })
	over := func(s *agentsv1alpha1.SandboxClaimSpec) { s.ClaimTimeout = &metav1.Duration{Duration: time.Second} }
	d.changeClaim("part", over)
	d.changeClaim("nothing", over)
	d.completed("part")
	d.status("nothing", "has failed", func(st agentsv1alpha1.SandboxClaimStatus) bool { return st.Phase == agentsv1alpha1.ClaimFailed })
	d.sandboxes(2 + 2)
	d.changeClaim("part", func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.TTLAfterCompleted = &metav1.Duration{Duration: time.Second}
	})
	d.eventually("the claim is gone", func() bool { return len(d.list(claimsGVR, d.namespace)) == 1 })
	d.sandboxes(2 + 2)
}

// settled waits until nothing changes any more.
func (d *drill) settled() string {
	d.Helper()
	last, same := "", 0
	d.eventually("nothing changes any more", func() bool {
		if now := d.state(d.namespace); now != last {
			last, same = now, 0
		} else {
			same++
		}
		return same == 20
	})
	return last
}

// TestTakeOver has controllers end where it is worst, and others take over.
func TestTakeOver(t *testing.T) {
	c := newCluster(t)
	t.Run("killed-at-every-step", func(t *testing.T) { killedAtEveryStep(t, c) })
	t.Run("a-removal-that-began", func(t *testing.T) { aRemovalThatBegan(t, c) })
	t.Run("behind", func(t *testing.T) { aLeaderWhoseWatchIsBehind(t, c) })
	t.Run("late", func(t *testing.T) { lateLeaders(t, c) })
}

// rounds is how often the scenarios are gone through for the points that a controller has not died at yet. One more
// is enough nearly always: a step that is done once, as a volume's claim is made once, is done, but its end not come to,
// when another goroutine's point kills the controller between the two.
const rounds = 5

// killedAtEveryStep has the controller die at every step of its work, before it and after it, and the next take over
// there. Nothing is ever as it may not be (witness), and in the end all is as if nobody had died.
func killedAtEveryStep(t *testing.T, c *cluster) {
	left := map[string]string{}
	for _, point := range points() {
		left[point] = "kill"
	}
	scenarios := map[string]func(*drill){"grown": grown, "claimed": claimed, "ended": ended}
	calm := map[string]string{}
	for name, scenario := range scenarios {
		t.Run(name, func(t *testing.T) {
			c := c.of(t)
			nobody := c.supervise(nil)
			d := c.drill(name)
			scenario(d)
			calm[name] = d.settled()
			nobody.end()
			d.check()
			armed := map[string]string{}
			for _, point := range points() {
				armed[point] = "kill"
			}
			for _, point := range dies(t, c, name, scenario, armed, calm[name]) {
				delete(left, point)
			}
		})
	}
	if len(calm) < len(scenarios) || t.Failed() {
		return // not all were asked for, or one has not ended
	}
	for round := 2; round <= rounds && len(left) > 0; round++ {
		for name, scenario := range scenarios {
			t.Run(fmt.Sprint(name, "-", round), func(t *testing.T) {
				for _, point := range dies(t, c.of(t), name, scenario, left, calm[name]) {
					delete(left, point)
				}
			})
			if len(left) == 0 {
				break
			}
		}
	}
	for point := range left {
		t.Errorf("no scenario comes to %s", point)
	}
}

// dies has a scenario end as it did in the calm, while controllers die at what is armed, and returns where they died.
func dies(t *testing.T, c *cluster, name string, scenario func(*drill), armed map[string]string, calm string) (killed []string) {
	deaths := c.supervise(armed)
	d := c.drill(name)
	scenario(d)
	var got string
	if !testenv.Poll(patience, func() bool { got = d.state(d.namespace); return got == calm }) {
		t.Errorf("it did not end as without a death:\n%s", cut(differences(calm, got)))
	}
	d.settled() // who made the last change dies of it only now
	killed = deaths.end()
	d.check()
	slices.Sort(killed)
	t.Logf("killed at %d points: %s", len(killed), strings.Join(killed, " "))
	return killed
}

// aRemovalThatBegan: one that dies between the two writes of a removal leaves a sandbox that keeps its claim of a volume although it was deleted
// for another reason: so that is removed, whatever its set asks for by then, and nobody gets it.
func aRemovalThatBegan(t *testing.T, c *cluster) {
	c = c.of(t)
	c.expireLease()
	first := c.controller("first", map[string]string{"set/retain/after": "kill"})
	t.Cleanup(first.kill)
	d := c.drill("removal")
	d.set("keep-set", 2, func(s *agentsv1alpha1.SandboxSetSpec) {
		s.PersistentVolumeClaimRetentionPolicy = &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionDelete, WhenScaled: v1alpha1.RetentionRetain}
	})
	d.ready("keep-set")
	d.change("keep-set", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 1 })
	<-first.ended
	d.change("keep-set", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 2 })
	d.allow("keep-set", 3) // the one that is being removed is not being deleted yet
	d.claim("both", "keep-set", 2, nil)
	second := c.supervise(nil)
	d.completed("both")
	d.ready("keep-set")
	given := must(d.pools.Claims().Get(d.Context(), d.key("both"))).Status.SandboxNames
	if err := d.pools.Claims().Delete(d.Context(), d.key("both"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	d.sandboxes(2)
	d.eventually("what the claimed ones had is gone, and what the removed one had is left", func() bool {
		pvcs := d.list(pvcsGVR, d.namespace)
		return len(pvcs) == 3 && !slices.ContainsFunc(pvcs, func(o unstructured.Unstructured) bool {
			return slices.Contains(given, o.GetLabels()[v1alpha1.LabelSandbox])
		})
	})
	second.end()
	d.check()
}
