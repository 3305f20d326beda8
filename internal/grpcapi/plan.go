package grpcapi

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/util/uuid"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// step is what a volume call does after it has looked at the sandbox.
type step int

const (
	// stepWait: the entry was written, or is on its way already; wait for what comes of it.
	stepWait step = iota
	// stepAnswer: everything is as wished.
	stepAnswer
	// stepDetached: an entry at the target is being detached; wait for its end, then look again.
	stepDetached
)

// plan is what a call decided, and the entry that it is about. For stepAnswer on a removal entry is zero.
type plan struct {
	step  step
	entry v1alpha1.DynamicVolume
	// priorRow is the request id of the row of the entry before the call.
	priorRow string
}

// hasCSI says whether the sandbox's SandboxSet lets it have dynamic volumes.
func hasCSI(sb *v1alpha1.Sandbox) bool { return slices.Contains(sb.Spec.Runtimes, v1alpha1.RuntimeCSI) }

// planAdd decides what to do to have the volume wish, which is valid by itself, in the sandbox, and changes
// the spec accordingly. sb is a fresh copy, group its group's present state.
func planAdd(sb *v1alpha1.Sandbox, group *v1alpha1.SandboxGroup, available func(v1alpha1.VolumeType) bool, wish v1alpha1.DynamicVolume) (plan, error) {
	if err := checkTakesVolumes(sb); err != nil {
		return plan{}, err
	}
	switch set := sb.Labels[agentsv1alpha1.LabelSandboxSet]; {
	case hasCSI(sb):
	case set != "" && sb.Spec.Template != nil:
		return plan{}, fault.New(errdefs.ErrFailedPrecondition, fault.FeatureDisabled,
			"dynamic volumes are off in SandboxSet %s/%s: add the runtime csi to its spec.runtimes, which counts for new sandboxes", sb.Namespace, set)
	case !group.Spec.FeatureGates.DynamicVolumeMount:
		return plan{}, fault.New(errdefs.ErrFailedPrecondition, fault.FeatureDisabled,
			"dynamic volumes are off for group %s/%s: its operator turns them on with spec.featureGates.dynamicVolumeMount: true",
			group.Namespace, group.Name)
	}
	err := volume.ValidateEntry(&wish, volume.SandboxContext{
		TenantID: sb.Spec.TenantID, Policy: group.Spec.VolumePolicy, Available: available,
	})
	if err != nil {
		return plan{}, err
	}
	volume.Default(&wish, sb.Spec.TenantID)

	present := entryAt(sb, wish.Target)
	switch {
	case present == nil:
		if most := maxVolumes(group); len(sb.Spec.DynamicVolumes) >= most {
			return plan{}, tooMany("dynamic", most)
		}
		if err := volume.ValidateTargets(sb.Spec.VolumeMounts, append(sb.Spec.DynamicVolumes[:len(sb.Spec.DynamicVolumes):len(sb.Spec.DynamicVolumes)], wish)); err != nil {
			return plan{}, err
		}
		wish.RequestID = freshID(sb, wish.RequestID)
		sb.Spec.DynamicVolumes = append(sb.Spec.DynamicVolumes, wish)
		return plan{step: stepWait, entry: wish}, nil
	case present.Detach != nil:
		return plan{step: stepDetached, entry: *present}, nil
	case !volume.SameVolume(present, &wish):
		return plan{}, fault.New(errdefs.ErrAlreadyExists, fault.TargetInUse,
			"%s of sandbox %s/%s has another volume (%s %s, %s): remove that one first, or choose another target",
			wish.Target, sb.Namespace, sb.Name, present.VolumeType, present.Source, modeOf(present.Mode))
	}

	switch row := rowOf(sb, present); {
	case row != nil && row.Phase == v1alpha1.VolumeMounted:
		return plan{step: stepAnswer, entry: *present}, nil
	case row != nil && row.Phase == v1alpha1.VolumeFailed:
		// A new request id makes it another entry, which is tried from the beginning.
		present.RequestID = freshID(sb, wish.RequestID)
		present.ForceMount, present.OnFailure = wish.ForceMount, wish.OnFailure
	}
	return plan{step: stepWait, entry: *present}, nil
}

