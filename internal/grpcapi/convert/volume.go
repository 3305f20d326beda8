package convert

import (
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// DynamicVolume makes an entry of spec.dynamicVolumes of its message. Nil is the empty entry.
func DynamicVolume(m *sandboxv1.DynamicVolume) v1alpha1.DynamicVolume {
	return v1alpha1.DynamicVolume{
		VolumeType: v1alpha1.VolumeType(m.GetVolumeType()),
		Source:     m.GetSource(),
		Target:     m.GetTarget(),
		Mode:       v1alpha1.VolumeMode(m.GetMode()),
		SizeLimit:  m.GetSizeLimit(),
		TenantID:   m.GetTenantId(),
		SubPath:    m.GetSubPath(),
		ForceMount: m.GetForceMount(),
		OnFailure:  v1alpha1.OnFailure(m.GetOnFailure()),
		RequestID:  m.GetRequestId(),
		Detach:     detach(m.GetDetach()),
	}
}

func detach(m *sandboxv1.DetachRequest) *v1alpha1.DetachRequest {
	if m == nil {
		return nil
	}
	return &v1alpha1.DetachRequest{Force: m.GetForce(), RequestID: m.GetRequestId()}
}

func detachProto(d *v1alpha1.DetachRequest) *sandboxv1.DetachRequest {
	if d == nil {
		return nil
	}
	return &sandboxv1.DetachRequest{Force: d.Force, RequestId: d.RequestID}
}

// DynamicVolumeProto is the reverse of DynamicVolume.
func DynamicVolumeProto(v v1alpha1.DynamicVolume) *sandboxv1.DynamicVolume {
	return &sandboxv1.DynamicVolume{
		VolumeType: string(v.VolumeType),
		Source:     v.Source,
		Target:     v.Target,
		Mode:       string(v.Mode),
		SizeLimit:  v.SizeLimit,
		TenantId:   v.TenantID,
		SubPath:    v.SubPath,
		ForceMount: v.ForceMount,
		OnFailure:  string(v.OnFailure),
		RequestId:  v.RequestID,
		Detach:     detachProto(v.Detach),
	}
}

// VolumeMount makes an entry of spec.volumeMounts of its message.
func VolumeMount(m *sandboxv1.VolumeMount) v1alpha1.VolumeMount {
	return v1alpha1.VolumeMount{Source: m.GetSource(), Target: m.GetTarget(), Mode: v1alpha1.VolumeMode(m.GetMode())}
}

// VolumeMountProto is the reverse of VolumeMount.
func VolumeMountProto(v v1alpha1.VolumeMount) *sandboxv1.VolumeMount {
	return &sandboxv1.VolumeMount{Source: v.Source, Target: v.Target, Mode: string(v.Mode)}
}

// VolumeStatus makes a row of status.volumes of its message.
func VolumeStatus(m *sandboxv1.VolumeStatus) v1alpha1.VolumeStatus {
	return v1alpha1.VolumeStatus{
		Kind:               v1alpha1.VolumeKind(m.GetKind()),
		VolumeType:         v1alpha1.VolumeType(m.GetVolumeType()),
		Source:             m.GetSource(),
		Target:             m.GetTarget(),
		Mode:               v1alpha1.VolumeMode(m.GetMode()),
		SizeLimit:          m.GetSizeLimit(),
		TenantID:           m.GetTenantId(),
		SubPath:            m.GetSubPath(),
		ForceMount:         m.GetForceMount(),
		OnFailure:          v1alpha1.OnFailure(m.GetOnFailure()),
		RequestID:          m.GetRequestId(),
		EntryHash:          m.GetEntryHash(),
		OperationID:        m.GetOperationId(),
		ObservedGeneration: m.GetObservedGeneration(),
		Phase:              v1alpha1.VolumePhase(m.GetPhase()),
		Reason:             m.GetReason(),
		Message:            m.GetMessage(),
		Since:              Time(m.GetSince()),
		Attempts:           m.GetAttempts(),
		NextRetryTime:      TimePtr(m.GetNextRetryTime()),
		PVCName:            m.GetPvcName(),
		PVName:             m.GetPvName(),
		Path:               v1alpha1.VolumePath(m.GetPath()),
		PathReason:         m.GetPathReason(),
		LimitEnforcement:   v1alpha1.LimitEnforcement(m.GetLimitEnforcement()),
		CapacityBytes:      m.GetCapacityBytes(),
		Topology:           v1alpha1.Topology(m.GetTopology()),
		VolumeDomain:       m.GetVolumeDomain(),
		SandboxDomain:      m.GetSandboxDomain(),
		Attached:           v1alpha1.AttachTime(m.GetAttached()),
		HasBeenMounted:     m.GetHasBeenMounted(),
		DetachState:        v1alpha1.DetachState(m.GetDetachState()),
		Holders:            each(m.GetHolders(), Holder),
	}
}

// VolumeStatusProto is the reverse of VolumeStatus.
func VolumeStatusProto(v v1alpha1.VolumeStatus) *sandboxv1.VolumeStatus {
	return &sandboxv1.VolumeStatus{
		Kind:               string(v.Kind),
		VolumeType:         string(v.VolumeType),
		Source:             v.Source,
		Target:             v.Target,
		Mode:               string(v.Mode),
		SizeLimit:          v.SizeLimit,
		TenantId:           v.TenantID,
		SubPath:            v.SubPath,
		ForceMount:         v.ForceMount,
		OnFailure:          string(v.OnFailure),
		RequestId:          v.RequestID,
		EntryHash:          v.EntryHash,
		OperationId:        v.OperationID,
		ObservedGeneration: v.ObservedGeneration,
		Phase:              string(v.Phase),
		Reason:             v.Reason,
		Message:            text(v.Message),
		Since:              timeProto(v.Since),
		Attempts:           v.Attempts,
		NextRetryTime:      TimeProto(v.NextRetryTime),
		PvcName:            v.PVCName,
		PvName:             v.PVName,
		Path:               string(v.Path),
		PathReason:         v.PathReason,
		LimitEnforcement:   string(v.LimitEnforcement),
		CapacityBytes:      v.CapacityBytes,
		Topology:           string(v.Topology),
		VolumeDomain:       v.VolumeDomain,
		SandboxDomain:      v.SandboxDomain,
		Attached:           string(v.Attached),
		HasBeenMounted:     v.HasBeenMounted,
		DetachState:        string(v.DetachState),
		Holders:            each(v.Holders, HolderProto),
	}
}

// Holder makes a holder of its message.
func Holder(m *sandboxv1.Holder) v1alpha1.VolumeHolder {
	return v1alpha1.VolumeHolder{PID: m.GetPid(), Command: m.GetCommand(), Kind: m.GetKind()}
}

// HolderProto is the reverse of Holder.
func HolderProto(h v1alpha1.VolumeHolder) *sandboxv1.Holder {
	return &sandboxv1.Holder{Pid: h.PID, Command: text(h.Command), Kind: h.Kind}
}
