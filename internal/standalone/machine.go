package standalone

import (
	"context"
	"iter"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/node"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// machine is the one node of a standalone server, and the connection to its agent.
type machine struct {
	*node.Node
	name   string
	server *grpc.Server
	conn   *grpc.ClientConn
	direct *direct
	client agentv1.AgentServiceClient
	named  *namedVolumes
}

// openMachine brings the node up, and the agent's socket.
func openMachine(ctx context.Context, config Config, log *slog.Logger, registry prometheus.Registerer) (_ *machine, err error) {
	if os.Geteuid() != 0 {
		return nil, fault.New(errdefs.ErrPermissionDenied, fault.Forbidden, "flux-sandbox makes containers and mounts: run it as root")
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	beside := filepath.Dir(self)
	m := &machine{name: config.Node}
	// Before the node, whose repair may need it.
	if m.named, err = openNamedVolumes(ctx, config); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && m.Node == nil {
			m.named.close()
		}
	}()
	m.Node, err = node.Open(ctx, config.Config, node.Programs{
		Init: filepath.Join(beside, "flux-sandbox-init"), Logger: filepath.Join(beside, "flux-sandbox-logger"),
		Hook: filepath.Join(beside, "flux-sandbox-hook"),
	}, log, registry)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	listener, err := listen(config.agentSocket(), "")
	if err != nil {
		return nil, err
	}
	m.server = agent.NewServer(m.Agent())
	go func() { _ = m.server.Serve(listener) }() // ends with close, which is the only way it ends
	// The agent is in this process: a connection that breaks comes back, and a call is worth waiting for it.
	m.conn, err = grpc.NewClient("unix://"+config.agentSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(agentv1.Window), grpc.WithStaticConnWindowSize(agentv1.Window),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		return nil, err
	}
	service, around := agent.Service(m.Agent())
	m.direct = newDirect(m.conn, &agentv1.AgentService_ServiceDesc, service, around)
	m.client = agentv1.NewAgentServiceClient(m.direct)
	return m, nil
}

// close ends the agent. Sandboxes and containerd go on.
func (m *machine) close() {
	if m.direct != nil {
		m.direct.close()
	}
	if m.conn != nil {
		_ = m.conn.Close()
	}
	if m.server != nil {
		m.server.Stop()
	}
	m.Node.Close()
	m.named.close()
}

// Available says whether there is a source for a volume type.
func (m *machine) Available(t v1alpha1.VolumeType) bool {
	return t == v1alpha1.VolumeTypePVC || t != v1alpha1.VolumeTypePV && m.Node.Available(t)
}

// Follow tells the scheduler of the one agent.
func (m *machine) Follow(ctx context.Context) iter.Seq[scheduler.AgentEvent] {
	return scheduler.StaticAgents{{Node: m.name, Client: m.client}}.Follow(ctx)
}

// Dead implements scheduler.Agents: the one node is this machine.
func (m *machine) Dead(string) bool { return false }

// Client is the agent's client, for the API.
func (m *machine) Client(name string) (agentv1.AgentServiceClient, error) {
	if name != "" && name != m.name {
		return nil, fault.New(errdefs.ErrUnavailable, fault.NoAgent, "node %s has no agent here: this is %s", name, m.name)
	}
	return m.client, nil
}
