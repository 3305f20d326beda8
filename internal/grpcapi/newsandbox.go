package grpcapi

import (
	"context"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

const (
	// maxAnnotations is the most that all annotations may hold, as in Kubernetes (TotalAnnotationSizeLimitB).
	maxAnnotations = 256 << 10
	// maxProcess is the most that command, args and environment may hold together: half of the 2 MiB that
	// Linux gives them with a stack of 8 MiB (execve(2), "Limits on size of arguments and environment").
	maxProcess = 1 << 20
	// maxImage is the longest reference of an image.
	maxImage = 1024
	// maxPathBytes is PATH_MAX of limits.h without its NUL.
	maxPathBytes = 4095
)

// imagePattern is the rough form of an image reference: what it means is the runtime's to say.
var imagePattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._/:@+-]*$`)

// newSandbox makes the object of a request and checks what can be checked without its group.
func (s *sandboxService) newSandbox(ctx context.Context, m *sandboxv1.Sandbox) (*v1alpha1.Sandbox, error) {
	if m == nil || m.GetSpec() == nil {
		return nil, invalid("the request has no sandbox with a spec: set sandbox.spec.image")
	}
	spec, err := convert.Spec(m.GetSpec())
	if err != nil {
		return nil, invalid("%v", err)
	}
	sb := &v1alpha1.Sandbox{ObjectMeta: objectMeta(m), Spec: spec}
	if err := checkNamespace(sb.Namespace); err != nil {
		return nil, err
	}
	tenant, err := s.permit(ctx, Access{Verb: "create", Namespace: sb.Namespace})
	if err != nil {
		return nil, err
	}
	if sb.Spec.TenantID == "" {
		sb.Spec.TenantID = tenant
	}
	checks := []func(*v1alpha1.Sandbox) error{checkMeta, checkGroupNames, checkTenant, checkProcess, checkResources, checkPod, s.checkShutdown}
	for _, check := range checks {
		if err := check(sb); err != nil {
			return nil, err
		}
	}
	return sb, holdTo(tenant, sb)
}

// checkPod checks what is for sandboxes that are Pods. Runtimes are what a set may turn on for its sandboxes, and no caller here:
// the API server would take them for the controller's wish.
func checkPod(sb *v1alpha1.Sandbox) error {
	switch {
	case len(sb.Spec.Runtimes) > 0:
		return invalid("spec.runtimes is set by a SandboxSet for its sandboxes: leave it out, and let the sandbox's group turn dynamic volumes on")
	case len(sb.Spec.VolumeClaimTemplates) > 0 && sb.Spec.Template == nil:
		return invalid("spec.volumeClaimTemplates are for a sandbox that is a Pod: set spec.template, or leave them out")
	}
	return nil
}

// checkAgainstGroup checks what depends on the group: the sub-group, the image, the volumes.
func (s *sandboxService) checkAgainstGroup(sb *v1alpha1.Sandbox, group *v1alpha1.SandboxGroup) error {
	sub, err := subGroup(group, sb.Spec.SubGroup)
	if err != nil {
		return err
	}
	isPod := sb.Spec.Template != nil || sb.Spec.PodRef != nil
	if sb.Spec.Image == "" && sub.Template.Image == "" && !isPod {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage,
			"spec.image is empty and group %s/%s has no image in its template: name an image", group.Namespace, group.Name)
	}
	if len(sb.Spec.VolumeMounts) > v1alpha1.MaxVolumes {
		return tooMany("static", v1alpha1.MaxVolumes)
	}
	if most := maxVolumes(group); len(sb.Spec.DynamicVolumes) > most {
		return tooMany("dynamic", most)
	}
	return volume.ValidateSandbox(&sb.Spec, volume.SandboxContext{
		TenantID: sb.Spec.TenantID, Policy: group.Spec.VolumePolicy, Available: s.options.Available,
	})
}

// subGroup is the named part of a group; its first when the name is empty.
func subGroup(group *v1alpha1.SandboxGroup, name string) (v1alpha1.SubSandboxGroup, error) {
	parts := group.Spec.SubGroups
	if len(parts) == 0 {
		parts = []v1alpha1.SubSandboxGroup{{Name: v1alpha1.DefaultSubGroup}}
	}
	if name == "" {
		return parts[0], nil
	}
	for _, p := range parts {
		if p.Name == name {
			return p, nil
		}
	}
	return v1alpha1.SubSandboxGroup{}, fault.New(errdefs.ErrFailedPrecondition, fault.GroupNotFound,
		"group %s/%s has no sub-group %q: leave spec.subGroup empty for %q, or name another", group.Namespace, group.Name, name, parts[0].Name)
}

func checkMeta(sb *v1alpha1.Sandbox) error {
	if sb.Name != "" {
		if err := checkLabelName("name", sb.Name); err != nil {
			return err
		}
	}
	for k, v := range sb.Labels {
		problems := append(validation.IsQualifiedName(k), validation.IsValidLabelValue(v)...)
		if len(problems) > 0 {
			return invalid("label %q=%q: %s", k, v, strings.Join(problems, "; "))
		}
	}
	size := 0
	for k, v := range sb.Annotations {
		if problems := validation.IsQualifiedName(strings.ToLower(k)); len(problems) > 0 {
			return invalid("annotation %q: %s", k, strings.Join(problems, "; "))
		}
		size += len(k) + len(v)
	}
	if size > maxAnnotations {
		return invalid("the annotations hold %d bytes: at most %d are allowed", size, maxAnnotations)
	}
	return nil
}

// checkLabelName checks a name that must be a DNS label, as hostnames are made of it.
func checkLabelName(field, name string) error {
	if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidName, "%s %q: %s", field, name, strings.Join(problems, "; "))
	}
	return nil
}

func checkGroupNames(sb *v1alpha1.Sandbox) error {
	if sb.Spec.Group != "" {
		if err := checkLabelName("spec.group", sb.Spec.Group); err != nil {
			return err
		}
	}
	if sb.Spec.SubGroup != "" {
		return checkLabelName("spec.subGroup", sb.Spec.SubGroup)
	}
	return nil
}

func checkTenant(sb *v1alpha1.Sandbox) error {
	if sb.Spec.TenantID == "" {
		return nil
	}
	return volume.ValidateTenant(sb.Spec.TenantID)
}

func checkProcess(sb *v1alpha1.Sandbox) error {
	spec := &sb.Spec
	if spec.Image != "" && (len(spec.Image) > maxImage || !imagePattern.MatchString(spec.Image)) {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage, "spec.image %q is not an image reference such as docker.io/library/busybox:latest", spec.Image)
	}
	if err := checkCommand("spec.command", slices.Concat(spec.Command, spec.Args), spec.Env, spec.WorkingDir); err != nil {
		return err
	}
	switch spec.RestartPolicy {
	case "", v1alpha1.RestartAlways, v1alpha1.RestartOnFailure, v1alpha1.RestartNever:
		return nil
	}
	return invalid("spec.restartPolicy %q is not valid: write Always, OnFailure or Never", spec.RestartPolicy)
}

// checkCommand checks what a process is started with; field names the command in messages.
func checkCommand(field string, words []string, env []v1alpha1.EnvVar, workingDir string) error {
	size := 0
	for i, w := range words {
		if strings.ContainsRune(w, 0) {
			return invalid("word %d of %s has a NUL byte", i, field)
		}
		size += len(w) + 1
	}
	seen := map[string]bool{}
	for _, e := range env {
		if e.Name == "" || strings.ContainsFunc(e.Name, func(r rune) bool { return r == '=' || unicode.IsControl(r) || unicode.IsSpace(r) }) {
			return invalid("the environment variable %q has no valid name: it must not be empty nor have spaces, control characters or =", e.Name)
		}
		if seen[e.Name] {
			return invalid("the environment variable %s is set twice", e.Name)
		}
		seen[e.Name] = true
		if strings.ContainsRune(e.Value, 0) {
			return invalid("the environment variable %s has a NUL byte in its value", e.Name)
		}
		size += len(e.Name) + len(e.Value) + 2
	}
	if size > maxProcess {
		return invalid("%s and environment hold %d bytes: at most %d are allowed", field, size, maxProcess)
	}
	if workingDir == "" {
		return nil
	}
	if len(workingDir) > maxPathBytes || !path.IsAbs(workingDir) || path.Clean(workingDir) != workingDir || strings.ContainsFunc(workingDir, unicode.IsControl) {
		return invalid("the working directory %q is not a clean absolute path such as /work", workingDir)
	}
	return nil
}

func checkResources(sb *v1alpha1.Sandbox) error {
	for field, list := range map[string]corev1.ResourceList{"limits": sb.Spec.Resources.Limits, "requests": sb.Spec.Resources.Requests} {
		for name, q := range list {
			at := fmt.Sprintf("spec.resources.%s[%q]", field, string(name))
			if name != corev1.ResourceCPU && name != corev1.ResourceMemory {
				return invalid("%s is not known: only cpu and memory can be set", at)
			}
			if q.Sign() <= 0 {
				return invalid("%s is %s: it must be more than nothing; leave it out for no limit", at, q.String())
			}
			if name == corev1.ResourceMemory && q.Value() < v1alpha1.MinMemoryBytes {
				return invalid("%s is %s: a sandbox needs at least %dMi of memory; did you forget a unit?", at, q.String(), v1alpha1.MinMemoryBytes>>20)
			}
			if name == corev1.ResourceCPU && q.MilliValue() < v1alpha1.MinCPUMilli {
				return invalid("%s is %s: at least %dm can be enforced", at, q.String(), v1alpha1.MinCPUMilli)
			}
			limit, limited := sb.Spec.Resources.Limits[name]
			if field == "requests" && limited && q.Cmp(limit) > 0 {
				return invalid("%s is %s, more than its limit of %s", at, q.String(), limit.String())
			}
		}
	}
	return nil
}

func (s *sandboxService) checkShutdown(sb *v1alpha1.Sandbox) error {
	if t := sb.Spec.ShutdownTime; t != nil && !t.After(s.options.Clock.Now()) {
		return invalid("spec.shutdownTime %s is not in the future", t.UTC().Format("2006-01-02T15:04:05Z"))
	}
	return nil
}
