package admission

import (
	"encoding/json"
	"errors"
	"path"
	"reflect"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	volumes "github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/volumetest"
)

// The API server, by the CRD's rules and the policies, and package volume say the same of every sandbox: what the one
// lets through, no component refuses for its form, and the other way round. (Sandboxes that name their tenant in an
// entry only are left out: they have got the tenant of their Namespace before package volume sees them.)
func TestRulesDoNotDrift(t *testing.T) {
	c := open(t)
	checked := map[bool]int{}
	for name, spec := range specs() {
		data, err := json.Marshal(spec)
		if err != nil {
			t.Fatal(err)
		}
		var back v1alpha1.SandboxSpec
		if err := json.Unmarshal(data, &back); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(back, spec) {
			continue // it is no UTF-8: JSON cannot say it, and so the API server never gets it
		}
		ours := volumes.ValidateSandbox(&spec, volumes.SandboxContext{TenantID: spec.TenantID})
		theirs := c.dryRun(spec)
		if (ours == nil) != (theirs == nil) {
			t.Errorf("%s: package volume says %v, the API server %v", name, ours, theirs)
		}
		checked[ours == nil]++
	}
	if checked[true] < 30 || checked[false] < 100 {
		t.Errorf("%d valid and %d malformed specs were compared", checked[true], checked[false])
	}
}

// The same for changes of an entry.
func TestImmutabilityDoesNotDrift(t *testing.T) {
	c := open(t)
	base := volumetest.Valid()
	made := c.made("", `{metadata: {name: drift}, spec: {tenantId: `+volumetest.Tenant+`}}`)
	withEntry := func(e v1alpha1.DynamicVolume) *unstructured.Unstructured {
		o := made.DeepCopy()
		entry, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&e)
		if err != nil {
			t.Fatal(err)
		}
		if err := unstructured.SetNestedSlice(o.Object, []any{entry}, "spec", "dynamicVolumes"); err != nil {
			t.Fatal(err)
		}
		return o
	}
	made, err := c.admin.Resource(sandboxes).Namespace("default").Update(t.Context(), withEntry(base), metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*v1alpha1.DynamicVolume){
		"nothing":           func(*v1alpha1.DynamicVolume) {},
		"volumeType":        func(e *v1alpha1.DynamicVolume) { e.VolumeType = v1alpha1.VolumeTypeSnapshot },
		"source":            func(e *v1alpha1.DynamicVolume) { e.Source += "2" },
		"mode":              func(e *v1alpha1.DynamicVolume) { e.Mode = v1alpha1.VolumeModeReadOnly },
		"default mode":      func(e *v1alpha1.DynamicVolume) { e.Mode = "" },
		"sizeLimit":         func(e *v1alpha1.DynamicVolume) { e.SizeLimit = "2Gi" },
		"no sizeLimit":      func(e *v1alpha1.DynamicVolume) { e.SizeLimit = "" },
		"equal sizeLimit":   func(e *v1alpha1.DynamicVolume) { e.SizeLimit = "1024Mi" },
		"default tenant":    func(e *v1alpha1.DynamicVolume) { e.TenantID = "" },
		"subPath":           func(e *v1alpha1.DynamicVolume) { e.SubPath = "models/v2" },
		"no subPath":        func(e *v1alpha1.DynamicVolume) { e.SubPath = "" },
		"forceMount":        func(e *v1alpha1.DynamicVolume) { e.ForceMount = true },
		"onFailure":         func(e *v1alpha1.DynamicVolume) { e.OnFailure = v1alpha1.OnFailureRemove },
		"default onFailure": func(e *v1alpha1.DynamicVolume) { e.OnFailure = "" },
		"requestId":         func(e *v1alpha1.DynamicVolume) { e.RequestID = "another" },
		"detach":            func(e *v1alpha1.DynamicVolume) { e.Detach = &v1alpha1.DetachRequest{Force: true} },
	} {
		changed := base
		change(&changed)
		ours := volumes.Immutable(&base, &changed)
		_, theirs := c.admin.Resource(sandboxes).Namespace("default").Update(t.Context(), withEntry(changed), metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
		if (ours == nil) != (theirs == nil) {
			t.Errorf("a change of %s: package volume says %v, the API server %v", name, ours, theirs)
		}
	}
}

// dryRun asks whether a sandbox with the spec would be accepted. An error is a refusal.
func (c cluster) dryRun(spec v1alpha1.SandboxSpec) error {
	c.Helper()
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "dry-run"}, Spec: spec})
	if err != nil {
		c.Fatal(err)
	}
	o := &unstructured.Unstructured{Object: object}
	o.SetAPIVersion(v1alpha1.GroupVersion.String())
	o.SetKind("Sandbox")
	_, err = c.admin.Resource(sandboxes).Namespace("default").Create(c.Context(), o, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	var status apierrors.APIStatus
	if err != nil && (!errors.As(err, &status) || status.Status().Reason != metav1.StatusReasonInvalid) {
		c.Fatal(err)
	}
	return err
}

