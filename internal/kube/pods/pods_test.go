package pods_test

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

var _ scheduler.Pods = (*pods.Pods)(nil)

// cluster is a fake API server with Pods that follow it.
type cluster struct {
	t      *testing.T
	client *fake.Clientset
	pods   *pods.Pods
	told   chan store.Key
}

func start(t *testing.T, objects ...runtime.Object) *cluster {
	t.Helper()
	c := &cluster{t: t, client: fake.NewClientset(objects...), told: make(chan store.Key, 1000)}
	var made atomic.Int64
	c.client.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		a.(clienttesting.CreateAction).GetObject().(*corev1.Pod).UID = types.UID(fmt.Sprintf("made-%d", made.Add(1)))
		return false, nil, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	var err error
	if c.pods, err = pods.New(ctx, c.client, nil); err != nil {
		t.Fatal(err)
	}
	followed := make(chan struct{})
	go func() {
		defer close(followed)
		for key := range c.pods.Follow(ctx) {
			c.told <- key
		}
	}()
	t.Cleanup(func() {
		cancel()
		c.pods.Wait()
		<-followed
	})
	return c
}

// eventually asks whenever something is told, and at first.
func (c *cluster) eventually(what string, holds func() bool) {
	c.t.Helper()
	deadline := time.After(20 * time.Second)
	for !holds() {
		select {
		case <-c.told:
		case <-deadline:
			c.t.Fatalf("waited in vain: %s", what)
		}
	}
}

// get waits until a sandbox's Pod is as wished.
func (c *cluster) get(sb *v1alpha1.Sandbox, what string, holds func(*scheduler.Pod) bool) *scheduler.Pod {
	c.t.Helper()
	var pod *scheduler.Pod
	c.eventually(what, func() bool {
		var err error
		pod, err = c.pods.Get(sb)
		return err == nil && holds(pod)
	})
	return pod
}

func there(p *scheduler.Pod) bool  { return p != nil }
func absent(p *scheduler.Pod) bool { return p == nil }

func (c *cluster) put(pod *corev1.Pod) {
	c.t.Helper()
	if _, err := c.client.CoreV1().Pods(pod.Namespace).Update(c.t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) live(name string) *corev1.Pod {
	c.t.Helper()
	pod, err := c.client.CoreV1().Pods("ns").Get(c.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return pod
}

func owner(name, uid string) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(uid)}}
	sb.Spec.Template = &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "x", v1alpha1.LabelSandbox: "forged"}, Annotations: map[string]string{"note": "y"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "busybox"}, {Name: "side", Image: "busybox"}}},
	}
	return sb
}

func adopter(name, uid, pod string) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(uid)}}
	sb.Spec.PodRef = &v1alpha1.PodReference{Name: pod}
	return sb
}

func foreign(name, uid string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(uid)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}, {Name: "side"}}}}
}

func TestAPodIsMadeFromTheTemplate(t *testing.T) {
	c := start(t)
	sb := owner("a", "sb-1")
	c.get(sb, "none", absent)
	if err := c.pods.Create(t.Context(), sb); err != nil {
		t.Fatal(err)
	}
	pod := c.get(sb, "made", there)
	if pod.Name != "a" || pod.UID != "made-1" || pod.Container != "main" || pod.Running || pod.Node != "" {
		t.Errorf("%+v", pod)
	}
	made := c.live("a")
	ref := metav1.GetControllerOf(made)
	if !maps.Equal(made.Labels, map[string]string{"app": "x", v1alpha1.LabelSandbox: "a"}) || made.Annotations["note"] != "y" || len(made.Spec.Containers) != 2 ||
		ref == nil || ref.UID != "sb-1" || ref.Kind != "Sandbox" || ref.APIVersion != "sandbox.flux.io/v1alpha1" || !ptr.Deref(ref.BlockOwnerDeletion, false) {
		t.Errorf("%+v", made)
	}
	if sb.Spec.Template.Labels[v1alpha1.LabelSandbox] != "forged" {
		t.Error("the sandbox was changed")
	}
	// Again is success, and makes none.
	if err := c.pods.Create(t.Context(), sb); err != nil || c.live("a").UID != "made-1" {
		t.Errorf("created again: %v", err)
	}
	made.Spec.NodeName, made.Status.Phase = "n1", corev1.PodRunning
	made.Status.ContainerStatuses = []corev1.ContainerStatus{
		{Name: "side"},
		{Name: "main", ContainerID: "containerd://abc", RestartCount: 2, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Unix(7, 0)}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3}}},
	}
	c.put(made)
	pod = c.get(sb, "runs", func(p *scheduler.Pod) bool { return p != nil && p.Running })
	if pod.Node != "n1" || pod.ContainerID != "abc" || pod.Restarts != 2 || pod.StartedAt.Unix() != 7 || ptr.Deref(pod.ExitCode, 0) != 3 || pod.Phase != corev1.PodRunning {
		t.Errorf("%+v", pod)
	}
	if err := c.pods.Delete(t.Context(), sb, "another"); err != nil || c.live("a") == nil {
		t.Errorf("deleted by another UID: %v", err)
	}
	if err := c.pods.Delete(t.Context(), sb, pod.UID); err != nil {
		t.Fatal(err)
	}
	c.get(sb, "gone", absent)
	if err := c.pods.Delete(t.Context(), sb, pod.UID); err != nil {
		t.Errorf("deleted again: %v", err)
	}
}

