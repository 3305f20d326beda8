package claims_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

func TestAClaimTakesASandboxThatRunsAndThePoolIsFilledAgain(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 2, nil)
	w.ready(set)
	before := w.pool(set)
	shared, models := w.pv("shared", nil), w.pv("models", nil)
	end := metav1.NewTime(w.clock.Now().Add(time.Hour).Truncate(time.Second))
	claim := w.claim("mine", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
		mounts(agentsv1alpha1.DynamicVolumeMount{PVName: shared, MountPath: "/data1"},
			agentsv1alpha1.DynamicVolumeMount{PVName: models, MountPath: "/data2", SubPath: "sub/dir", ReadOnly: true})(s)
		s.Labels, s.Annotations, s.ShutdownTime = map[string]string{"team": "a"}, map[string]string{"note": "b"}, &end
	})
	st := w.phase("mine", agentsv1alpha1.ClaimCompleted)
	got := w.of(claim)
	if len(got) != 1 || !slices.Equal(st.SandboxNames, []string{got[0].Name}) || st.ClaimedReplicas != 1 || st.CompletionTime == nil {
		t.Fatalf("status %+v, %d sandboxes", st, len(got))
	}
	sb := got[0]
	if !slices.ContainsFunc(before, func(o *v1alpha1.Sandbox) bool { return o.UID == sb.UID }) {
		t.Error("a warm sandbox was there, and another was made")
	}
	if sb.Labels[agentsv1alpha1.LabelClaimName] != "mine" || sb.Labels[agentsv1alpha1.LabelSandboxSet] != "pool" || sb.Labels["team"] != "a" || sb.Annotations["note"] != "b" ||
		len(sb.OwnerReferences) != 1 || sb.OwnerReferences[0].Kind != "SandboxClaim" || !*sb.OwnerReferences[0].BlockOwnerDeletion || !sb.Spec.ShutdownTime.Equal(&end) {
		t.Errorf("the sandbox is %+v, %v", sb.ObjectMeta, sb.Spec.ShutdownTime)
	}
	want := []v1alpha1.DynamicVolume{
		{VolumeType: "pv", Source: shared, Target: "/data1", Mode: "rw", OnFailure: "Keep"},
		{VolumeType: "pv", Source: models, Target: "/data2", SubPath: "sub/dir", Mode: "ro", OnFailure: "Keep"},
	}
	if !slices.Equal(sb.Spec.DynamicVolumes, want) {
		t.Errorf("volumes %+v", sb.Spec.DynamicVolumes)
	}
	w.ready(set)
	if c := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimClaimed); c == nil || c.Status != metav1.ConditionTrue {
		t.Errorf("conditions %+v", st.Conditions)
	}
	if w.events.count("mine Completed: claimed "+sb.Name) != 1 {
		t.Errorf("events %q", w.events.all)
	}
	// A second sandbox has the same volume.
	w.claim("other", "pool", mounts(agentsv1alpha1.DynamicVolumeMount{PVName: shared, MountPath: "/data1"}))
	if st := w.phase("other", agentsv1alpha1.ClaimCompleted); st.SandboxNames[0] == sb.Name {
		t.Error("one sandbox was given twice")
	}
	if n := w.expected.Load(); n != 2 {
		t.Errorf("volumes were held ahead for %d sandboxes", n)
	}
}

