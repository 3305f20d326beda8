// Command fluxctl is the command line of FluxSandbox. See package cli.
package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/flux-sandbox/flux-sandbox/internal/cli"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/connect"
)

func main() {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // what matters comes as an error
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Main(ctx, os.Args[1:], cli.Env{In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv, Cluster: load})
	stop()
	os.Exit(code)
}

// cluster is a connect.Cluster as package cli asks for it.
type cluster struct{ *connect.Cluster }

func (c cluster) Connect(ctx context.Context, system, namespace, account string) (*cli.Way, error) {
	way, err := c.Cluster.Connect(ctx, system, namespace, account)
	return (*cli.Way)(way), err
}

func load(kubeconfig, contextName string) (cli.Cluster, bool, error) {
	c, found, err := connect.Load(kubeconfig, contextName)
	return cluster{c}, found, err
}
