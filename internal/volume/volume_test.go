package volume_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/volumetest"
)

var tenant = volume.SandboxContext{TenantID: volumetest.Tenant}

func TestMalformedEntriesAreRefused(t *testing.T) {
	cases := volumetest.Malformed()
	if len(cases) < 60 {
		t.Errorf("only %d cases", len(cases))
	}
	seen := map[string]bool{}
	for _, c := range cases {
		if seen[c.Name] {
			t.Errorf("two cases %q", c.Name)
		}
		seen[c.Name] = true
		t.Run(c.Name, func(t *testing.T) {
			before := *c.Entry.DeepCopy()
			err := volume.ValidateEntry(&c.Entry, tenant)
			if !errors.Is(err, c.Kind) || fault.ReasonOf(err) != c.Reason {
				t.Errorf("error %v (reason %s), want %s of kind %v", err, fault.ReasonOf(err), c.Reason, c.Kind)
			}
			if err != nil && (len(err.Error()) > 1000 || strings.ContainsAny(err.Error(), "\x00\n\x1b")) {
				t.Errorf("the message repeats raw or endless input: %.200q", err)
			}
			if c.Entry.Source != before.Source || c.Entry.Mode != before.Mode {
				t.Error("validation changed the entry")
			}
		})
	}
}

func TestConflictingTargetsAreRefused(t *testing.T) {
	for _, c := range volumetest.Conflicts() {
		t.Run(c.Name, func(t *testing.T) {
			spec := v1alpha1.SandboxSpec{TenantID: volumetest.Tenant}
			for _, target := range c.Static {
				spec.VolumeMounts = append(spec.VolumeMounts, v1alpha1.VolumeMount{Source: "/srv/x", Target: target})
			}
			for _, target := range c.Dynamic {
				e := volumetest.Valid()
				e.Target = target
				spec.DynamicVolumes = append(spec.DynamicVolumes, e)
			}
			err := volume.ValidateSandbox(&spec, tenant)
			if !errors.Is(err, c.Kind) || fault.ReasonOf(err) != c.Reason {
				t.Errorf("error %v, want %s", err, c.Reason)
			}
		})
	}
	neighbours := []v1alpha1.DynamicVolume{{Target: "/a"}, {Target: "/ab"}, {Target: "/a-b/c"}, {Target: "/A"}}
	if err := volume.ValidateTargets(nil, neighbours); err != nil {
		t.Errorf("neighbours: %v", err)
	}
}

