package grpcapi_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
)

func create(t *testing.T, e *grpcapitest.Env, sb *sandboxv1.Sandbox, wait bool) (*sandboxv1.Sandbox, error) {
	t.Helper()
	return e.Sandboxes.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Sandbox: sb, Wait: wait})
}

func image(name string) func(*sandboxv1.Sandbox) {
	return func(sb *sandboxv1.Sandbox) { sb.Spec.Image = name }
}

func TestCreateSandbox(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	wish := sandbox("a", func(sb *sandboxv1.Sandbox) {
		sb.Labels = map[string]string{"app": "demo"}
		sb.Annotations = map[string]string{"Note": "anything goes"}
		sb.Uid, sb.Generation, sb.Status = "ignored", 9, &sandboxv1.SandboxStatus{Phase: "Ignored"}
		sb.Spec.Command, sb.Spec.Args = []string{"sh", "-c"}, []string{"sleep 1"}
		sb.Spec.Env = []*sandboxv1.EnvVar{{Name: "A", Value: "1"}}
		sb.Spec.Resources = &sandboxv1.Resources{Limits: map[string]string{"cpu": "500m", "memory": "64Mi"}}
		sb.Spec.VolumeMounts = []*sandboxv1.VolumeMount{{Source: "/srv/models", Target: "/models", Mode: "ro"}}
		sb.Spec.DynamicVolumes = []*sandboxv1.DynamicVolume{{VolumeType: "local", Source: "/srv/data", Target: "/data", SizeLimit: "1Gi",
			RequestId: "ignored", Detach: &sandboxv1.DetachRequest{RequestId: "ignored"}}}
	})
	got, err := create(t, e, wish, true)
	noError(t, err)
	if got.Namespace != "default" || got.Generation != 1 || got.Uid == "ignored" || got.Status.Phase != "Running" || got.Status.VolumesReady != "2/2" {
		t.Errorf("created %v", got)
	}
	entry := wish.Spec.DynamicVolumes[0]
	if entry.RequestId == got.Spec.DynamicVolumes[0].RequestId {
		t.Error("the id of another request was taken")
	}
	entry.RequestId, entry.Detach = got.Spec.DynamicVolumes[0].RequestId, nil
	if !proto.Equal(got.Spec, wish.Spec) {
		t.Errorf("spec:\n got %v\nwant %v", got.Spec, wish.Spec)
	}
	kept := stored(t, e, "a")
	if len(kept.Finalizers) != 1 || kept.Finalizers[0] != v1alpha1.FinalizerVolumes || kept.Spec.DynamicVolumes[0].RequestID == "" {
		t.Errorf("stored %+v", kept)
	}
	read, err := e.Sandboxes.GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Sandbox: named("a")})
	noError(t, err)
	if read.Uid != got.Uid {
		t.Errorf("read %v", read)
	}
	_, err = create(t, e, sandbox("a"), false)
	wantError(t, err, codes.AlreadyExists, fault.SandboxExists, "default/a")
}

func TestCreateMakesNames(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	names := map[string]bool{}
	for range 3 {
		sb, err := create(t, e, sandbox(""), false)
		noError(t, err)
		names[sb.Name] = true
	}
	if len(names) != 3 {
		t.Errorf("names %v", names)
	}
}

func TestCreateTakesTheImageOfTheGroup(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	_, err := create(t, e, sandbox("a", image(""), func(sb *sandboxv1.Sandbox) { sb.Spec.Group = "strict" }), true)
	noError(t, err)
}

func TestCreateWithTheGateOffIsAllowed(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	_, err := create(t, e, sandbox("a", func(sb *sandboxv1.Sandbox) {
		sb.Spec.Group = "off"
		sb.Spec.DynamicVolumes = []*sandboxv1.DynamicVolume{{VolumeType: "local", Source: "/srv/data", Target: "/data"}}
	}), true)
	noError(t, err)
}

