package standalone

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store/embedded"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/local"
)

// leaseUID names the lease that the epochs of a standalone server count: it has one leader, itself.
const leaseUID = "standalone"

// Reload is a source of new configurations, for SIGHUP. Only groups and nothing else are taken from them.
type Reload <-chan Config

// Run runs the server until ctx ends. ready is called once it serves; its argument is the API's address.
func Run(ctx context.Context, config Config, reload Reload, ready func(address string)) error {
	log, err := newLogger(config.Log)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	node, err := openNode(ctx, config, log, registry)
	if err != nil {
		return err
	}
	defer node.close()

	database, err := embedded.Open(config.database(), embedded.Options{})
	if err != nil {
		return err
	}
	defer database.Close()
	if err := applyGroups(ctx, database, config.Groups); err != nil {
		return err
	}
	epoch, err := database.NextEpoch(ctx)
	if err != nil {
		return err
	}
	sched, err := scheduler.New(scheduler.Config{Store: database, Agents: node, Epoch: epoch, LeaseUID: leaseUID,
		Logger: log.With("component", "scheduler"), Registerer: registry})
	if err != nil {
		return err
	}
	api, err := grpcapi.New(grpcapi.Options{Store: database, Agents: node, Authenticator: grpcapi.SocketPermissions{},
		Available: node.available, Logger: log.With("component", "api")})
	if err != nil {
		return err
	}

	group, ctx := errgroup.WithContext(ctx)
	if node.child != nil {
		group.Go(func() error {
			node.child.Supervise(ctx, log)
			return nil
		})
	}
	group.Go(func() error { return sched.Run(ctx) })
	group.Go(func() error { return followReload(ctx, database, reload, log) })
	if config.MetricsListen != "" {
		if err := serveMetrics(ctx, group, config.MetricsListen, registry); err != nil {
			return err
		}
	}
	group.Go(func() error {
		// Nobody is answered before what was there is known again.
		select {
		case <-sched.Ready():
		case <-ctx.Done():
			return nil
		}
		listener, err := listen(config.Listen, config.ListenGroup)
		if err != nil {
			return err
		}
		log.Info("serving", "address", config.Listen, "node", config.Node, "epoch", epoch)
		ready("unix://" + config.Listen)
		return api.Serve(ctx, listener)
	})
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	log.Info("stopped; sandboxes and their volumes go on")
	return nil
}

// node is the one node of a standalone server: its containerd, its agent, and the connection to that.
type node struct {
	config  Config
	sources map[v1alpha1.VolumeType]volume.Source
	child   *containers.Child // our own containerd, or nil
	runtime *containers.Runtime
	agent   *agent.Agent
	server  *grpc.Server
	conn    *grpc.ClientConn
}

