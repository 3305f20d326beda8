package leader_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/flux-sandbox/flux-sandbox/internal/kube/leader"
)

// replica stands for election, and tells of its terms.
type replica struct {
	terms chan string // identities
	lost  chan struct{}
	stop  func()
}

func stand(t *testing.T, client *fake.Clientset, name string) *replica {
	r := &replica{terms: make(chan string, 10), lost: make(chan struct{}, 10)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := leader.Run(ctx, leader.Config{Client: client, Namespace: "flux", Name: "leader", Identity: name,
			Log: slog.New(slog.DiscardHandler)}, func(ctx context.Context, identity string) error {
			r.terms <- identity
			<-ctx.Done()
			r.lost <- struct{}{}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}()
	r.stop = func() {
		cancel()
		<-done
	}
	return r
}

func holder(t *testing.T, client *fake.Clientset) string {
	lease, err := client.CoordinationV1().Leases("flux").Get(t.Context(), "leader", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return *lease.Spec.HolderIdentity
}

func TestOneLeadsAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		a := stand(t, client, "a")
		first := <-a.terms
		if got := holder(t, client); got != first || !strings.HasPrefix(first, "a_") {
			t.Errorf("%q leads, the Lease says %q", first, got)
		}
		b := stand(t, client, "b")
		select {
		case second := <-b.terms:
			t.Fatalf("%q and %q lead", first, second)
		case <-a.lost:
			t.Fatal("the first lost its lease")
		case <-time.After(time.Minute): // of the bubble's clock
		}
		// Who stops gives the Lease up when its term has ended: the other needs not wait for it to run out.
		before := time.Now()
		a.stop()
		<-a.lost
		second := <-b.terms
		if waited := time.Since(before); waited >= leader.DefaultLeaseDuration || !strings.HasPrefix(second, "b_") {
			t.Errorf("%q leads after %s", second, waited)
		}
		b.stop()
	})
}

// A leader that cannot renew its lease loses its term and nothing else: it is elected again, under another identity.
func TestALostLeaseIsNotTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		var away atomic.Bool
		client.PrependReactor("*", "leases", func(k8stesting.Action) (bool, runtime.Object, error) {
			return away.Load(), nil, errors.New("the API server is away")
		})
		r := stand(t, client, "a")
		first := <-r.terms
		away.Store(true)
		<-r.lost
		away.Store(false)
		if second := <-r.terms; second == first {
			t.Errorf("both terms have the identity %q", first)
		}
		r.stop()
	})
}
