package scheduler

import (
	"slices"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// entry is a volume that a sandbox's spec asks for, static or dynamic, with its defaults.
type entry struct {
	v1alpha1.DynamicVolume
	kind v1alpha1.VolumeKind
	hash string
	// invalid is why it cannot be attached whatever the node says.
	invalid error
}

// entriesOf are the volumes of a sandbox in the order of its rows: static ones first. Of two at one target
// the first counts; the API keeps that from happening.
func entriesOf(sb *v1alpha1.Sandbox, policy v1alpha1.VolumePolicy, resolver Resolver) []*entry {
	c := volume.SandboxContext{TenantID: sb.Spec.TenantID, Policy: policy, Available: func(t v1alpha1.VolumeType) bool { return available(t, resolver) }}
	var all []*entry
	var taken []string
	add := func(e *entry) {
		if slices.Contains(taken, e.Target) {
			return
		}
		if e.invalid == nil {
			e.invalid = volume.CheckConflict(taken, e.Target)
		}
		volume.Default(&e.DynamicVolume, sb.Spec.TenantID)
		taken = append(taken, e.Target)
		all = append(all, e)
	}
	for i := range sb.Spec.VolumeMounts {
		v := &sb.Spec.VolumeMounts[i]
		add(&entry{
			DynamicVolume: volume.FromStatic(v),
			kind:          v1alpha1.VolumeKindStatic,
			hash:          volume.StaticHash(v),
			invalid:       volume.ValidateStatic(v, c),
		})
	}
	most := int(policy.MaxVolumes)
	if most == 0 {
		most = v1alpha1.MaxVolumes
	}
	for i := range sb.Spec.DynamicVolumes {
		v := &sb.Spec.DynamicVolumes[i]
		e := &entry{
			DynamicVolume: *v,
			kind:          v1alpha1.VolumeKindDynamic,
			hash:          volume.EntryHash(v),
			invalid:       volume.ValidateEntry(v, c),
		}
		if i >= most && e.invalid == nil {
			e.invalid = fault.New(errdefs.ErrFailedPrecondition, fault.TooManyVolumes,
				"a sandbox may have at most %d dynamic volumes here: remove one first", most)
		}
		add(e)
	}
	return all
}

// available says whether there is anything that makes an agent's source of a volume of this type.
func available(t v1alpha1.VolumeType, resolver Resolver) bool {
	return t == v1alpha1.VolumeTypeLocal || t == v1alpha1.VolumeTypeSnapshot || resolver != nil
}

// row is the entry's row of status.volumes, before anything is known of it.
func (e *entry) row() v1alpha1.VolumeStatus {
	return v1alpha1.VolumeStatus{
		Kind:       e.kind,
		VolumeType: e.VolumeType,
		Source:     e.Source,
		Target:     e.Target,
		Mode:       e.Mode,
		SizeLimit:  e.SizeLimit,
		TenantID:   e.TenantID,
		SubPath:    e.SubPath,
		ForceMount: e.ForceMount,
		OnFailure:  e.OnFailure,
		RequestID:  e.RequestID,
		EntryHash:  e.hash,
	}
}

// subGroupOf is the sub-group that a sandbox names, empty in it for the group's first.
func subGroupOf(sb *v1alpha1.Sandbox) SubSandboxGroupKey {
	k := SubSandboxGroupKey{Namespace: sb.Namespace, Group: sb.Spec.Group, SubGroup: sb.Spec.SubGroup}
	if k.Group == "" {
		k.Group = v1alpha1.DefaultGroup
	}
	return k
}

// workload is what is run for a sandbox: its spec, with the sub-group's template where it is silent.
type workload struct {
	image         string
	command, args []string
	env           []v1alpha1.EnvVar
	resources     corev1.ResourceRequirements
}

func workloadOf(spec *v1alpha1.SandboxSpec, t *v1alpha1.SandboxTemplate) workload {
	w := workload{image: spec.Image, command: spec.Command, args: spec.Args}
	if w.image == "" {
		w.image = t.Image
	}
	if len(w.command) == 0 {
		// Arguments belong to their command: those of the template do not follow another's.
		w.command = t.Command
		if len(w.args) == 0 {
			w.args = t.Args
		}
	}
	for _, v := range t.Env {
		if !slices.ContainsFunc(spec.Env, func(own v1alpha1.EnvVar) bool { return own.Name == v.Name }) {
			w.env = append(w.env, v)
		}
	}
	w.env = append(w.env, spec.Env...)
	w.resources.Limits = merged(t.Resources.Limits, spec.Resources.Limits)
	w.resources.Requests = merged(t.Resources.Requests, spec.Resources.Requests)
	return w
}

func merged(base, over corev1.ResourceList) corev1.ResourceList {
	out := base.DeepCopy()
	for name, q := range over {
		if out == nil {
			out = corev1.ResourceList{}
		}
		out[name] = q
	}
	return out
}

// requests are what is accounted: requests, and limits where there is no request, as in Kubernetes.
func (w *workload) requests() Requests {
	get := func(name corev1.ResourceName) resource.Quantity {
		if q, ok := w.resources.Requests[name]; ok {
			return q
		}
		return w.resources.Limits[name]
	}
	cpu, memory := get(corev1.ResourceCPU), get(corev1.ResourceMemory)
	return Requests{CPUMilli: cpu.MilliValue(), MemoryBytes: memory.Value()}
}

// createRequest asks for the sandbox's container.
func (w *workload) createRequest(sb *v1alpha1.Sandbox, key SubSandboxGroupKey) *agentv1.CreateSandboxRequest {
	policy := sb.Spec.RestartPolicy
	if policy == "" {
		policy = v1alpha1.RestartAlways
	}
	cpu, memory := w.resources.Limits[corev1.ResourceCPU], w.resources.Limits[corev1.ResourceMemory]
	r := &agentv1.CreateSandboxRequest{
		Namespace:     sb.Namespace,
		Name:          sb.Name,
		TenantId:      sb.Spec.TenantID,
		Group:         key.Group,
		SubGroup:      key.SubGroup,
		Image:         w.image,
		Entrypoint:    w.command,
		Args:          w.args,
		WorkingDir:    sb.Spec.WorkingDir,
		CpuMilli:      cpu.MilliValue(),
		MemoryBytes:   memory.Value(),
		RestartPolicy: string(policy),
	}
	for _, v := range w.env {
		r.Env = append(r.Env, &agentv1.EnvVar{Name: v.Name, Value: v.Value})
	}
	return r
}
