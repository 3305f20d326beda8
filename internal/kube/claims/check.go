package claims

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/sets"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// final is an error that no waiting ends.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// checked is what is known of a claim that may take sandboxes.
type checked struct {
	set      *agentsv1alpha1.SandboxSet
	revision string
	// tenant is that of the Namespace.
	tenant string
	places []volumes.Place
}

// check is all that can be known before a sandbox is taken. An error that is final ends the claim; any other is waited
// for.
func (p *pass) check(ctx context.Context) (*checked, error) {
	claim := p.claim
	set, err := p.Sets.Get(ctx, store.Key{Namespace: claim.Namespace, Name: claim.Spec.TemplateName})
	switch {
	case errdefs.IsNotFound(err), err == nil && set.DeletionTimestamp != nil:
		return nil, final{fault.New(errdefs.ErrNotFound, store.SetNotFound,
			"there is no SandboxSet %s in Namespace %s: create it first, or correct templateName", claim.Spec.TemplateName, claim.Namespace)}
	case err != nil:
		return nil, err
	}
	if len(claim.Spec.DynamicVolumesMount) > 0 && !sets.HasCSI(set) {
		return nil, final{fault.New(errdefs.ErrFailedPrecondition, fault.FeatureDisabled,
			"SandboxSet %s does not have the runtime csi, without which its sandboxes get no volumes: add it to spec.runtimes, or leave dynamicVolumesMount out", set.Name)}
	}
	if onlyFresh(claim) && !creates(claim) {
		return nil, final{fault.New(errdefs.ErrFailedPrecondition, fault.InvalidRequest,
			"envVars cannot be given to a sandbox that runs already, and createOnNoStock does not let one be made: set createOnNoStock, or leave envVars out")}
	}
	// Each sandbox would be deleted when it is taken, and the next be taken for it, to the end of the pool.
	if t := claim.Spec.ShutdownTime; t != nil && !t.After(p.now) {
		return nil, final{fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest,
			"shutdownTime is %s, which is over, so the sandboxes would be deleted at once: write a later time, or leave it out", t.UTC().Format(time.RFC3339))}
	}
	if err := valid(claim, set); err != nil {
		return nil, final{err}
	}
	c := &checked{set: set}
	if c.revision, err = sets.Revision(set); err != nil {
		return nil, err
	}
	if c.tenant, err = p.Tenant(ctx, claim.Namespace); err != nil {
		return nil, err
	}
	if c.places, err = p.locate(ctx, c.tenant); err != nil {
		return nil, err
	}
	return c, nil
}

// maxVariable is the most bytes of an environment variable, without its = and zero (MAX_ARG_STRLEN in execve(2)).
const maxVariable = 128<<10 - 2

// valid checks what can be checked without asking anybody.
func valid(claim *agentsv1alpha1.SandboxClaim, set *agentsv1alpha1.SandboxSet) error {
	problems := metav1validation.ValidateLabels(claim.Spec.Labels, field.NewPath("labels"))
	problems = append(problems, validation.ValidateAnnotations(claim.Spec.Annotations, field.NewPath("annotations"))...)
	if len(problems) > 0 {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "what is to be given to the sandboxes is not valid: %s", problems.ToAggregate())
	}
	for _, name := range slices.Sorted(maps.Keys(claim.Spec.EnvVars)) {
		switch value := claim.Spec.EnvVars[name]; {
		case strings.ContainsRune(value, 0):
			return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "the environment variable %s has a zero byte, which no variable can have: leave it out", name)
		case len(name)+len(value) > maxVariable:
			return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "the environment variable %s has %d bytes with its name: write at most %d, as a process can be given no more", name, len(name)+len(value), maxVariable)
		}
	}
	all := entries(claim)
	for i := range all {
		if err := volume.ValidateEntry(&all[i], volume.SandboxContext{}); err != nil {
			return err
		}
	}
	if err := volume.ValidateTargets(nil, all); err != nil {
		return err
	}
	return fits(claim, "SandboxSet "+set.Name, &set.Spec.Template)
}