// What can be known before is known before: the reason is there at once, and the pool is as it was.
func TestAClaimThatCannotWorkFailsAtOnceAndLeavesThePoolAlone(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	tmpfs := func(s *agentsv1alpha1.SandboxSet) {
		s.Spec.Template.Spec.Volumes = []corev1.Volume{
			{Name: "work", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{Name: "mem", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}}}
		s.Spec.Template.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "work", MountPath: "/job"}, {Name: "mem", MountPath: "/mem"}}
	}
	set := w.set("pool", 1, tmpfs)
	plain := w.set("plain", 1, func(s *agentsv1alpha1.SandboxSet) { s.Spec.Runtimes = nil })
	odd := w.set("odd", 1, func(s *agentsv1alpha1.SandboxSet) {
		tmpfs(s)
		c := &s.Spec.Template.Spec.Containers[0]
		c.VolumeMounts[0].MountPath = "//other/../job/."
		c.Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("64Mi")}
	})
	w.ready(set)
	w.ready(plain)
	w.ready(odd)
	good := w.pv("good", nil)
	foreign := w.pv("foreign", func(pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef = &corev1.ObjectReference{Kind: "PersistentVolumeClaim", Namespace: "default", Name: "theirs", UID: "u-1"}
	})
	readOnly := w.pv("models", func(pv *corev1.PersistentVolume) {
		pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
	})
	other := w.pv("tenant", func(pv *corev1.PersistentVolume) { pv.Labels = map[string]string{v1alpha1.LabelTenantID: "t-2"} })
	before := w.sandboxes()
	mount := func(pv, path string) func(*agentsv1alpha1.SandboxClaimSpec) {
		return mounts(agentsv1alpha1.DynamicVolumeMount{PVName: pv, MountPath: path})
	}
	resized := func(r corev1.ResourceRequirements) func(*agentsv1alpha1.SandboxClaimSpec) {
		return func(s *agentsv1alpha1.SandboxClaimSpec) {
			s.InplaceUpdate = &agentsv1alpha1.InplaceUpdate{Resources: &r}
		}
	}
	for name, tc := range map[string]struct {
		set             string
		alter           func(*agentsv1alpha1.SandboxClaimSpec)
		reason, message string
	}{
		"no-set":     {"nowhere", nil, "SET_NOT_FOUND", "there is no SandboxSet nowhere in Namespace " + w.namespace + ": create it first, or correct templateName"},
		"no-csi":     {"plain", mount(good, "/data"), "FEATURE_DISABLED", "SandboxSet plain does not have the runtime csi, without which its sandboxes get no volumes: add it to spec.runtimes, or leave dynamicVolumesMount out"},
		"no-pv":      {"pool", mount("shared-pv-1", "/data1"), "VOLUME_NOT_FOUND", "there is no PersistentVolume shared-pv-1, which is to be mounted at /data1: create it first, or correct pvName"},
		"foreign-pv": {"pool", mount(foreign, "/data"), "SOURCE_DENIED", "PersistentVolume " + foreign + " is bound to a claim of another namespace than the sandbox's " + w.namespace + ": use a volume that is free, or a claim"},
		"mode":       {"pool", mount(readOnly, "/data"), "MODE_DENIED", "PersistentVolume " + readOnly + " has access modes [ReadOnlyMany] only: ask for mode ro"},
		"tenant":     {"pool", mount(other, "/data"), "TENANT_MISMATCH", ""},
		"nested": {"pool", mounts(agentsv1alpha1.DynamicVolumeMount{PVName: good, MountPath: "/a"}, agentsv1alpha1.DynamicVolumeMount{PVName: good, MountPath: "/a/b"}),
			"TARGET_NESTED", ""},
		"on-a-volume": {"pool", mount(good, "/job/data"), "TARGET_NESTED", ""},
		"env-of-warm": {"pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
			s.EnvVars, s.CreateOnNoStock = map[string]string{"A": "b"}, ptr.To(false)
		}, "INVALID_REQUEST", "envVars cannot be given to a sandbox that runs already, and createOnNoStock does not let one be made: set createOnNoStock, or leave envVars out"},
		"shut-down": {"pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
			s.ShutdownTime = ptr.To(metav1.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC))
		}, "INVALID_REQUEST", "shutdownTime is 2020-01-02T03:04:05Z, which is over, so the sandboxes would be deleted at once: write a later time, or leave it out"},
		"in-another-way": {"odd", mount(good, "/job/data"), "TARGET_NESTED", ""},
		"zero": {"pool", func(s *agentsv1alpha1.SandboxClaimSpec) { s.EnvVars = map[string]string{"A": "x\x00y"} }, "INVALID_REQUEST",
			"the environment variable A has a zero byte, which no variable can have: leave it out"},
		"long": {"pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
			s.EnvVars = map[string]string{"A": strings.Repeat("x", 131070)}
		}, "INVALID_REQUEST", "the environment variable A has 131071 bytes with its name: write at most 131070, as a process can be given no more"},
		"negative": {"pool", resized(corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("-1")}}), "INVALID_REQUEST",
			"inplaceUpdate.resources: cpu is -1: must not be negative"},
		"over-limit": {"odd", resized(corev1.ResourceRequirements{Requests: corev1.ResourceList{"memory": resource.MustParse("128Mi")}}), "INVALID_REQUEST",
			"inplaceUpdate.resources: with it the container main of SandboxSet odd requests 128Mi of memory, which is more than its limit of 64Mi: change both"},
		"label": {"pool", func(s *agentsv1alpha1.SandboxClaimSpec) { s.Labels = map[string]string{"team": "a b"} }, "INVALID_REQUEST", ""},
	} {
		w.claim(name, tc.set, tc.alter)
		st := w.phase(name, agentsv1alpha1.ClaimFailed)
		c := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimClaimed)
		if c == nil || c.Reason != tc.reason || tc.message != "" && c.Message != tc.message || len(st.SandboxNames) != 0 {
			t.Errorf("%s: %+v", name, st)
		}
		w.eventually("an Event tells of "+name, func() bool { return w.events.count(name+" "+tc.reason+": Failed: ") == 1 })
	}
	versions := func(all []*v1alpha1.Sandbox) (v []string) {
		for _, sb := range all {
			v = append(v, string(sb.UID)+" "+sb.ResourceVersion)
		}
		return v
	}
	if !slices.Equal(versions(w.sandboxes()), versions(before)) {
		t.Errorf("the pool is not as it was")
	}
	// Below the sandbox's own tmpfs a volume may be.
	w.claim("on-tmpfs", "pool", mount(good, "/mem/data"))
	w.phase("on-tmpfs", agentsv1alpha1.ClaimCompleted)
}