// A claim that waits for its first consumer is bound by Kubernetes' scheduler alone, which does not see a Pod that has a node.
func TestAPodWithClaimsIsLeftToTheScheduler(t *testing.T) {
	c := start(t)
	here := corev1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"}}
	zone := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpExists}
	for name, tc := range map[string]struct {
		required *corev1.NodeSelector
		want     []corev1.NodeSelectorTerm
	}{
		"alone": {nil, []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{here}}}},
		"beside": {&corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{zone}}}},
			[]corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{zone}, MatchFields: []corev1.NodeSelectorRequirement{here}}}},
	} {
		sb := owner(name, "sb-"+name)
		sb.Spec.Template.Spec.NodeName = "n1"
		if tc.required != nil {
			sb.Spec.Template.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: tc.required}}
		}
		before := sb.DeepCopy()
		sb.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}}}
		if err := c.pods.Create(t.Context(), sb); err != nil {
			t.Fatal(err)
		}
		made := c.live(name)
		if made.Spec.NodeName != "" || !equality.Semantic.DeepEqual(made.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms, tc.want) {
			t.Errorf("%s: node %q, affinity %+v", name, made.Spec.NodeName, made.Spec.Affinity)
		}
		if !equality.Semantic.DeepEqual(sb.Spec.Template, before.Spec.Template) {
			t.Errorf("%s: the sandbox was changed", name)
		}
	}
	// Without claims the template has the last word.
	sb := owner("plain", "sb-plain")
	sb.Spec.Template.Spec.NodeName = "n1"
	if err := c.pods.Create(t.Context(), sb); err != nil || c.live("plain").Spec.NodeName != "n1" {
		t.Errorf("%v, node %q", err, c.live("plain").Spec.NodeName)
	}
}

func TestAPodOfSomebodyElseIsNeverTakenForOurs(t *testing.T) {
	labelled := foreign("b", "p-2")
	labelled.Labels = map[string]string{v1alpha1.LabelSandbox: "b"}
	formers := foreign("d", "p-3")
	formers.OwnerReferences = []metav1.OwnerReference{{Kind: "Sandbox", Name: "d", UID: "another-sandbox", Controller: ptr.To(true)}}
	c := start(t, foreign("a", "p-1"), labelled, formers)
	for name, owner1 := range map[string]string{"a": "nobody", "b": "nobody", "d": "Sandbox d"} {
		sb := owner(name, "sb-of-"+name)
		c.get(sb, "none of ours", absent)
		if pod, err := c.pods.Read(t.Context(), sb); pod != nil || err != nil {
			t.Errorf("read: %+v, %v", pod, err)
		}
		err := c.pods.Create(t.Context(), sb)
		if !errdefs.IsAlreadyExists(err) || fault.ReasonOf(err) != fault.PodNameTaken || !strings.Contains(err.Error(), owner1) {
			t.Errorf("%s: %v", name, err)
		}
		uid := c.live(name).UID
		if err := c.pods.Delete(t.Context(), sb, uid); !errdefs.IsPermissionDenied(err) || c.live(name) == nil {
			t.Errorf("%s: delete: %v", name, err)
		}
	}
}

