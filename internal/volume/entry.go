package volume

import (
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

const (
	// maxRequestID is the longest request id in bytes.
	maxRequestID = 128
	// maxName is the longest DNS subdomain, which names claims and volumes (RFC 1123).
	maxName = 253
)

var (
	tenantPattern = regexp.MustCompile(`^[a-z0-9-]{1,63}$`) // design, ruling 16
	// requestIDPattern is printable ASCII without space: an id travels in logs and labels.
	requestIDPattern = regexp.MustCompile(`^[!-~]*$`)
	namePattern      = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
)

// knownTypes are the volume types of this version. An entry of another is refused, though it may be in a spec
// that a newer version wrote.
var knownTypes = []v1alpha1.VolumeType{
	v1alpha1.VolumeTypeLocal, v1alpha1.VolumeTypePVC, v1alpha1.VolumeTypePV, v1alpha1.VolumeTypeSnapshot, v1alpha1.VolumeTypeOSS,
}

// SandboxContext is what an entry is validated against.
type SandboxContext struct {
	// TenantID is the sandbox's tenant; empty for none.
	TenantID string
	// Policy is the group's.
	Policy v1alpha1.VolumePolicy
	// Available says whether a Source for the type is there. Nil leaves that to a later check.
	Available func(v1alpha1.VolumeType) bool
}

// Default fills in what an entry leaves open: mode rw, onFailure Keep, the sandbox's tenant.
func Default(e *v1alpha1.DynamicVolume, sandboxTenant string) {
	if e.Mode == "" {
		e.Mode = v1alpha1.VolumeModeReadWrite
	}
	if e.OnFailure == "" {
		e.OnFailure = v1alpha1.OnFailureKeep
	}
	if e.TenantID == "" {
		e.TenantID = sandboxTenant
	}
}

// FromStatic is the entry that says the same as a static volume.
func FromStatic(v *v1alpha1.VolumeMount) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{VolumeType: v1alpha1.VolumeTypeLocal, Source: v.Source, Target: v.Target, Mode: v.Mode}
}

// ValidateSandbox checks all that a sandbox's spec says about volumes: the tenant, every entry, their number, and
// that no two targets meet. A policy's maxVolumes counts dynamic volumes.
func ValidateSandbox(spec *v1alpha1.SandboxSpec, c SandboxContext) error {
	if spec.TenantID != "" {
		if err := ValidateTenant(spec.TenantID); err != nil {
			return err
		}
	}
	if err := checkCount(len(spec.VolumeMounts), v1alpha1.MaxVolumes, "static"); err != nil {
		return err
	}
	if err := checkCount(len(spec.DynamicVolumes), c.maxDynamic(), "dynamic"); err != nil {
		return err
	}
	for i := range spec.VolumeMounts {
		if err := ValidateStatic(&spec.VolumeMounts[i], c); err != nil {
			return err
		}
	}
	for i := range spec.DynamicVolumes {
		if err := ValidateEntry(&spec.DynamicVolumes[i], c); err != nil {
			return err
		}
	}
	return ValidateTargets(spec.VolumeMounts, spec.DynamicVolumes)
}

func (c SandboxContext) maxDynamic() int {
	if n := int(c.Policy.MaxVolumes); n > 0 && n < v1alpha1.MaxVolumes {
		return n
	}
	return v1alpha1.MaxVolumes
}

func checkCount(n, most int, kind string) error {
	if n <= most {
		return nil
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.TooManyVolumes,
		"a sandbox may have at most %d %s volumes here, not %d: remove some first", most, kind, n)
}

// ValidateEntry checks one dynamic volume by itself; ValidateTargets compares it with the others. Defaults may be
// left open. Reasons: INVALID_VOLUME_TYPE, VOLUME_TYPE_UNAVAILABLE, INVALID_SOURCE, INVALID_TARGET, TARGET_DENIED,
// INVALID_MODE, INVALID_SIZE, SIZE_REQUIRED, INVALID_TENANT, TENANT_MISMATCH, INVALID_SUB_PATH,
// INVALID_ON_FAILURE, INVALID_REQUEST.
func ValidateEntry(e *v1alpha1.DynamicVolume, c SandboxContext) error {
	d := *e
	Default(&d, c.TenantID)
	checks := []func(*v1alpha1.DynamicVolume, SandboxContext) error{
		checkType, checkSource, checkTarget, checkMode, checkSize, checkTenant, checkSubPath, checkOnFailure, checkRequestIDs,
	}
	for _, check := range checks {
		if err := check(&d, c); err != nil {
			return err
		}
	}
	return nil
}

// ValidateStatic checks one static volume by itself. Reasons: those of ValidateEntry.
func ValidateStatic(v *v1alpha1.VolumeMount, c SandboxContext) error {
	e := FromStatic(v)
	// A static volume has no sizeLimit that could be required.
	c.Policy.RequireSizeLimit = false
	return ValidateEntry(&e, c)
}

