package clusterdriver_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/flux-sandbox/flux-sandbox/internal/clusterdriver"
	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
)

// childEnv has "KUBECONFIG NODE POOL" for a process that is the driver of a node.
const childEnv = "FLUX_TEST_DRIVER"

// The driver's sockets are beside the pool.
const (
	csiSocket          = ".sock"
	registrationSocket = "-reg.sock"
)

func isChild() bool { return os.Getenv(childEnv) != "" }

func runChild() {
	args := strings.Fields(os.Getenv(childEnv))
	pool := args[2]
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	err := clusterdriver.Run(ctx, clusterdriver.Config{
		Config: csidriver.Config{Node: args[1], Pool: pool, DomainKey: domainKey, Version: "test"},
		Socket: pool + csiSocket, Registration: pool + registrationSocket,
		Provision: true, Kubeconfig: args[0],
	}, nil, func(string) { fmt.Println("ready") })
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
