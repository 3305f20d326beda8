package clustercontroller

import (
	"cmp"
	"net"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/observability"
)

// Config is what the controller is told by its flags.
type Config struct {
	// Kubeconfig is the file that says how the API server is reached; the Pod's own ServiceAccount when empty.
	Kubeconfig string
	// Namespace is the controller's own: its Lease, its CA and the agents' Service are there.
	Namespace string
	// Identity names this replica: its Pod's name.
	Identity string
	// Listen is the TCP address of the gRPC API, CertificateListen that of the service that signs agents' certificates,
	// MetricsListen that of /metrics, /healthz and /readyz.
	Listen, CertificateListen, MetricsListen string
	// Names are the DNS names by which the gRPC services are called.
	Names []string
	// AgentService is the Service whose endpoints are the agents, AgentServiceAccount the agents' ServiceAccount.
	AgentService, AgentServiceAccount string
	// Lease is the name of the leaders' Lease; its times are the defaults of package leader when zero.
	Lease                                     string
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// Audience is what callers' tokens must be for; that of package callers when empty. APIServerTokens accepts those that
	// are for the API server itself, too.
	Audience        string
	APIServerTokens bool
	// DirectDrivers are the CSI drivers whose volumes the agents publish themselves; that of package csidriver when nil.
	DirectDrivers []string
	// AnchorImage is the image of the Pods that have kubelet mount volumes (package kube/anchors); the controller's own when
	// empty. AnchorGrace is how long one that nobody uses is kept, AnchorRate (in a second) and AnchorBurst bound how fast they
	// are made; the defaults of that package when zero.
	AnchorImage string
	// AnchorPullSecrets are the names of the Secrets that it is pulled with; they are looked for in the namespace of each anchor,
	// which is its claim's.
	AnchorPullSecrets []string
	AnchorGrace       time.Duration
	AnchorRate        float64
	AnchorBurst       int
	// QPS and Burst bound the calls to the API server; the defaults when zero.
	QPS   float32
	Burst int
	// Log says how to log.
	Log observability.LogConfig
}

// The defaults of Config.
const (
	DefaultListen            = ":9443"
	DefaultCertificateListen = ":9444"
	DefaultMetricsListen     = ":9464"
	DefaultAgentService      = "flux-sandbox-agent"
	DefaultServiceAccount    = "flux-sandbox-agent"
	DefaultLease             = "flux-sandbox-controller"
	// DefaultQPS and DefaultBurst are no limit in practice: the API server's own priority and fairness is the one that
	// knows what it can take.
	DefaultQPS   = 1000
	DefaultBurst = 2000
)

func (c Config) withDefaults() (Config, error) {
	for field, value := range map[string]string{"namespace": c.Namespace, "identity": c.Identity} {
		if value == "" {
			return c, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "%s is not set: in a Pod it comes from the downward API", field)
		}
	}
	c.Listen = cmp.Or(c.Listen, DefaultListen)
	c.CertificateListen = cmp.Or(c.CertificateListen, DefaultCertificateListen)
	c.MetricsListen = cmp.Or(c.MetricsListen, DefaultMetricsListen)
	c.AgentService = cmp.Or(c.AgentService, DefaultAgentService)
	c.AgentServiceAccount = cmp.Or(c.AgentServiceAccount, DefaultServiceAccount)
	c.Lease = cmp.Or(c.Lease, DefaultLease)
	if c.DirectDrivers == nil {
		c.DirectDrivers = []string{csidriver.Name}
	}
	c.QPS = cmp.Or(c.QPS, DefaultQPS)
	c.Burst = cmp.Or(c.Burst, DefaultBurst)
	for field, address := range map[string]string{"listen": c.Listen, "certificate-listen": c.CertificateListen, "metrics-listen": c.MetricsListen} {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return c, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "%s %q: must be host:port: %w", field, address, err)
		}
	}
	if len(c.Names) == 0 {
		c.Names = []string{"flux-sandbox-controller." + c.Namespace + ".svc", "flux-sandbox-controller." + c.Namespace, "localhost"}
	}
	return c, nil
}

func (c Config) lease() types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: c.Lease}
}