// ValidateTenant checks the form of a tenant's name. Reason: INVALID_TENANT.
func ValidateTenant(tenant string) error {
	if tenantPattern.MatchString(tenant) {
		return nil
	}
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidTenant,
		"tenant %q is not valid: write 1 to 63 of the characters a-z, 0-9 and -", short(tenant))
}

func checkType(e *v1alpha1.DynamicVolume, c SandboxContext) error {
	if !slices.Contains(knownTypes, e.VolumeType) {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidVolumeType,
			"volumeType %q is not known: write local, pvc, pv, snapshot or oss", short(string(e.VolumeType)))
	}
	if allowed := c.Policy.AllowedTypes; len(allowed) > 0 && !slices.Contains(allowed, e.VolumeType) {
		return fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
			"the group's volumePolicy does not allow volumes of type %s", e.VolumeType)
	}
	if c.Available != nil && !c.Available(e.VolumeType) {
		return fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
			"volumes of type %s are not available here: no source for them is set up", e.VolumeType)
	}
	return nil
}

func checkSource(e *v1alpha1.DynamicVolume, _ SandboxContext) error {
	why := ""
	switch e.VolumeType {
	case v1alpha1.VolumeTypeLocal:
		why = checkAbsolute(e.Source, maxPath)
		if e.Source == "/" {
			why = "it is the whole node"
		}
	case v1alpha1.VolumeTypePVC, v1alpha1.VolumeTypePV:
		if len(e.Source) > maxName || !namePattern.MatchString(e.Source) {
			why = "it is no name of a claim or volume (lower-case letters, digits, - and ., at most 253)"
		}
	default:
		switch {
		case e.Source == "":
			why = "it is empty"
		case len(e.Source) > maxPath:
			why = "it is too long"
		case !utf8.ValidString(e.Source):
			why = "it is not UTF-8"
		case strings.ContainsFunc(e.Source, func(r rune) bool { return unicode.IsControl(r) || unicode.IsSpace(r) }):
			why = "it has spaces or control characters"
		}
	}
	if why == "" {
		return nil
	}
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "source %q of type %s is not valid: %s", short(e.Source), e.VolumeType, why)
}

func checkTarget(e *v1alpha1.DynamicVolume, c SandboxContext) error {
	return CheckTarget(e.Target, c.Policy.DeniedTargets)
}

func checkMode(e *v1alpha1.DynamicVolume, _ SandboxContext) error {
	if e.Mode == v1alpha1.VolumeModeReadOnly || e.Mode == v1alpha1.VolumeModeReadWrite {
		return nil
	}
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidMode, "mode %q is not valid: write ro or rw", short(string(e.Mode)))
}

func checkSize(e *v1alpha1.DynamicVolume, c SandboxContext) error {
	if e.SizeLimit == "" {
		if c.Policy.RequireSizeLimit && e.Mode == v1alpha1.VolumeModeReadWrite {
			return fault.New(errdefs.ErrFailedPrecondition, fault.SizeRequired,
				"the group's volumePolicy requires a sizeLimit for volumes of mode rw: set one such as 10Gi")
		}
		return nil
	}
	_, err := ParseSize(e.SizeLimit)
	return err
}

func checkTenant(e *v1alpha1.DynamicVolume, c SandboxContext) error {
	if e.TenantID == "" {
		return nil
	}
	if err := ValidateTenant(e.TenantID); err != nil {
		return err
	}
	if e.TenantID == c.TenantID {
		return nil
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
		"the volume is of tenant %q and the sandbox of tenant %q: a sandbox uses its own tenant's volumes only", e.TenantID, c.TenantID)
}

func checkSubPath(e *v1alpha1.DynamicVolume, _ SandboxContext) error {
	return CheckSubPath(e.SubPath)
}

// CheckSubPath checks the form of a subPath, which may be empty: a clean relative path that stays inside. Reason:
// INVALID_SUB_PATH.
func CheckSubPath(subPath string) error {
	if subPath == "" {
		return nil
	}
	if why := checkRelative(subPath, maxPath); why != "" {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidSubPath,
			"subPath %q is not valid: %s; write a clean relative path such as models/v1", short(subPath), why)
	}
	return nil
}

func checkOnFailure(e *v1alpha1.DynamicVolume, _ SandboxContext) error {
	if e.OnFailure == v1alpha1.OnFailureKeep || e.OnFailure == v1alpha1.OnFailureRemove {
		return nil
	}
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidOnFailure, "onFailure %q is not valid: write Keep or Remove", short(string(e.OnFailure)))
}

func checkRequestIDs(e *v1alpha1.DynamicVolume, _ SandboxContext) error {
	if err := ValidateRequestID(e.RequestID); err != nil || e.Detach == nil {
		return err
	}
	return ValidateRequestID(e.Detach.RequestID)
}

// ValidateRequestID checks the form of a request id, which may be empty. Reason: INVALID_REQUEST.
func ValidateRequestID(id string) error {
	if len(id) <= maxRequestID && requestIDPattern.MatchString(id) {
		return nil
	}
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest,
		"requestId %q is not valid: write at most %d printable ASCII characters without spaces", short(id), maxRequestID)
}