func TestCreateWaits(t *testing.T) {
	t.Run("until the process has ended", func(t *testing.T) {
		e := grpcapitest.Start(t, nil)
		e.Scheduler.Set("ends:1", grpcapitest.Fate{Phase: v1alpha1.SandboxSucceeded})
		sb, err := create(t, e, sandbox("a", image("ends:1")), true)
		noError(t, err)
		if sb.Status.Phase != "Succeeded" {
			t.Errorf("got %v", sb.Status)
		}
	})
	t.Run("not for what cannot come", func(t *testing.T) {
		e := grpcapitest.Start(t, nil)
		e.Scheduler.Set("missing:1", grpcapitest.Fate{Reason: fault.ImageNotFound, Message: "no image missing:1 on node-1: import it"})
		_, err := create(t, e, sandbox("a", image("missing:1")), true)
		wantError(t, err, codes.NotFound, fault.ImageNotFound, "import it", "stays Pending")
	})
	t.Run("through what passes, to its deadline", func(t *testing.T) {
		e := grpcapitest.Start(t, impatient)
		e.Scheduler.Set("full:1", grpcapitest.Fate{Reason: fault.NoCapacity, Message: "node-1 is full"})
		_, err := create(t, e, sandbox("a", image("full:1")), true)
		wantError(t, err, codes.DeadlineExceeded, fault.OperationPending, "fluxctl get a")
		e.Await(keyOf("a"), func(sb *v1alpha1.Sandbox) bool { return sb.Status.Reason != "" })
		_, err = e.Sandboxes.PauseSandbox(t.Context(), &sandboxv1.PauseSandboxRequest{Sandbox: named("a"), Wait: true})
		wantError(t, err, codes.DeadlineExceeded, fault.OperationPending, "node-1 is full")
	})
	t.Run("not if it is deleted", func(t *testing.T) {
		e := grpcapitest.Start(t, nil)
		e.Scheduler.Set("late:1", grpcapitest.Fate{Hold: true})
		done := make(chan error, 1)
		go func() {
			_, err := create(t, e, sandbox("a", image("late:1")), true)
			done <- err
		}()
		e.Await(keyOf("a"), func(sb *v1alpha1.Sandbox) bool { return sb.Status.Phase == v1alpha1.SandboxPending })
		_, err := e.Sandboxes.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Sandbox: named("a")})
		noError(t, err)
		wantError(t, <-done, codes.NotFound, fault.SandboxNotFound, "deleted")
	})
}