func TestValidEntries(t *testing.T) {
	for name, change := range map[string]func(*v1alpha1.DynamicVolume){
		"full": func(*v1alpha1.DynamicVolume) {},
		"least": func(e *v1alpha1.DynamicVolume) {
			*e = v1alpha1.DynamicVolume{VolumeType: "local", Source: "/srv/x", Target: "/x"}
		},
		"claim":            func(e *v1alpha1.DynamicVolume) { e.VolumeType, e.Source = "pvc", "my-claim.v2" },
		"image":            func(e *v1alpha1.DynamicVolume) { e.VolumeType, e.Source = "snapshot", "datasets/faces:v1" },
		"bucket":           func(e *v1alpha1.DynamicVolume) { e.VolumeType, e.Source = "oss", "bucket/prefix" },
		"unicode":          func(e *v1alpha1.DynamicVolume) { e.Target = "/数据/模型" },
		"spaces":           func(e *v1alpha1.DynamicVolume) { e.Target, e.Source = "/my data", "/srv/my data" },
		"dots in names":    func(e *v1alpha1.DynamicVolume) { e.Target, e.SubPath = "/..data/...", "..2024/.x" },
		"longest target":   func(e *v1alpha1.DynamicVolume) { e.Target = "/" + strings.Repeat("abcdefghi/", 102) + "abc" },
		"like denied ones": func(e *v1alpha1.DynamicVolume) { e.Target = "/etcetera" },
		"library":          func(e *v1alpha1.DynamicVolume) { e.Target = "/library" },
		"another case":     func(e *v1alpha1.DynamicVolume) { e.Target = "/Etc" },
		"beside secrets":   func(e *v1alpha1.DynamicVolume) { e.Target = "/var/lib/data" },
		"below run":        func(e *v1alpha1.DynamicVolume) { e.Target = "/run/data" },
		"tmp":              func(e *v1alpha1.DynamicVolume) { e.Target = "/tmp/x" },
	} {
		e := volumetest.Valid()
		change(&e)
		if err := volume.ValidateEntry(&e, tenant); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestGroupPolicyTightens(t *testing.T) {
	with := func(p v1alpha1.VolumePolicy) volume.SandboxContext {
		return volume.SandboxContext{TenantID: volumetest.Tenant, Policy: p}
	}
	entry := volumetest.Valid()
	entry.SizeLimit = ""
	for _, tc := range []struct {
		name   string
		c      volume.SandboxContext
		reason fault.Reason
	}{
		{"type", with(v1alpha1.VolumePolicy{AllowedTypes: []v1alpha1.VolumeType{"pvc"}}), fault.VolumeTypeOff},
		{"target", with(v1alpha1.VolumePolicy{DeniedTargets: []string{"/data"}}), fault.TargetDenied},
		{"target, written carelessly", with(v1alpha1.VolumePolicy{DeniedTargets: []string{"data/x/"}}), fault.TargetDenied},
		{"size", with(v1alpha1.VolumePolicy{RequireSizeLimit: true}), fault.SizeRequired},
		{"no source", volume.SandboxContext{TenantID: volumetest.Tenant, Available: func(v1alpha1.VolumeType) bool { return false }}, fault.VolumeTypeOff},
		{"no tenant", volume.SandboxContext{}, fault.TenantMismatch},
	} {
		if err := volume.ValidateEntry(&entry, tc.c); fault.ReasonOf(err) != tc.reason || !fault.IsPermanent(err) {
			t.Errorf("%s: %v, want %s", tc.name, err, tc.reason)
		}
	}
	entry.Mode = v1alpha1.VolumeModeReadOnly
	if err := volume.ValidateEntry(&entry, with(v1alpha1.VolumePolicy{RequireSizeLimit: true})); err != nil {
		t.Errorf("a read-only volume needs no size: %v", err)
	}
}

func TestNumberOfVolumes(t *testing.T) {
	spec := v1alpha1.SandboxSpec{TenantID: volumetest.Tenant}
	for i := range v1alpha1.MaxVolumes {
		e := volumetest.Valid()
		e.Target = fmt.Sprintf("/d%d", i)
		spec.DynamicVolumes = append(spec.DynamicVolumes, e)
		spec.VolumeMounts = append(spec.VolumeMounts, v1alpha1.VolumeMount{Source: "/srv/x", Target: fmt.Sprintf("/s%d", i)})
	}
	if err := volume.ValidateSandbox(&spec, tenant); err != nil {
		t.Fatal(err)
	}
	group := tenant
	group.Policy.MaxVolumes = 3
	if err := volume.ValidateSandbox(&spec, group); fault.ReasonOf(err) != fault.TooManyVolumes {
		t.Errorf("more than the group allows: %v", err)
	}
	spec.VolumeMounts = append(spec.VolumeMounts, v1alpha1.VolumeMount{Source: "/srv/x", Target: "/more"})
	if err := volume.ValidateSandbox(&spec, tenant); fault.ReasonOf(err) != fault.TooManyVolumes {
		t.Errorf("33 static volumes: %v", err)
	}
	if err := volume.ValidateSandbox(&v1alpha1.SandboxSpec{TenantID: "T"}, tenant); fault.ReasonOf(err) != fault.InvalidTenant {
		t.Errorf("tenant: %v", err)
	}
}

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{
		"1Mi": 1 << 20, "1048576": 1 << 20, "50Gi": 50 << 30, "1.5Gi": 3 << 29, "1G": 1e9, "0.5Gi": 1 << 29,
		"2000k": 2e6, "1e9": 1e9, "1E9": 1e9, "1E": 1e18, "1Ei": 1 << 60, "1024Pi": 1 << 60, "01Gi": 1 << 30,
	} {
		if got, err := volume.ParseSize(in); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", in, got, err, want)
		}
	}
}