// fits checks what a claim asks for against the template of its set, or of a sandbox; of is whose it is.
func fits(claim *agentsv1alpha1.SandboxClaim, of string, template *corev1.PodTemplateSpec) error {
	if err := updatable(claim, of, template); err != nil {
		return err
	}
	for _, m := range claim.Spec.DynamicVolumesMount {
		if err := apart(of, template, m.MountPath); err != nil {
			return err
		}
	}
	return nil
}

// updatable refuses resources of inplaceUpdate that no Pod can have, and that the schema cannot tell.
func updatable(claim *agentsv1alpha1.SandboxClaim, of string, template *corev1.PodTemplateSpec) error {
	u := claim.Spec.InplaceUpdate
	if u == nil || u.Resources == nil {
		return nil
	}
	refuse := func(format string, args ...any) error {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "inplaceUpdate.resources: "+format, args...)
	}
	for _, list := range []corev1.ResourceList{u.Resources.Limits, u.Resources.Requests} {
		for name, q := range list {
			if q.Sign() < 0 {
				return refuse("%s is %s: must not be negative", name, q.String())
			}
		}
	}
	template = template.DeepCopy()
	update(u, template)
	i := mainOf(template)
	if i < 0 {
		return nil
	}
	r := template.Spec.Containers[i].Resources
	for name, request := range r.Requests {
		if limit, bounded := r.Limits[name]; bounded && request.Cmp(limit) > 0 {
			return refuse("with it the container %s of %s requests %s of %s, which is more than its limit of %s: change both",
				template.Spec.Containers[i].Name, of, request.String(), name, limit.String())
		}
	}
	return nil
}

// apart refuses a target that is on, in or around a volume of the template's container. Below its tmpfs it may be.
func apart(of string, template *corev1.PodTemplateSpec, target string) error {
	i := mainOf(template)
	if i < 0 {
		return nil
	}
	for _, m := range template.Spec.Containers[i].VolumeMounts {
		at := strings.TrimRight(path.Clean("/"+m.MountPath), "/")
		if strings.HasPrefix(target, at+"/") && slices.ContainsFunc(template.Spec.Volumes, func(v corev1.Volume) bool {
			return v.Name == m.Name && v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory
		}) {
			continue
		}
		if err := volume.CheckConflict([]string{at}, target); err != nil {
			return fmt.Errorf("the container of %s has volume %s at %s: %w", of, m.Name, m.MountPath, err)
		}
	}
	return nil
}

// locate finds the volumes, and whether the claim's sandboxes, which are that tenant's, may use them.
func (p *pass) locate(ctx context.Context, tenant string) ([]volumes.Place, error) {
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: p.claim.Namespace}, Spec: v1alpha1.SandboxSpec{TenantID: tenant}}
	var places []volumes.Place
	for _, e := range entries(p.claim) {
		at, err := p.Volumes.Check(ctx, scheduler.Wish{Sandbox: sb, Volume: &e, TopologyKey: v1alpha1.DefaultTopologyKey})
		switch reason := fault.ReasonOf(err); {
		case err == nil:
			places = append(places, at)
		case reason == fault.VolumeNotFound:
			return nil, final{fault.New(errdefs.ErrNotFound, fault.VolumeNotFound,
				"there is no PersistentVolume %s, which is to be mounted at %s: create it first, or correct pvName", e.Source, e.Target)}
		case fault.IsPermanent(err) && reason != fault.ClaimNotFound && reason != fault.VolumeNotBound:
			return nil, final{err}
		default:
			return nil, err
		}
	}
	return places, nil
}

func creates(claim *agentsv1alpha1.SandboxClaim) bool {
	return claim.Spec.CreateOnNoStock == nil || *claim.Spec.CreateOnNoStock
}