func TestAnAdoptedPodIsOnlyRead(t *testing.T) {
	c := start(t, foreign("web-0", "p-1"), foreign("other", "p-9"))
	a, b := adopter("a", "sb-a", "web-0"), adopter("b", "sb-b", "web-0")
	b.Spec.PodRef.Container = "side"
	wrong := adopter("w", "sb-w", "web-0")
	wrong.Spec.PodRef.Container = "none"
	for sb, container := range map[*v1alpha1.Sandbox]string{a: "main", b: "side", wrong: ""} {
		if pod := c.get(sb, "there", there); pod.UID != "p-1" || pod.Container != container {
			t.Errorf("%+v", pod)
		}
	}
	if pod := c.get(adopter("c", "sb-c", "later"), "not there", absent); pod != nil {
		t.Errorf("%+v", pod)
	}
	if err := c.pods.Delete(t.Context(), a, "p-1"); !errdefs.IsPermissionDenied(err) {
		t.Errorf("delete: %v", err)
	}
	if err := c.pods.Create(t.Context(), a); !errdefs.IsInvalidArgument(err) {
		t.Errorf("create: %v", err)
	}
	now := time.Now()
	pod := foreign("web-0", "p-1")
	pod.DeletionTimestamp = &metav1.Time{Time: now}
	pod.Annotations = map[string]string{v1alpha1.AnnotationContainer: "side"}
	c.put(pod)
	for _, sb := range []*v1alpha1.Sandbox{a, b} {
		if pod := c.get(sb, "deleting", func(p *scheduler.Pod) bool { return p != nil && p.Deleting }); pod.Container != "side" {
			t.Errorf("%+v", pod)
		}
	}
	if err := c.client.CoreV1().Pods("ns").Delete(t.Context(), "web-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.get(a, "gone", absent)
	for _, action := range c.client.Actions() {
		if v := action.GetVerb(); v == "create" || v == "patch" { // the updates and the delete are the test's
			t.Errorf("action %v", action)
		}
	}
}

// watches counts the watches by name that were begun, and those of all owned Pods.
func (c *cluster) watches() (named, all int) {
	for _, action := range c.client.Actions() {
		if w, ok := action.(clienttesting.WatchAction); ok {
			if w.GetWatchRestrictions().Fields.Empty() {
				all++
			} else {
				named++
			}
		}
	}
	return named, all
}

func TestEachAdoptedPodHasOneWatchForAsLongAsItIsUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{t: t, client: fake.NewClientset(foreign("web-0", "p-1"))}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var err error
		if c.pods, err = pods.New(ctx, c.client, nil); err != nil {
			t.Fatal(err)
		}
		a, b := adopter("a", "sb-a", "web-0"), adopter("b", "sb-b", "web-0")
		for range 3 {
			for _, sb := range []*v1alpha1.Sandbox{a, b} {
				_, _ = c.pods.Get(sb) // not read yet
				synctest.Wait()
				if pod, err := c.pods.Get(sb); err != nil || pod == nil {
					t.Fatalf("%+v, %v", pod, err)
				}
			}
		}
		if named, all := c.watches(); named != 1 || all != 1 {
			t.Errorf("%d watches by name, %d of all", named, all)
		}
		before := len(c.client.Actions())
		<-time.After(24 * time.Hour) // of the bubble's clock
		if after := c.client.Actions(); len(after) != before {
			t.Errorf("calls in a day of quiet: %v", after[before:])
		}
		c.pods.Forget(a.UID)
		c.pods.Forget(a.UID)
		if pod, err := c.pods.Get(b); err != nil || pod == nil {
			t.Errorf("the other's watch is gone: %v", err)
		}
		c.pods.Forget(b.UID)
		_, _ = c.pods.Get(a)
		synctest.Wait()
		if named, _ := c.watches(); named != 2 {
			t.Errorf("%d watches by name: the first was not ended", named)
		}
		cancel()
		c.pods.Wait()
	})
}

func TestWhyAPodDoesNotRun(t *testing.T) {
	waiting := func(reason, message string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}
	}
	main := func(s corev1.ContainerState) []corev1.ContainerStatus {
		return []corev1.ContainerStatus{{Name: "side", State: waiting("CrashLoopBackOff", "not ours")}, {Name: "main", State: s}}
	}
	for _, tc := range []struct {
		name            string
		node            string
		status          corev1.PodStatus
		reason, message string
	}{
		{name: "unschedulable", status: corev1.PodStatus{Phase: corev1.PodPending,
			Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable", Message: "0/1 nodes"}}},
			reason: "Unschedulable", message: "0/1 nodes"},
		{name: "on its way", node: "n1", status: corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: main(waiting("ContainerCreating", ""))}},
		{name: "image", node: "n1", status: corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: main(waiting("ErrImagePull", "no such image"))},
			reason: "ErrImagePull", message: "no such image"},
		{name: "init", node: "n1", status: corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: main(waiting("PodInitializing", "")),
			InitContainerStatuses: []corev1.ContainerStatus{{Name: "i", State: waiting("CrashLoopBackOff", "back-off")}}},
			reason: "CrashLoopBackOff", message: "init container i: back-off"},
		{name: "crash", node: "n1", status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: main(waiting("CrashLoopBackOff", "back-off"))},
			reason: "CrashLoopBackOff", message: "back-off"},
		{name: "ended", node: "n1", status: corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: main(corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{Reason: "OOMKilled", ExitCode: 137}})},
			reason: "OOMKilled", message: "container main ended with exit code 137"},
		{name: "evicted", node: "n1", status: corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", Message: "low on memory",
			Conditions: []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "TerminationByKubelet"}}}, reason: "Evicted", message: "low on memory"},
		{name: "no word", node: "n1", status: corev1.PodStatus{Phase: corev1.PodFailed, Reason: "not a word", Message: strings.Repeat("é", 2000)},
			message: strings.Repeat("é", 510) + "..."},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := foreign("web-0", "p-1")
			pod.Spec.NodeName, pod.Status = tc.node, tc.status
			got := start(t, pod).get(adopter("a", "sb-a", "web-0"), "there", there)
			if got.Reason != tc.reason || got.Message != tc.message || got.Running || got.Disrupted != (tc.name == "evicted") {
				t.Errorf("%q %q", got.Reason, got.Message)
			}
		})
	}
}
