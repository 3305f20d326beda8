package grpcapi_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/reflect/protoreflect"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
)

// rights is an Authorizer that notes what it was asked.
type rights struct {
	tenant string

	mu     sync.Mutex // guards what follows
	refuse bool
	asked  []grpcapi.Access
}

func (r *rights) Authorize(_ context.Context, caller grpcapi.Identity, access grpcapi.Access) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, access)
	if caller.Name != "alice" || r.refuse {
		return "", fault.New(errdefs.ErrPermissionDenied, fault.Forbidden, "you may not")
	}
	if access.Namespace == "" {
		return "", nil
	}
	return r.tenant, nil
}

// take returns what was asked since, and sets whether to refuse.
func (r *rights) take(refuse bool) []grpcapi.Access {
	r.mu.Lock()
	defer r.mu.Unlock()
	asked := r.asked
	r.asked, r.refuse = nil, refuse
	return asked
}

// Every call asks for its own right, before it looks anything up; who may not changes nothing and learns nothing.
func TestEveryCallAsksForItsRight(t *testing.T) {
	r := &rights{tenant: "acme"}
	e := grpcapitest.Start(t, func(o *grpcapi.Options) {
		o.Authenticator, o.Authorizer = callers{"alice": {Name: "alice"}}, r
	})
	ctx := as(t, "alice")
	created, err := e.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Wait: true,
		Sandbox: sandbox("a", func(sb *sandboxv1.Sandbox) { sb.Spec.TenantId = "" })})
	noError(t, err)
	if created.Spec.TenantId != "acme" {
		t.Errorf("the sandbox has the tenant %q, not its namespace's", created.Spec.TenantId)
	}
	_, err = e.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{
		Sandbox: sandbox("b", func(sb *sandboxv1.Sandbox) { sb.Spec.TenantId = "evil" })})
	wantError(t, err, codes.PermissionDenied, fault.TenantMismatch)

	e.MustSet("a", 1)
	_, err = e.Claims.CreateSandboxClaim(ctx, &sandboxv1.CreateSandboxClaimRequest{Claim: claimOf("a", "a")})
	noError(t, err)

	watch := func(req *sandboxv1.WatchSandboxesRequest) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := e.Sandboxes.WatchSandboxes(ctx, req)
		if err != nil {
			return err
		}
		_, err = stream.Recv()
		return err
	}
	on := func(verb, subresource, name string) grpcapi.Access {
		return grpcapi.Access{Verb: verb, Subresource: subresource, Namespace: "default", Name: name}
	}
	onPool := func(verb, resource, name string) grpcapi.Access {
		return grpcapi.Access{Verb: verb, Resource: resource, Namespace: "default", Name: name}
	}
	node := grpcapi.Access{Verb: "update", Subresource: "node"}
	calls := map[string]struct {
		want grpcapi.Access
		call func(name string) error
	}{
		"create": {on("create", "", ""), func(string) error {
			_, err := e.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Sandbox: sandbox("c")})
			return err
		}},
		"get": {on("get", "", "a"), func(name string) error {
			_, err := e.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: named(name)})
			return err
		}},
		"get by UID": {on("get", "", "a"), func(string) error {
			_, err := e.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: &sandboxv1.SandboxRef{Uid: created.Uid}})
			return err
		}},
		"list": {on("list", "", ""), func(string) error {
			_, err := e.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: "default"})
			return err
		}},
		"list all": {grpcapi.Access{Verb: "list"}, func(string) error {
			_, err := e.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{})
			return err
		}},
		"watch":     {on("watch", "", ""), func(string) error { return watch(&sandboxv1.WatchSandboxesRequest{Namespace: "default"}) }},
		"watch all": {grpcapi.Access{Verb: "watch"}, func(string) error { return watch(&sandboxv1.WatchSandboxesRequest{}) }},
		"watch one": {on("watch", "", "a"), func(name string) error { return watch(&sandboxv1.WatchSandboxesRequest{Sandbox: named(name)}) }},
		"pause": {on("update", "", "a"), func(name string) error {
			_, err := e.Sandboxes.PauseSandbox(ctx, &sandboxv1.PauseSandboxRequest{Sandbox: named(name)})
			return err
		}},
		"add": {on("create", "volumes", "a"), func(name string) error {
			_, err := e.Volumes.AddSandVolume(ctx, add(name, "/srv/data", "/data"))
			return err
		}},
		"volumes": {on("get", "volumes", "a"), func(name string) error {
			_, err := e.Volumes.ListSandVolumes(ctx, &sandboxv1.ListSandVolumesRequest{Sandbox: named(name)})
			return err
		}},
		"remove": {on("delete", "volumes", "a"), func(name string) error {
			_, err := e.Volumes.RemoveSandVolume(ctx, remove(name, "/data"))
			return err
		}},
		"exec": {on("create", "exec", "a"), func(name string) error { _, _, err := exec(ctx, e, name, "", "echo"); return err }},
		"logs": {on("get", "log", "a"), func(name string) error {
			_, err := logs(ctx, e, &sandboxv1.LogsRequest{Sandbox: named(name)})
			return err
		}},
		"images": {node, func(string) error {
			_, err := e.Images.ListImages(ctx, &sandboxv1.ListImagesRequest{})
			return err
		}},
		"doctor": {node, func(string) error {
			_, err := e.Nodes.Doctor(ctx, &sandboxv1.DoctorRequest{})
			return err
		}},
		"delete": {on("delete", "", "a"), func(name string) error {
			_, err := e.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Sandbox: named(name)})
			return err
		}},
		"import": {node, func(string) error {
			stream, err := e.Images.ImportImage(ctx)
			if err != nil {
				return err
			}
			if err := stream.Send(&sandboxv1.ImportImageRequest{Chunk: []byte("busybox:1")}); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			_, err = stream.CloseAndRecv()
			return err
		}},
		"pull": {node, func(string) error {
			_, err := e.Images.PullImage(ctx, &sandboxv1.PullImageRequest{Name: "busybox:1"})
			if fault.ReasonOf(fault.FromGRPC(err)) == fault.ImageNotFound {
				return nil // the agent was asked, and has no registry
			}
			return err
		}},
		"volume create": {node, func(string) error {
			_, err := e.Named.CreateVolume(ctx, &sandboxv1.CreateVolumeRequest{Name: "v", Size: "1Gi"})
			return err
		}},
		"volume list": {node, func(string) error {
			_, err := e.Named.ListVolumes(ctx, &sandboxv1.ListVolumesRequest{})
			return err
		}},
		"volume remove": {node, func(string) error {
			_, err := e.Named.DeleteVolume(ctx, &sandboxv1.DeleteVolumeRequest{Name: "v"})
			return err
		}},
		"claim create": {onPool("create", "sandboxclaims", ""), func(string) error {
			_, err := e.Claims.CreateSandboxClaim(ctx, &sandboxv1.CreateSandboxClaimRequest{Claim: claimOf("", "a")})
			return err
		}},
		"claim with an image": {grpcapi.Access{Verb: "create", Namespace: "default"}, func(string) error {
			_, err := e.Claims.CreateSandboxClaim(ctx, &sandboxv1.CreateSandboxClaimRequest{Claim: &sandboxv1.SandboxClaim{Name: "image", Spec: &sandboxv1.SandboxClaimSpec{
				TemplateName: "a", InplaceUpdate: &sandboxv1.InplaceUpdate{Image: "busybox"}}}})
			return err
		}},
		"claim with an environment": {grpcapi.Access{Verb: "create", Namespace: "default"}, func(string) error {
			_, err := e.Claims.CreateSandboxClaim(ctx, &sandboxv1.CreateSandboxClaimRequest{Claim: &sandboxv1.SandboxClaim{Name: "environment", Spec: &sandboxv1.SandboxClaimSpec{
				TemplateName: "a", EnvVars: map[string]string{"LD_PRELOAD": "/data/mine.so"}}}})
			return err
		}},
		"claim get": {onPool("get", "sandboxclaims", "a"), func(name string) error {
			_, err := e.Claims.GetSandboxClaim(ctx, &sandboxv1.GetSandboxClaimRequest{Name: name, Wait: true})
			return err
		}},
		"claim list": {onPool("list", "sandboxclaims", ""), func(string) error {
			_, err := e.Claims.ListSandboxClaims(ctx, &sandboxv1.ListSandboxClaimsRequest{Namespace: "default"})
			return err
		}},
		"claim list all": {grpcapi.Access{Verb: "list", Resource: "sandboxclaims"}, func(string) error {
			_, err := e.Claims.ListSandboxClaims(ctx, &sandboxv1.ListSandboxClaimsRequest{})
			return err
		}},
		"claim remove": {onPool("delete", "sandboxclaims", "a"), func(name string) error {
			_, err := e.Claims.DeleteSandboxClaim(ctx, &sandboxv1.DeleteSandboxClaimRequest{Name: name, Wait: true})
			return err
		}},
		"set get": {onPool("get", "sandboxsets", "a"), func(name string) error {
			_, err := e.Sets.GetSandboxSet(ctx, &sandboxv1.GetSandboxSetRequest{Name: name})
			return err
		}},
		"set list": {onPool("list", "sandboxsets", ""), func(string) error {
			_, err := e.Sets.ListSandboxSets(ctx, &sandboxv1.ListSandboxSetsRequest{Namespace: "default"})
			return err
		}},
		"set list all": {grpcapi.Access{Verb: "list", Resource: "sandboxsets"}, func(string) error {
			_, err := e.Sets.ListSandboxSets(ctx, &sandboxv1.ListSandboxSetsRequest{})
			return err
		}},
		"set remove": {onPool("delete", "sandboxsets", "a"), func(name string) error {
			_, err := e.Sets.DeleteSandboxSet(ctx, &sandboxv1.DeleteSandboxSetRequest{Name: name, Wait: true})
			return err
		}},
	}
	for name, tc := range calls {
		before := e.Dump()
		r.take(true)
		wantError(t, tc.call("a"), codes.PermissionDenied, fault.Forbidden, "you may not")
		if asked := r.take(true); !slices.Equal(asked, []grpcapi.Access{tc.want}) {
			t.Errorf("%s asks for %+v, want %+v", name, asked, tc.want)
		}
		if tc.want.Name != "" && name != "get by UID" {
			wantError(t, tc.call("not-there"), codes.PermissionDenied, fault.Forbidden)
		}
		if e.Dump() != before {
			t.Errorf("%s changed something", name)
		}
	}
	// A method that is not in the table may ask for nothing.
	for _, file := range []protoreflect.FileDescriptor{sandboxv1.File_sandbox_v1_sandbox_proto, sandboxv1.File_sandbox_v1_volume_proto, sandboxv1.File_sandbox_v1_named_proto, sandboxv1.File_sandbox_v1_pool_proto} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				if method := fmt.Sprintf("method=/%s/%s ", service.FullName(), service.Methods().Get(j).Name()); !strings.Contains(e.Log.String(), method) {
					t.Errorf("the table has no call of %s", method)
				}
			}
		}
	}
	r.take(false)
	names := slices.Sorted(maps.Keys(calls))
	slices.SortStableFunc(names, func(a, b string) int { return order[a] - order[b] })
	for _, name := range names {
		if err := calls[name].call("a"); err != nil {
			t.Errorf("%s by who may: %v", name, err)
		}
	}
}

// order puts the calls that undo others last: paused last but one, since it keeps others from working.
var order = map[string]int{"remove": 1, "claim remove": 1, "set remove": 1, "pause": 2, "delete": 3}
