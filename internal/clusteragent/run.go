package clusteragent

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
	"github.com/flux-sandbox/flux-sandbox/internal/node"
	"github.com/flux-sandbox/flux-sandbox/internal/observability"
)

// Run runs the agent until ctx ends. ready is called once it serves, with the address. Sandboxes and volumes outlive it.
func Run(ctx context.Context, config Config, files *Files, ready func(address string)) error {
	log, err := observability.NewLogger(config.Log)
	if err != nil {
		return err
	}
	log = log.With("node", config.Node)
	registry := observability.NewRegistry()

	holder, err := identity.Agent(config.Node)
	if err != nil {
		return err
	}
	trust := identity.NewBundleFile(files.Trust)
	controller, err := grpc.NewClient("passthrough:///"+config.Controller,
		grpc.WithTransportCredentials(credentials.NewTLS(identity.Credentials{Bundle: trust.Bundle}.ServiceClient(config.ControllerName))))
	if err != nil {
		return fmt.Errorf("controller %s: %w", config.Controller, err)
	}
	defer controller.Close()
	attempts := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "flux_agent_certificate_requests_total",
		Help: "Requests for a certificate, by result (ok, failed)."}, []string{"result"})
	renewer := identity.NewRenewer(identity.RenewerOptions{
		Issuer: identity.NewRemoteIssuer(controller, files.Token), ID: holder, Usage: x509.ExtKeyUsageServerAuth, Trust: trust.Bundle,
		Renewed: func(err error) {
			result := "ok"
			if err != nil {
				result = "failed"
			}
			attempts.WithLabelValues(result).Inc()
		},
		Logger: log.With("component", "identity"),
	})
	registry.MustRegister(attempts, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "flux_agent_certificate_not_after_seconds",
		Help: "When the agent's certificate ends, in seconds since 1970; 0 before the first."}, func() float64 {
		if t := renewer.NotAfter(); !t.IsZero() {
			return float64(t.Unix())
		}
		return 0
	}))

	programs, err := files.InstallPrograms(filepath.Join(config.StateDir, "bin"))
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	// The certificate comes while the node is repaired: neither needs the other.
	group.Go(func() error {
		renewer.Run(ctx)
		return nil
	})
	serving := make(chan struct{})
	if config.MetricsListen != "" {
		wait, err := observability.Serve(ctx, config.MetricsListen, registry, func() error { return isReady(serving, renewer.Ready()) })
		if err != nil {
			return err
		}
		group.Go(wait)
	}
	// Only the controller has a certificate with which this agent's server can be called.
	config.PersistentVolumes = true
	n, err := node.Open(ctx, config.Config, programs, log, registry)
	if err != nil {
		return err
	}
	defer n.Close()
	group.Go(func() error {
		n.Supervise(ctx, log)
		return nil
	})
	listener, err := net.Listen("tcp", config.Listen)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	tls := identity.Credentials{Certificate: renewer.Certificate, Bundle: trust.Bundle}.AgentServer()
	server := agent.NewServer(n.Agent(), identity.ServerOptions(tls, identity.ConnectionAge, func(err error) {
		log.Warn("a connection was refused", "error", err)
	})...)
	group.Go(func() error { return server.Serve(listener) })
	group.Go(func() error {
		<-ctx.Done()
		server.Stop()
		return nil
	})
	close(serving)
	log.Info("serving", "address", listener.Addr().String())
	ready(listener.Addr().String())
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	log.Info("stopped; sandboxes and their volumes go on")
	return nil
}

func isReady(serving, certified <-chan struct{}) error {
	select {
	case <-serving:
	default:
		return errors.New("the node is being repaired")
	}
	select {
	case <-certified:
		return nil
	default:
		return errors.New("there is no certificate from the controller yet")
	}
}
