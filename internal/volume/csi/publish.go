package csi

import (
	"context"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// begun is the record of a volume that is about to be published.
func (s *Source) begun(r volume.Request, d Driver) record {
	return record{Driver: d.Name, Socket: d.Socket, Handle: r.CSI.Handle, Terms: termsOf(r.CSI)}
}

// publish has the driver mount a volume that is not known to be mounted. The caller undoes what fails.
func (s *Source) publish(ctx context.Context, r volume.Request, d Driver) (record, error) {
	if r.CSI.NeedsSecrets && len(r.CSI.Secrets) == 0 {
		return record{}, fault.New(errdefs.ErrUnavailable, fault.DriverUnavailable,
			"it has to be published again and needs secrets, which the node does not keep: it is published with the controller's next command to attach it")
	}
	// Before anything is done: a driver that is away could undo nothing.
	can, err := s.ask(ctx, d)
	if err != nil {
		return record{}, err
	}
	if can.stages {
		return record{}, fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
			"CSI driver %s wants to stage its volumes (STAGE_UNSTAGE_VOLUME), which is kubelet's part and not possible on the direct path: take it off the list of drivers (csi.drivers) and mount its volumes in Pods", d.Name)
	}
	rec := s.begun(r, d)
	if err := failpoint.Step(publishSteps, "record", func() error { return s.sys.Save(s.dir(r.Key), rec) }); err != nil {
		return record{}, err
	}
	if err := failpoint.Step(publishSteps, "publish", func() error {
		ctx, cancel := context.WithTimeout(ctx, s.config.Timeouts.Publish)
		defer cancel()
		return s.sys.Publish(ctx, d, publishRequest(r.CSI, s.path(r.Key), can))
	}); err != nil {
		return record{}, err
	}
	if err := s.verify(ctx, r, d, &rec); err != nil {
		return record{}, err
	}
	if err := failpoint.Step(publishSteps, "recorded", func() error { return s.sys.Save(s.dir(r.Key), rec) }); err != nil {
		return record{}, err
	}
	return rec, nil
}

func (s *Source) ask(ctx context.Context, d Driver) (abilities, error) {
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeouts.Ask)
	defer cancel()
	return s.sys.Ask(ctx, d)
}

// verify notes what the driver mounted.
func (s *Source) verify(ctx context.Context, r volume.Request, d Driver, rec *record) error {
	at, there, err := s.sys.At(s.path(r.Key))
	if err != nil {
		return err
	}
	if !there {
		return fault.New(errdefs.ErrInternal, fault.DriverFailed,
			"CSI driver %s answered OK and mounted nothing at %s: does it run in a Pod, and is the folder mounted there with mountPropagation Bidirectional?", d.Name, s.path(r.Key))
	}
	id := at.Identity()
	rec.Mount, rec.FSType = &id, at.FSType
	size, err := s.size(ctx, r, d, *rec)
	if err != nil {
		return err
	}
	if isOwn(id) {
		rec.Bytes = size
	}
	return nil
}

// isOwn says whether a mount shows a whole filesystem.
func isOwn(id mount.Identity) bool { return id.Root == "/" }

// size asks the volume's filesystem for its size.
func (s *Source) size(ctx context.Context, r volume.Request, d Driver, rec record) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeouts.Look)
	defer cancel()
	helper := helper(d, rec.FSType)
	tree, err := s.sys.Clone(ctx, s.path(r.Key), *rec.Mount, "", helper)
	if err != nil {
		return 0, err
	}
	defer tree.Close()
	return s.sys.Size(ctx, tree, helper)
}

// limit says what holds a volume to its sizeLimit. The size is asked for again, as a volume may be expanded.
func (s *Source) limit(ctx context.Context, r volume.Request, d Driver, rec record) (v1alpha1.LimitEnforcement, int64, error) {
	total, err := s.size(ctx, r, d, rec)
	if err != nil {
		return "", 0, err
	}
	return volume.LimitOf(r, total, isOwn(*rec.Mount), rec.Bytes)
}

// undo takes back what a Prepare that failed may have done. It returns the cause, which is volume.ErrUnfinished if that
// failed too.
func (s *Source) undo(ctx context.Context, r volume.Request, d Driver, cause error) error {
	// The caller's end is no reason to leave it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.config.Timeouts.Held+s.config.Timeouts.Unpublish)
	defer cancel()
	if err := s.release(ctx, r.Key, s.begun(r, d)); err != nil {
		return volume.Unfinished(cause, err)
	}
	return cause
}