// A volume that cannot be mounted costs no more than the sandbox that was asked for.
func TestABadMountDoesNotBurnThePool(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 3, nil)
	w.ready(set)
	bad := w.pv("bad", nil)
	w.failing[bad] = "/data is not an empty directory"
	claim := w.claim("mine", "pool", mounts(agentsv1alpha1.DynamicVolumeMount{PVName: bad, MountPath: "/data"}))
	message := w.reason("mine", "TARGET_NOT_EMPTY")
	taken := w.of(claim)
	if len(taken) != 1 || !strings.HasSuffix(message, "sandbox "+taken[0].Name+": PersistentVolume "+bad+" cannot be mounted at /data: /data is not an empty directory") {
		t.Fatalf("%d taken, %s", len(taken), message)
	}
	if st := w.claimStatus("mine"); st.ClaimedReplicas != 0 || !slices.Equal(st.SandboxNames, []string{taken[0].Name}) || st.Phase != agentsv1alpha1.ClaimClaiming {
		t.Errorf("status %+v", st)
	}
	w.ready(set)
	w.clock.Step(30 * time.Second)
	if got := w.of(claim); len(got) != 1 || got[0].UID != taken[0].UID {
		t.Errorf("it has another sandbox: %d", len(got))
	}
	w.clock.Step(31 * time.Second)
	st := w.phase("mine", agentsv1alpha1.ClaimFailed)
	if c := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimClaimed); c.Reason != "TARGET_NOT_EMPTY" || !strings.HasPrefix(c.Message, "the time is over") {
		t.Errorf("%+v", c)
	}
	w.eventually("what was taken is deleted", func() bool { return len(w.sandboxes()) == 3 })
	w.ready(set)
	if n := w.events.count("mine SandboxDeleted"); n != 1 {
		t.Errorf("%d deletions", n)
	}
	if n := w.events.count("mine SandboxTaken"); n != 1 {
		t.Errorf("%d sandboxes were taken", n)
	}

	// When it is mended in time, the same sandbox is claimed.
	second := w.claim("second", "pool", mounts(agentsv1alpha1.DynamicVolumeMount{PVName: bad, MountPath: "/data"}))
	w.reason("second", "TARGET_NOT_EMPTY")
	kept := w.of(second)[0].Name
	w.mu.Lock()
	delete(w.failing, bad)
	w.mu.Unlock()
	w.replay()
	if st := w.phase("second", agentsv1alpha1.ClaimCompleted); !slices.Equal(st.SandboxNames, []string{kept}) {
		t.Errorf("%v; want %s", st.SandboxNames, kept)
	}
}

