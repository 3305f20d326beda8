package kube

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// What a tenant writes into one object, and the API server accepts, keeps nobody from seeing the others.
func TestAnObjectThatCannotBeRead(t *testing.T) {
	c := newCluster(t)
	s := c.open(nil)
	good, err := s.Sandboxes().Create(t.Context(), newSandbox("good"))
	if err != nil {
		t.Fatal(err)
	}
	for name, spec := range map[string]map[string]any{
		"time":     {"shutdownTime": "2036-01-01t00:00:00z"},
		"quantity": {"template": map[string]any{"spec": map[string]any{"overhead": map[string]any{"cpu": "1e99999999999999999999"}, "containers": []any{map[string]any{"name": "a"}}}}},
		"port": {"template": map[string]any{"spec": map[string]any{"containers": []any{map[string]any{"name": "a",
			"livenessProbe": map[string]any{"httpGet": map[string]any{"port": int64(3000000000)}}}}}}},
	} {
		o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "sandbox.flux.io/v1alpha1", "kind": "Sandbox", "metadata": map[string]any{"name": name}, "spec": spec}}
		if _, err := c.sandboxes("default").Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := s.Sandboxes().Get(t.Context(), keyOf(name)); fault.ReasonOf(err) != fault.InvalidRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
	// One that was good stays as it was.
	c.edit("default", "good", func(o map[string]any) { o["spec"].(map[string]any)["shutdownTime"] = "2036-01-01t00:00:00z" })
	later, err := c.sandboxes("default").Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "sandbox.flux.io/v1alpha1", "kind": "Sandbox", "metadata": map[string]any{"name": "later"}, "spec": map[string]any{}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	seen := func(s *Store, want ...string) {
		t.Helper()
		testenv.Eventually(t, 30*time.Second, "they are seen", func() bool {
			page, err := s.Sandboxes().List(t.Context(), store.ListOptions{})
			if err != nil || len(page.Items) != len(want) {
				return false
			}
			for i, o := range page.Items {
				if o.Name != want[i] {
					return false
				}
			}
			return true
		})
	}
	seen(s, "good", "later")
	if o, err := s.Sandboxes().GetByUID(t.Context(), later.GetUID()); err != nil || o.Name != "later" {
		t.Errorf("%v", err)
	}
	if o, err := s.Sandboxes().Get(t.Context(), keyOf("good")); err != nil || o.Spec.ShutdownTime != nil {
		t.Errorf("what was good: %+v, %v", o, err)
	}
	if _, err := s.Sandboxes().UpdateSpec(t.Context(), keyOf("good"), store.Preconditions{UID: good.UID}, setDir("/x")); fault.ReasonOf(err) != fault.InvalidRequest {
		t.Errorf("a write of what cannot be read: %v", err)
	}
	// Another process, which begins with a list, sees all that can be read.
	other := c.open(nil)
	seen(other, "later")
	// Corrected, it is seen by both, and what is deleted goes.
	c.edit("default", "good", func(o map[string]any) { delete(o["spec"].(map[string]any), "shutdownTime") })
	seen(s, "good", "later")
	seen(other, "good", "later")
	c.edit("default", "good", func(o map[string]any) { o["spec"].(map[string]any)["shutdownTime"] = "2036-01-01t00:00:00z" })
	if err := c.sandboxes("default").Delete(t.Context(), "good", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	seen(s, "later")
	seen(other, "later")
}
