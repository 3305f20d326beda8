package kube

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store/storetest"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

var lease = types.NamespacedName{Namespace: "default", Name: "leader"}

// cluster is an API server with our kinds and no objects of them.
type cluster struct {
	*testing.T
	config *rest.Config
}

var install sync.Once

// newCluster empties the test binary's API server. A newer build's CRDs are in it: each object has a field "future"
// that this build does not know. They have no rules, as a store takes every content that its suite writes.
func newCluster(t *testing.T) cluster {
	t.Helper()
	c := cluster{t, apiserver.Shared(t).Config()}
	install.Do(func() {
		crds := manifests.Objects(t, "config/crd/*.yaml")
		for _, crd := range crds {
			fromTheFuture(crd.Object["spec"])
		}
		manifests.Apply(t, c.config, crds...)
		client := kubernetes.NewForConfigOrDie(c.config)
		for _, name := range storetest.Namespaces() {
			namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
			if _, err := client.CoreV1().Namespaces().Create(t.Context(), namespace, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
				t.Fatal(err)
			}
		}
		if _, err := client.CoordinationV1().Leases(lease.Namespace).Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: lease.Name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	})
	for _, resource := range []string{"sandboxes", "sandboxgroups"} {
		all := c.dynamic().Resource(v1alpha1.GroupVersion.WithResource(resource))
		list, err := all.List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range list.Items {
			one := all.Namespace(o.GetNamespace())
			if err := one.Delete(t.Context(), o.GetName(), metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			if _, err := one.Patch(t.Context(), o.GetName(), types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
		}
	}
	return c
}

// fromTheFuture adds a field "future" to every object of a schema that has fields of its own, and removes the rules.
func fromTheFuture(schema any) {
	switch schema := schema.(type) {
	case map[string]any:
		delete(schema, "x-kubernetes-validations")
		for name, member := range schema {
			if name == "template" {
				continue
			}
			fromTheFuture(member)
		}
		if properties, ok := schema["properties"].(map[string]any); ok && schema["type"] == "object" {
			properties["future"] = map[string]any{"type": "string"}
		}
	case []any:
		for _, entry := range schema {
			fromTheFuture(entry)
		}
	}
}

func (c cluster) dynamic() dynamic.Interface { return dynamic.NewForConfigOrDie(c.config) }

func (c cluster) sandboxes(namespace string) dynamic.ResourceInterface {
	return c.dynamic().Resource(v1alpha1.GroupVersion.WithResource("sandboxes")).Namespace(namespace)
}

// open opens a store, with a way for its requests to go.
func (c cluster) open(way func(http.RoundTripper) http.RoundTripper) *Store {
	c.Helper()
	config := rest.CopyConfig(c.config)
	if way != nil {
		config.Wrap(way)
	}
	s, err := Open(c.Context(), config, Options{Lease: lease})
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(s.Close)
	return s
}

// transport is a way for requests.
type transport func(*http.Request) (*http.Response, error)

func (f transport) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func isWrite(r *http.Request) bool { return r.Method != http.MethodGet }

// failing makes the n-th write fail before it is sent.
func failing(countdown *atomic.Int64) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper {
		return transport(func(r *http.Request) (*http.Response, error) {
			if isWrite(r) && countdown.Add(-1) == 0 {
				return nil, errors.New("injected")
			}
			return next.RoundTrip(r)
		})
	}
}

// raw is a sandbox as it is stored.
func (c cluster) raw(namespace, name string) *unstructured.Unstructured {
	c.Helper()
	o, err := c.sandboxes(namespace).Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		c.Fatal(err)
	}
	return o
}

// edit changes a sandbox as somebody else does, object and status.
func (c cluster) edit(namespace, name string, change func(map[string]any)) {
	c.Helper()
	wanted := c.raw(namespace, name)
	wanted.SetManagedFields(nil)
	change(wanted.Object)
	// As a client would send it: what is in it are JSON's types.
	data, err := json.Marshal(wanted.Object)
	if err != nil {
		c.Fatal(err)
	}
	for _, subresource := range [][]string{nil, {"status"}} {
		o := &unstructured.Unstructured{}
		if err := json.Unmarshal(data, &o.Object); err != nil {
			c.Fatal(err)
		}
		o.SetResourceVersion(c.raw(namespace, name).GetResourceVersion())
		if _, err := c.sandboxes(namespace).Update(context.Background(), o, metav1.UpdateOptions{}, subresource...); err != nil {
			c.Fatal(err)
		}
	}
}
