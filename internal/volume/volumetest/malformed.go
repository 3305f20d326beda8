// Package volumetest has tables of bad volume requests with the kind and the reason with which each must be refused,
// for the tests of every layer that checks them.
package volumetest

import (
	"strings"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Tenant is the tenant of the sandbox that the cases are meant for.
const Tenant = "t-1"

// Case is an entry that must be refused.
type Case struct {
	Name  string
	Entry v1alpha1.DynamicVolume
	// Kind is the errdefs sentinel of the refusal.
	Kind   error
	Reason fault.Reason
}

// Valid is an entry that passes validation in a sandbox of Tenant.
func Valid() v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{
		VolumeType: v1alpha1.VolumeTypeLocal, Source: "/srv/tenants/" + Tenant + "/data", Target: "/data",
		Mode: v1alpha1.VolumeModeReadWrite, SizeLimit: "1Gi", TenantID: Tenant, SubPath: "models/v1",
		OnFailure: v1alpha1.OnFailureKeep, RequestID: "request-1",
	}
}

// Malformed are entries with one thing wrong each. They are refused by what is in them alone, whatever a sandbox of
// Tenant has, and whichever node it is on.
func Malformed() []Case {
	var cases []Case
	add := func(kind error, reason fault.Reason, name string, change func(*v1alpha1.DynamicVolume)) {
		e := Valid()
		change(&e)
		cases = append(cases, Case{Name: name, Entry: e, Kind: kind, Reason: reason})
	}
	each := func(kind error, reason fault.Reason, field string, set func(*v1alpha1.DynamicVolume, string), values map[string]string) {
		for name, value := range values {
			add(kind, reason, field+": "+name, func(e *v1alpha1.DynamicVolume) { set(e, value) })
		}
	}
	invalid, denied := errdefs.ErrInvalidArgument, errdefs.ErrPermissionDenied

	target := func(e *v1alpha1.DynamicVolume, v string) { e.Target = v }
	each(invalid, fault.InvalidTarget, "target", target, map[string]string{
		"empty":             "",
		"relative":          "data",
		"dot":               ".",
		"trailing slash":    "/data/",
		"double slash":      "/data//x",
		"leading double":    "//data",
		"dot component":     "/data/./x",
		"dotdot":            "/data/../etc",
		"dotdot at the end": "/data/..",
		"only dotdot":       "/..",
		"too long":          "/" + strings.Repeat("abcdefghi/", 102) + "abcde",
		"long component":    "/" + strings.Repeat("a", 256),
		"NUL":               "/data\x00",
		"newline":           "/data\nx",
		"escape":            "/data\x1b[2J",
		"delete":            "/data\x7f",
		"C1 control":        "/data\u0085",
		"not UTF-8":         "/data\xff",
		"backslash path":    `C:\data`,
		"home":              "~/data",
	})
	each(denied, fault.TargetDenied, "target", target, map[string]string{
		"root":                  "/",
		"etc":                   "/etc",
		"below etc":             "/etc/ssl/certs",
		"proc":                  "/proc",
		"below proc":            "/proc/1/root",
		"sys":                   "/sys/fs/cgroup",
		"dev":                   "/dev/shm",
		"our init":              "/dev/flux-sandbox-init",
		"bin":                   "/bin",
		"sbin":                  "/sbin/x",
		"usr":                   "/usr/local/lib",
		"lib":                   "/lib",
		"lib32":                 "/lib32",
		"lib64":                 "/lib64/x",
		"libx32":                "/libx32",
		"boot":                  "/boot/grub",
		"run secrets":           "/run/secrets/token",
		"contains run secrets":  "/run",
		"var run secrets":       "/var/run/secrets/kubernetes.io",
		"contains it":           "/var/run",
		"contains it from afar": "/var",
	})
	each(invalid, fault.InvalidVolumeType, "volumeType",
		func(e *v1alpha1.DynamicVolume, v string) { e.VolumeType = v1alpha1.VolumeType(v) }, map[string]string{
			"empty": "", "unknown": "nfs", "upper case": "Local", "space": "local ",
		})
	each(invalid, fault.InvalidSource, "source", func(e *v1alpha1.DynamicVolume, v string) { e.Source = v }, map[string]string{
		"empty":          "",
		"root":           "/",
		"relative":       "srv/data",
		"dotdot":         "/srv/tenants/t-1/../t-2",
		"double slash":   "/srv//data",
		"trailing slash": "/srv/data/",
		"NUL":            "/srv/data\x00",
		"tab":            "/srv/\tdata",
		"not UTF-8":      "/srv/\xc3\x28",
		"too long":       strings.Repeat("/abcdefg", 513),
		"long component": "/srv/" + strings.Repeat("a", 256),
		"URL":            "file:///srv/data",
	})
	for _, kind := range []v1alpha1.VolumeType{v1alpha1.VolumeTypePVC, v1alpha1.VolumeTypePV} {
		each(invalid, fault.InvalidSource, string(kind)+" source", func(e *v1alpha1.DynamicVolume, v string) { e.VolumeType, e.Source = kind, v }, map[string]string{
			"empty": "", "path": "/srv/data", "namespace": "ns/claim", "upper case": "Claim",
			"underscore": "a_b", "too long": strings.Repeat("a", 254), "dash first": "-a", "dot last": "a.",
		})
	}
	each(invalid, fault.InvalidSource, "oss source", func(e *v1alpha1.DynamicVolume, v string) { e.VolumeType, e.Source = v1alpha1.VolumeTypeOSS, v }, map[string]string{
		"empty": "", "space": "bucket a", "newline": "bucket\n",
	})
	each(invalid, fault.InvalidMode, "mode", func(e *v1alpha1.DynamicVolume, v string) { e.Mode = v1alpha1.VolumeMode(v) }, map[string]string{
		"unknown": "rwx", "upper case": "RO", "word": "readonly", "space": " ro",
	})
	each(invalid, fault.InvalidSize, "sizeLimit", func(e *v1alpha1.DynamicVolume, v string) { e.SizeLimit = v }, map[string]string{
		"word":               "big",
		"zero":               "0",
		"negative":           "-1Gi",
		"signed":             "+1Gi",
		"unknown unit":       "1GB",
		"lower-case unit":    "1gi",
		"space":              "1 Gi",
		"two numbers":        "1Gi2",
		"milli":              "1500m",
		"fraction of a byte": "1048576.5",
		"forgotten unit":     "50",
		"below 1Mi":          "1048575",
		"above 1Ei":          "1025Pi",
		"cut off by others":  "100Ei",
		"huge exponent":      "1e999999999",
		"infinite":           "Inf",
		"hexadecimal":        "0x100000",
		"only a unit":        "Gi",
		"wide digits":        "１Gi",
		"long":               strings.Repeat("9", 1000),
	})
	each(invalid, fault.InvalidTenant, "tenantId", func(e *v1alpha1.DynamicVolume, v string) { e.TenantID = v }, map[string]string{
		"upper case": "T-1", "dot": "t.1", "slash": "t/1", "dotdot": "..", "space": "t 1", "too long": strings.Repeat("t", 64),
	})
	each(denied, fault.TenantMismatch, "tenantId", func(e *v1alpha1.DynamicVolume, v string) { e.TenantID = v }, map[string]string{
		"another": "t-2", "prefix": "t", "longer": "t-11",
	})
	each(invalid, fault.InvalidSubPath, "subPath", func(e *v1alpha1.DynamicVolume, v string) { e.SubPath = v }, map[string]string{
		"absolute":       "/models",
		"dot":            ".",
		"dotdot":         "..",
		"climbs":         "../other",
		"climbs later":   "models/../../other",
		"stays":          "models/../v1",
		"dot component":  "./models",
		"double slash":   "models//v1",
		"trailing slash": "models/",
		"NUL":            "models\x00",
		"newline":        "models\n",
		"not UTF-8":      "models/\xff",
		"too long":       strings.Repeat("abcdefg/", 512) + "a",
		"long component": strings.Repeat("a", 256),
	})
	each(invalid, fault.InvalidOnFailure, "onFailure", func(e *v1alpha1.DynamicVolume, v string) { e.OnFailure = v1alpha1.OnFailure(v) }, map[string]string{
		"unknown": "Retry", "lower case": "keep",
	})
	each(invalid, fault.InvalidRequest, "requestId", func(e *v1alpha1.DynamicVolume, v string) { e.RequestID = v }, map[string]string{
		"too long": strings.Repeat("r", 129), "space": "a b", "newline": "a\nb", "not ASCII": "é",
	})
	each(invalid, fault.InvalidRequest, "detach.requestId",
		func(e *v1alpha1.DynamicVolume, v string) { e.Detach = &v1alpha1.DetachRequest{RequestID: v} }, map[string]string{
			"too long": strings.Repeat("r", 129), "control": "a\x07",
		})
	return cases
}

// Conflict is a list of entries of one sandbox of which each is valid by itself, and all together are not.
type Conflict struct {
	Name    string
	Static  []string // targets of static volumes
	Dynamic []string // targets of dynamic volumes
	Kind    error
	Reason  fault.Reason
}

// Conflicts are the ways in which targets of one sandbox meet.
func Conflicts() []Conflict {
	exists, failed := errdefs.ErrAlreadyExists, errdefs.ErrFailedPrecondition
	return []Conflict{
		{"same target, dynamic", nil, []string{"/a", "/a"}, exists, fault.TargetInUse},
		{"same target, static and dynamic", []string{"/a"}, []string{"/a"}, exists, fault.TargetInUse},
		{"same target, static", []string{"/a", "/a"}, nil, exists, fault.TargetInUse},
		{"in another", nil, []string{"/a", "/a/b"}, failed, fault.TargetNested},
		{"around another", nil, []string{"/a/b/c", "/a"}, failed, fault.TargetNested},
		{"in a static one", []string{"/a"}, []string{"/a/b"}, failed, fault.TargetNested},
		{"around a static one", []string{"/a/b"}, []string{"/a"}, failed, fault.TargetNested},
	}
}
