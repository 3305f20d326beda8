package local

import (
	"context"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

func TestWhoMayUseWhat(t *testing.T) {
	src, err := New([]Root{
		{Path: "/srv/tenants/{tenantId}"},
		{Path: "/srv/tenants/{tenantId}/exchange", Shared: true},
		{Path: "/srv/tenants/common", Shared: true, Modes: []v1alpha1.VolumeMode{"ro"}},
		{Path: "/srv/scratch"},
		{Path: "/srv/scratch/readonly", Modes: []v1alpha1.VolumeMode{"ro"}},
		{Path: "/srv/models", Shared: true},
		{Path: "/srv/writeonly", Modes: []v1alpha1.VolumeMode{"rw"}},
		{Path: "/images/{tenantId}", Backing: BackingImage},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	const ok = fault.Reason("")
	for _, tc := range []struct {
		source, tenant, mode string
		want                 fault.Reason
	}{
		{"/srv/tenants/t-1", "t-1", "rw", ok},
		{"/srv/tenants/t-1/a/b", "t-1", "rw", ok},
		{"/srv/tenants/t-1/a", "t-1", "ro", ok},
		{"/srv/tenants/t-2", "t-1", "ro", fault.TenantMismatch},
		{"/srv/tenants/t-2/a", "t-1", "rw", fault.TenantMismatch},
		{"/srv/tenants/t-1/a", "", "ro", fault.TenantMismatch},
		{"/srv/tenants/t-1a", "t-1", "ro", fault.TenantMismatch},
		{"/srv/tenants", "t-1", "ro", fault.SourceDenied},
		{"/srv/tenants/Bad", "t-1", "ro", fault.SourceDenied},
		{"/srv/tenants/{tenantId}", "t-1", "ro", fault.SourceDenied},
		{"/srv/tenants/{tenantId}/exchange", "t-1", "ro", fault.SourceDenied},
		// A longer root wins, and says more, or less.
		{"/srv/tenants/t-1/exchange", "t-1", "rw", ok},
		{"/srv/tenants/t-1/exchange/x", "t-2", "ro", ok},
		{"/srv/tenants/t-1/exchange/x", "", "ro", ok},
		{"/srv/tenants/t-1/exchange/x", "t-2", "rw", fault.ModeDenied},
		{"/srv/tenants/t-1/exchanges", "t-2", "ro", fault.TenantMismatch},
		// A literal component goes before {tenantId}.
		{"/srv/tenants/common/x", "t-1", "ro", ok},
		{"/srv/tenants/common/x", "t-1", "rw", fault.ModeDenied},
		{"/srv/tenants/common/x", "", "rw", fault.ModeDenied},
		// What nobody owns is for sandboxes without a tenant, and for all if it is shared.
		{"/srv/scratch/x", "", "rw", ok},
		{"/srv/scratch/x", "t-1", "ro", fault.TenantMismatch},
		{"/srv/scratch/readonly/x", "", "rw", fault.ModeDenied},
		{"/srv/scratch/readonly2/x", "", "rw", ok},
		{"/srv/models/llm", "", "rw", ok},
		{"/srv/models/llm", "t-1", "ro", ok},
		{"/srv/models/llm", "t-1", "rw", fault.ModeDenied},
		{"/srv/models2", "", "ro", fault.SourceDenied},
		{"/srv/writeonly", "", "ro", fault.ModeDenied},
		{"/srv", "", "ro", fault.SourceDenied},
		{"/", "", "ro", fault.SourceDenied},
		{"/etc", "t-1", "ro", fault.SourceDenied},
		// Images are one name below the root.
		{"/images/t-1/v", "t-1", "rw", ok},
		{"/images/t-1", "t-1", "rw", fault.InvalidSource},
		{"/images/t-1/a/b", "t-1", "rw", fault.InvalidSource},
		{"/images/t-1/.hidden", "t-1", "rw", fault.InvalidSource},
		{"/images/t-2/v", "t-1", "rw", fault.TenantMismatch},
		// What is no clean path is refused whatever it would lead to.
		{"/srv/scratch/../scratch/x", "", "ro", fault.InvalidSource},
		{"/srv/scratch//x", "", "ro", fault.InvalidSource},
		{"/srv/scratch/", "", "ro", fault.InvalidSource},
		{"srv/scratch", "", "ro", fault.InvalidSource},
		{"", "", "ro", fault.InvalidSource},
		{"/srv/scratch/\x00", "", "ro", fault.InvalidSource},
	} {
		r := volume.Request{Type: v1alpha1.VolumeTypeLocal, Source: tc.source, TenantID: tc.tenant, ReadOnly: tc.mode == "ro"}
		_, err := src.Resolve(context.Background(), &r)
		if got := fault.ReasonOf(err); got != tc.want {
			t.Errorf("%q for tenant %q, %s: %s (%v), want %q", tc.source, tc.tenant, tc.mode, got, err, tc.want)
		}
	}
	_, err = src.Resolve(context.Background(), &volume.Request{Type: "pvc", Source: "/srv/models"})
	if fault.ReasonOf(err) != fault.InvalidVolumeType {
		t.Errorf("another type: %v", err)
	}
}

func TestBadRootsAreRefused(t *testing.T) {
	image := func(path string) Root { return Root{Path: path, Backing: BackingImage} }
	for _, tc := range []struct {
		name  string
		roots []Root
		says  string
	}{
		{"relative", []Root{{Path: "srv"}}, "absolute"},
		{"not clean", []Root{{Path: "/srv/../etc"}}, "clean"},
		{"final slash", []Root{{Path: "/srv/"}}, "clean"},
		{"empty", []Root{{}}, "absolute"},
		{"the node", []Root{{Path: "/"}}, "whole node"},
		{"tenant in a component", []Root{{Path: "/srv/x-{tenantId}"}}, "whole component"},
		{"unknown variable", []Root{{Path: "/srv/{tenant}"}}, "whole component"},
		{"tenant twice", []Root{{Path: "/srv/{tenantId}/{tenantId}"}}, "once"},
		{"tenant first", []Root{{Path: "/{tenantId}"}}, "first component"},
		{"mode", []Root{{Path: "/srv", Modes: []v1alpha1.VolumeMode{"rwx"}}}, "mode"},
		{"backing", []Root{{Path: "/srv", Backing: "block"}}, "backing"},
		{"filesystem", []Root{{Path: "/srv", Backing: BackingImage, Filesystem: "btrfs"}}, "filesystem"},
		{"filesystem of a directory", []Root{{Path: "/srv", Filesystem: capacity.Ext4}}, "image only"},
		{"negative overcommit", []Root{{Path: "/srv", Backing: BackingImage, Overcommit: -1}}, "overcommit"},
		{"preallocated overcommit", []Root{{Path: "/srv", Backing: BackingImage, Preallocate: true, Overcommit: 2}}, "overcommit"},
		{"twice", []Root{{Path: "/srv"}, {Path: "/srv"}}, "twice"},
		{"images in a directory", []Root{{Path: "/srv"}, image("/srv/images")}, "another root"},
		{"directory in images", []Root{image("/srv"), {Path: "/srv/data"}}, "another root"},
		{"images beside a tenant's data", []Root{{Path: "/srv/{tenantId}/data"}, image("/srv/{tenantId}/images")}, "another root"},
		{"images where a tenant may be", []Root{{Path: "/srv/{tenantId}"}, image("/srv/images")}, "another root"},
		{"images in images", []Root{image("/srv/{tenantId}"), image("/srv/t-1/more")}, "another root"},
	} {
		if _, err := New(tc.roots, nil); err == nil || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: error %v does not say %q", tc.name, err, tc.says)
		}
	}
	good := []Root{
		{Path: "/srv/{tenantId}"}, {Path: "/srv/common", Shared: true}, {Path: "/srv/{tenantId}/deep"},
		image("/pool/{tenantId}"), image("/pool2/a"), image("/pool2/b"), {Path: "/pools"},
	}
	if _, err := New(good, nil); err != nil {
		t.Error(err)
	}
}
