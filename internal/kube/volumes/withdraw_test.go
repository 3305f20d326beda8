package volumes_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// told keeps Events.
type told struct {
	mu  sync.Mutex // guards all
	all []string
}

func (e *told) About(o runtime.Object, eventType, reason, message string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	claim := o.(*corev1.PersistentVolumeClaim)
	e.all = append(e.all, strings.Join([]string{claim.Kind, claim.Namespace, claim.Name, eventType, reason, message}, " "))
}

// claimFor makes a claim for a PersistentVolume.
func (r *real) claimFor(namespace, name, pv string, labels map[string]string) *corev1.PersistentVolumeClaim {
	r.t.Helper()
	c, err := r.admin.CoreV1().PersistentVolumeClaims(namespace).Create(r.t.Context(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: pv, StorageClassName: ptr.To(""),
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}}},
	}, metav1.CreateOptions{})
	r.must(err)
	return c
}

// bound plays the controller of PersistentVolumes, as far as the volume: the claim's own state comes later.
func (r *real) bound(pv string, to *corev1.PersistentVolumeClaim) {
	r.t.Helper()
	api := r.admin.CoreV1().PersistentVolumes()
	o, err := api.Get(r.t.Context(), pv, metav1.GetOptions{})
	r.must(err)
	o.Spec.ClaimRef = &corev1.ObjectReference{Namespace: to.Namespace, Name: to.Name, UID: to.UID}
	o, err = api.Update(r.t.Context(), o, metav1.UpdateOptions{})
	r.must(err)
	o.Status.Phase = corev1.VolumeBound
	_, err = api.UpdateStatus(r.t.Context(), o, metav1.UpdateOptions{})
	r.must(err)
}

// Of two Namespaces that name one free volume one gets it. The other's sandbox is told who has it, if it may know that, and the claim
// that was made for it is deleted; no other claim is.
func TestWhoIsLateForAVolumeLeavesNoClaim(t *testing.T) {
	r := startReal(t, "raced")
	first, second, third := r.namespace+"-first", r.namespace+"-second", r.namespace+"-third"
	tenants := map[string]string{first: "alice", second: "alice", third: "bob"}
	for namespace := range tenants {
		r.namespaced(namespace)
	}
	v, err := volumes.New(kubernetes.NewForConfigOrDie(r.server.As("controller")), volumes.Options{Tenant: func(namespace string) string { return tenants[namespace] }})
	r.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { v.Run(ctx) })
	<-v.Synced()
	pv, free, old := r.namespace+"-pv", r.namespace+"-free", r.namespace+"-old"
	for _, name := range []string{pv, free, old} {
		r.volume(name, nil)
	}
	claimed := func(namespace, name string) *corev1.PersistentVolumeClaim {
		t.Helper()
		var c *corev1.PersistentVolumeClaim
		testenv.Eventually(t, time.Minute, "there is claim "+namespace+"/"+name, func() bool {
			c, err = r.admin.CoreV1().PersistentVolumeClaims(namespace).Get(t.Context(), name, metav1.GetOptions{})
			return err == nil
		})
		return c
	}
	// Each wants the volume, and has a claim of its own made.
	results := map[string]chan error{}
	waits := make(chan error, 100)
	for _, namespace := range []string{first, second, third} {
		results[namespace] = make(chan error, 1)
		go func() {
			_, err := v.Resolve(t.Context(), scheduler.Wish{TopologyKey: topologyKey, Waits: func(why error) { waits <- why },
				Sandbox: &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "s"}, Spec: v1alpha1.SandboxSpec{TenantID: tenants[namespace]}},
				Volume:  &v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePV, Source: pv, Mode: v1alpha1.VolumeModeReadWrite}}, "n1")
			results[namespace] <- err
		}()
		claimed(namespace, "flux-"+pv)
	}
	if why := <-waits; fault.ReasonOf(why) != fault.VolumeNotBound || !strings.HasPrefix(why.Error(), "PersistentVolume "+pv+" is not bound yet to claim ") {
		t.Errorf("what it waits for is %v", why)
	}
	ours := claimed(first, "flux-"+pv).Labels
	// Beside these: a claim that somebody made himself, one of ours whose volume is free, one that has its volume and does not
	// say so yet, and one that nobody waits for any more.
	r.claimFor(third, "by-hand", pv, nil)
	r.claimFor(third, "flux-"+free, free, ours)
	r.bound(old, r.claimFor(first, "flux-"+old, old, ours))
	r.claimFor(second, "flux-"+old, old, ours)

	winner := claimed(first, "flux-"+pv)
	r.bound(pv, winner)
	for namespace, want := range map[string]string{
		second: "PersistentVolume " + pv + " is bound to claim flux-" + pv + " of namespace " + first + ", and the sandbox is in " + second + ": use a volume that is free, or a claim",
		third:  "PersistentVolume " + pv + " is bound to a claim of another namespace than the sandbox's " + third + ": use a volume that is free, or a claim",
	} {
		if err := <-results[namespace]; fault.ReasonOf(err) != fault.SourceDenied || err.Error() != want {
			t.Errorf("in %s: %v", namespace, err)
		}
	}
	events := &told{}
	running.Go(func() { v.Withdraw(ctx, events, slog.New(slog.DiscardHandler)) })
	goes := func(namespace, name string) {
		t.Helper()
		testenv.Eventually(t, time.Minute, "claim "+namespace+"/"+name+" is deleted", func() bool {
			c, err := r.admin.CoreV1().PersistentVolumeClaims(namespace).Get(t.Context(), name, metav1.GetOptions{})
			return err != nil || c.DeletionTimestamp != nil
		})
	}
	goes(second, "flux-"+pv)
	goes(third, "flux-"+pv)
	goes(second, "flux-"+old)
	// The volume that is free yet is taken from the one of ours that has waited for it.
	r.bound(free, r.claimFor(first, "by-hand", free, nil))
	goes(third, "flux-"+free)
	winner.Status.Phase = corev1.ClaimBound
	_, err = r.admin.CoreV1().PersistentVolumeClaims(first).UpdateStatus(t.Context(), winner, metav1.UpdateOptions{})
	r.must(err)
	r.must(<-results[first])
	for _, c := range []*corev1.PersistentVolumeClaim{claimed(first, "flux-"+pv), claimed(first, "flux-"+old), claimed(first, "by-hand"), claimed(third, "by-hand")} {
		if c.DeletionTimestamp != nil {
			t.Errorf("claim %s/%s is deleted", c.Namespace, c.Name)
		}
	}
	testenv.Eventually(t, time.Minute, "an Event tells of each", func() bool {
		events.mu.Lock()
		defer events.mu.Unlock()
		return len(events.all) == 4
	})
	if want := "PersistentVolumeClaim " + third + " flux-" + free + " Warning ClaimWithdrawn deleted the claim, which was made for PersistentVolume " + free + ": another claim has it by now"; events.all[3] != want {
		t.Errorf("%q", events.all)
	}
}
