package kube

import (
	"context"
	"errors"
	"iter"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

// What the API server refuses has a kind, a reason and its words.
func TestErrors(t *testing.T) {
	c := newCluster(t)
	mine := c.open(nil).Sandboxes()
	client := kubernetes.NewForConfigOrDie(c.config)
	ending := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "ending-"}}
	ending, err := client.CoreV1().Namespaces().Create(t.Context(), ending, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.CoreV1().Namespaces().Delete(t.Context(), ending.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	create := func(namespace string, change func(*sandbox)) func() error {
		return func() error {
			o := newSandbox("a")
			o.Namespace = namespace
			change(o)
			_, err := mine.Create(t.Context(), o)
			return err
		}
	}
	nothing := func(*sandbox) {}
	must[*sandbox](t)(mine.Create(t.Context(), newSandbox("b")))
	for _, tc := range []struct {
		name    string
		call    func() error
		kind    error
		reason  fault.Reason
		message string
	}{
		{"no Namespace", create("nowhere", nothing), errdefs.ErrFailedPrecondition, store.NoNamespace, "create sandbox nowhere/a: there is no Namespace nowhere: create it first"},
		{"a Namespace that ends", create(ending.Name, nothing), errdefs.ErrFailedPrecondition, store.NoNamespace, "create sandbox " + ending.Name + "/a: the Namespace " + ending.Name + " is being deleted"},
		{"a field too long", create("default", func(s *sandbox) { s.Spec.Group = strings.Repeat("g", 64) }), errdefs.ErrInvalidArgument, fault.InvalidRequest, "create sandbox default/a: spec.group: Too long: may not be more than 63 bytes"},
		{"an update that is not valid", func() error {
			_, err := mine.UpdateSpec(t.Context(), keyOf("b"), none, func(s *sandbox) error { s.Labels = map[string]string{"a b": ""}; return nil })
			return err
		}, errdefs.ErrInvalidArgument, fault.InvalidRequest, `update sandbox default/b: metadata.labels: Invalid value: "a b"`},
	} {
		err := tc.call()
		if !errors.Is(err, tc.kind) || fault.ReasonOf(err) != tc.reason || !strings.HasPrefix(err.Error(), tc.message) {
			t.Errorf("%s: %v (reason %s)", tc.name, err, fault.ReasonOf(err))
		}
	}
}

// A user without rights is told that it lacks them.
func TestForbidden(t *testing.T) {
	newCluster(t)
	s, err := newRESTClient(apiserver.Shared(t).As("stranger"))
	if err != nil {
		t.Fatal(err)
	}
	stranger := newCollection(s, sandboxKind)
	_, err = stranger.Create(t.Context(), newSandbox("a"))
	if !errdefs.IsPermissionDenied(err) || fault.ReasonOf(err) != store.Forbidden || !strings.Contains(err.Error(), `cannot create resource "sandboxes"`) {
		t.Errorf("the error is %v", err)
	}
	if _, err = stranger.Get(t.Context(), keyOf("a")); !errdefs.IsPermissionDenied(err) {
		t.Errorf("the error is %v", err)
	}
}

// While the API server is away reads go on and writes say so; when it is back, so is everything.
func TestTheServerGoesAndComesBack(t *testing.T) {
	server := apiserver.Start(t)
	// Without the CRDs there is nothing to open.
	api, err := newRESTClient(server.Config())
	if err != nil {
		t.Fatal(err)
	}
	bare := newCollection(api, sandboxKind)
	if _, err := bare.Create(t.Context(), newSandbox("a")); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "install the CRDs") {
		t.Errorf("without CRDs: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, server.Config(), Options{}); !errdefs.IsUnavailable(err) || !errors.Is(err, context.Canceled) {
		t.Errorf("Open returned %v", err)
	}

	manifests.Apply(t, server.Config(), manifests.Objects(t, "config/crd/*.yaml")...)
	s, err := Open(t.Context(), server.Config(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	mine := s.Sandboxes()
	must := must[*sandbox](t)
	made := must(mine.Create(t.Context(), newSandbox("a")))
	next, stop := iter.Pull(mine.Follow(t.Context()))
	defer stop()
	next()
	next()

	server.Stop()
	if got := must(mine.Get(t.Context(), keyOf("a"))); got.ResourceVersion != made.ResourceVersion {
		t.Error("reads do not go on")
	}
	pause := func(s *sandbox) error { s.Spec.Paused = !s.Spec.Paused; return nil }
	for what, err := range map[string]error{
		"a write":                   second(mine.UpdateSpec(t.Context(), keyOf("a"), none, pause)),
		"a creation":                second(mine.Create(t.Context(), newSandbox("b"))),
		"a deletion":                mine.Delete(t.Context(), keyOf("a"), none),
		"a read of what is unknown": second(mine.Get(t.Context(), keyOf("b"))),
	} {
		if !errdefs.IsUnavailable(err) || fault.ReasonOf(err) != store.Unavailable {
			t.Errorf("%s: %v", what, err)
		}
	}

	server.Restart(t)
	other, err := Open(t.Context(), server.Config(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	must(other.Sandboxes().UpdateSpec(t.Context(), keyOf("a"), none, pause))
	if e, _ := next(); e.Type != store.Changed || !e.Object.Spec.Paused || e.Object.UID != made.UID {
		t.Errorf("the event is %s of %+v", e.Type, e.Object)
	}
	must(mine.UpdateSpec(t.Context(), keyOf("a"), none, pause))
}

func second[T any](_ T, err error) error { return err }

// The epoch grows whatever becomes of the Lease.
func TestEpochOutlivesTheLease(t *testing.T) {
	c := newCluster(t)
	s := c.open(nil)
	leases := kubernetes.NewForConfigOrDie(c.config).CoordinationV1().Leases(lease.Namespace)
	last := int64(0)
	count := func() {
		t.Helper()
		e, err := c.open(nil).NextEpoch(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if e <= last {
			t.Errorf("epoch %d after %d", e, last)
		}
		last = e
	}
	count()
	count()
	l, err := leases.Get(t.Context(), lease.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if l.Annotations[epochAnnotation] != strconv.FormatInt(last, 10) {
		t.Errorf("the Lease says %v; the epoch is %d", l.Annotations, last)
	}
	if err := leases.Delete(t.Context(), lease.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.NextEpoch(t.Context()); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "no Lease") {
		t.Errorf("without a Lease: %v", err)
	}
	fresh := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: lease.Name, Annotations: map[string]string{"a": "b"}}}
	if _, err := leases.Create(t.Context(), fresh, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	count()
	count()

	// Who lost the Lease gets none, also when nobody told it.
	l, err = leases.Get(t.Context(), lease.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l.Spec.HolderIdentity = ptr.To("new")
	if _, err := leases.Update(t.Context(), l, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if e, err := s.NextEpochOf(t.Context(), "old"); !errdefs.IsConflict(err) {
		t.Errorf("the old leader got epoch %d: %v", e, err)
	}
	if e, err := s.NextEpochOf(t.Context(), "new"); err != nil || e <= last {
		t.Errorf("epoch %d after %d: %v", e, last, err)
	}
	if err := s.Leads(t.Context(), "old"); !errdefs.IsConflict(err) {
		t.Errorf("the old leader leads still: %v", err)
	}
	if err := s.Leads(t.Context(), "new"); err != nil {
		t.Error(err)
	}
	if err := leases.Delete(t.Context(), lease.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Leads(t.Context(), "new"); !errdefs.IsConflict(err) {
		t.Errorf("somebody leads without a Lease: %v", err)
	}
}
