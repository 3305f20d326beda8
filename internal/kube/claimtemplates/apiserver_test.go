package claimtemplates_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// claimed is the claim that a Pod's volume data is.
func claimed(pod *corev1.Pod) string {
	i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "data" })
	if i < 0 || pod.Spec.Volumes[i].PersistentVolumeClaim == nil || pod.Spec.Volumes[i].EmptyDir != nil {
		return ""
	}
	return pod.Spec.Volumes[i].PersistentVolumeClaim.ClaimName
}

// TestTheSameClaimUnderEveryPod goes through the life of a sandbox: made, lost in every way, paused, resumed, deleted.
func TestTheSameClaimUnderEveryPod(t *testing.T) {
	w := open(t)
	sb := w.create("a", nil)
	uid := w.bind("data-a")
	claim := w.claim("data-a")
	controller := metav1.GetControllerOf(claim)
	if controller == nil || controller.UID != sb.UID || !ptr.Deref(controller.BlockOwnerDeletion, false) {
		t.Errorf("owner %+v", controller)
	}
	if claim.Labels["tier"] != "gold" || claim.Labels[v1alpha1.LabelSandbox] != "a" || claim.Labels[v1alpha1.LabelSandboxUID] != string(sb.UID) || claim.Annotations["note"] != "kept" ||
		*claim.Spec.StorageClassName != "standard" || claim.Spec.Resources.Requests.Storage().String() != "1Gi" {
		t.Errorf("claim %+v", claim)
	}
	pod := w.run("a", "n1", "")
	if claimed(pod) != "data-a" || !slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "scratch" && v.EmptyDir != nil }) {
		t.Errorf("volumes %+v", pod.Spec.Volumes)
	}
	if pod.CreationTimestamp.Before(&claim.CreationTimestamp) {
		t.Error("the Pod was made before its claim")
	}
	w.bound("a", scheduler.ReasonClaimsBound)
	for _, reason := range []string{"VolumeClaimCreated", "PodCreated", "VolumeClaimsBound", "Started"} {
		w.happened("a", reason)
	}

	for name, lose := range map[string]func(){
		"deleted": func() { w.end("a") },
		"evicted": func() {
			w.status("a", func(s *corev1.PodStatus) {
				s.Phase, s.Reason, s.Message = corev1.PodFailed, "Evicted", "the node was low on memory"
				s.ContainerStatuses[0].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137}}
			})
			w.happened("a", "Evicted")
			w.end("a") // kubelet confirms the deletion
		},
	} {
		lose()
		next := w.run("a", "n1", pod.UID)
		if claimed(next) != "data-a" || w.claim("data-a").UID != uid {
			t.Errorf("%s: the next Pod has claim %s, UID %s", name, claimed(next), w.claim("data-a").UID)
		}
		pod = next
	}
	w.happened("a", "PodLost")

	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = true })
	w.eventually("the Pod is to end", func() bool { return w.pod("a", "").DeletionTimestamp != nil })
	w.end("a")
	w.phase("a", v1alpha1.SandboxPaused)
	if c := w.claim("data-a"); c.UID != uid || c.DeletionTimestamp != nil {
		t.Errorf("claim %+v", c)
	}
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.Paused = false })
	next := w.run("a", "n1", pod.UID)
	if claimed(next) != "data-a" || w.claim("data-a").UID != uid {
		t.Error("another claim after a pause")
	}

	// Unreachable is not dead: the Pod is waited for. Of a dead node it is taken away.
	if err := w.admin.CoreV1().Pods(w.namespace).Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("terminating", func() bool { return w.sandbox("a").Status.Reason == "PodTerminating" })
	w.nodes.dead.Store("n1", true)
	w.nodes.events <- scheduler.AgentEvent{Type: scheduler.NodeDied, Agent: scheduler.Agent{Node: "n1"}}
	next = w.run("a", "n2", next.UID)
	w.happened("a", "NODE_DEAD")
	if claimed(next) != "data-a" || w.claim("data-a").UID != uid {
		t.Error("another claim on another node")
	}

	if err := w.store.Sandboxes().Delete(t.Context(), w.key("a"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("the Pod is to end", func() bool { return w.pod("a", "").DeletionTimestamp != nil })
	w.end("a")
	w.eventually("gone", func() bool { return w.sandbox("a") == nil })
	if controller := metav1.GetControllerOf(w.claim("data-a")); controller == nil || controller.UID != sb.UID {
		t.Errorf("the garbage collector would not take it: %+v", w.claim("data-a").OwnerReferences)
	}
}

func TestAClaimOfTheNameThatIsSomebodyElses(t *testing.T) {
	w := open(t)
	foreign := template("data-a")
	foreign.Labels = nil
	made := must(w.admin.CoreV1().PersistentVolumeClaims(w.namespace).Create(t.Context(), &foreign, metav1.CreateOptions{}))
	sb := w.create("a", nil)
	c := w.bound("a", string(fault.ClaimNameTaken))
	for _, part := range []string{"data-a", "somebody else made it", "sandbox.flux.io/adopt=a"} {
		if !strings.Contains(c.Message, part) {
			t.Errorf("%q does not say %q", c.Message, part)
		}
	}
	w.happened("a", string(fault.ClaimNameTaken))
	if st := w.sandbox("a").Status; st.Phase != v1alpha1.SandboxPending || st.Reason != string(fault.ClaimNameTaken) {
		t.Errorf("status %+v", st)
	}
	if now := w.claim("data-a"); now.ResourceVersion != made.ResourceVersion {
		t.Errorf("a claim that is somebody else's was written: %+v", now)
	}
	if list := must(w.admin.CoreV1().Pods(w.namespace).List(t.Context(), metav1.ListOptions{})); len(list.Items) != 0 {
		t.Error("a Pod was made over it")
	}

	// Its owner lets the sandbox use it. It never goes with the sandbox.
	now := w.claim("data-a")
	now.Labels = map[string]string{v1alpha1.LabelAdopt: "a"}
	must(w.admin.CoreV1().PersistentVolumeClaims(w.namespace).Update(t.Context(), now, metav1.UpdateOptions{}))
	if uid := w.bind("data-a"); uid != made.UID {
		t.Error("it is another claim")
	}
	if pod := w.run("a", "n1", ""); claimed(pod) != "data-a" {
		t.Errorf("volumes %+v", pod.Spec.Volumes)
	}
	w.bound("a", scheduler.ReasonClaimsBound)
	if now := w.claim("data-a"); len(now.OwnerReferences) != 0 || now.Labels[v1alpha1.LabelSandboxUID] != string(sb.UID) {
		t.Errorf("claim %+v", now.ObjectMeta)
	}

	// One that another object controls is not taken over, whatever its label says.
	owned := template("data-b")
	owned.Labels = map[string]string{v1alpha1.LabelAdopt: "b"}
	owned.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "db", UID: "u-1", Controller: ptr.To(true)}}
	must(w.admin.CoreV1().PersistentVolumeClaims(w.namespace).Create(t.Context(), &owned, metav1.CreateOptions{}))
	w.create("b", nil)
	if c := w.bound("b", string(fault.ClaimNameTaken)); !strings.Contains(c.Message, "StatefulSet db owns it") {
		t.Errorf("condition %+v", c)
	}
}

