package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/internal/version"
)

// DefaultAddress is where a standalone server listens.
const DefaultAddress = "unix:///run/flux-sandbox/flux-sandbox.sock"

// AddressEnv names the environment variable with the server's address.
const AddressEnv = "FLUX_ADDRESS"

// CAFileEnv, ServerNameEnv and TokenFileEnv name the environment variables with the defaults of the flags of these names.
const (
	CAFileEnv     = "FLUX_CA_FILE"
	ServerNameEnv = "FLUX_SERVER_NAME"
	TokenFileEnv  = "FLUX_TOKEN_FILE"
)

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
	// exitInterrupted is 128 + SIGINT, as shells have it.
	exitInterrupted = 130
)

// Env is what a command line works in.
type Env struct {
	In       io.Reader
	Out, Err io.Writer
	// Getenv reads the environment.
	Getenv func(string) string
	// Cluster is the cluster of a kubeconfig's context: of that file, or where kubectl looks for it when it is empty, and the
	// current context likewise. found is false when there is no kubeconfig. May be nil.
	Cluster func(kubeconfig, context string) (cluster Cluster, found bool, err error)
	// Clock tells ages; the system's when nil.
	Clock clock.PassiveClock
}

// app is one run of fluxctl.
type app struct {
	Env
	address string
	// caFile, serverName and tokenFile are for addresses that begin with tls://.
	caFile, serverName, tokenFile string
	// kubeconfig, context, system and account are for a cluster, which is cluster when the server is in one.
	kubeconfig, context, system, account string
	cluster                              Cluster
	// nowhere is why it is not known where the server is, for commands that need one.
	nowhere error

	namespace string
	output    string
	timeout   time.Duration
}

// usageError is an error in the command line itself.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// exitError ends fluxctl with a code and says nothing.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// Main runs the command line args, without the program's name, and returns the exit code.
func Main(ctx context.Context, args []string, env Env) int {
	if env.Clock == nil {
		env.Clock = clock.RealClock{}
	}
	a := &app{Env: env}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(env.In)
	root.SetOut(env.Out)
	root.SetErr(env.Err)
	for _, arg := range args {
		if !utf8.ValidString(arg) { // no message of gRPC can carry it
			return a.finish(root, usagef("the argument %q is not UTF-8", arg))
		}
	}
	command, err := root.ExecuteContextC(ctx)
	if err != nil && ctx.Err() != nil {
		return exitInterrupted
	}
	return a.finish(command, err)
}

// finish prints an error and chooses the exit code.
func (a *app) finish(command *cobra.Command, err error) int {
	var usage usageError
	var exit exitError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &exit):
		return int(exit)
	case errors.As(err, &usage):
		fmt.Fprintf(a.Err, "fluxctl: %v (see: %s --help)\n", err, command.CommandPath())
		return exitUsage
	}
	a.printError(err)
	return exitFailed
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "fluxctl",
		Short: "Sandboxes, and volumes that come and go while they run",
		Long: `fluxctl creates sandboxes, runs commands in them, and attaches volumes to them and
detaches volumes from them while they run.

It talks to a flux-sandbox server. Where that is: --address, or the environment variable
` + AddressEnv + `, or ` + DefaultAddress + `. Where there is no such socket, or with
--kubeconfig or --context, it is that of a Kubernetes cluster: the API server forwards a port of
it, and fluxctl calls as a ServiceAccount of the namespace, of which it gets a token.

NAME is a sandbox of the namespace given by -n; namespace/name or a UID will do as well.`,
		Example: `  fluxctl run --name a --image busybox -- sleep infinity
  fluxctl volume add a --source /srv/flux/acme/data --target /data
  fluxctl exec a -- ls /data
  fluxctl volume rm a /data
  fluxctl rm a`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noSuchCommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			switch a.output {
			case outTable, outJSON, outYAML:
				a.nowhere = a.chooseServer(cmd.Flags().Changed("address"), cmd.Flags().Changed("namespace"))
				return nil
			}
			return usagef("--output %q is not known: write table, json or yaml", a.output)
		},
	}
	address := a.Getenv(AddressEnv)
	if address == "" {
		address = DefaultAddress
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.address, "address", address, "the server: unix:///path/of/the.sock, or tls://host:port")
	flags.StringVar(&a.caFile, "ca-file", a.Getenv(CAFileEnv), "with tls://: file with the CAs that the server's certificate must come from (default: this machine's)")
	flags.StringVar(&a.serverName, "server-name", a.Getenv(ServerNameEnv), "with tls://: the DNS name that the certificate must have (default: the host of --address)")
	flags.StringVar(&a.tokenFile, "token-file", a.Getenv(TokenFileEnv), "with tls://: file with the token that says who calls, as \"kubectl create token\" prints it")
	flags.StringVar(&a.kubeconfig, "kubeconfig", "", "in a cluster: the file that says which and as whom (default: where kubectl looks)")
	flags.StringVar(&a.context, "context", "", "in a cluster: the kubeconfig's context (default: its current one)")
	flags.StringVar(&a.account, "service-account", defaultServiceAccount, "in a cluster: call as this ServiceAccount of the namespace; empty for the kubeconfig's own token, where the server takes those")
	flags.StringVar(&a.system, "system-namespace", defaultSystemNamespace, "in a cluster: the namespace of the server")
	flags.StringVarP(&a.namespace, "namespace", "n", "default", "the namespace of sandboxes; in a cluster the context's when not given")
	flags.StringVarP(&a.output, "output", "o", outTable, "table, json or yaml")
	flags.DurationVar(&a.timeout, "timeout", 2*time.Minute, "how long to wait for the server's answer; 0 for no bound")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(
		a.runCommand(), a.psCommand(), a.getCommand(), a.execCommand(), a.logsCommand(), a.rmCommand(),
		a.pauseCommand(true), a.pauseCommand(false), a.volumeCommand(), a.claimCommand(), a.setCommand(), a.imageCommand(), a.doctorCommand(),
		&cobra.Command{
			Use: "version", Short: "Print the version of fluxctl", Args: exactly(),
			RunE: func(*cobra.Command, []string) error {
				_, err := fmt.Fprintln(a.Out, version.String())
				return err
			},
		},
	)
	return root
}

// noSuchCommand is the Args of a command that only has others.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return usagef("%s has no command %q", cmd.CommandPath(), args[0])
}

// exactly is an Args that wants one argument for each name.
func exactly(names ...string) cobra.PositionalArgs { return between(len(names), names...) }

// between is an Args that wants one argument for each name, of which those after the first few may be missing.
func between(few int, names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) < few {
			return usagef("%s is missing", names[len(args)])
		}
		if len(args) > len(names) {
			return usagef("%q is one argument too many", args[len(names)])
		}
		return nil
	}
}
