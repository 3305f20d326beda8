// Command flux-sandbox-controller serves the API of a cluster and, on the replica that leads, reconciles its sandboxes.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/flux-sandbox/flux-sandbox/internal/clustercontroller"
	"github.com/flux-sandbox/flux-sandbox/internal/version"
)

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "flux-sandbox-controller:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var c clustercontroller.Config
	cmd := &cobra.Command{
		Use:           "flux-sandbox-controller",
		Short:         "The controller of a cluster: the gRPC API on every replica, the scheduler on the leader",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.String(),
		RunE: func(*cobra.Command, []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return clustercontroller.Run(ctx, c, func(api, certificates string) { fmt.Println("ready:", api, certificates) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "how to reach the API server; in a Pod its ServiceAccount says so")
	f.StringVar(&c.Namespace, "namespace", os.Getenv("POD_NAMESPACE"), "the controller's own namespace ($POD_NAMESPACE)")
	f.StringVar(&c.Identity, "identity", os.Getenv("POD_NAME"), "the name of this replica ($POD_NAME)")
	f.StringVar(&c.Listen, "listen", clustercontroller.DefaultListen, "address of the gRPC API")
	f.StringVar(&c.CertificateListen, "certificate-listen", clustercontroller.DefaultCertificateListen, "address of the service that signs agents' certificates")
	f.StringVar(&c.MetricsListen, "metrics-listen", clustercontroller.DefaultMetricsListen, "address of /metrics, /healthz and /readyz")
	f.StringSliceVar(&c.Names, "name", nil, "DNS names by which the gRPC services are called (default: those of the Service flux-sandbox-controller)")
	f.StringVar(&c.AgentService, "agent-service", clustercontroller.DefaultAgentService, "the Service whose endpoints are the agents")
	f.StringVar(&c.AgentServiceAccount, "agent-service-account", clustercontroller.DefaultServiceAccount, "the agents' ServiceAccount")
	f.StringVar(&c.Lease, "lease", clustercontroller.DefaultLease, "name of the Lease by which the leader is elected")
	f.DurationVar(&c.LeaseDuration, "lease-duration", 0, "how long a leader that does not renew its lease is waited for (default 15s)")
	f.DurationVar(&c.RenewDeadline, "renew-deadline", 0, "how long the leader tries to renew its lease (default 10s)")
	f.DurationVar(&c.RetryPeriod, "retry-period", 0, "the time between tries (default 2s)")
	f.StringVar(&c.Audience, "audience", "", "the audience that callers' tokens must have (default sandbox.flux.io/api)")
	f.BoolVar(&c.APIServerTokens, "api-server-tokens", false, "accept callers' tokens that are meant for the API server, too")
	f.StringSliceVar(&c.DirectDrivers, "direct-drivers", nil, "CSI drivers whose volumes the agents publish themselves: those of csi.drivers in the agents' configuration (default: the built-in one)")
	f.StringVar(&c.AnchorImage, "anchor-image", "", "image of the Pods that have kubelet mount volumes for sandboxes (default: the controller's own)")
	f.StringSliceVar(&c.AnchorPullSecrets, "anchor-pull-secrets", nil, "names of the Secrets that the image is pulled with, each to be in the namespaces of the claims")
	f.DurationVar(&c.AnchorGrace, "anchor-grace", 0, "how long such a Pod is kept when nobody uses it (default 1m)")
	f.Float64Var(&c.AnchorRate, "anchor-rate", 0, "how many such Pods are made in a second (default 20)")
	f.IntVar(&c.AnchorBurst, "anchor-burst", 0, "how many at once (default 50)")
	f.StringVar(&c.Log.Level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&c.Log.Format, "log-format", "json", "json or text")
	return cmd
}