func TestTenClaimsForFiveSandboxes(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 5, nil)
	w.ready(set)
	for i := range 10 {
		w.claim("c"+string(rune('0'+i)), "pool", nil)
	}
	had := map[string]string{}
	for i := range 10 {
		name := "c" + string(rune('0'+i))
		st := w.phase(name, agentsv1alpha1.ClaimCompleted)
		if len(st.SandboxNames) != 1 || had[st.SandboxNames[0]] != "" {
			t.Errorf("%s has %v, of %s", name, st.SandboxNames, had[st.SandboxNames[0]])
		}
		had[st.SandboxNames[0]] = name
	}
	w.ready(set)
	if n := len(w.sandboxes()); n != 15 {
		t.Errorf("there are %d sandboxes", n)
	}
}

func TestWithoutStock(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 0, nil)
	w.ready(set)
	near := w.pv("near", func(pv *corev1.PersistentVolume) {
		pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"}}}}}}}
	})
	// One is made, where the volume can be used.
	claim := w.claim("made", "pool", mounts(agentsv1alpha1.DynamicVolumeMount{PVName: near, MountPath: "/data"}))
	w.phase("made", agentsv1alpha1.ClaimCompleted)
	made := w.of(claim)
	if len(made) != 1 || !strings.HasPrefix(made[0].Name, "pool-") || len(made[0].Name) != len("pool-")+5 ||
		made[0].Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions[0].Values[0] != "n1" {
		t.Errorf("made %+v", made)
	}
	// Environments are for sandboxes that are made for them.
	claim = w.claim("env", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) { s.EnvVars = map[string]string{"B": "2", "A": "1"} })
	w.phase("env", agentsv1alpha1.ClaimCompleted)
	if env := w.of(claim)[0].Spec.Template.Spec.Containers[0].Env; !slices.Equal(env, []corev1.EnvVar{{Name: "A", Value: "1"}, {Name: "B", Value: "2"}}) {
		t.Errorf("env %v", env)
	}
	// An update in place is part of the taking, of a warm sandbox too.
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 1 })
	w.ready(set)
	warm := w.pool(set)[0]
	claim = w.claim("updated", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.InplaceUpdate = &agentsv1alpha1.InplaceUpdate{Image: "alpine", Resources: &corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}}}
	})
	w.phase("updated", agentsv1alpha1.ClaimCompleted)
	if got := w.of(claim)[0]; got.UID != warm.UID || got.Spec.Template.Spec.Containers[0].Image != "alpine" || got.Spec.Template.Spec.Containers[0].Resources.Limits.Cpu().Value() != 1 {
		t.Errorf("updated %+v", got.Spec.Template)
	}
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 0 })
	w.ready(set)
	// One that is not to be made is waited for, and the time ends.
	none := func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.CreateOnNoStock, s.Replicas = ptr.To(false), ptr.To(int32(2))
	}
	w.claim("waits", "pool", none)
	if m := w.reason("waits", "NO_STOCK"); m != "0 of 2 sandboxes are claimed; SandboxSet pool has no sandbox that could be taken: waiting for 2" {
		t.Error(m)
	}
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 1 })
	w.phase("waits", agentsv1alpha1.ClaimCompleted)
	w.change("pool", func(s *agentsv1alpha1.SandboxSetSpec) { s.Replicas = 0 })
	w.ready(set)
	w.claim("in-vain", "pool", none)
	w.reason("in-vain", "NO_STOCK")
	w.clock.Step(61 * time.Second)
	st := w.phase("in-vain", agentsv1alpha1.ClaimFailed)
	if c := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimClaimed); c.Reason != "NO_STOCK" {
		t.Errorf("%+v", c)
	}
}

