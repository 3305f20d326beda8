package grpcapi_test

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
)

func TestNamedVolumesAreKept(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	create := func(r *sandboxv1.CreateVolumeRequest) error {
		_, err := e.Named.CreateVolume(t.Context(), r)
		return fault.FromGRPC(err)
	}
	for reason, r := range map[fault.Reason]*sandboxv1.CreateVolumeRequest{
		fault.InvalidName:   {Name: "../x", Size: "1Gi"},
		fault.SizeRequired:  {Name: "v"},
		fault.InvalidSize:   {Name: "v", Size: "1"},
		fault.InvalidTenant: {Name: "v", Size: "1Gi", TenantId: "No"},
	} {
		if err := create(r); fault.ReasonOf(err) != reason {
			t.Errorf("%v: %v, want %s", r, err, reason)
		}
	}
	for _, name := range []string{"v", "v", "w"} {
		if err := create(&sandboxv1.CreateVolumeRequest{Name: name, Size: "1Gi", TenantId: "acme"}); err != nil {
			t.Fatal(err)
		}
	}
	e.Run(sandbox("a", func(sb *sandboxv1.Sandbox) {
		sb.Spec.DynamicVolumes = []*sandboxv1.DynamicVolume{{VolumeType: "pvc", Source: "v", Target: "/v"}}
	}))
	list, err := e.Named.ListVolumes(t.Context(), &sandboxv1.ListVolumesRequest{})
	if err != nil || len(list.GetVolumes()) != 2 || strings.Join(list.GetVolumes()[0].GetSandboxes(), " ") != "a" || len(list.GetVolumes()[1].GetSandboxes()) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	remove := func(name string) (bool, error) {
		r, err := e.Named.DeleteVolume(t.Context(), &sandboxv1.DeleteVolumeRequest{Name: name})
		return r.GetDeleted(), fault.FromGRPC(err)
	}
	if _, err := remove("v"); fault.ReasonOf(err) != fault.Busy || !strings.Contains(err.Error(), "in use by a") {
		t.Errorf("in use: %v", err)
	}
	for _, deleted := range []bool{true, false} {
		if got, err := remove("w"); err != nil || got != deleted {
			t.Errorf("deleted %t, %v, want %t", got, err, deleted)
		}
	}
}

func TestWhereThereAreClaimsNoVolumeIsNamed(t *testing.T) {
	e := grpcapitest.Start(t, func(o *grpcapi.Options) { o.NamedVolumes = nil })
	_, err := e.Named.CreateVolume(t.Context(), &sandboxv1.CreateVolumeRequest{Name: "v", Size: "1Gi"})
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "PersistentVolumeClaim") {
		t.Errorf("%v", err)
	}
}
