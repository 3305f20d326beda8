package clusterdriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/provisioner"
	"github.com/flux-sandbox/flux-sandbox/internal/observability"
)

// Config is what the process is told by its flags.
type Config struct {
	csidriver.Config
	// Socket and Registration are the driver's sockets; below KubeletDir, where kubelet expects them, when empty.
	KubeletDir, Socket, Registration string
	// Provision makes the volumes of claims. Without it the process knows no API server, and Config.Domain is what it is
	// told; kubelet registers it all the same.
	Provision bool
	// Kubeconfig is the file that says how the API server is reached; the Pod's own ServiceAccount when empty.
	Kubeconfig string
	// MetricsListen is the TCP address of /metrics, /healthz and /readyz; off when empty.
	MetricsListen string
	// Log says how to log.
	Log observability.LogConfig
}

// The defaults of Config.
const (
	DefaultKubeletDir    = "/var/lib/kubelet"
	DefaultPool          = "/var/lib/flux-sandbox/csi"
	DefaultMetricsListen = ":9472"
)

func (c Config) sockets() csidriver.Sockets {
	s := csidriver.Sockets{CSI: c.Socket, Registration: c.Registration}
	if s.CSI == "" {
		s.CSI = filepath.Join(c.KubeletDir, "plugins", csidriver.Name, "csi.sock")
	}
	if s.Registration == "" {
		s.Registration = filepath.Join(c.KubeletDir, "plugins_registry", csidriver.Name+"-reg.sock")
	}
	return s
}

// process is the driver's process.
type process struct {
	Config
	log      *slog.Logger
	registry *prometheus.Registry
	driver   *csidriver.Driver
	// client and provisioner are nil without an API server.
	client      kubernetes.Interface
	provisioner *provisioner.Provisioner
	calls       *prometheus.CounterVec
	// serving is closed once volumes are published, known once kubelet may register the driver.
	serving, known chan struct{}
}

// Run runs the driver until ctx ends. ready is called once it publishes volumes, with the socket. Published volumes outlive
// it.
func Run(ctx context.Context, config Config, account *Account, ready func(socket string)) error {
	defer account.close()
	log, err := observability.NewLogger(config.Log)
	if err != nil {
		return err
	}
	p := &process{Config: config, log: log.With("node", config.Node), registry: observability.NewRegistry(),
		serving: make(chan struct{}), known: make(chan struct{})}
	klog.SetSlogLogger(p.log.With("component", "client-go"))
	var to *rest.Config
	if config.Provision {
		if to, err = account.client(config.Kubeconfig); err != nil {
			return err
		}
	}
	p.checkTools()
	p.calls = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "flux_csi_calls_total", Help: "Calls of the driver that change something, by method and result (ok, or the reason)."},
		[]string{"method", "result"})
	p.Called = p.called
	if p.driver, err = csidriver.New(ctx, p.Config.Config); err != nil {
		return err
	}
	defer p.driver.Close()
	if to != nil {
		if p.client, err = kubernetes.NewForConfig(to); err != nil {
			return fmt.Errorf("make a client of the API server: %w", err)
		}
		if p.provisioner, err = provisioner.New(ctx, provisioner.Config{Client: p.client, Node: p.Node, Driver: p.driver, DomainKey: p.DomainKey,
			Labels: p.labels(), Metrics: p.registry}); err != nil {
			return err
		}
	}
	p.measure()
	if err := p.run(ctx, ready); err != nil && ctx.Err() == nil {
		return err
	}
	p.log.Info("stopped; published volumes stay")
	return nil
}

// checkTools says which filesystems cannot be made here. Volumes that are there can be used without.
func (p *process) checkTools() {
	for _, f := range []capacity.Filesystem{capacity.Ext4, capacity.XFS} {
		if err := f.CheckTool(); err != nil {
			p.log.Warn("volumes with this filesystem cannot be made on this node", "filesystem", string(f), "error", err)
		}
	}
}

func (p *process) run(ctx context.Context, ready func(socket string)) error {
	group, ctx := errgroup.WithContext(ctx)
	if p.MetricsListen != "" {
		wait, err := observability.Serve(ctx, p.MetricsListen, p.registry, p.ready)
		if err != nil {
			return err
		}
		group.Go(wait)
	}
	sockets := p.sockets()
	sockets.Register = p.known
	group.Go(func() error {
		return csidriver.Serve(ctx, p.driver, sockets, func() {
			close(p.serving)
			p.log.Info("serving", "socket", sockets.CSI, "pool", p.Pool)
			ready(sockets.CSI)
		})
	})
	if p.client == nil {
		close(p.known)
		return group.Wait()
	}
	group.Go(func() error { return p.provision(ctx) })
	return group.Wait()
}

// provision waits for the node, whose domain kubelet is told, and makes volumes.
func (p *process) provision(ctx context.Context) error {
	if err := p.provisioner.Follow(ctx); err != nil {
		return err
	}
	close(p.known)
	p.provisioner.Run(ctx)
	return nil
}

// labels is told the node's labels.
func (p *process) labels() func(map[string]string) {
	domain := p.Domain
	return func(labels map[string]string) {
		if now := labels[p.DomainKey]; now != domain {
			domain = now
			p.driver.SetDomain(now)
			p.log.Info("the node's topology domain", "key", p.DomainKey, "domain", now)
		}
	}
}

// ready says what is missing yet.
func (p *process) ready() error {
	type part struct {
		done    <-chan struct{}
		missing string
	}
	parts := []part{{p.serving, "the pool is being repaired"}, {p.known, "the node has not been read from the API server yet"}}
	if p.provisioner != nil {
		parts = append(parts, part{p.provisioner.Synced(), "claims, volumes and classes have not been read yet"})
	}
	for _, part := range parts {
		select {
		case <-part.done:
		default:
			return errors.New(part.missing)
		}
	}
	return nil
}
