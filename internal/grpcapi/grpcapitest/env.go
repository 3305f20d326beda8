package grpcapitest

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/embedded"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// Env is a running server and all that is behind it.
type Env struct {
	t         testing.TB
	Store     store.Store
	Scheduler *Scheduler
	Agent     *Agent
	// Address is where the server listens, as a gRPC target.
	Address string
	// Pools are the SandboxSets and SandboxClaims.
	Pools *Pools
	// Volumes and the others are clients of it.
	Volumes   sandboxv1.SandboxVolumeServiceClient
	Sandboxes sandboxv1.SandboxServiceClient
	Named     sandboxv1.VolumeServiceClient
	Claims    sandboxv1.SandboxClaimServiceClient
	Sets      sandboxv1.SandboxSetServiceClient
	Images    sandboxv1.ImageServiceClient
	Nodes     sandboxv1.NodeServiceClient
	// Conn is the connection of the clients.
	Conn *grpc.ClientConn
	// Log is what the server has logged.
	Log *testenv.Log
	// Stop ends the server and waits for it. The test's end does it otherwise.
	Stop func()
}

// agents has the one agent of the test.
type agents struct{ client agentv1.AgentServiceClient }

func (a agents) Client(string) (agentv1.AgentServiceClient, error) { return a.client, nil }

