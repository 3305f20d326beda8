package grpcapi_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

func callerOf(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	return strings.Join(md.Get("caller"), "")
}

func unauthenticated(cause error) error {
	return fault.New(errdefs.ErrUnauthenticated, "UNKNOWN_CALLER", "%w", cause)
}

func as(t *testing.T, caller string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), "caller", caller)
}

func TestTenantsApart(t *testing.T) {
	e := grpcapitest.Start(t, func(o *grpcapi.Options) {
		o.Authenticator = callers{"operator": {Name: "operator"}, "acme": {Name: "alice", Tenant: "acme"}, "evil": {Name: "mallory", Tenant: "evil"}}
	})
	created, err := e.Sandboxes.CreateSandbox(as(t, "acme"), &sandboxv1.CreateSandboxRequest{Wait: true,
		Sandbox: sandbox("a", func(sb *sandboxv1.Sandbox) { sb.Spec.TenantId = "" })})
	noError(t, err)
	if created.Spec.TenantId != "acme" {
		t.Errorf("a caller's sandbox has the tenant %q", created.Spec.TenantId)
	}
	_, err = e.Sandboxes.CreateSandbox(as(t, "evil"), &sandboxv1.CreateSandboxRequest{Sandbox: sandbox("b")})
	wantError(t, err, codes.PermissionDenied, fault.TenantMismatch)

	calls := map[string]func(ctx context.Context) error{
		"add": func(ctx context.Context) error {
			_, err := e.Volumes.AddSandVolume(ctx, add("a", "/srv/data", "/data"))
			return err
		},
		"remove": func(ctx context.Context) error {
			_, err := e.Volumes.RemoveSandVolume(ctx, remove("a", "/nothing"))
			return err
		},
		"list": func(ctx context.Context) error {
			_, err := e.Volumes.ListSandVolumes(ctx, &sandboxv1.ListSandVolumesRequest{Sandbox: named("a")})
			return err
		},
		"get": func(ctx context.Context) error {
			_, err := e.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: &sandboxv1.SandboxRef{Uid: created.Uid}})
			return err
		},
		"pause": func(ctx context.Context) error {
			_, err := e.Sandboxes.PauseSandbox(ctx, &sandboxv1.PauseSandboxRequest{Sandbox: named("a")})
			return err
		},
		"exec": func(ctx context.Context) error { _, _, err := exec(ctx, e, "a", "", "echo"); return err },
		"logs": func(ctx context.Context) error {
			_, err := logs(ctx, e, &sandboxv1.LogsRequest{Sandbox: named("a")})
			return err
		},
		"watch": func(ctx context.Context) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			stream, err := e.Sandboxes.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Sandbox: named("a")})
			if err != nil {
				return err
			}
			_, err = stream.Recv()
			return err
		},
		"delete": func(ctx context.Context) error {
			_, err := e.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Sandbox: named("a")})
			return err
		},
	}
	for name, call := range calls {
		before := e.Dump()
		wantError(t, call(as(t, "evil")), codes.PermissionDenied, fault.TenantMismatch, "does not belong")
		wantError(t, call(t.Context()), codes.Unauthenticated, "UNKNOWN_CALLER")
		if e.Dump() != before {
			t.Errorf("%s changed something", name)
		}
	}
	for caller, n := range map[string]int{"operator": 1, "acme": 1, "evil": 0} {
		list, err := e.Sandboxes.ListSandboxes(as(t, caller), &sandboxv1.ListSandboxesRequest{PageSize: 1})
		noError(t, err)
		if len(list.Sandboxes) != n {
			t.Errorf("%s is shown %d sandboxes", caller, len(list.Sandboxes))
		}
	}
	_, err = e.Images.ListImages(as(t, "acme"), &sandboxv1.ListImagesRequest{})
	wantError(t, err, codes.PermissionDenied, fault.TenantMismatch, "for operators")
	_, err = e.Nodes.Doctor(as(t, "acme"), &sandboxv1.DoctorRequest{})
	wantError(t, err, codes.PermissionDenied, fault.TenantMismatch, "for operators")
	_, err = e.Nodes.Doctor(as(t, "operator"), &sandboxv1.DoctorRequest{})
	noError(t, err)

	for name, call := range calls {
		if name == "delete" {
			continue
		}
		if err := call(as(t, "acme")); err != nil {
			t.Errorf("%s by the owner: %v", name, err)
		}
	}
}

