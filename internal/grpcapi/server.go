package grpcapi

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"k8s.io/utils/clock"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcstop"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// Agents finds the agents that exec, logs, images and probes are passed on to.
type Agents interface {
	// Client is the client of a node's agent. An empty node means the only one there is, which standalone
	// has. Errors: ErrUnavailable, reason AGENT_UNAVAILABLE or NO_AGENT.
	Client(node string) (agentv1.AgentServiceClient, error)
}

// Options are what a Server is made of.
type Options struct {
	// Store is required.
	Store store.Store
	// Agents is required.
	Agents Agents
	// Authenticator says who calls; required, so that nobody leaves it out by accident.
	Authenticator Authenticator
	// Authorizer says what callers may do; when nil, their tenant decides.
	Authorizer Authorizer
	// Available says whether there is a source for a volume type; nil leaves that to the agent.
	Available func(v1alpha1.VolumeType) bool
	// NamedVolumes keeps the volumes of VolumeService; nil where there are claims instead.
	NamedVolumes NamedVolumes
	// Pools are the SandboxSets and SandboxClaims; nil where there are none. Its error says why there are none now.
	Pools func() (*Pools, error)
	// Logger gets a line per call; slog's default when nil.
	Logger *slog.Logger
	// MaxWait is how long a call waits at most, also without a deadline; 2 minutes when 0.
	MaxWait time.Duration
	// StopGrace is how long calls may go on when the server stops; 2 seconds when 0.
	StopGrace time.Duration
	// Clock tells the time for checks of shutdownTime; the system's when nil.
	Clock clock.PassiveClock
	// ServerOptions are further options of the gRPC server, such as credentials.
	ServerOptions []grpc.ServerOption
}

// Server is the public gRPC API over a store.
type Server struct {
	options Options
	store   store.Store
	log     *slog.Logger
	waiter  *waiter
	grpc    *grpc.Server
	health  *health.Server
}

// maxMessage bounds a request: a Sandbox may be as large as the API server of Kubernetes takes it
// (1.5 MiB, etcd's default), a chunk of an image or of stdin much less.
const maxMessage = 4 << 20

// streamWorkers is how many goroutines wait for calls, whose stacks have grown already. Calls beyond that, and beside
// streams that stay open, get a goroutine of their own.
const streamWorkers = 16

// window is the size of the flow-control windows, in bytes: fixed, for the reason that agentv1.Window has.
const window = 1 << 20

// New makes a server. Call Serve once.
func New(options Options) (*Server, error) {
	if options.Store == nil || options.Agents == nil || options.Authenticator == nil {
		return nil, errors.New("grpcapi: Store, Agents and Authenticator are required")
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	if options.MaxWait == 0 {
		options.MaxWait = 2 * time.Minute
	}
	if options.StopGrace == 0 {
		options.StopGrace = 2 * time.Second
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	s := &Server{
		options: options,
		store:   options.Store,
		log:     options.Logger,
		waiter:  newWaiter(options.Store.Sandboxes()),
		health:  health.NewServer(),
	}
	s.grpc = grpc.NewServer(append([]grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.StaticStreamWindowSize(window),
		grpc.StaticConnWindowSize(window),
		grpc.NumStreamWorkers(streamWorkers),
		grpc.ChainUnaryInterceptor(s.unary),
		grpc.ChainStreamInterceptor(s.stream),
	}, options.ServerOptions...)...)
	sandboxv1.RegisterSandboxVolumeServiceServer(s.grpc, &volumeService{Server: s})
	sandboxv1.RegisterSandboxServiceServer(s.grpc, &sandboxService{Server: s})
	sandboxv1.RegisterImageServiceServer(s.grpc, &imageService{Server: s})
	sandboxv1.RegisterNodeServiceServer(s.grpc, &nodeService{Server: s})
	sandboxv1.RegisterVolumeServiceServer(s.grpc, &namedService{Server: s})
	sandboxv1.RegisterSandboxClaimServiceServer(s.grpc, &claimService{Server: s})
	sandboxv1.RegisterSandboxSetServiceServer(s.grpc, &setService{Server: s})
	healthv1.RegisterHealthServer(s.grpc, s.health)
	reflection.Register(s.grpc)
	s.setHealth(healthv1.HealthCheckResponse_NOT_SERVING)
	return s, nil
}

func (s *Server) setHealth(status healthv1.HealthCheckResponse_ServingStatus) {
	s.health.SetServingStatus("", status)
	for name := range s.grpc.GetServiceInfo() {
		s.health.SetServingStatus(name, status)
	}
}

// Serve serves on the listener until ctx ends, and closes it. The health service says SERVING when the
// follower of the store has seen everything. When ctx ends, calls that wait are answered, and others are
// given Options.StopGrace; one that hangs even then is left behind. The error is that of the listener; nil after ctx has ended.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go s.waiter.run(ctx)
	go func() {
		select {
		case <-s.waiter.synced:
			s.setHealth(healthv1.HealthCheckResponse_SERVING)
		case <-ctx.Done():
		}
	}()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		s.health.Shutdown()
		grpcstop.Within(s.grpc, s.options.StopGrace)
	}()
	err := s.grpc.Serve(listener)
	stop()
	<-stopped
	<-s.waiter.ended
	return err
}

// untilStop is a context that ends when the server begins to stop, for streams that have no end of their own.
func (s *Server) untilStop(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-s.waiter.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// streamEnd is the error of a stream that ended although its client, whose context is given, did not ask for it.
func (s *Server) streamEnd(client context.Context, do string) error {
	if err := client.Err(); err != nil {
		return err
	}
	return fault.New(errdefs.ErrUnavailable, store.Unavailable, "the server is stopping: %s when it is back", do)
}