// openNode brings the node up: containerd, the agent and its recovery, and the agent's socket.
func openNode(ctx context.Context, config Config, log *slog.Logger, registry prometheus.Registerer) (*node, error) {
	if err := mount.Require(mount.Probe()); err != nil {
		return nil, err
	}
	for _, dir := range []string{config.StateDir, config.RunDir} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return nil, fmt.Errorf("create %s: %w", dir, err)
		}
	}
	source, err := local.New(config.Volumes.Local, nil)
	if err != nil {
		return nil, invalid("volumes.local: %w", err)
	}
	n := &node{config: config, sources: map[v1alpha1.VolumeType]volume.Source{v1alpha1.VolumeTypeLocal: source}}
	if err := n.openContainers(ctx); err != nil {
		return nil, err
	}
	n.agent, err = agent.Open(ctx, agent.Config{
		Node: config.Node, RunDir: config.journal(), Containers: n.runtime, Sources: n.sources,
		DeniedTargets: config.Volumes.DeniedTargets, BestEffortLimits: config.Volumes.BestEffortLimits,
		PrepareRate: config.Volumes.PrepareRate, PrepareBurst: config.Volumes.PrepareBurst,
		Log: log.With("component", "agent"), Registerer: registry,
	})
	if err != nil {
		n.close()
		return nil, err
	}
	listener, err := listen(config.agentSocket(), "")
	if err != nil {
		n.close()
		return nil, err
	}
	n.server = agent.NewServer(n.agent)
	go func() { _ = n.server.Serve(listener) }() // ends with close, which is the only way it ends
	// The agent is in this process: a connection that breaks comes back, and a call is worth waiting for it.
	n.conn, err = grpc.NewClient("unix://"+config.agentSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(agent.Window), grpc.WithStaticConnWindowSize(agent.Window),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

// close ends the agent. Sandboxes and containerd go on.
func (n *node) close() {
	if n.conn != nil {
		_ = n.conn.Close()
	}
	if n.server != nil {
		n.server.Stop()
	}
	if n.agent != nil {
		_ = n.agent.Close()
	}
	_ = n.runtime.Close()
}

// Follow tells the scheduler of the one agent.
func (n *node) Follow(ctx context.Context) iter.Seq[scheduler.AgentEvent] {
	return func(yield func(scheduler.AgentEvent) bool) {
		one := scheduler.Agent{Node: n.config.Node, Client: agentv1.NewAgentServiceClient(n.conn)}
		if yield(scheduler.AgentEvent{Type: scheduler.AgentAdded, Agent: one}) && yield(scheduler.AgentEvent{Type: scheduler.AgentsSynced}) {
			<-ctx.Done()
		}
	}
}

// Client is the agent's client, for the API.
func (n *node) Client(name string) (agentv1.AgentServiceClient, error) {
	if name != "" && name != n.config.Node {
		return nil, fault.New(errdefs.ErrUnavailable, fault.NoAgent, "node %s has no agent here: this is %s", name, n.config.Node)
	}
	return agentv1.NewAgentServiceClient(n.conn), nil
}

func (n *node) available(t v1alpha1.VolumeType) bool {
	_, ok := n.sources[t]
	return ok
}

// openContainers opens the containerd that the configuration names, or our own, which is started if need be.
func (n *node) openContainers(ctx context.Context) (err error) {
	config := n.config
	address := config.Containerd.Address
	if address == "" {
		if n.child, err = containers.StartContainerd(ctx, config.child()); err != nil {
			return err
		}
		address = n.child.Address()
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	helpers := filepath.Dir(self)
	n.runtime, err = containers.Open(ctx, containers.Config{
		Address: address, Namespace: config.Containerd.Namespace, Snapshotter: config.Containerd.Snapshotter,
		AllowPull: config.Containerd.AllowPull, StateDir: config.sandboxState(), RunDir: config.containersRun(),
		InitPath: filepath.Join(helpers, "flux-sandbox-init"), LoggerPath: filepath.Join(helpers, "flux-sandbox-logger"),
		CgroupParent: config.Sandboxes.CgroupParent, PidsLimit: config.Sandboxes.PidsLimit,
		LogMaxSize: config.Sandboxes.LogMaxSize, LogMaxFiles: config.Sandboxes.LogMaxFiles,
		Steps: agent.ContainerSteps(),
	})
	return err
}

func (c Config) child() containers.ChildConfig {
	return containers.ChildConfig{Binary: c.Containerd.Binary, Root: c.containerdRoot(), State: c.containerdRun(),
		Cgroup: c.cgroupParent() + "-containerd"}
}

func (c Config) cgroupParent() string {
	if c.Sandboxes.CgroupParent != "" {
		return c.Sandboxes.CgroupParent
	}
	return containers.DefaultCgroupParent
}

// listen makes a unix socket that root, and the members of a group if one is named, may use. One that a process left
// behind is replaced: a second server never comes so far, since the journal and the database have one owner.
func listen(path, group string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: remove the old socket: %w", path, err)
	}
	// Made under another name, so that nobody connects before it has its permissions.
	making := path + ".new"
	if err := os.Remove(making); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: making, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	err = os.Chmod(making, 0o600)
	if err == nil && group != "" {
		err = shareWith(making, group)
	}
	if err == nil {
		err = os.Rename(making, path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", path, err), l.Close())
	}
	return l, nil
}

func shareWith(path, group string) error {
	gid, err := strconv.Atoi(group)
	if err != nil {
		g, err := user.LookupGroup(group)
		if err != nil {
			return invalid("listenGroup: %w", err)
		}
		if gid, err = strconv.Atoi(g.Gid); err != nil {
			return err
		}
	}
	if err := os.Chown(path, 0, gid); err != nil {
		return err
	}
	return os.Chmod(path, 0o660)
}

// metricsTimeout bounds a scrape's request headers and the end of the metrics server.
const metricsTimeout = 5 * time.Second

func serveMetrics(ctx context.Context, group *errgroup.Group, address string, registry *prometheus.Registry) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("metricsListen %s: %w", address, err)
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: metricsTimeout}
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), metricsTimeout)
		defer cancel()
		return server.Shutdown(stop)
	})
	return nil
}
