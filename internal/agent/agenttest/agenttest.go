// Package agenttest gives tests and benchmarks an agent on a real containerd, with volume roots to attach from.
//
//	func TestMain(m *testing.M) { mount.RunHelperIfAsked(); os.Exit(containerstest.Main(m)) }
//
//	func TestX(t *testing.T) {
//		n := agenttest.New(t, nil)
//		sb := n.Run(t, agenttest.Sandbox{Tenant: "t1", Command: []string{"sleep", "600"}})
//		sb.Attach(t, agenttest.Volume{Source: n.Dir(t, "t1", "data"), Target: "/data"})
//		…
//	}
//
// What a test asserts it reads from the kernel: Sandbox.Mounts, Sandbox.Exec, the source's own content.
package agenttest

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/local"
)

// Node is an agent and what it stands on.
type Node struct {
	// Env is the containerd environment.
	Env *containerstest.Env
	// Data is the folder with the volume roots: tenants/{tenantId} (directories), shared (directories, read-only for
	// tenants) and images/{tenantId} (image-backed).
	Data string
	// Client speaks to the running agent, also after a restart.
	Client agentv1.AgentServiceClient
	// Agent is the running agent.
	Agent *agent.Agent
	// Runtime is the agent's containerd runtime.
	Runtime *containers.Runtime

	run    string
	change func(*agent.Config)
	server *grpc.Server
	conn   *grpc.ClientConn
	epoch  int64
}

// serial makes names unique in the process.
var serial atomic.Int64

// New starts an agent in the shared containerd environment. change, if not nil, changes its configuration before each
// start. Everything is removed with the test.
func New(tb testing.TB, change func(*agent.Config)) *Node {
	tb.Helper()
	return NewOn(tb, containerstest.Shared(tb), change)
}

// NewOn is New in an environment of the caller's.
func NewOn(tb testing.TB, env *containerstest.Env, change func(*agent.Config)) *Node {
	tb.Helper()
	dir := filepath.Join(env.Dir, "n"+strconv.FormatInt(serial.Add(1), 10))
	n := &Node{Env: env, Data: filepath.Join(dir, "data"), run: filepath.Join(dir, "run"), change: change, epoch: 1}
	for _, d := range []string{"tenants", "shared", "images"} {
		must(tb, os.MkdirAll(filepath.Join(n.Data, d), 0o755))
	}
	n.Start(tb)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if n.Agent == nil {
			n.Start(tb)
		}
		if err := n.Agent.RemoveAll(ctx); err != nil {
			tb.Error("clean up:", err)
		}
		n.Stop(tb)
		must(tb, n.conn.Close())
		must(tb, os.RemoveAll(dir))
	})
	return n
}

// Sources are the node's volume sources, before change sees them.
func (n *Node) Sources(tb testing.TB) map[v1alpha1.VolumeType]volume.Source {
	tb.Helper()
	sources, err := SourcesIn(n.Data)
	must(tb, err)
	return sources
}

// SourcesIn are the volume sources of a Node whose Data is given, for an agent in a process of its own.
func SourcesIn(data string) (map[v1alpha1.VolumeType]volume.Source, error) {
	src, err := local.New([]local.Root{
		{Path: filepath.Join(data, "tenants", local.TenantComponent)},
		{Path: filepath.Join(data, "shared"), Shared: true},
		{Path: filepath.Join(data, "images", local.TenantComponent), Backing: local.BackingImage},
	}, nil)
	return map[v1alpha1.VolumeType]volume.Source{v1alpha1.VolumeTypeLocal: src}, err
}

// RunDir is the agent's, and Socket where Client finds it: for an agent in a process of its own, between Stop and Start.
func (n *Node) RunDir() string { return n.run }

// Socket is in RunDir.
func (n *Node) Socket() string { return filepath.Join(n.run, "agent.sock") }