// Start starts a server with the groups of Groups. change may alter its options. Everything ends with the test.
func Start(t testing.TB, change func(*grpcapi.Options)) *Env {
	t.Helper()
	// Not t.TempDir: the path of a unix socket must be short (unix(7): 108 bytes).
	dir, err := os.MkdirTemp("", "flux")
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	st, err := embedded.Open(filepath.Join(dir, "state.db"), embedded.Options{Clock: clocktesting.NewFakePassiveClock(Epoch)})
	must(t, err)
	t.Cleanup(func() { must(t, st.Close()) })

	failures := make(chan error, 1)
	e := &Env{
		t: t, Store: st, Log: &testenv.Log{}, Pools: NewPools(),
		Scheduler: &Scheduler{sandboxes: st.Sandboxes(), errors: failures, kick: make(chan struct{}, 1), fates: map[string]Fate{}},
		Agent:     &Agent{started: make(chan string, 8), cancelled: make(chan string, 8)},
	}
	for _, g := range Groups() {
		_, err := st.Groups().Create(t.Context(), g)
		must(t, err)
	}

	agentServer := grpc.NewServer()
	agentv1.RegisterAgentServiceServer(agentServer, e.Agent)
	agentSocket := filepath.Join(dir, "agent.sock")
	agentListener, err := net.Listen("unix", agentSocket)
	must(t, err)
	agentConn := dial(t, "unix://"+agentSocket)

	options := grpcapi.Options{
		Store: st, Agents: agents{agentv1.NewAgentServiceClient(agentConn)}, Authenticator: grpcapi.SocketPermissions{},
		Logger: slog.New(slog.NewTextHandler(e.Log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Clock:  clocktesting.NewFakePassiveClock(Epoch), NamedVolumes: &NamedVolumes{}, Pools: e.Pools.API,
	}
	if change != nil {
		change(&options)
	}
	server, err := grpcapi.New(options)
	must(t, err)
	socket := filepath.Join(dir, "flux.sock")
	listener, err := net.Listen("unix", socket)
	must(t, err)

	ctx, cancel := context.WithCancel(context.Background())
	serverCtx, stopServer := context.WithCancel(ctx)
	var running, serving sync.WaitGroup
	running.Go(func() { _ = agentServer.Serve(agentListener) })
	running.Go(func() { e.Scheduler.run(ctx) })
	serving.Go(func() {
		if err := server.Serve(serverCtx, listener); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	e.Stop = func() {
		stopServer()
		serving.Wait()
	}
	e.Address = "unix://" + socket
	e.Conn = dial(t, e.Address)
	e.Volumes = sandboxv1.NewSandboxVolumeServiceClient(e.Conn)
	e.Sandboxes = sandboxv1.NewSandboxServiceClient(e.Conn)
	e.Named = sandboxv1.NewVolumeServiceClient(e.Conn)
	e.Claims = sandboxv1.NewSandboxClaimServiceClient(e.Conn)
	e.Sets = sandboxv1.NewSandboxSetServiceClient(e.Conn)
	e.Images = sandboxv1.NewImageServiceClient(e.Conn)
	e.Nodes = sandboxv1.NewNodeServiceClient(e.Conn)
	t.Cleanup(func() {
		must(t, e.Conn.Close())
		e.Stop()
		cancel()
		must(t, agentConn.Close())
		agentServer.Stop()
		running.Wait()
		select {
		case err := <-failures:
			t.Error(err)
		default:
		}
	})
	return e
}

// Groups are the groups that every test has, in the namespace default: "default" takes everything; "off" has
// its gate off; "strict" has a policy and an image; "parts" has two sub-groups.
func Groups() []*v1alpha1.SandboxGroup {
	group := func(name string, on bool) *v1alpha1.SandboxGroup {
		return &v1alpha1.SandboxGroup{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec:       v1alpha1.SandboxGroupSpec{FeatureGates: v1alpha1.FeatureGates{DynamicVolumeMount: on}},
		}
	}
	strict := group("strict", true)
	strict.Spec.VolumePolicy = v1alpha1.VolumePolicy{
		AllowedTypes: []v1alpha1.VolumeType{v1alpha1.VolumeTypeLocal}, DeniedTargets: []string{"/opt"}, MaxVolumes: 2, RequireSizeLimit: true,
	}
	strict.Spec.SubGroups = []v1alpha1.SubSandboxGroup{{Name: "default", Template: v1alpha1.SandboxTemplate{Image: "template:1"}}}
	parts := group("parts", true)
	parts.Spec.SubGroups = []v1alpha1.SubSandboxGroup{{Name: "prefill"}, {Name: "decode"}}
	return []*v1alpha1.SandboxGroup{group("default", true), group("off", false), strict, parts}
}

// Run creates a sandbox and waits until it is no longer Pending.
func (e *Env) Run(sb *sandboxv1.Sandbox) *sandboxv1.Sandbox {
	e.t.Helper()
	created, err := e.Sandboxes.CreateSandbox(e.t.Context(), &sandboxv1.CreateSandboxRequest{Sandbox: sb})
	must(e.t, err)
	e.Await(store.Key{Namespace: created.Namespace, Name: created.Name}, func(sb *v1alpha1.Sandbox) bool {
		return sb.Status.Phase != "" && sb.Status.Phase != v1alpha1.SandboxPending
	})
	return created
}

// Dump is everything in the store, as text.
func (e *Env) Dump() string {
	e.t.Helper()
	sandboxes, err := e.Store.Sandboxes().List(e.t.Context(), store.ListOptions{})
	must(e.t, err)
	groups, err := e.Store.Groups().List(e.t.Context(), store.ListOptions{})
	must(e.t, err)
	sets, err := e.Pools.Sets.List(e.t.Context(), store.ListOptions{})
	must(e.t, err)
	claims, err := e.Pools.Claims.List(e.t.Context(), store.ListOptions{})
	must(e.t, err)
	text, err := json.MarshalIndent(map[string]any{"sandboxes": sandboxes.Items, "groups": groups.Items, "sets": sets.Items, "claims": claims.Items}, "", "  ")
	must(e.t, err)
	return string(text)
}

// Await follows a sandbox until it is as wished.
func (e *Env) Await(key store.Key, wished func(*v1alpha1.Sandbox) bool) *v1alpha1.Sandbox {
	e.t.Helper()
	for event := range e.Store.Sandboxes().Follow(e.t.Context(), key) {
		if event.Type == store.Changed && wished(event.Object) {
			return event.Object
		}
	}
	e.t.Fatalf("sandbox %s never became as wished", key)
	return nil
}

func dial(t testing.TB, target string) *grpc.ClientConn {
	t.Helper()
	// Fixed windows, so that a test can tell back-pressure from buffering.
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
	must(t, err)
	return conn
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