func TestListSandboxes(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	for i := range 5 {
		_, err := create(t, e, sandbox(fmt.Sprintf("s%d", i), func(sb *sandboxv1.Sandbox) {
			sb.Labels = map[string]string{"even": fmt.Sprint(i%2 == 0)}
		}), false)
		noError(t, err)
	}
	list := func(req *sandboxv1.ListSandboxesRequest) string {
		var names []string
		for {
			resp, err := e.Sandboxes.ListSandboxes(t.Context(), req)
			noError(t, err)
			for _, sb := range resp.Sandboxes {
				names = append(names, sb.Name)
			}
			if req.PageToken = resp.NextPageToken; req.PageToken == "" {
				return strings.Join(names, " ")
			}
			names = append(names, "|")
		}
	}
	for want, req := range map[string]*sandboxv1.ListSandboxesRequest{
		"s0 s1 s2 s3 s4":     {},
		"s0 s1 | s2 s3 | s4": {Namespace: "default", PageSize: 2},
		"s0 s2 s4":           {LabelSelector: "even=true"},
		"s1 | s3":            {LabelSelector: "even notin (true)", PageSize: 1},
		"":                   {Namespace: "elsewhere"},
	} {
		if got := list(req); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Sandboxes may be so large that a page of them is more than a client takes.
func TestPagesFitIntoAMessage(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	const count = 20
	for i := range count {
		_, err := create(t, e, sandbox(fmt.Sprintf("s%02d", i), func(sb *sandboxv1.Sandbox) {
			sb.Spec.Args = []string{strings.Repeat("x", 500<<10)}
		}), false)
		noError(t, err)
	}
	seen := map[string]bool{}
	req := &sandboxv1.ListSandboxesRequest{}
	for {
		resp, err := e.Sandboxes.ListSandboxes(t.Context(), req)
		noError(t, err)
		for _, sb := range resp.Sandboxes {
			seen[sb.Name] = true
		}
		if req.PageToken = resp.NextPageToken; req.PageToken == "" {
			break
		}
	}
	if len(seen) != count {
		t.Errorf("%d of %d were listed", len(seen), count)
	}
}

func TestDeleteSandbox(t *testing.T) {
	e := grpcapitest.Start(t, impatient)
	e.Run(sandbox("a"))
	e.Scheduler.Set("a", grpcapitest.Fate{Hold: true})
	req := &sandboxv1.DeleteSandboxRequest{Sandbox: named("a"), Wait: true}
	_, err := e.Sandboxes.DeleteSandbox(t.Context(), req)
	wantError(t, err, codes.DeadlineExceeded, fault.OperationPending, "not gone yet")
	e.Scheduler.Set("a", grpcapitest.Fate{})
	// It may be gone before, or not as soon as the server stops waiting.
	for err = errors.New("not asked yet"); err != nil && fault.ReasonOf(fault.FromGRPC(err)) != fault.SandboxNotFound; {
		_, err = e.Sandboxes.DeleteSandbox(t.Context(), req)
	}
	_, err = e.Sandboxes.DeleteSandbox(t.Context(), req)
	wantError(t, err, codes.NotFound, fault.SandboxNotFound)
}

func TestPauseAndResume(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	for _, c := range []struct {
		paused bool
		phase  string
	}{{true, "Paused"}, {true, "Paused"}, {false, "Running"}, {false, "Running"}} {
		sb, err := e.Sandboxes.PauseSandbox(t.Context(), &sandboxv1.PauseSandboxRequest{Sandbox: named("a"), Paused: c.paused, Wait: true})
		noError(t, err)
		if sb.Status.Phase != c.phase {
			t.Errorf("paused=%v: %s", c.paused, sb.Status.Phase)
		}
	}
	e.Scheduler.Set("ends:1", grpcapitest.Fate{Phase: v1alpha1.SandboxFailed})
	e.Run(sandbox("ended", image("ends:1")))
	_, err := e.Sandboxes.PauseSandbox(t.Context(), &sandboxv1.PauseSandboxRequest{Sandbox: named("ended"), Paused: true})
	wantError(t, err, codes.FailedPrecondition, fault.SandboxNotRunning, "has ended")
	e.Scheduler.Set("a", grpcapitest.Fate{Hold: true})
	_, err = e.Sandboxes.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Sandbox: named("a")})
	noError(t, err)
	_, err = e.Sandboxes.PauseSandbox(t.Context(), &sandboxv1.PauseSandboxRequest{Sandbox: named("a"), Paused: true})
	wantError(t, err, codes.FailedPrecondition, fault.SandboxTerminating)
}

func TestWatchSandboxes(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	e.Run(sandbox("b"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// next is the next event of a type for the name.
	next := func(stream interface {
		Recv() (*sandboxv1.SandboxEvent, error)
	}, kind sandboxv1.SandboxEvent_Type, name string) {
		t.Helper()
		for {
			m, err := stream.Recv()
			noError(t, err)
			if m.Type == kind && m.GetSandbox().GetName() == name {
				return
			}
		}
	}
	all, err := e.Sandboxes.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Namespace: "default"})
	noError(t, err)
	elsewhere, err := e.Sandboxes.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Namespace: "elsewhere"})
	noError(t, err)
	one, err := e.Sandboxes.WatchSandboxes(ctx, &sandboxv1.WatchSandboxesRequest{Sandbox: named("b")})
	noError(t, err)
	there := map[string]bool{}
	for m, err := all.Recv(); m.GetType() != sandboxv1.SandboxEvent_SYNCED; m, err = all.Recv() {
		noError(t, err)
		there[m.Sandbox.Name] = true
	}
	if !there["a"] || !there["b"] {
		t.Errorf("before SYNCED there came only %v", there)
	}
	m, err := elsewhere.Recv()
	noError(t, err)
	if m.Type != sandboxv1.SandboxEvent_SYNCED {
		t.Errorf("elsewhere: %v", m)
	}
	next(one, sandboxv1.SandboxEvent_SYNCED, "")
	_, err = e.Sandboxes.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Sandbox: named("b"), Wait: true})
	noError(t, err)
	next(all, sandboxv1.SandboxEvent_DELETED, "b")
	next(one, sandboxv1.SandboxEvent_DELETED, "b")
	if _, err := one.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the watch of one sandbox did not end with it: %v", err)
	}
	e.Run(sandbox("c"))
	next(all, sandboxv1.SandboxEvent_UPDATED, "c")
}