func TestHealthAndReflection(t *testing.T) {
	e := grpcapitest.Start(t, func(o *grpcapi.Options) { o.Authenticator = callers{} })
	health := healthv1.NewHealthClient(e.Conn)
	watch, err := health.Watch(t.Context(), &healthv1.HealthCheckRequest{Service: "flux.sandbox.v1.SandboxVolumeService"})
	noError(t, err)
	for {
		m, err := watch.Recv()
		noError(t, err)
		if m.Status == healthv1.HealthCheckResponse_SERVING {
			break
		}
	}
	reflection, err := reflectionv1.NewServerReflectionClient(e.Conn).ServerReflectionInfo(t.Context())
	noError(t, err)
	// The server may have ended the stream before it is sent; Recv says why.
	_ = reflection.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}})
	_, err = reflection.Recv()
	wantError(t, err, codes.Unauthenticated, "UNKNOWN_CALLER")
}

func TestReflectionListsTheServices(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	reflection, err := reflectionv1.NewServerReflectionClient(e.Conn).ServerReflectionInfo(t.Context())
	noError(t, err)
	noError(t, reflection.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}))
	m, err := reflection.Recv()
	noError(t, err)
	for _, want := range []string{"SandboxVolumeService", "SandboxService", "ImageService", "NodeService"} {
		if !strings.Contains(m.String(), "flux.sandbox.v1."+want) {
			t.Errorf("%s is not listed", want)
		}
	}
}

// panicking is an Agents that fails in the worst way.
type panicking struct{}

func (panicking) Client(string) (agentv1.AgentServiceClient, error) { panic("out of agents") }

func TestPanicIsAnInternalError(t *testing.T) {
	e := grpcapitest.Start(t, func(o *grpcapi.Options) { o.Agents = panicking{} })
	e.Run(sandbox("a"))
	_, err := e.Nodes.Doctor(t.Context(), &sandboxv1.DoctorRequest{})
	wantError(t, err, codes.Internal, fault.Internal, "report it")
	_, err = logs(t.Context(), e, &sandboxv1.LogsRequest{Sandbox: named("a")})
	wantError(t, err, codes.Internal, fault.Internal)
	if log := e.Log.String(); !strings.Contains(log, "out of agents") || !strings.Contains(log, "images.go") {
		t.Errorf("the log has no stack:\n%s", log)
	}
	_, err = e.Sandboxes.GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Sandbox: named("a")})
	noError(t, err)
}

func TestAccessLine(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	uid := e.Run(sandbox("a")).Uid
	_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/data"))
	noError(t, err)
	_, err = e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/other", "/data"))
	wantError(t, err, codes.AlreadyExists, fault.TargetInUse)
	e.Stop()
	log := e.Log.String()
	for _, want := range []string{
		"method=/flux.sandbox.v1.SandboxVolumeService/AddSandVolume code=OK", "caller=socket", "source=/srv/data target=/data",
		"sandbox=default/a uid=" + uid + " tenant=acme", "operationId=op-1", "code=AlreadyExists", "reason=TARGET_IN_USE",
	} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
}

func TestStoppingAnswersWhoWaits(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	e.Scheduler.Set("/srv/slow", grpcapitest.Fate{Hold: true})
	waiting, watching := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/slow", "/data"))
		waiting <- err
	}()
	watch, err := e.Sandboxes.WatchSandboxes(t.Context(), &sandboxv1.WatchSandboxesRequest{})
	noError(t, err)
	go func() {
		for {
			if _, err := watch.Recv(); err != nil {
				watching <- err
				return
			}
		}
	}()
	e.Await(keyOf("a"), rowPhase("/data", "Attaching"))
	e.Stop()
	wantError(t, <-waiting, codes.Unavailable, fault.OperationPending, "the server is stopping", "goes on")
	wantError(t, <-watching, codes.Unavailable, store.Unavailable, "watch again")
}

// hanging is an Agents that does not come back, whatever becomes of the call.
type hanging struct{ entered, end chan struct{} }

func (h hanging) Client(string) (agentv1.AgentServiceClient, error) {
	close(h.entered)
	<-h.end
	return nil, errors.New("the test is over")
}

func TestACallThatHangsDoesNotKeepTheServer(t *testing.T) {
	h := hanging{make(chan struct{}), make(chan struct{})}
	defer close(h.end)
	e := grpcapitest.Start(t, func(o *grpcapi.Options) { o.Agents, o.StopGrace = h, time.Millisecond })
	call := make(chan error, 1)
	go func() {
		_, err := e.Nodes.Doctor(t.Context(), &sandboxv1.DoctorRequest{})
		call <- err
	}()
	<-h.entered
	e.Stop()
	if <-call == nil {
		t.Error("the call was answered")
	}
}

func TestOptionsAreRequired(t *testing.T) {
	if _, err := grpcapi.New(grpcapi.Options{}); err == nil {
		t.Error("a server without a store")
	}
}