// planRemove decides what to do to have no volume at the target, and changes the spec accordingly.
func planRemove(sb *v1alpha1.Sandbox, target string, detach v1alpha1.DetachRequest) (plan, error) {
	for _, v := range sb.Spec.VolumeMounts {
		if v.Target == target {
			return plan{}, fault.New(errdefs.ErrFailedPrecondition, fault.Immutable,
				"%s of sandbox %s/%s is a static volume and stays until the sandbox is deleted: only dynamic volumes can be removed",
				target, sb.Namespace, sb.Name)
		}
	}
	present := entryAt(sb, target)
	if present == nil {
		return plan{step: stepAnswer}, nil
	}
	p := plan{step: stepWait}
	if row := rowOf(sb, present); row != nil {
		p.priorRow = row.RequestID
	}
	if present.Detach == nil || detach.Force && !present.Detach.Force {
		detach.RequestID = freshID(sb, detach.RequestID)
		present.Detach = &detach
	}
	p.entry = *present.DeepCopy()
	return p, nil
}

// checkTakesVolumes refuses sandboxes in which no volume can be attached until somebody does something.
func checkTakesVolumes(sb *v1alpha1.Sandbox) error {
	refuse := func(reason fault.Reason, format string, args ...any) error {
		return fault.New(errdefs.ErrFailedPrecondition, reason, "sandbox %s/%s %s", sb.Namespace, sb.Name, fmt.Sprintf(format, args...))
	}
	if sb.DeletionTimestamp != nil {
		return refuse(fault.SandboxTerminating, "is being deleted and takes no more volumes")
	}
	if sb.Spec.Paused {
		return refuse(fault.SandboxNotRunning, "is paused: resume it, then add the volume")
	}
	switch sb.Status.Phase {
	case v1alpha1.SandboxSucceeded, v1alpha1.SandboxFailed:
		return refuse(fault.SandboxNotRunning, "has ended (%s): create it anew with the volume", sb.Status.Phase)
	case v1alpha1.SandboxLost:
		return refuse(fault.SandboxNotRunning, "is lost with its node: delete it, and create it anew with the volume")
	}
	return nil
}

func maxVolumes(group *v1alpha1.SandboxGroup) int {
	if n := int(group.Spec.VolumePolicy.MaxVolumes); n > 0 && n < v1alpha1.MaxVolumes {
		return n
	}
	return v1alpha1.MaxVolumes
}

func tooMany(kind string, most int) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.TooManyVolumes,
		"a sandbox of this group may have at most %d %s volumes: remove one first", most, kind)
}

// entryAt is the dynamic volume at a target, in place; nil when there is none.
func entryAt(sb *v1alpha1.Sandbox, target string) *v1alpha1.DynamicVolume {
	for i := range sb.Spec.DynamicVolumes {
		if sb.Spec.DynamicVolumes[i].Target == target {
			return &sb.Spec.DynamicVolumes[i]
		}
	}
	return nil
}

// rowAt is the row of a target, whichever entry it speaks of; nil when there is none.
func rowAt(sb *v1alpha1.Sandbox, target string) *v1alpha1.VolumeStatus {
	for i := range sb.Status.Volumes {
		if sb.Status.Volumes[i].Target == target {
			return &sb.Status.Volumes[i]
		}
	}
	return nil
}

// rowOf is the row that speaks of this very entry; nil when there is none.
func rowOf(sb *v1alpha1.Sandbox, entry *v1alpha1.DynamicVolume) *v1alpha1.VolumeStatus {
	row := rowAt(sb, entry.Target)
	if row == nil || row.EntryHash != volume.EntryHash(entry) {
		return nil
	}
	return row
}

// freshID is the wished request id, or a new one when it is empty or the sandbox has seen it.
func freshID(sb *v1alpha1.Sandbox, wished string) string {
	taken := wished == ""
	for _, e := range sb.Spec.DynamicVolumes {
		taken = taken || e.RequestID == wished || e.Detach != nil && e.Detach.RequestID == wished
	}
	for _, row := range sb.Status.Volumes {
		taken = taken || row.RequestID == wished
	}
	if taken {
		return newID()
	}
	return wished
}

func newID() string { return "r-" + strings.ReplaceAll(string(uuid.NewUUID()), "-", "")[:16] }

func modeOf(m v1alpha1.VolumeMode) v1alpha1.VolumeMode {
	if m == "" {
		return v1alpha1.VolumeModeReadWrite
	}
	return m
}