// Start opens the agent and serves it.
func (n *Node) Start(tb testing.TB) {
	tb.Helper()
	var err error
	config := n.Env.Config()
	n.Runtime, err = containers.Open(context.Background(), config)
	must(tb, err)
	c := agent.Config{Node: "node", RunDir: n.run, Containers: n.Runtime, Sources: n.Sources(tb)}
	if n.change != nil {
		n.change(&c)
	}
	n.Agent, err = agent.Open(context.Background(), c)
	must(tb, err)
	// Stop waits for the handlers: an agent that was stopped must not act beside its successor, as one that was killed
	// does not either.
	n.server = agent.NewServer(n.Agent, grpc.WaitForHandlers(true))
	must(tb, os.MkdirAll(n.run, 0o700)) // change may have put the journal elsewhere
	socket := n.Socket()
	_ = os.Remove(socket)
	l, err := net.Listen("unix", socket)
	must(tb, err)
	server := n.server
	go func() { _ = server.Serve(l) }() // ends with Stop
	if n.conn != nil {
		return
	}
	// One connection for all agents that come after each other, so that clients may go on during a restart.
	n.conn, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Minute,
			Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 2, MaxDelay: 50 * time.Millisecond}}))
	must(tb, err)
	n.Client = agentv1.NewAgentServiceClient(n.conn)
}

// Stop ends the agent; sandboxes go on.
func (n *Node) Stop(tb testing.TB) {
	tb.Helper()
	n.server.Stop()
	must(tb, n.Agent.Close())
	must(tb, n.Runtime.Close())
	n.Agent = nil
}

// Restart ends the agent and opens it again.
func (n *Node) Restart(tb testing.TB) {
	tb.Helper()
	n.Stop(tb)
	n.Start(tb)
}

// Dir makes a directory of a tenant that can be a source.
func (n *Node) Dir(tb testing.TB, tenant, name string) string {
	tb.Helper()
	p := filepath.Join(n.Data, "tenants", tenant, name)
	must(tb, os.MkdirAll(p, 0o755))
	return p
}

// Shared makes a directory that every tenant may read.
func (n *Node) Shared(tb testing.TB, name string) string {
	tb.Helper()
	p := filepath.Join(n.Data, "shared", name)
	must(tb, os.MkdirAll(p, 0o755))
	return p
}

// Image is the source of an image-backed directory of a tenant.
func (n *Node) Image(tenant, name string) string {
	return filepath.Join(n.Data, "images", tenant, name)
}

// Sandbox is a sandbox on a node.
type Sandbox struct {
	Tenant  string
	Name    string
	Command []string
	Restart v1alpha1.RestartPolicy
	Memory  int64
	// Pod is set for a sandbox that is a container of a Pod.
	Pod *agentv1.PodWorkload

	UID        string
	Generation int64
	node       *Node
}

// Command is the header of a command for the sandbox, with a fresh operation id.
func (s *Sandbox) command() *agentv1.Command {
	return &agentv1.Command{Epoch: s.node.epoch, LeaseUid: "test", SandboxUid: s.UID, Generation: s.Generation,
		OperationId: "op-" + strconv.FormatInt(serial.Add(1), 10)}
}

// Create makes a sandbox with a created task.
func (n *Node) Create(tb testing.TB, sb Sandbox) *Sandbox {
	tb.Helper()
	s := n.Prepare(sb)
	_, err := n.Client.CreateSandbox(tb.Context(), s.createRequest())
	must(tb, fault.FromGRPC(err))
	return s
}

// Prepare names a sandbox without making it.
func (n *Node) Prepare(sb Sandbox) *Sandbox {
	s := &sb
	s.node, s.Generation = n, 1
	if s.UID == "" {
		s.UID = fmt.Sprintf("u%d-%d", os.Getpid(), serial.Add(1))
	}
	if s.Name == "" {
		s.Name = s.UID
	}
	if len(s.Command) == 0 {
		s.Command = []string{"sleep", "3600"}
	}
	return s
}

func (s *Sandbox) createRequest() *agentv1.CreateSandboxRequest {
	return &agentv1.CreateSandboxRequest{Command: s.command(), Namespace: "default", Name: s.Name, TenantId: s.Tenant,
		Image: containerstest.Image, Entrypoint: s.Command, RestartPolicy: string(s.Restart), MemoryBytes: s.Memory}
}

