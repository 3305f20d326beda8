package clustercontroller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/agents"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/anchors"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/callers"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/certificates"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/claimtemplates"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/events"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/leader"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/pods"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/observability"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store/kube"
	"github.com/flux-sandbox/flux-sandbox/internal/version"
)

// Component is the name of the controller in Events and user agents.
const Component = "flux-sandbox-controller"

// controller is the process.
type controller struct {
	Config
	log      *slog.Logger
	rest     *rest.Config
	client   kubernetes.Interface
	registry *prometheus.Registry
	term     *termMetrics

	store     *kube.Store
	agents    *agents.Agents
	volumes   *volumes.Volumes
	authority *certificates.Authority
	// clientCert is shown to agents, serverCert to callers.
	clientCert, serverCert *identity.Renewer
	events                 *events.Recorder
	// cluster tells this cluster from another that uses the same nodes one day.
	cluster string
	leading prometheus.Gauge
	// tenants knows the Namespaces.
	tenants *tenants
	pools   *pools
}

// Run runs the controller until ctx ends. ready is called once it serves, with the addresses of the API and of the
// service for certificates.
func Run(ctx context.Context, config Config, ready func(api, certificates string)) error {
	config, err := config.withDefaults()
	if err != nil {
		return err
	}
	c := &controller{Config: config, registry: observability.NewRegistry(), term: &termMetrics{}, pools: newPools()}
	if c.log, err = observability.NewLogger(config.Log); err != nil {
		return err
	}
	klog.SetSlogLogger(c.log.With("component", "client-go"))
	c.leading = prometheus.NewGauge(prometheus.GaugeOpts{Name: "flux_controller_leading", Help: "1 while this replica leads."})
	c.registry.MustRegister(c.leading)
	if err := c.connect(ctx); err != nil {
		return err
	}
	defer c.events.Close()
	defer c.store.Close()
	defer c.pools.close()
	return c.run(ctx, ready)
}

// connect makes the clients, reads what there is, and comes by the CA.
func (c *controller) connect(ctx context.Context) (err error) {
	if c.rest, err = restConfig(c.Config); err != nil {
		return err
	}
	if c.client, err = kubernetes.NewForConfig(c.rest); err != nil {
		return fmt.Errorf("make a client of the API server: %w", err)
	}
	own, err := c.client.CoreV1().Namespaces().Get(ctx, c.Namespace, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read our own namespace: %w", err)
	}
	c.cluster = string(own.UID)
	if c.authority, err = certificates.NewAuthority(ctx, certificates.AuthorityOptions{Client: c.client, Namespace: c.Namespace, Logger: c.log.With("component", "certificates")}); err != nil {
		return err
	}
	c.clientCert, c.serverCert = c.authority.ClientRenewer(), c.authority.ServerRenewer(c.Names...)
	c.agents, err = agents.New(agents.Config{Client: c.client, Namespace: c.Namespace, Service: c.AgentService, Log: c.log.With("component", "agents"),
		Credentials: c.agentCredentials})
	if err != nil {
		return err
	}
	options := volumes.Options{DirectDrivers: c.DirectDrivers, Tenant: func(namespace string) string { return c.tenants.known(namespace) }}
	if options.Anchors, err = c.anchors(ctx); err != nil {
		return err
	}
	if c.volumes, err = volumes.New(c.client, options); err != nil {
		return err
	}
	if c.events, err = events.NewRecorder(c.client, Component); err != nil {
		return err
	}
	if c.store, err = kube.Open(ctx, c.rest, kube.Options{Lease: c.lease(), Log: c.log.With("component", "store")}); err != nil {
		c.events.Close()
	}
	return err
}

// anchors makes what makes anchors; nil, and volumes that need them are refused, where there is no image for them.
func (c *controller) anchors(ctx context.Context) (*anchors.Anchors, error) {
	image := c.AnchorImage
	if image == "" {
		own, err := c.client.CoreV1().Pods(c.Namespace).Get(ctx, c.Identity, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			c.log.Warn("anchors are off: we are no Pod whose image they could have, and anchor-image is not set", "identity", c.Identity)
			return nil, nil
		case err != nil:
			return nil, fmt.Errorf("find our own image, for anchors: %w", err)
		}
		image = own.Spec.Containers[0].Image
	}
	return anchors.New(anchors.Options{Client: c.client, Image: image, PullSecrets: c.AnchorPullSecrets, Grace: c.AnchorGrace, Rate: c.AnchorRate, Burst: c.AnchorBurst,
		Log: c.log.With("component", "anchors")})
}

