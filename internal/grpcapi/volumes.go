package grpcapi

import (
	"cmp"
	"context"
	"log/slog"
	"slices"

	"github.com/containerd/errdefs"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// The page sizes of ListSandVolumes. A sandbox has at most 64 volumes, and what is left of former ones.
const (
	defaultVolumePage = 100
	maxVolumePage     = 1000
)

// volumeService serves SandboxVolumeService.
type volumeService struct {
	sandboxv1.UnimplementedSandboxVolumeServiceServer
	*Server
}

// AddSandVolume writes the entry and waits for the row of status that answers it.
func (s *volumeService) AddSandVolume(ctx context.Context, req *sandboxv1.AddSandVolumeRequest) (*sandboxv1.AddSandVolumeResponse, error) {
	r, err := parseRef(req.GetSandbox())
	if err != nil {
		return nil, err
	}
	wish, err := newEntry(req)
	if err != nil {
		return nil, err
	}
	annotate(ctx, slog.String("source", wish.Source), slog.String("target", wish.Target), slog.String("request", wish.RequestID))
	sb, err := s.resolve(ctx, r, "create", "volumes")
	if err != nil {
		return nil, err
	}
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()
	for {
		var p plan
		sb, p, err = s.writeEntry(ctx, sb, wish)
		if err != nil {
			return nil, err
		}
		if p.step == stepDetached {
			if err := s.waiter.until(waitCtx, sb, entryGone(p.entry)); err != nil {
				return nil, stillPending(ctx, err,
					"the former volume at %s of sandbox %s is still being detached (%s), and nothing was added: try again, or look with: fluxctl volume ls",
					wish.Target, keyOf(sb), soFar(rowOf(sb, &p.entry)))
			}
			continue
		}
		outcome := &attached{entry: p.entry, row: rowOf(sb, &p.entry)}
		if p.step == stepWait {
			if err := s.waiter.until(waitCtx, sb, outcome.decide); err != nil {
				return nil, stillPending(ctx, err,
					"the volume at %s of sandbox %s is not mounted yet (%s); the operation goes on: ask again to wait for it, or look with: fluxctl volume ls",
					wish.Target, keyOf(sb), soFar(outcome.row))
			}
		}
		annotate(ctx, slog.String("operationId", outcome.row.OperationID))
		return &sandboxv1.AddSandVolumeResponse{
			Volume:         convert.VolumeStatusProto(*outcome.row),
			AlreadyMounted: p.step == stepAnswer,
			Warnings:       outcome.warnings(),
		}, nil
	}
}

// newEntry makes an entry of a request and checks what can be checked without its sandbox.
func newEntry(req *sandboxv1.AddSandVolumeRequest) (v1alpha1.DynamicVolume, error) {
	if req.GetVolume() == nil {
		return v1alpha1.DynamicVolume{}, invalid("the request has no volume: set volume.volume_type, source and target")
	}
	if req.GetVolume().GetOnFailure() != "" {
		return v1alpha1.DynamicVolume{}, fault.New(errdefs.ErrInvalidArgument, fault.InvalidOnFailure,
			"set on_failure of the request, not of its volume")
	}
	entry := convert.DynamicVolume(req.GetVolume())
	entry.OnFailure = v1alpha1.OnFailure(req.GetOnFailure())
	if entry.OnFailure == "" {
		entry.OnFailure = v1alpha1.OnFailureRemove
	}
	entry.RequestID, entry.Detach = req.GetRequestId(), nil
	// Any tenant will do here: whether it is the sandbox's is said when that is known.
	return entry, volume.ValidateEntry(&entry, volume.SandboxContext{TenantID: entry.TenantID})
}

// writeEntry makes the plan for a wish on the stored sandbox and writes it. It returns what is stored then.
func (s *Server) writeEntry(ctx context.Context, sb *v1alpha1.Sandbox, wish v1alpha1.DynamicVolume) (*v1alpha1.Sandbox, plan, error) {
	group, err := s.groupOf(ctx, sb.Namespace, sb.Spec.Group)
	if hasCSI(sb) && fault.ReasonOf(err) == fault.GroupNotFound {
		group, err = &v1alpha1.SandboxGroup{}, nil // it needs none: the set has turned the gate
	}
	if err != nil {
		return nil, plan{}, err
	}
	var p plan
	written, err := s.store.Sandboxes().UpdateSpec(ctx, keyOf(sb), store.Preconditions{UID: sb.UID}, func(fresh *v1alpha1.Sandbox) error {
		var err error
		p, err = planAdd(fresh, group, s.options.Available, wish)
		return err
	})
	return written, p, err
}

// RemoveSandVolume asks for the entry to be detached and waits for its end.
func (s *volumeService) RemoveSandVolume(ctx context.Context, req *sandboxv1.RemoveSandVolumeRequest) (*sandboxv1.RemoveSandVolumeResponse, error) {
	r, err := parseRef(req.GetSandbox())
	if err != nil {
		return nil, err
	}
	target := req.GetTarget()
	// A denied target is no error here: what lies there from before it was denied can be removed.
	if err := volume.CheckTarget(target, nil); fault.ReasonOf(err) == fault.InvalidTarget {
		return nil, err
	}
	if err := volume.ValidateRequestID(req.GetRequestId()); err != nil {
		return nil, err
	}
	annotate(ctx, slog.String("target", target), slog.Bool("force", req.GetForce()), slog.String("request", req.GetRequestId()))
	sb, err := s.resolve(ctx, r, "delete", "volumes")
	if err != nil {
		return nil, err
	}
	waitCtx, cancel := s.waiting(ctx)
	defer cancel()

	outcome := &detached{}
	detach := v1alpha1.DetachRequest{Force: req.GetForce(), RequestID: req.GetRequestId()}
	sb, err = s.store.Sandboxes().UpdateSpec(ctx, keyOf(sb), store.Preconditions{UID: sb.UID}, func(fresh *v1alpha1.Sandbox) error {
		var err error
		outcome.plan, err = planRemove(fresh, target, detach)
		return err
	})
	if err != nil {
		return nil, err
	}
	if outcome.plan.step == stepAnswer {
		resp := &sandboxv1.RemoveSandVolumeResponse{Result: sandboxv1.RemoveSandVolumeResponse_ABSENT}
		if row := rowAt(sb, target); row != nil {
			resp.Volume = convert.VolumeStatusProto(*row)
		}
		return resp, nil
	}
	outcome.row = rowOf(sb, &outcome.plan.entry)
	if err := s.waiter.until(waitCtx, sb, outcome.decide); err != nil {
		return nil, stillPending(ctx, err,
			"the volume at %s of sandbox %s is not detached yet (%s); the operation goes on: ask again to wait for it, or look with: fluxctl volume ls",
			target, keyOf(sb), soFar(outcome.row))
	}
	resp := &sandboxv1.RemoveSandVolumeResponse{Result: outcome.result}
	if row := outcome.last(); row != nil {
		annotate(ctx, slog.String("source", row.Source), slog.String("operationId", row.OperationID))
		resp.Volume = convert.VolumeStatusProto(*row)
	}
	return resp, nil
}

// ListSandVolumes lists the static volumes by target, then the dynamic ones, and what status still says of
// former ones.
func (s *volumeService) ListSandVolumes(ctx context.Context, req *sandboxv1.ListSandVolumesRequest) (*sandboxv1.ListSandVolumesResponse, error) {
	size, err := pageSize(req.GetPageSize(), defaultVolumePage, maxVolumePage)
	if err != nil {
		return nil, err
	}
	after, err := decodeToken(req.GetPageToken())
	if err != nil {
		return nil, err
	}
	sb, err := s.resolveMessage(ctx, req.GetSandbox(), "get", "volumes")
	if err != nil {
		return nil, err
	}
	rows := volumeRows(sb)
	if after != "" {
		rows = slices.DeleteFunc(rows, func(row v1alpha1.VolumeStatus) bool { return rowToken(row) <= after })
	}
	resp := &sandboxv1.ListSandVolumesResponse{}
	for i, row := range rows {
		if i == size {
			resp.NextPageToken = encodeToken(rowToken(rows[i-1]))
			break
		}
		resp.Volumes = append(resp.Volumes, convert.VolumeStatusProto(row))
	}
	return resp, nil
}

// volumeRows are the rows of a sandbox in the order of their tokens. What the spec asks for and status does
// not speak of yet is Pending.
func volumeRows(sb *v1alpha1.Sandbox) []v1alpha1.VolumeStatus {
	var rows []v1alpha1.VolumeStatus
	shown := map[string]bool{}
	add := func(kind v1alpha1.VolumeKind, e v1alpha1.DynamicVolume) {
		shown[e.Target] = true
		if row := rowOf(sb, &e); row != nil {
			rows = append(rows, *row)
			return
		}
		volume.Default(&e, sb.Spec.TenantID)
		rows = append(rows, v1alpha1.VolumeStatus{
			Kind: kind, VolumeType: e.VolumeType, Source: e.Source, Target: e.Target, Mode: e.Mode, SizeLimit: e.SizeLimit,
			TenantID: e.TenantID, SubPath: e.SubPath, ForceMount: e.ForceMount, OnFailure: e.OnFailure, RequestID: e.RequestID,
			EntryHash: volume.EntryHash(&e), Phase: v1alpha1.VolumePending,
		})
	}
	for i := range sb.Spec.VolumeMounts {
		add(v1alpha1.VolumeKindStatic, volume.FromStatic(&sb.Spec.VolumeMounts[i]))
	}
	for _, e := range sb.Spec.DynamicVolumes {
		add(v1alpha1.VolumeKindDynamic, e)
	}
	for _, row := range sb.Status.Volumes {
		if !shown[row.Target] {
			rows = append(rows, row)
		}
	}
	slices.SortFunc(rows, func(a, b v1alpha1.VolumeStatus) int { return cmp.Compare(rowToken(a), rowToken(b)) })
	return rows
}

// rowToken orders rows: static ones first, then by target.
func rowToken(row v1alpha1.VolumeStatus) string {
	if row.Kind == v1alpha1.VolumeKindStatic {
		return "0" + row.Target
	}
	return "1" + row.Target
}
