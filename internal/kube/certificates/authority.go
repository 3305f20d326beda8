package certificates

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/internal/identity"
)

// The names of the objects, where Options name no others, and the key of the bundle in the ConfigMap.
const (
	DefaultSecret    = "flux-sandbox-ca"
	DefaultConfigMap = "flux-sandbox-ca-bundle"
	BundleKey        = "ca.crt"
)

// The ends of the names of a CA's two files in the Secret.
const (
	certSuffix = ".crt"
	keySuffix  = ".key"
)

const (
	// lookAgain is the longest time between two looks at what follows from the CAs' age. It costs two reads.
	lookAgain = 24 * time.Hour
	// conflicts is how often a write is tried again because another replica wrote meanwhile.
	conflicts = 5
)

// AuthorityOptions are what an Authority is made of.
type AuthorityOptions struct {
	// Client and Namespace, the controller's own, are required.
	Client    kubernetes.Interface
	Namespace string
	// Secret and ConfigMap are names; DefaultSecret and DefaultConfigMap when empty.
	Secret, ConfigMap string
	// Clock is the system's when nil.
	Clock clock.Clock
	// Logger is slog's default when nil.
	Logger *slog.Logger
}

// Authority is the CAs of the installation. Methods may be called from any goroutine.
type Authority struct {
	options AuthorityOptions
	log     *slog.Logger

	mu  sync.RWMutex // guards cas
	cas identity.Authorities
}

// NewAuthority reads the CAs, makes the first one if there is none, and publishes the bundle. Call Run to follow
// changes. Errors: the API server's; and a Secret that holds something else, which is left alone.
func NewAuthority(ctx context.Context, options AuthorityOptions) (*Authority, error) {
	if options.Client == nil || options.Namespace == "" {
		return nil, errors.New("certificates: Client and Namespace are required")
	}
	if options.Secret == "" {
		options.Secret = DefaultSecret
	}
	if options.ConfigMap == "" {
		options.ConfigMap = DefaultConfigMap
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	a := &Authority{options: options, log: options.Logger}
	return a, a.reconcile(ctx)
}

// Bundle is the CAs to trust now.
func (a *Authority) Bundle() (*identity.Bundle, error) {
	return a.authorities().Bundle(a.options.Clock.Now())
}

func (a *Authority) authorities() identity.Authorities {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.cas
}

// Agent signs the certificate of a node's agent.
func (a *Authority) Agent(node string, key crypto.PublicKey) (*identity.Issued, error) {
	return a.sign(func(ca *identity.CA, now time.Time) ([][]byte, error) { return ca.SignAgent(now, node, key) })
}

func (a *Authority) sign(sign func(*identity.CA, time.Time) ([][]byte, error)) (*identity.Issued, error) {
	cas, now := a.authorities(), a.options.Clock.Now()
	ca, err := cas.Signer(now)
	if err != nil {
		return nil, err
	}
	bundle, err := cas.Bundle(now)
	if err != nil {
		return nil, err
	}
	chain, err := sign(ca, now)
	return &identity.Issued{Chain: chain, Bundle: bundle}, err
}

// ClientRenewer keeps the certificate with which the controller commands agents. The caller runs it.
func (a *Authority) ClientRenewer() *identity.Renewer {
	return a.renewer(identity.Controller(), x509.ExtKeyUsageClientAuth, func(ca *identity.CA, now time.Time, key crypto.PublicKey) ([][]byte, error) {
		return ca.SignController(now, key)
	})
}

// ServerRenewer keeps the certificate of the controller's gRPC servers for the DNS names of its Service. The caller
// runs it.
func (a *Authority) ServerRenewer(names ...string) *identity.Renewer {
	return a.renewer(identity.ID{}, x509.ExtKeyUsageServerAuth, func(ca *identity.CA, now time.Time, key crypto.PublicKey) ([][]byte, error) {
		return ca.SignServer(now, names, key)
	})
}

func (a *Authority) renewer(id identity.ID, usage x509.ExtKeyUsage, sign func(*identity.CA, time.Time, crypto.PublicKey) ([][]byte, error)) *identity.Renewer {
	return identity.NewRenewer(identity.RenewerOptions{
		Issuer: identity.IssuerFunc(func(_ context.Context, csr []byte) (*identity.Issued, error) {
			key, err := identity.CheckRequest(csr, id)
			if err != nil {
				return nil, err
			}
			return a.sign(func(ca *identity.CA, now time.Time) ([][]byte, error) { return sign(ca, now, key) })
		}),
		ID: id, Usage: usage, Trust: a.Bundle, Clock: a.options.Clock, Logger: a.log,
	})
}

// Run follows the Secret and the ConfigMap, and does what time brings, until ctx ends. What the API server refuses
// is tried again; meanwhile the CAs that are known go on.
func (a *Authority) Run(ctx context.Context) {
	changed := make(chan struct{}, 1)
	stop := a.watch(ctx, changed)
	defer stop()
	failures := 0
	wait := lookAgain
	for {
		timer := a.options.Clock.NewTimer(wait)
		select {
		case <-changed:
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return
		}
		timer.Stop()
		err := a.reconcile(ctx)
		if err == nil || ctx.Err() != nil {
			failures, wait = 0, lookAgain
			continue
		}
		wait = identity.Backoff(failures)
		failures++
		a.log.Warn("the CA is not up to date", "error", err, "retryIn", wait.Round(time.Millisecond))
	}
}

// watch tells changed when one of the two objects changes. The function it returns waits for its end.
func (a *Authority) watch(ctx context.Context, changed chan<- struct{}) func() {
	tell := func() {
		select {
		case changed <- struct{}{}:
		default: // it is told already
		}
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { tell() },
		UpdateFunc: func(any, any) { tell() },
		DeleteFunc: func(any) { tell() },
	}
	factory := func(name string) informers.SharedInformerFactory {
		return informers.NewSharedInformerFactoryWithOptions(a.options.Client, 0, informers.WithNamespace(a.options.Namespace),
			informers.WithTweakListOptions(func(o *metav1.ListOptions) {
				o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
			}))
	}
	secrets, configMaps := factory(a.options.Secret), factory(a.options.ConfigMap)
	// Adding a handler fails only to an informer that has stopped.
	_, _ = secrets.Core().V1().Secrets().Informer().AddEventHandler(handler)
	_, _ = configMaps.Core().V1().ConfigMaps().Informer().AddEventHandler(handler)
	secrets.Start(ctx.Done())
	configMaps.Start(ctx.Done())
	return func() {
		secrets.Shutdown()
		configMaps.Shutdown()
	}
}

// reconcile brings memory, Secret and ConfigMap to one state.
func (a *Authority) reconcile(ctx context.Context) error {
	cas, err := a.load(ctx)
	if err != nil {
		return err
	}
	a.mu.Lock()
	a.cas = cas
	a.mu.Unlock()
	return a.publish(ctx)
}

// load reads the CAs, and writes the one that is missing: the first, or a successor.
func (a *Authority) load(ctx context.Context) (identity.Authorities, error) {
	secrets := a.options.Client.CoreV1().Secrets(a.options.Namespace)
	for range conflicts {
		secret, err := secrets.Get(ctx, a.options.Secret, metav1.GetOptions{})
		found := err == nil
		if !found {
			if !apierrors.IsNotFound(err) {
				return nil, fmt.Errorf("read the CA: %w", err)
			}
			secret = &corev1.Secret{ObjectMeta: a.meta(a.options.Secret), Type: corev1.SecretTypeOpaque}
		}
		cas, err := parseSecret(secret)
		if err != nil {
			return nil, fmt.Errorf("the Secret %s/%s holds no CA that can be used: %w; put it right, or delete it to have a new CA made", a.options.Namespace, a.options.Secret, err)
		}
		now := a.options.Clock.Now()
		if !cas.NeedSuccessor(now) {
			return cas, nil
		}
		next, err := identity.NewCA(now)
		if err != nil {
			return nil, err
		}
		cas = identity.NewAuthorities(append(cas.Live(now), next)...)
		if err := fillSecret(secret, cas); err != nil {
			return nil, err
		}
		if found {
			_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
		} else {
			_, err = secrets.Create(ctx, secret, metav1.CreateOptions{})
		}
		switch {
		case err == nil:
			a.log.Info("a CA was made", "name", next.Name(), "secret", a.options.Namespace+"/"+a.options.Secret, "successor", found)
			return cas, nil
		case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err) && found:
			// Another replica, or somebody, was faster: what is stored now counts.
		default:
			return nil, fmt.Errorf("write the CA: %w", err)
		}
	}
	return nil, fmt.Errorf("write the CA: Secret %s/%s changes all the time", a.options.Namespace, a.options.Secret)
}

