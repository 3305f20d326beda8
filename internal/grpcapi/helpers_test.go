package grpcapi_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// sandbox is a request for a sandbox of tenant acme with the name.
func sandbox(name string, change ...func(*sandboxv1.Sandbox)) *sandboxv1.Sandbox {
	sb := &sandboxv1.Sandbox{Name: name, Spec: &sandboxv1.SandboxSpec{Image: "busybox:1", TenantId: "acme"}}
	for _, c := range change {
		c(sb)
	}
	return sb
}

func named(name string) *sandboxv1.SandboxRef { return &sandboxv1.SandboxRef{Name: name} }

func keyOf(name string) store.Key { return store.Key{Namespace: "default", Name: name} }

// add is a request for a local volume.
func add(name, source, target string, change ...func(*sandboxv1.AddSandVolumeRequest)) *sandboxv1.AddSandVolumeRequest {
	req := &sandboxv1.AddSandVolumeRequest{
		Sandbox: named(name),
		Volume:  &sandboxv1.DynamicVolume{VolumeType: "local", Source: source, Target: target},
	}
	for _, c := range change {
		c(req)
	}
	return req
}

func keep(req *sandboxv1.AddSandVolumeRequest) { req.OnFailure = "Keep" }

func remove(name, target string, change ...func(*sandboxv1.RemoveSandVolumeRequest)) *sandboxv1.RemoveSandVolumeRequest {
	req := &sandboxv1.RemoveSandVolumeRequest{Sandbox: named(name), Target: target}
	for _, c := range change {
		c(req)
	}
	return req
}

func force(req *sandboxv1.RemoveSandVolumeRequest) { req.Force = true }

// impatient makes calls that wait give up soon.
func impatient(o *grpcapi.Options) { o.MaxWait = 50 * time.Millisecond }

// wantError checks the code and the reason, and that the message has the words.
func wantError(t *testing.T, err error, code codes.Code, reason fault.Reason, words ...string) {
	t.Helper()
	if got := status.Code(err); got != code {
		t.Errorf("code %s, want %s: %v", got, code, err)
	}
	if got := fault.ReasonOf(fault.FromGRPC(err)); got != reason {
		t.Errorf("reason %s, want %s: %v", got, reason, err)
	}
	for _, w := range words {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("the message lacks %q: %v", w, err)
		}
	}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// rowPhase waits until the row of a target is in a phase.
func rowPhase(target string, phase v1alpha1.VolumePhase) func(*v1alpha1.Sandbox) bool {
	return func(sb *v1alpha1.Sandbox) bool {
		for _, row := range sb.Status.Volumes {
			if row.Target == target && row.Phase == phase {
				return true
			}
		}
		return false
	}
}

func stored(t *testing.T, e *grpcapitest.Env, name string) *v1alpha1.Sandbox {
	t.Helper()
	sb, err := e.Store.Sandboxes().Get(t.Context(), keyOf(name))
	noError(t, err)
	return sb
}

// callers are identities by the word in the metadata of a call.
type callers map[string]grpcapi.Identity

var errStranger = errors.New("who is that?")

func (c callers) Authenticate(ctx context.Context) (grpcapi.Identity, error) {
	id, ok := c[callerOf(ctx)]
	if !ok {
		return grpcapi.Identity{}, unauthenticated(errStranger)
	}
	return id, nil
}