// CreateAgain sends the create command again.
func (s *Sandbox) CreateAgain(tb testing.TB) {
	tb.Helper()
	must(tb, s.TryCreate(tb.Context()))
}

// TryCreate sends the create command.
func (s *Sandbox) TryCreate(ctx context.Context) error {
	_, err := s.node.Client.CreateSandbox(ctx, s.createRequest())
	return fault.FromGRPC(err)
}

// TryStart sends the start command.
func (s *Sandbox) TryStart(ctx context.Context) error {
	_, err := s.node.Client.StartSandbox(ctx, &agentv1.StartSandboxRequest{Command: s.command()})
	return fault.FromGRPC(err)
}

// Start starts the sandbox's process.
func (s *Sandbox) Start(tb testing.TB) {
	tb.Helper()
	_, err := s.node.Client.StartSandbox(tb.Context(), &agentv1.StartSandboxRequest{Command: s.command()})
	must(tb, fault.FromGRPC(err))
}

// Run makes a sandbox and starts it.
func (n *Node) Run(tb testing.TB, sb Sandbox) *Sandbox {
	tb.Helper()
	s := n.Create(tb, sb)
	s.Start(tb)
	return s
}

// TryRun creates the sandbox and starts it; its error is a fault.
func (s *Sandbox) TryRun(ctx context.Context) error {
	if _, err := s.node.Client.CreateSandbox(ctx, s.createRequest()); err != nil {
		return fault.FromGRPC(err)
	}
	_, err := s.node.Client.StartSandbox(ctx, &agentv1.StartSandboxRequest{Command: s.command()})
	return fault.FromGRPC(err)
}

// Stop ends the sandbox's task.
func (s *Sandbox) Stop(tb testing.TB) {
	tb.Helper()
	_, err := s.node.Client.StopSandbox(tb.Context(), &agentv1.StopSandboxRequest{Command: s.command()})
	must(tb, fault.FromGRPC(err))
}

// Delete deletes the sandbox.
func (s *Sandbox) Delete(tb testing.TB) {
	tb.Helper()
	must(tb, s.TryDelete(tb.Context()))
}

// TryDelete deletes the sandbox.
func (s *Sandbox) TryDelete(ctx context.Context) error {
	_, err := s.node.Client.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Command: s.command()})
	return fault.FromGRPC(err)
}

// Volume is what to attach.
type Volume struct {
	Source, Target, SubPath string
	ReadOnly                bool
	Size                    int64
	AtCreate                bool
	// Hash is the entry's; made of the fields when empty.
	Hash string
	// PersistentVolume is the one that vouches for the source.
	PersistentVolume string
	// CSI, or Anchor, is the source instead of all that.
	CSI    *agentv1.CSISource
	Anchor *agentv1.AnchorSource
}

// Attach attaches a volume.
func (s *Sandbox) Attach(tb testing.TB, v Volume) *agentv1.MountRecord {
	tb.Helper()
	r, err := s.TryAttach(tb.Context(), v)
	must(tb, err)
	return r.GetRecord()
}

// TryAttach attaches a volume; its error is a fault.
func (s *Sandbox) TryAttach(ctx context.Context, v Volume) (*agentv1.AttachResponse, error) {
	r, err := s.node.Client.Attach(ctx, s.AttachRequest(v))
	return r, fault.FromGRPC(err)
}

// AttachRequest is the request of an attach.
func (s *Sandbox) AttachRequest(v Volume) *agentv1.AttachRequest {
	mode, when := v1alpha1.VolumeModeReadWrite, agentv1.When_NOW
	if v.ReadOnly {
		mode = v1alpha1.VolumeModeReadOnly
	}
	if v.AtCreate {
		when = agentv1.When_AT_CREATE
	}
	if v.Hash == "" {
		v.Hash = fmt.Sprintf("%s%s|%s|%s|%d", v.Source, v.CSI.GetVolumeHandle()+v.Anchor.GetPvName(), v.SubPath, mode, v.Size)
	}
	var workload *agentv1.Workload
	if s.Pod != nil {
		workload = &agentv1.Workload{Kind: &agentv1.Workload_Pod{Pod: s.Pod}}
	}
	r := &agentv1.AttachRequest{Command: s.command(), Workload: workload, When: when, TenantId: s.Tenant, Target: v.Target, Mode: string(mode),
		SubPath: v.SubPath, SizeLimitBytes: v.Size, EntryHash: v.Hash, Source: &agentv1.AttachRequest_Local{Local: &agentv1.LocalSource{Path: v.Source, PersistentVolume: v.PersistentVolume}}}
	if v.CSI != nil {
		r.Source = &agentv1.AttachRequest_Csi{Csi: v.CSI}
	}
	if v.Anchor != nil {
		r.Source = &agentv1.AttachRequest_Anchor{Anchor: v.Anchor}
	}
	return r
}

