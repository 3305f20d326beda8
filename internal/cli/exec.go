package cli

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
)

func (a *app) execCommand() *cobra.Command {
	var interactive bool
	var envs []string
	start := &sandboxv1.ExecStart{}
	cmd := &cobra.Command{
		Use:   "exec NAME [flags] -- COMMAND [ARG…]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox. Its output is fluxctl's output and its exit code fluxctl's exit code. With -i it
reads fluxctl's input.`,
		Example: `  fluxctl exec a -- ls -l /data
  echo hello | fluxctl exec a -i -- sh -c 'cat > /data/hello'`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case len(args) == 0 || dash == 0:
				return usagef("NAME is missing")
			case dash > 1:
				return usagef("%q is one argument too many before --", args[1])
			case len(args) == 1:
				return usagef("the command to run is missing: write it after --")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if start.Env, err = a.parseEnv(envs); err != nil {
				return err
			}
			start.Sandbox, start.Command, start.Stdin = a.ref(args[0]), args[1:], interactive
			return a.connect("run the command in sandbox "+args[0], func(s server) error {
				return a.exec(cmd.Context(), s, start)
			})
		},
	}
	cmd.Flags().BoolVarP(&interactive, "stdin", "i", false, "pass fluxctl's input on to the command")
	cmd.Flags().StringArrayVarP(&envs, "env", "e", nil, "NAME=VALUE in the environment; may be repeated")
	cmd.Flags().StringVarP(&start.WorkingDir, "workdir", "w", "", "the working directory")
	return cmd
}

// exec runs a command to its end, and returns its exit code as an error unless it is 0.
func (a *app) exec(ctx context.Context, s server, start *sandboxv1.ExecStart) error {
	streamCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := s.sandboxes.Exec(streamCtx)
	if err != nil {
		return err
	}
	err = stream.Send(&sandboxv1.ExecRequest{Message: &sandboxv1.ExecRequest_Start{Start: start}})
	if err != nil && !errors.Is(err, io.EOF) { // EOF: Recv says why.
		return err
	}
	if start.Stdin {
		// It may hang in a read of the terminal when the command has ended; fluxctl ends then all the same.
		go a.sendInput(stream, cancel)
	} else if err := stream.CloseSend(); err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		switch x := m.GetMessage().(type) {
		case *sandboxv1.ExecResponse_Stdout:
			_, err = a.Out.Write(x.Stdout)
		case *sandboxv1.ExecResponse_Stderr:
			_, err = a.Err.Write(x.Stderr)
		case *sandboxv1.ExecResponse_ExitCode:
			if x.ExitCode != 0 {
				return exitError(x.ExitCode)
			}
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// sendInput sends the input to its end. When the input cannot be read the command must not take what came of
// it for all.
func (a *app) sendInput(stream sandboxv1.SandboxService_ExecClient, cancel context.CancelFunc) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := a.In.Read(buffer)
		if n > 0 {
			if stream.Send(&sandboxv1.ExecRequest{Message: &sandboxv1.ExecRequest_Stdin{Stdin: append([]byte(nil), buffer[:n]...)}}) != nil {
				return
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			_ = stream.Send(&sandboxv1.ExecRequest{Message: &sandboxv1.ExecRequest_StdinClosed{StdinClosed: true}})
			_ = stream.CloseSend()
			return
		case err != nil:
			cancel()
			return
		}
	}
}

func (a *app) logsCommand() *cobra.Command {
	var follow, times bool
	var tail int32
	cmd := &cobra.Command{
		Use:   "logs NAME",
		Short: "Print what a sandbox's process has written",
		Long:  `Print what a sandbox's process has written: its stdout to stdout, its stderr to stderr.`,
		Example: `  fluxctl logs a
  fluxctl logs a -f --tail 10`,
		Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.connect("read the logs of sandbox "+args[0], func(s server) error {
				ctx, cancel := context.WithCancel(cmd.Context())
				defer cancel()
				stream, err := s.sandboxes.Logs(ctx, &sandboxv1.LogsRequest{Sandbox: a.ref(args[0]), Follow: follow, Tail: tail})
				if err != nil {
					return err
				}
				for {
					m, err := stream.Recv()
					switch {
					case errors.Is(err, io.EOF):
						return nil
					case err != nil:
						return err
					}
					out := a.Out
					if m.GetStream() == "stderr" {
						out = a.Err
					}
					line := append(append([]byte(nil), m.GetLine()...), '\n')
					if times {
						line = append([]byte(m.GetTime().AsTime().Format("2006-01-02T15:04:05.000Z ")), line...)
					}
					if _, err := out.Write(line); err != nil {
						return err
					}
				}
			})
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what it writes from now on")
	cmd.Flags().Int32Var(&tail, "tail", 0, "only the last so many lines; 0 for all")
	cmd.Flags().BoolVarP(&times, "timestamps", "t", false, "with the time of each line")
	return cmd
}
