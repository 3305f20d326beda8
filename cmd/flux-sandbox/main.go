// Command flux-sandbox runs FluxSandbox on one Linux machine, without Kubernetes.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/standalone"
	"github.com/flux-sandbox/flux-sandbox/internal/version"
)

func main() {
	mount.RunHelperIfAsked() // this process may be a helper that may be abandoned
	executed, err := command().ExecuteC()
	var usage usageError
	switch {
	case err == nil:
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "flux-sandbox: %v (see: %s --help)\n", err, executed.CommandPath())
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "flux-sandbox:", err)
		os.Exit(1)
	}
}

// usageError is an error in the command line itself.
type usageError struct{ error }

// noArgs is the Args of every command.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("%q is not known", args[0])}
	}
	return nil
}

func command() *cobra.Command {
	var file string
	root := &cobra.Command{
		Use:           "flux-sandbox",
		Short:         "Sandboxes whose volumes come and go while they run, on one Linux machine",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version.String(),
		Args:          noArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.PersistentFlags().StringVarP(&file, "config", "c", "", "configuration file (default "+standalone.DefaultConfigFile+", if it exists)")
	root.AddCommand(
		&cobra.Command{
			Use:   "serve",
			Short: "Run the server in the foreground; SIGHUP applies the groups of the configuration file again",
			Args:  noArgs,
			RunE:  func(*cobra.Command, []string) error { return serve(file) },
		},
		&cobra.Command{
			Use:   "check-config",
			Short: "Check the configuration file",
			Args:  noArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				if _, err := standalone.LoadConfig(file); err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), "the configuration is valid")
				return nil
			},
		},
		resetCommand(&file),
	)
	if failpoint.Enabled {
		root.AddCommand(&cobra.Command{
			Use: "failpoints", Short: "List the steps at which a test can stop this build", Args: noArgs,
			Run: func(cmd *cobra.Command, _ []string) {
				fmt.Fprintln(cmd.OutOrStdout(), strings.Join(failpoint.Names(), "\n"))
			},
		})
	}
	return root
}

func serve(file string) error {
	config, err := standalone.LoadConfig(file)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	reload := make(chan standalone.Config)
	go reloadOnHangup(ctx, file, reload)
	return standalone.Run(ctx, config, reload, func(address string) { fmt.Println("ready:", address) })
}

// reloadOnHangup reads the configuration file again at every SIGHUP.
func reloadOnHangup(ctx context.Context, file string, reload chan<- standalone.Config) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	for {
		select {
		case <-ctx.Done():
			return
		case <-hangup:
		}
		config, err := standalone.LoadConfig(file)
		if err != nil {
			fmt.Fprintln(os.Stderr, "flux-sandbox: the configuration was not applied again:", err)
			continue
		}
		select {
		case reload <- config:
		case <-ctx.Done():
			return
		}
	}
}

func resetCommand(file *string) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Remove every sandbox of this machine and all state of flux-sandbox, but no volume's data",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			if !yes {
				return usageError{errors.New("reset removes every sandbox of this machine: say so with --yes")}
			}
			config, err := standalone.LoadConfig(*file)
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return standalone.Reset(ctx, config)
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "really do it")
	return cmd
}
