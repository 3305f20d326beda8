package containers

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Runtime runs the sandboxes of one containerd namespace. It is safe for concurrent use; one process at a time may
// have one on the same namespace and directories.
type Runtime struct {
	config  Config
	client  *containerd.Client
	locks   keyedLocks
	images  imageCache
	cgroups []cgroup.Root

	// cgroupParent guards the existence of the parent cgroup: read-locked while a task is created below it, locked while
	// it is removed.
	cgroupParent sync.RWMutex

	execMu sync.Mutex          // guards execs
	execs  map[string]struct{} // ids of the execs that this process runs
}

// Open connects to containerd. It fails with ErrUnavailable when none listens at the address. Later, the connection is
// made again by itself whenever it is lost.
func Open(ctx context.Context, config Config) (*Runtime, error) {
	config, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	for _, helper := range []string{config.InitPath, config.LoggerPath} {
		if st, err := os.Stat(helper); err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			return nil, fault.New(errdefs.ErrFailedPrecondition, fault.Internal,
				"helper program %s is missing or not executable: install it beside flux-sandbox or correct the configuration", helper)
		}
	}
	if st, err := os.Stat(config.Address); err != nil || st.Mode()&os.ModeSocket == 0 {
		return nil, noContainerd(config.Address, "there is no socket")
	}
	roots, err := cgroup.Roots()
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{config.StateDir, filepath.Join(config.RunDir, "exec"), filepath.Join(config.RunDir, "runc")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("create the runtime's directory: %w", err)
		}
	}
	client, err := dial(config)
	if err != nil {
		return nil, err
	}
	r := &Runtime{config: config, client: client, cgroups: roots, execs: map[string]struct{}{}}
	if _, err := client.Version(r.context(ctx)); err != nil {
		client.Close()
		return nil, fmt.Errorf("connect to containerd at %s: %w", config.Address, err)
	}
	return r, nil
}

// Close closes the connection. Sandboxes, their loggers and containerd go on.
func (r *Runtime) Close() error { return r.client.Close() }

// Version is containerd's version.
func (r *Runtime) Version(ctx context.Context) (string, error) {
	v, err := r.client.Version(r.context(ctx))
	return v.Version, err
}

// reconnectInterval is how often a lost containerd is tried.
const reconnectInterval = 50 * time.Millisecond

func noContainerd(address, why string) error {
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
		"no containerd at %s (%s): start it (systemctl start containerd), correct the address, or let flux-sandbox start its own",
		address, why)
}

func (r *Runtime) context(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, r.config.Namespace)
}

func (r *Runtime) tasks() tasksapi.TasksClient { return r.client.TaskService() }

func (r *Runtime) snapshotter() snapshots.Snapshotter {
	return r.client.SnapshotService(r.config.Snapshotter)
}

// dial makes a client that reconnects within half a second of containerd's return (the client's own settings wait up to
// ten), and whose calls wait that long instead of failing.
func dial(config Config) (*containerd.Client, error) {
	unary := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if err := waitReady(ctx, cc, config.ConnectWait); err != nil {
			return err
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	stream := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		if err := waitReady(ctx, cc, config.ConnectWait); err != nil {
			return nil, err
		}
		return streamer(ctx, desc, cc, method, opts...)
	}
	return containerd.New(config.Address,
		containerd.WithDefaultNamespace(config.Namespace),
		containerd.WithDefaultRuntime(runtimeName),
		containerd.WithExtraDialOpts([]grpc.DialOption{
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
				MinConnectTimeout: config.ConnectWait,
			}),
			grpc.WithIdleTimeout(0), // going idle would cost the next call a connection set-up
			grpc.WithChainUnaryInterceptor(unary),
			grpc.WithChainStreamInterceptor(stream),
		}))
}

// awaitContainerd waits, after a call that was lost with its connection, until containerd answers again.
func (r *Runtime) awaitContainerd(ctx context.Context) error {
	deadline := time.After(r.config.ConnectWait)
	for {
		_, err := r.client.Version(r.context(ctx))
		if !errdefs.IsUnavailable(err) {
			return err
		}
		select {
		case <-time.After(reconnectInterval):
		case <-deadline:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// awaitReconnect is awaitContainerd for calls that are then made again at once: a shim that cannot be reached answers like
// a lost containerd, and must not be asked without a pause.
func (r *Runtime) awaitReconnect(ctx context.Context) error {
	select {
	case <-time.After(reconnectInterval):
		return r.awaitContainerd(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// waitReady waits until the connection is up.
func waitReady(ctx context.Context, cc *grpc.ClientConn, wait time.Duration) error {
	state := cc.GetState()
	if state == connectivity.Ready {
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for state != connectivity.Ready {
		if state == connectivity.Idle {
			cc.Connect()
		}
		if !cc.WaitForStateChange(bounded, state) {
			if err := ctx.Err(); err != nil {
				return status.FromContextError(err).Err()
			}
			return status.Errorf(codes.Unavailable, "containerd at %s has not answered for %s", cc.Target(), wait)
		}
		state = cc.GetState()
	}
	return nil
}