// specs are sandboxes to compare verdicts on, by what is particular about them.
func specs() map[string]v1alpha1.SandboxSpec {
	out := map[string]v1alpha1.SandboxSpec{}
	entry := func(name string, change func(*v1alpha1.DynamicVolume)) {
		e := volumetest.Valid()
		change(&e)
		out[name] = v1alpha1.SandboxSpec{TenantID: volumetest.Tenant, DynamicVolumes: []v1alpha1.DynamicVolume{e}}
	}
	for _, tc := range volumetest.Malformed() {
		entry(tc.Name, func(e *v1alpha1.DynamicVolume) { *e = tc.Entry })
	}
	targets := func(static, dynamic []string) (spec v1alpha1.SandboxSpec) {
		for _, target := range static {
			spec.VolumeMounts = append(spec.VolumeMounts, v1alpha1.VolumeMount{Source: "/srv/data", Target: target})
		}
		for _, target := range dynamic {
			spec.DynamicVolumes = append(spec.DynamicVolumes, v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypePVC, Source: "claim", Target: target})
		}
		return spec
	}
	for _, tc := range volumetest.Conflicts() {
		out[tc.Name] = targets(tc.Static, tc.Dynamic)
	}
	out["targets apart"] = targets([]string{"/a", "/ab"}, []string{"/a-b", "/abc", "/b/a"})

	some := []string{
		"/data", "/a/b/c", "/数据", "/a b", "/...", "/.a", "/a..b", "/..a", "/é", "/sandbox/workspace", "/library", "/libs", "/lib6", "/runs", "/var2",
		"/data/etc", "/home", "/opt/usr", "/" + strings.Repeat("a", 255), "/" + strings.Repeat("abcdefghi/", 102) + "abc", "/mnt//a", "/a/.", "/a/..",
		"/" + strings.Repeat("é", 512), // too many bytes, not too many characters
	}
	for _, denied := range append(append([]string{}, volumes.DeniedTargets...), volumes.ReservedTargets...) {
		some = append(some, denied, denied+"/x", denied+"x", denied+"-x", denied+".d", strings.ToUpper(denied), "/x"+denied)
		for p := path.Dir(denied); p != "/"; p = path.Dir(p) {
			some = append(some, p, p+"/x")
		}
	}
	for _, target := range some {
		entry("target "+target, func(e *v1alpha1.DynamicVolume) { e.Target = target })
		out["static target "+target] = targets([]string{target}, nil)
	}
	for _, size := range []string{"", "1Mi", "1Ei", "1.5Gi", "1048576", "1e9", "1E9", "1e+9", "0.5Gi", "1024Ki", "1.1Mi", "1.1Ki", "1025.5Ki", "2G", "2k", "1.0000000001Gi",
		"1152921504606846976", "1152921504606846977", "0.0000000000000000001Ei", "1.00000000000000000001Gi", "9007199254740993", "1e18", "2e18"} {
		entry("sizeLimit "+size, func(e *v1alpha1.DynamicVolume) { e.SizeLimit = size })
	}
	for _, tc := range []struct {
		kind   v1alpha1.VolumeType
		source string
	}{
		{"local", "/srv/数据"}, {"local", "/"}, {"local", "/srv/a b"}, {"local", "/" + strings.Repeat("abcdefg/", 511) + "abcdef"}, {"local", "/" + strings.Repeat("é/", 2040)},
		{"pvc", "a.b-c"}, {"pvc", "a..b"}, {"pv", "0"}, {"pv", strings.Repeat("a", 253)}, {"pvc", "é"},
		{"snapshot", "registry.example/data:v1"}, {"snapshot", "Data Set"}, {"oss", "bucket/prefix/数据"}, {"oss", "a\u00a0b"}, {"oss", "a\u3000b"}, {"oss", "a\u0085b"}, {"oss", "a\u2028b"},
		{"oss", strings.Repeat("é", 2047)}, {"oss", strings.Repeat("é", 2048)}, {"oss", strings.Repeat("a", 4096)},
	} {
		entry(string(tc.kind)+" source "+tc.source, func(e *v1alpha1.DynamicVolume) { e.VolumeType, e.Source = tc.kind, tc.source })
	}
	for _, subPath := range []string{"", "a", "a/b", ".a", "...", "a/..b", "a//b", "数据/x", " ", strings.Repeat("a", 255)} {
		entry("subPath "+subPath, func(e *v1alpha1.DynamicVolume) { e.SubPath = subPath })
	}
	for _, source := range []string{"/srv", "/", "srv", "/srv/", "/srv/../x", ""} {
		out["static source "+source] = v1alpha1.SandboxSpec{VolumeMounts: []v1alpha1.VolumeMount{{Source: source, Target: "/a"}}}
	}
	for _, mode := range []v1alpha1.VolumeMode{"", "ro", "rw", "RO"} {
		out["static mode "+string(mode)] = v1alpha1.SandboxSpec{VolumeMounts: []v1alpha1.VolumeMount{{Source: "/srv", Target: "/a", Mode: mode}}}
	}
	for _, tenant := range []string{"", "t", "-", "0-9", strings.Repeat("t", 63), strings.Repeat("t", 64), "T", "a.b", "a b"} {
		out["tenant "+tenant] = v1alpha1.SandboxSpec{TenantID: tenant}
	}
	entry("valid", func(*v1alpha1.DynamicVolume) {})
	entry("defaults", func(e *v1alpha1.DynamicVolume) { e.Mode, e.OnFailure, e.TenantID, e.RequestID = "", "", "", "" })
	return out
}