// parseSecret reads the CAs of a Secret, none if it is empty.
func parseSecret(secret *corev1.Secret) (identity.Authorities, error) {
	var cas []*identity.CA
	for file, cert := range secret.Data {
		name, ok := strings.CutSuffix(file, certSuffix)
		if !ok {
			continue
		}
		ca, err := identity.ParseCA(cert, secret.Data[name+keySuffix])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		cas = append(cas, ca)
	}
	if len(cas) == 0 && len(secret.Data) > 0 {
		return nil, errors.New("it has other things in it")
	}
	return identity.NewAuthorities(cas...), nil
}

// fillSecret writes the CAs into a Secret, and nothing else.
func fillSecret(secret *corev1.Secret, cas identity.Authorities) error {
	secret.Data = map[string][]byte{}
	for _, ca := range cas {
		cert, key, err := ca.PEM()
		if err != nil {
			return err
		}
		secret.Data[ca.Name()+certSuffix], secret.Data[ca.Name()+keySuffix] = cert, key
	}
	return nil
}

// publish writes the bundle. Every replica writes the same, so who is first does not matter.
func (a *Authority) publish(ctx context.Context) error {
	bundle, err := a.Bundle()
	if err != nil {
		return err
	}
	want := map[string]string{BundleKey: string(bundle.PEM())}
	configMaps := a.options.Client.CoreV1().ConfigMaps(a.options.Namespace)
	for range conflicts {
		stored, err := configMaps.Get(ctx, a.options.ConfigMap, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			_, err = configMaps.Create(ctx, &corev1.ConfigMap{ObjectMeta: a.meta(a.options.ConfigMap), Data: want}, metav1.CreateOptions{})
		case err == nil && maps.Equal(stored.Data, want):
			return nil
		case err == nil:
			stored.Data = want
			_, err = configMaps.Update(ctx, stored, metav1.UpdateOptions{})
		}
		switch {
		case err == nil:
			a.log.Info("the trust bundle was published", "configMap", a.options.Namespace+"/"+a.options.ConfigMap, "cas", len(bundle.DER()))
			return nil
		case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		default:
			return fmt.Errorf("publish the trust bundle: %w", err)
		}
	}
	return fmt.Errorf("publish the trust bundle: ConfigMap %s/%s changes all the time", a.options.Namespace, a.options.ConfigMap)
}

func (a *Authority) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: a.options.Namespace, Name: name, Labels: map[string]string{
		"app.kubernetes.io/name": "flux-sandbox", "app.kubernetes.io/managed-by": "flux-sandbox-controller",
	}}
}