func TestEntryHash(t *testing.T) {
	base := volumetest.Valid()
	hash := volume.EntryHash(&base)
	if len(hash) != 16 || strings.Trim(hash, "0123456789abcdef") != "" {
		t.Errorf("hash %q", hash)
	}
	// It stands in journals and status: another value for the same entry would take volumes for changed.
	if want := "12c86009364ae5cb"; hash != want {
		t.Errorf("the hash of an entry changed from %s to %s", want, hash)
	}
	same := map[string]func(*v1alpha1.DynamicVolume){
		"forceMount": func(e *v1alpha1.DynamicVolume) { e.ForceMount = true },
		"onFailure":  func(e *v1alpha1.DynamicVolume) { e.OnFailure = "Remove" },
		"detach":     func(e *v1alpha1.DynamicVolume) { e.Detach = &v1alpha1.DetachRequest{Force: true} },
		"default":    func(e *v1alpha1.DynamicVolume) { e.Mode, e.OnFailure, e.TenantID = "", "", "" },
		"same size":  func(e *v1alpha1.DynamicVolume) { e.SizeLimit = "1024Mi" },
	}
	different := map[string]func(*v1alpha1.DynamicVolume){
		"volumeType": func(e *v1alpha1.DynamicVolume) { e.VolumeType = "pvc" },
		"source":     func(e *v1alpha1.DynamicVolume) { e.Source += "x" },
		"target":     func(e *v1alpha1.DynamicVolume) { e.Target += "x" },
		"mode":       func(e *v1alpha1.DynamicVolume) { e.Mode = "ro" },
		"sizeLimit":  func(e *v1alpha1.DynamicVolume) { e.SizeLimit = "2Gi" },
		"subPath":    func(e *v1alpha1.DynamicVolume) { e.SubPath = "" },
		"requestId":  func(e *v1alpha1.DynamicVolume) { e.RequestID = "request-2" },
	}
	for name, change := range same {
		e := volumetest.Valid()
		change(&e)
		if volume.EntryHash(&e) != hash {
			t.Errorf("%s changes the hash", name)
		}
		if err := volume.Immutable(&base, &e); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, change := range different {
		e := volumetest.Valid()
		change(&e)
		if volume.EntryHash(&e) == hash {
			t.Errorf("%s does not change the hash", name)
		}
		if volume.SameVolume(&base, &e) != (name == "requestId") {
			t.Errorf("%s: same volume is %v", name, volume.SameVolume(&base, &e))
		}
		err := volume.Immutable(&base, &e)
		if name == "requestId" {
			if err != nil {
				t.Errorf("the same volume cannot be asked for again: %v", err)
			}
		} else if fault.ReasonOf(err) != fault.Immutable || fault.MetadataOf(err)["field"] != name {
			t.Errorf("%s: %v", name, err)
		}
	}
	e := volumetest.Valid()
	e.TenantID = "t-2"
	if err := volume.Immutable(&base, &e); fault.ReasonOf(err) != fault.Immutable {
		t.Errorf("tenantId: %v", err)
	}
	// Where one field ends and the next begins counts.
	a, b := volumetest.Valid(), volumetest.Valid()
	a.Source, a.Target = "/ab", "/c"
	b.Source, b.Target = "/a", "b/c"
	if volume.EntryHash(&a) == volume.EntryHash(&b) {
		t.Error("two entries share a hash")
	}
}

func TestKey(t *testing.T) {
	k := volume.Key("local", "directory", "/srv/a")
	if k != volume.Key("local", "directory", "/srv/a") || k == volume.Key("local", "directory/srv", "/a") || k == volume.Key("pvc", "directory", "/srv/a") {
		t.Error("keys are not told apart by type and parts")
	}
	if strings.ContainsAny(k, "/ ") || !strings.HasPrefix(k, "local-") {
		t.Errorf("key %q is no file name", k)
	}
}