func restConfig(c Config) (*rest.Config, error) {
	config, err := rest.InClusterConfig()
	if c.Kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	config.UserAgent = Component + "/" + version.String()
	config.QPS, config.Burst = c.QPS, c.Burst
	return config, nil
}

func (c *controller) agentCredentials(node string) (credentials.TransportCredentials, error) {
	tls, err := identity.Credentials{Certificate: c.clientCert.Certificate, Bundle: c.authority.Bundle}.ControllerClient(node)
	return credentials.NewTLS(tls), err
}

// run runs every part until ctx ends or one fails.
func (c *controller) run(ctx context.Context, ready func(api, certificates string)) error {
	group, ctx := errgroup.WithContext(ctx)
	forever := func(run func(context.Context)) {
		group.Go(func() error {
			run(ctx)
			return nil
		})
	}
	forever(c.authority.Run)
	forever(c.clientCert.Run)
	forever(c.serverCert.Run)
	group.Go(func() error { return c.agents.Run(ctx) })
	forever(c.volumes.Run)
	forever(c.openPools)

	refused := func(err error) { c.log.Warn("a connection was refused", "error", err) }
	server := identity.Credentials{Certificate: c.serverCert.Certificate, Bundle: c.authority.Bundle}.ControllerServer()
	issued := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "flux_controller_certificate_requests_total",
		Help: "Requests of agents for a certificate, by result."}, []string{"result"})
	c.registry.MustRegister(issued)
	signer, err := certificates.NewService(certificates.ServiceOptions{Reviews: c.client.AuthenticationV1().TokenReviews(), Authority: c.authority,
		ServiceAccount: types.NamespacedName{Namespace: c.Namespace, Name: c.AgentServiceAccount}, Logger: c.log.With("component", "certificates"),
		Issued: func(reason fault.Reason) {
			if reason == "" {
				reason = "OK"
			}
			issued.WithLabelValues(string(reason)).Inc()
		}})
	if err != nil {
		return err
	}
	asker, err := c.callers(forever)
	if err != nil {
		return err
	}
	api, err := grpcapi.New(grpcapi.Options{Store: c.store, Agents: c.agents, Authenticator: asker, Authorizer: asker, Pools: c.pools.get, Logger: c.log.With("component", "api"),
		ServerOptions: []grpc.ServerOption{grpc.Creds(credentials.NewTLS(server))}})
	if err != nil {
		return err
	}
	apiListener, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listen for the API: %w", err)
	}
	signerListener, err := net.Listen("tcp", c.CertificateListen)
	if err != nil {
		return fmt.Errorf("listen for certificates: %w", err)
	}
	wait, err := observability.Serve(ctx, c.MetricsListen, prometheus.Gatherers{c.registry, c.term}, c.ready)
	if err != nil {
		return err
	}
	group.Go(wait)
	signing := certificates.NewServer(signer, server, refused)
	group.Go(func() error { return signing.Serve(signerListener) })
	group.Go(func() error {
		<-ctx.Done()
		signing.Stop()
		return nil
	})
	group.Go(func() error { return api.Serve(ctx, apiListener) })
	group.Go(func() error {
		return leader.Run(ctx, leader.Config{Client: c.client, Namespace: c.Namespace, Name: c.Lease, Identity: c.Identity, Log: c.log.With("component", "leader"),
			LeaseDuration: c.LeaseDuration, RenewDeadline: c.RenewDeadline, RetryPeriod: c.RetryPeriod}, c.lead)
	})
	c.log.Info("serving", "api", apiListener.Addr().String(), "certificates", signerListener.Addr().String())
	ready(apiListener.Addr().String(), signerListener.Addr().String())
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	c.log.Info("stopped; sandboxes and their volumes go on")
	return nil
}

