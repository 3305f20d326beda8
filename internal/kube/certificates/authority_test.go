package certificates

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	testclock "k8s.io/utils/clock/testing"

	"github.com/flux-sandbox/flux-sandbox/internal/identity"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

var (
	start  = time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)
	silent = slog.New(slog.NewTextHandler(io.Discard, nil))
)

// nearEnd is a time at which a CA that was made at start needs a successor.
var nearEnd = start.Add(identity.CAValidity - 365*24*time.Hour)

func authority(t *testing.T, client kubernetes.Interface, namespace string, at time.Time) (*Authority, *testclock.FakeClock) {
	t.Helper()
	clock := testclock.NewFakeClock(at)
	a, err := NewAuthority(t.Context(), AuthorityOptions{Client: client, Namespace: namespace, Clock: clock, Logger: silent})
	if err != nil {
		t.Fatal(err)
	}
	return a, clock
}

func secretOf(t *testing.T, client kubernetes.Interface, namespace string) *corev1.Secret {
	t.Helper()
	s, err := client.CoreV1().Secrets(namespace).Get(t.Context(), DefaultSecret, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// published is the bundle that agents mount.
func published(t *testing.T, client kubernetes.Interface, namespace string) string {
	t.Helper()
	m, err := client.CoreV1().ConfigMaps(namespace).Get(t.Context(), DefaultConfigMap, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return m.Data[BundleKey]
}

func bundlePEM(t *testing.T, a *Authority) string {
	t.Helper()
	b, err := a.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	return string(b.PEM())
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	testenv.Eventually(t, time.Minute, what, holds)
}

func inNamespace(t *testing.T, client kubernetes.Interface) string {
	t.Helper()
	ns, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "certificates-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return ns.Name
}

func realClient(t *testing.T) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(apiserver.Shared(t).Config())
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestFirstReplicaMakesTheCA(t *testing.T) {
	client := fake.NewClientset()
	first, _ := authority(t, client, "flux", start)
	secret := secretOf(t, client, "flux")
	if len(secret.Data) != 2 || !strings.Contains(published(t, client, "flux"), "BEGIN CERTIFICATE") || strings.Contains(published(t, client, "flux"), "KEY") {
		t.Errorf("stored: %v; published: %s", secret.Data, published(t, client, "flux"))
	}
	second, _ := authority(t, client, "flux", start.Add(time.Hour))
	if bundlePEM(t, first) != bundlePEM(t, second) || bundlePEM(t, first) != published(t, client, "flux") {
		t.Error("the second replica has another CA")
	}
}

// Replicas that start at the same moment, and that find at the same moment that a successor is due.
func TestReplicasConverge(t *testing.T) {
	client := realClient(t)
	namespace := inNamespace(t, client)
	for _, step := range []struct {
		at  time.Time
		cas int
	}{{start, 1}, {nearEnd, 2}, {start.Add(identity.CAValidity), 1}} {
		var wg sync.WaitGroup
		bundles := make([]string, 8)
		for i := range bundles {
			wg.Go(func() {
				clock := testclock.NewFakeClock(step.at)
				a, err := NewAuthority(context.Background(), AuthorityOptions{Client: client, Namespace: namespace, Clock: clock, Logger: silent})
				if err != nil {
					t.Errorf("replica %d: %v", i, err)
					return
				}
				if b, err := a.Bundle(); err != nil {
					t.Errorf("replica %d: %v", i, err)
				} else {
					bundles[i] = string(b.PEM())
				}
			})
		}
		wg.Wait()
		for i, b := range bundles {
			if b != published(t, client, namespace) || strings.Count(b, "BEGIN CERTIFICATE") != step.cas {
				t.Errorf("at %s replica %d trusts\n%s\npublished is\n%s", step.at, i, b, published(t, client, namespace))
			}
		}
	}
}

func TestSecretOfSomebodyElse(t *testing.T) {
	good := fake.NewClientset()
	authority(t, good, "flux", start)
	broken := secretOf(t, good, "flux").DeepCopy()
	for file := range broken.Data {
		if strings.HasSuffix(file, keySuffix) {
			broken.Data[file] = []byte("secret words")
		}
	}
	foreign := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "flux", Name: DefaultSecret}, Data: map[string][]byte{"password": []byte("secret words")}}
	for name, secret := range map[string]*corev1.Secret{"key spoiled": broken, "other things": foreign} {
		client := fake.NewClientset(secret)
		_, err := NewAuthority(t.Context(), AuthorityOptions{Client: client, Namespace: "flux", Logger: silent})
		if err == nil || !strings.Contains(err.Error(), "flux/"+DefaultSecret) || strings.Contains(err.Error(), "secret words") {
			t.Errorf("%s: %v", name, err)
		}
		if after := secretOf(t, client, "flux"); after.String() != secret.String() {
			t.Errorf("%s: it was overwritten", name)
		}
	}
	empty := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "flux", Name: DefaultSecret, Labels: map[string]string{"made-by": "chart"}}}
	client := fake.NewClientset(empty)
	authority(t, client, "flux", start)
	if s := secretOf(t, client, "flux"); len(s.Data) != 2 || s.Labels["made-by"] != "chart" {
		t.Errorf("an empty Secret was not filled: %v", s)
	}
}