func TestOfSomeTheRestIsGivenUp(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 2, nil)
	w.ready(set)
	ready := w.pool(set)
	w.hold(func(sb *v1alpha1.Sandbox) bool { return sb.Status.Phase != v1alpha1.SandboxRunning })
	claim := w.claim("mine", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) { s.Replicas = ptr.To(int32(4)) })
	w.eventually("four are taken", func() bool { return len(w.of(claim)) == 4 })
	w.eventually("two are claimed", func() bool { return w.claimStatus("mine").ClaimedReplicas == 2 })
	w.clock.Step(61 * time.Second)
	st := w.phase("mine", agentsv1alpha1.ClaimCompleted)
	want := []string{ready[0].Name, ready[1].Name}
	slices.Sort(want)
	if !slices.Equal(st.SandboxNames, want) || st.ClaimedReplicas != 2 || !meta.IsStatusConditionTrue(st.Conditions, agentsv1alpha1.ClaimPartially) {
		t.Errorf("status %+v; want %v", st, want)
	}
	w.eventually("the others are deleted", func() bool { return len(w.of(claim)) == 2 })

	// What a claim was given stays when its time to live is over, and the claim goes. That time may be without an end.
	live := func(d time.Duration) {
		must(w.pools.Claims().UpdateSpec(t.Context(), w.key("mine"), store.Preconditions{}, func(o *agentsv1alpha1.SandboxClaim) error {
			o.Spec.TTLAfterCompleted = &metav1.Duration{Duration: d}
			return nil
		}))
	}
	live(-time.Second)
	w.clock.Step(time.Hour)
	w.claim("later", "pool", nil) // which comes after it
	w.eventually("a later claim is looked at", func() bool { return w.claimStatus("later").Phase != "" })
	if must(w.pools.Claims().Get(t.Context(), w.key("mine"))).DeletionTimestamp != nil {
		t.Error("a claim that is to be kept was deleted")
	}
	live(time.Hour)
	w.eventually("it is deleted", func() bool {
		w.clock.Step(time.Hour)
		c, err := w.pools.Claims().Get(t.Context(), w.key("mine"))
		return errdefs.IsNotFound(err) || c.DeletionTimestamp != nil
	})
	// They were let go of before: who deletes what a claim owns has not to be told first.
	for _, name := range want {
		sb := must(w.theirs.Sandboxes().Get(t.Context(), w.key(name)))
		if sb.DeletionTimestamp != nil || len(sb.OwnerReferences) != 0 || sb.Labels[agentsv1alpha1.LabelClaimName] != "mine" {
			t.Errorf("sandbox %+v", sb.ObjectMeta)
		}
	}
}

// A claim that can be given no more is over at once, not when its time is.
func TestASetThatGoesEndsItsClaims(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 1, nil)
	w.ready(set)
	warm := w.pool(set)[0].Name
	w.hold(func(sb *v1alpha1.Sandbox) bool { return sb.Name != warm })
	claim := w.claim("some", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.Replicas, s.ClaimTimeout = ptr.To(int32(2)), &metav1.Duration{Duration: 168 * time.Hour}
	})
	w.eventually("one of two is claimed", func() bool { return len(w.of(claim)) == 2 && w.claimStatus("some").ClaimedReplicas == 1 })
	if err := w.pools.Sets().Delete(t.Context(), w.key("pool"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	for _, sb := range w.of(claim) {
		if sb.Name != warm {
			w.delete(sb.Name)
		}
	}
	st := w.phase("some", agentsv1alpha1.ClaimCompleted)
	c, partly := meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimClaimed), meta.FindStatusCondition(st.Conditions, agentsv1alpha1.ClaimPartially)
	if !slices.Equal(st.SandboxNames, []string{warm}) || c.Status != metav1.ConditionFalse || c.Reason != "SET_NOT_FOUND" ||
		!strings.HasPrefix(c.Message, "1 of 2 sandboxes are claimed; there is no SandboxSet pool") ||
		partly == nil || partly.Status != metav1.ConditionTrue || partly.Message != "1 of 2 sandboxes are claimed, and there are no more" {
		t.Errorf("status %+v", st)
	}
}

