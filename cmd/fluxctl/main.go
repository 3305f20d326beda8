// Command fluxctl is the command line of FluxSandbox. See package cli.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/flux-sandbox/flux-sandbox/internal/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := cli.Main(ctx, os.Args[1:], cli.Env{In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv})
	stop()
	os.Exit(code)
}