// Everything that may happen to the two objects while a controller runs.
func TestRunFollows(t *testing.T) {
	client := realClient(t)
	namespace := inNamespace(t, client)
	a, clock := authority(t, client, namespace, start)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.Run(ctx)
	}()
	defer func() {
		cancel()
		<-done
	}()
	first := published(t, client, namespace)
	configMaps, secrets := client.CoreV1().ConfigMaps(namespace), client.CoreV1().Secrets(namespace)

	if err := configMaps.Delete(t.Context(), DefaultConfigMap, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a deleted bundle is published again", func() bool {
		m, err := configMaps.Get(t.Context(), DefaultConfigMap, metav1.GetOptions{})
		return err == nil && m.Data[BundleKey] == first
	})
	spoiled, err := configMaps.Get(t.Context(), DefaultConfigMap, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	spoiled.Data = map[string]string{BundleKey: "trust me", "more": "x"}
	if _, err := configMaps.Update(t.Context(), spoiled, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) {
		t.Fatal(err)
	}
	eventually(t, "a bundle that somebody changed is put right", func() bool {
		m, err := configMaps.Get(t.Context(), DefaultConfigMap, metav1.GetOptions{})
		return err == nil && m.Data[BundleKey] == first && len(m.Data) == 1
	})

	// Another replica makes the successor; this one follows.
	authority(t, client, namespace, nearEnd)
	eventually(t, "a successor is trusted", func() bool { return strings.Count(bundlePEM(t, a), "BEGIN") == 2 })
	if !strings.Contains(published(t, client, namespace), first) {
		t.Error("the first CA is no longer trusted")
	}

	// The key is in wrong hands: the operator deletes the Secret.
	if err := secrets.Delete(t.Context(), DefaultSecret, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a new CA is made and trusted alone", func() bool {
		b := bundlePEM(t, a)
		return strings.Count(b, "BEGIN") == 1 && b != first && published(t, client, namespace) == b
	})

	// Time makes a successor where nobody changes anything.
	clock.SetTime(nearEnd)
	eventually(t, "time brings a successor", func() bool {
		// Run may have looked just before the clock was set: then it looks again a day later.
		if clock.HasWaiters() && clock.Now().Before(nearEnd.Add(30*lookAgain)) {
			clock.Step(lookAgain)
		}
		return strings.Count(published(t, client, namespace), "BEGIN") == 2
	})
}

func TestOwnCertificates(t *testing.T) {
	client := fake.NewClientset()
	a, clock := authority(t, client, "flux", start)
	bundle, err := a.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		renewer *identity.Renewer
		usage   x509.ExtKeyUsage
		check   func(*tls.Certificate) bool
	}{
		"client": {a.ClientRenewer(), x509.ExtKeyUsageClientAuth, func(c *tls.Certificate) bool {
			id, err := identity.Of(c.Leaf)
			return err == nil && id == identity.Controller()
		}},
		"server": {a.ServerRenewer("controller.flux.svc"), x509.ExtKeyUsageServerAuth, func(c *tls.Certificate) bool {
			return c.Leaf.VerifyHostname("controller.flux.svc") == nil && len(c.Leaf.URIs) == 0
		}},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			tc.renewer.Run(ctx)
		}()
		<-tc.renewer.Ready()
		cert, err := tc.renewer.Certificate()
		if err != nil || !tc.check(cert) || bundle.Verify([]*x509.Certificate{cert.Leaf}, tc.usage, clock.Now()) != nil {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
		<-done
	}
}

func TestAPIServerAway(t *testing.T) {
	client, err := kubernetes.NewForConfig(unreachable())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewAuthority(t.Context(), AuthorityOptions{Client: client, Namespace: "flux", Logger: silent}); err == nil || !strings.Contains(err.Error(), "read the CA") {
		t.Errorf("NewAuthority: %v", err)
	}
}