// A refusal of the API server is shown at once, word for word.
func TestAQuotaIsToldInItsWords(t *testing.T) {
	w := newWorld(t)
	hard := corev1.ResourceList{"count/sandboxes.sandbox.flux.io": resource.MustParse("1")}
	quota := must(w.admin.CoreV1().ResourceQuotas(w.namespace).Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "few"},
		Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{}))
	// Nobody counts what is used here but the admission plugin.
	quota.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: corev1.ResourceList{"count/sandboxes.sandbox.flux.io": resource.MustParse("0")}}
	must(w.admin.CoreV1().ResourceQuotas(w.namespace).UpdateStatus(t.Context(), quota, metav1.UpdateOptions{}))
	w.eventually("the quota counts", func() bool {
		for i := range 2 {
			sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "probe-" + string(rune('a'+i))}}
			if _, err := w.theirs.Sandboxes().Create(t.Context(), sb); err != nil && !errdefs.IsAlreadyExists(err) {
				return true
			}
		}
		w.delete("probe-b")
		return false
	})
	const words = "is forbidden: exceeded quota: few, requested: count/sandboxes.sandbox.flux.io=1, used: count/sandboxes.sandbox.flux.io=1, limited: count/sandboxes.sandbox.flux.io=1"
	w.start(nil)
	w.set("pool", 2, nil)
	w.eventually("the set tells", func() bool {
		c := meta.FindStatusCondition(w.setStatus("pool").Conditions, agentsv1alpha1.SetReady)
		return c != nil && c.Reason == "FORBIDDEN" && strings.HasSuffix(c.Message, words)
	})
	w.claim("mine", "pool", nil)
	if m := w.reason("mine", "FORBIDDEN"); !strings.HasSuffix(m, words) {
		t.Error(m)
	}
}

// What an update in place waits for is no trouble, and no Event; what kubelet has against it is.
func TestAnUpdateUnderWayIsNoTrouble(t *testing.T) {
	w := newWorld(t)
	w.start(nil)
	set := w.set("pool", 1, nil)
	w.ready(set)
	w.hold(func(*v1alpha1.Sandbox) bool { return true })
	claim := w.claim("mine", "pool", func(s *agentsv1alpha1.SandboxClaimSpec) {
		s.InplaceUpdate = &agentsv1alpha1.InplaceUpdate{Image: "alpine"}
	})
	w.eventually("one is taken", func() bool { return len(w.of(claim)) == 1 })
	says := func(reason string) {
		t.Helper()
		must(w.theirs.Sandboxes().UpdateStatus(t.Context(), store.KeyOf(w.of(claim)[0]), store.Preconditions{}, func(o *v1alpha1.Sandbox) error {
			meta.SetStatusCondition(&o.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionUpdated, Status: metav1.ConditionFalse, Reason: reason, Message: "the words of " + reason})
			return nil
		}))
		if m := w.reason("mine", reason); !strings.HasSuffix(m, ": inplaceUpdate: the words of "+reason) {
			t.Error(m)
		}
	}
	for _, underWay := range []string{"Outdated", "NotSeen", "Resizing", "Restarting", "NoPod"} {
		says(underWay)
	}
	says("ErrImagePull")
	w.eventually("an Event tells of the image", func() bool { return w.events.count("mine ErrImagePull") == 1 })
	for _, underWay := range []string{"Outdated", "NotSeen", "Resizing", "Restarting", "NoPod"} {
		if w.events.count("mine "+underWay) != 0 {
			t.Errorf("an Event tells that it is %s", underWay)
		}
	}
}
