// Command flux-sandbox-agent runs the sandboxes of one node of a cluster and attaches their volumes.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/flux-sandbox/flux-sandbox/internal/clusteragent"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/version"
)

func main() {
	mount.RunHelperIfAsked() // this process may be a helper that may be abandoned
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "flux-sandbox-agent:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	beside := filepath.Dir(os.Args[0])
	if self, err := os.Executable(); err == nil {
		beside = filepath.Dir(self)
	}
	var paths clusteragent.Paths
	cmd := &cobra.Command{
		Use:           "flux-sandbox-agent",
		Short:         "The agent of one node of a cluster: runs sandboxes and attaches their volumes",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.String(),
		RunE:          func(*cobra.Command, []string) error { return run(paths) },
	}
	f := cmd.Flags()
	f.StringVar(&paths.Config, "config", "/etc/flux-sandbox/agent.yaml", "configuration file")
	f.StringVar(&paths.Token, "token", "/var/run/secrets/sandbox.flux.io/token", "file with the ServiceAccount token for the controller")
	f.StringVar(&paths.Trust, "trust", "/var/run/secrets/sandbox.flux.io/ca.crt", "file with the CAs of the controller")
	f.StringVar(&paths.Init, "init", filepath.Join(beside, "flux-sandbox-init"), "the program that is PID 1 of sandboxes")
	f.StringVar(&paths.Logger, "logger", filepath.Join(beside, "flux-sandbox-logger"), "the program that writes sandboxes' logs")
	f.StringVar(&paths.Hook, "hook", filepath.Join(beside, "flux-sandbox-hook"), "the program that containers wait for which require volumes")
	f.StringVar(&paths.Containerd, "containerd", "/run/containerd/containerd.sock", "socket of the host's containerd, to find the host's mount namespace by")
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

func run(paths clusteragent.Paths) error {
	files, err := clusteragent.EnterHost(paths)
	if err != nil {
		return err
	}
	data, err := files.Config()
	if err != nil {
		return err
	}
	config, err := clusteragent.ParseConfig(data, os.Getenv, os.Hostname)
	if err != nil {
		return fmt.Errorf("%s: %w", paths.Config, err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return clusteragent.Run(ctx, config, files, func(address string) { fmt.Println("ready:", address) })
}
