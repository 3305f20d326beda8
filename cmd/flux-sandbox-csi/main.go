// Command flux-sandbox-csi is the CSI driver for size-limited volumes of one node, and makes the volumes of its claims.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/clusterdriver"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/version"
)

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "flux-sandbox-csi:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var paths clusterdriver.Paths
	c := clusterdriver.Config{Config: csidriver.Config{Version: version.String()}}
	cmd := &cobra.Command{
		Use:           "flux-sandbox-csi",
		Short:         "The CSI driver " + csidriver.Name + ": size-limited volumes of one node",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.String(),
		RunE:          func(*cobra.Command, []string) error { return run(c, paths) },
	}
	f := cmd.Flags()
	f.StringVar(&c.Node, "node", os.Getenv("NODE_NAME"), "name of the node ($NODE_NAME)")
	f.StringVar(&c.Pool, "pool", clusterdriver.DefaultPool, "folder of the volumes' disk images")
	f.Float64Var(&c.Overcommit, "overcommit", 1, "by what factor thin volumes may promise more than is free")
	f.StringVar(&c.DomainKey, "domain-key", v1alpha1.DefaultTopologyKey, "node label of the topology domain")
	f.StringVar(&c.Domain, "domain", "", "the node's topology domain, with --provision=false; otherwise it is read from the node")
	f.StringVar(&c.KubeletDir, "kubelet-dir", clusterdriver.DefaultKubeletDir, "kubelet's folder (its --root-dir)")
	f.StringVar(&c.Socket, "socket", "", "socket of the CSI services (default: below kubelet's folder)")
	f.StringVar(&c.Registration, "registration", "", "socket by which kubelet finds the driver (default: below kubelet's folder)")
	f.BoolVar(&c.Provision, "provision", true, "make the volumes of claims for this node; without it no API server is needed")
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "file that says how the API server is reached; in a Pod leave it out")
	f.StringVar(&c.MetricsListen, "metrics-listen", clusterdriver.DefaultMetricsListen, "address of /metrics, /healthz and /readyz; empty for none")
	f.StringVar(&paths.Account, "account", "/var/run/secrets/kubernetes.io/serviceaccount", "folder of the ServiceAccount's token and CA")
	f.StringVar(&paths.Containerd, "containerd", "/run/containerd/containerd.sock", "socket of the host's containerd, to find the host's mount namespace by")
	f.StringVar(&c.Log.Level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&c.Log.Format, "log-format", "json", "json or text")
	if failpoint.Enabled {
		cmd.AddCommand(&cobra.Command{
			Use: "failpoints", Short: "List the steps at which a test can stop this build", Args: cobra.NoArgs,
			Run: func(cmd *cobra.Command, _ []string) {
				fmt.Fprintln(cmd.OutOrStdout(), strings.Join(failpoint.Names(), "\n"))
			},
		})
	}
	return cmd
}

func run(config clusterdriver.Config, paths clusterdriver.Paths) error {
	account, err := clusterdriver.EnterHost(paths)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return clusterdriver.Run(ctx, config, account, func(socket string) { fmt.Println("ready:", socket) })
}