// Detach detaches a target and returns the answer.
func (s *Sandbox) Detach(tb testing.TB, target string, force bool) *agentv1.DetachResponse {
	tb.Helper()
	r, err := s.TryDetach(tb.Context(), target, force)
	must(tb, err)
	return r
}

// TryDetach detaches a target; its error is a fault.
func (s *Sandbox) TryDetach(ctx context.Context, target string, force bool) (*agentv1.DetachResponse, error) {
	r, err := s.node.Client.Detach(ctx, &agentv1.DetachRequest{Command: s.command(), Target: target, Force: force})
	return r, fault.FromGRPC(err)
}

// Result is the outcome of a command in a sandbox.
type Result struct {
	Code           int
	Stdout, Stderr string
}

// Exec runs a command in the sandbox.
func (s *Sandbox) Exec(tb testing.TB, command ...string) Result {
	tb.Helper()
	var stdout, stderr bytes.Buffer
	code, err := s.node.Runtime.Exec(tb.Context(), s.UID, containers.ExecSpec{Command: command}, containers.ExecIO{Stdout: &stdout, Stderr: &stderr})
	must(tb, err)
	return Result{Code: code, Stdout: stdout.String(), Stderr: stderr.String()}
}

// Shell runs a script in the sandbox, which must succeed, and returns its output.
func (s *Sandbox) Shell(tb testing.TB, script string) string {
	tb.Helper()
	r := s.Exec(tb, "sh", "-c", script)
	if r.Code != 0 {
		tb.Fatalf("%s: exit code %d: %s%s", script, r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// PID is the host's PID of the sandbox's init; 0 when it has no task.
func (s *Sandbox) PID(tb testing.TB) int {
	tb.Helper()
	c, err := s.node.Runtime.Get(tb.Context(), s.UID)
	must(tb, err)
	return c.PID
}

// State is the state that the agent reports of the sandbox.
func (s *Sandbox) State(tb testing.TB) *agentv1.SandboxState {
	tb.Helper()
	for _, st := range s.node.Inventory(tb).GetSandboxes() {
		if st.GetUid() == s.UID {
			return st
		}
	}
	return nil
}

// Inventory is the agent's full inventory.
func (n *Node) Inventory(tb testing.TB) *agentv1.InventoryUpdate {
	tb.Helper()
	ctx, cancel := context.WithCancel(tb.Context())
	defer cancel()
	stream, err := n.Client.Inventory(ctx, &agentv1.InventoryRequest{LeaseUid: "test"})
	must(tb, err)
	u, err := stream.Recv()
	must(tb, err)
	return u
}

// Mounts are the mounts that the kernel shows in the sandbox's namespace, by mount point.
func (s *Sandbox) Mounts(tb testing.TB) map[string]mount.Info {
	tb.Helper()
	p, err := mount.OpenProcess(s.PID(tb))
	must(tb, err)
	defer p.Close()
	ns, err := mount.Enter(p)
	must(tb, err)
	defer ns.Close()
	list, err := ns.Mounts()
	must(tb, err)
	out := map[string]mount.Info{}
	for _, m := range list {
		out[m.MountPoint] = m
	}
	return out
}

// Eventually waits until a condition holds; a minute at most.
func Eventually(tb testing.TB, what string, condition func() bool) {
	tb.Helper()
	testenv.Eventually(tb, time.Minute, what, condition)
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