// callers makes what asks the API server about callers, with a client of its own: the questions that strangers can make us
// ask take nothing away from the controller's writes.
func (c *controller) callers(forever func(func(context.Context))) (*callers.Callers, error) {
	config := rest.CopyConfig(c.rest)
	config.QPS, config.Burst = callerQPS, callerBurst
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of the API server: %w", err)
	}
	namespaces := informers.NewSharedInformerFactory(client, 0).Core().V1().Namespaces()
	forever(namespaces.Informer().RunWithContext)
	c.tenants = &tenants{lister: namespaces.Lister(), client: client.CoreV1().Namespaces()}
	return callers.New(callers.Options{
		Tokens: client.AuthenticationV1().TokenReviews(), Access: client.AuthorizationV1().SubjectAccessReviews(),
		Namespaces: namespaces.Lister(), NamespaceClient: client.CoreV1().Namespaces(),
		APIServerTokens: c.APIServerTokens, Audience: c.Audience, Logger: c.log.With("component", "callers"),
	})
}

// callerQPS and callerBurst bound the questions about callers.
const (
	callerQPS   = 100
	callerBurst = 200
)

// ready says whether calls can be answered.
func (c *controller) ready() error {
	if _, err := c.serverCert.Certificate(); err != nil {
		return err
	}
	select {
	case <-c.agents.Synced():
		return nil
	default:
		return errors.New("the nodes are not read yet")
	}
}

// knowAll returns when all that was written in the terms before this one is known; false when the term ends first. The watch of the
// sandboxes may be behind by any time, while that of the Pods begins with the term: a sandbox that is gone with its Pod would be
// one whose Pod is missing, and get another, with new claims that nobody deletes.
func (c *controller) knowAll(ctx context.Context) bool {
	return wait.PollUntilContextCancel(ctx, knowAgain, true, func(ctx context.Context) (bool, error) {
		err := c.store.Refresh(ctx)
		if err != nil && ctx.Err() == nil {
			c.log.Warn("the sandboxes cannot be read, so the term does not begin; trying again", "error", err)
		}
		return err == nil, nil
	}) == nil
}

// knowAgain is the time between two tries of knowAll.
const knowAgain = 200 * time.Millisecond

// lead serves one term as leader.
func (c *controller) lead(ctx context.Context, identity string) error {
	epoch, err := c.store.NextEpochOf(ctx, identity)
	if err != nil {
		return err
	}
	for _, ready := range []<-chan struct{}{c.clientCert.Ready(), c.volumes.Synced()} {
		select {
		case <-ready:
		case <-ctx.Done():
			return nil
		}
	}
	if !c.knowAll(ctx) {
		return nil
	}
	c.leading.Set(1)
	defer c.leading.Set(0)
	registry := prometheus.NewRegistry()
	defer c.term.set(registry)()
	// Only the leader watches Pods, and the claims that are made for them.
	ofTerm, cancel := context.WithCancel(ctx)
	var ofPools sync.WaitGroup
	defer ofPools.Wait()
	podsOf, err := pods.New(ofTerm, c.client, c.log.With("component", "pods"))
	if err != nil {
		cancel()
		return err
	}
	defer podsOf.Wait()
	defer cancel()
	claims, err := claimtemplates.New(ofTerm, c.client, c.log.With("component", "claimtemplates"))
	if err != nil {
		return err
	}
	defer claims.Wait()
	defer cancel()
	s, err := scheduler.New(scheduler.Config{Store: c.store, Agents: c.agents, Epoch: epoch, LeaseUID: c.cluster + "/" + c.Lease,
		Logger: c.log.With("component", "scheduler"), Registerer: registry, Events: c.events, Resolver: c.volumes, Keeper: c.volumes, Pods: podsOf, Claims: claims})
	if err != nil {
		return err
	}
	ofPools.Go(func() { c.keepPools(ofTerm, identity, s, registry) })
	ofPools.Go(func() { c.volumes.Withdraw(ofTerm, c.events, c.log.With("component", "volumes")) })
	c.log.Info("leading", "epoch", epoch, "identity", identity)
	defer c.log.Info("no longer leading", "epoch", epoch)
	return s.Run(ctx)
}