// What the API server refuses is said at once, in its own words.
func TestAQuotaIsSaidWordForWord(t *testing.T) {
	w := open(t)
	hard := corev1.ResourceList{corev1.ResourcePersistentVolumeClaims: resource.MustParse("0")}
	quota := must(w.admin.CoreV1().ResourceQuotas(w.namespace).Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{}))
	quota.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: hard} // what the quota controller does
	must(w.admin.CoreV1().ResourceQuotas(w.namespace).UpdateStatus(t.Context(), quota, metav1.UpdateOptions{}))
	probe := template("data-a")
	var words string
	w.eventually("the quota counts", func() bool {
		_, err := w.admin.CoreV1().PersistentVolumeClaims(w.namespace).Create(t.Context(), &probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			words = err.Error()
		}
		return strings.Contains(words, "exceeded quota")
	})
	w.create("a", nil)
	c := w.bound("a", string(fault.ClaimRefused))
	if !strings.Contains(c.Message, words) {
		t.Errorf("%q does not say %q", c.Message, words)
	}
	if st := w.sandbox("a").Status; st.Reason != string(fault.ClaimRefused) || !strings.Contains(st.Message, words) {
		t.Errorf("status %+v", st)
	}
	w.happened("a", string(fault.ClaimRefused))
	if err := w.admin.CoreV1().ResourceQuotas(w.namespace).Delete(t.Context(), "none", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.run("a", "n1", "")
}

