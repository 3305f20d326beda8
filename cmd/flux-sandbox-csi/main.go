// Command flux-sandbox-csi is the CSI driver for size-limited volumes of one node.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/version"
)

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "flux-sandbox-csi:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	config := csidriver.Config{Version: version.String()}
	var sockets csidriver.Sockets
	cmd := &cobra.Command{
		Use:           "flux-sandbox-csi",
		Short:         "The CSI driver " + csidriver.Name + ": size-limited volumes of one node",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.String(),
		RunE:          func(*cobra.Command, []string) error { return run(config, sockets) },
	}
	const kubelet = "/var/lib/kubelet"
	f := cmd.Flags()
	f.StringVar(&config.Node, "node", os.Getenv("NODE_NAME"), "name of the node ($NODE_NAME)")
	f.StringVar(&config.Pool, "pool", "/var/lib/flux-sandbox-csi", "folder of the volumes' disk images")
	f.Float64Var(&config.Overcommit, "overcommit", 1, "by what factor thin volumes may promise more than is free")
	f.StringVar(&config.DomainKey, "domain-key", v1alpha1.DefaultTopologyKey, "node label of the topology domain")
	f.StringVar(&config.Domain, "domain", "", "the node's topology domain; empty for none")
	f.StringVar(&sockets.CSI, "socket", kubelet+"/plugins/"+csidriver.Name+"/csi.sock", "socket of the CSI services")
	f.StringVar(&sockets.KubeletCSI, "kubelet-socket", "", "the same socket as kubelet sees it (default: the same path)")
	f.StringVar(&sockets.Registration, "registration", kubelet+"/plugins_registry/"+csidriver.Name+"-reg.sock", "socket by which kubelet finds the driver; empty for none")
	return cmd
}

func run(config csidriver.Config, sockets csidriver.Sockets) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	driver, err := csidriver.New(ctx, config)
	if err != nil {
		return err
	}
	defer driver.Close()
	return csidriver.Serve(ctx, driver, sockets, func() { fmt.Println("ready:", sockets.CSI) })
}