func TestRetain(t *testing.T) {
	w := open(t)
	retain := &v1alpha1.PersistentVolumeClaimRetentionPolicy{WhenDeleted: v1alpha1.RetentionRetain}
	owners := func() []metav1.OwnerReference { return w.claim("data-a").OwnerReferences }
	sb := w.create("a", func(sb *v1alpha1.Sandbox) { sb.Spec.PersistentVolumeClaimRetentionPolicy = retain })
	uid := w.bind("data-a")
	if c := w.claim("data-a"); len(c.OwnerReferences) != 0 || c.Labels[v1alpha1.LabelSandboxUID] != string(sb.UID) {
		t.Errorf("claim %+v", c.ObjectMeta)
	}
	w.run("a", "n1", "")
	// The policy may change while the sandbox runs.
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.PersistentVolumeClaimRetentionPolicy = nil })
	w.eventually("owned", func() bool { return len(owners()) == 1 && owners()[0].UID == sb.UID })
	// And right before the sandbox goes: what scales down does that.
	w.change("a", func(sb *v1alpha1.Sandbox) { sb.Spec.PersistentVolumeClaimRetentionPolicy = retain })
	if err := w.store.Sandboxes().Delete(t.Context(), w.key("a"), store.Preconditions{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("the Pod is to end", func() bool { return w.pod("a", "").DeletionTimestamp != nil })
	w.end("a")
	w.eventually("gone", func() bool { return w.sandbox("a") == nil })
	if c := w.claim("data-a"); c == nil || c.UID != uid || len(c.OwnerReferences) != 0 || c.DeletionTimestamp != nil {
		t.Errorf("claim %+v", c)
	}
	// The next sandbox of the name is another one, and has to be let to it.
	w.create("a", nil)
	if c := w.bound("a", string(fault.ClaimNameTaken)); !strings.Contains(c.Message, string(sb.UID)) {
		t.Errorf("condition %+v", c)
	}
}

func TestAClaimDeletedUnderASandbox(t *testing.T) {
	w := open(t)
	w.create("a", nil)
	first := w.bind("data-a")
	pod := w.run("a", "n1", "")
	w.bound("a", scheduler.ReasonClaimsBound)
	if err := w.admin.CoreV1().PersistentVolumeClaims(w.namespace).Delete(t.Context(), "data-a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.bound("a", scheduler.ReasonClaimTerminating)
	w.happened("a", scheduler.ReasonClaimTerminating)
	if st := w.sandbox("a").Status; st.Phase != v1alpha1.SandboxRunning {
		t.Errorf("status %+v", st)
	}
	// The Pod ends. The claim is there for a while, and no Pod is made over it.
	w.end("a")
	if c := w.bound("a", string(fault.ClaimTerminating)); !strings.Contains(c.Message, "(kubernetes.io/pvc-protection)") {
		t.Errorf("condition %+v", c)
	}
	if _, err := w.admin.CoreV1().PersistentVolumeClaims(w.namespace).Patch(t.Context(), "data-a", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err) // Kubernetes lifts its protection
	}
	w.happened("a", scheduler.ReasonClaimLost)
	w.eventually("a new claim", func() bool { c := w.claim("data-a"); return c != nil && c.UID != first })
	if second := w.bind("data-a"); second == first {
		t.Error("it is the same claim")
	}
	w.run("a", "n1", pod.UID)
	w.bound("a", scheduler.ReasonClaimsBound)
}
