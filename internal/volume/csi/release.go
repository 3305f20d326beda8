package csi

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	csiv1 "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// Unfinished implements volume.Undoer.
func (s *Source) Unfinished(r volume.Request) volume.Prepared {
	p := volume.Prepared{Key: r.Key, Type: v1alpha1.VolumeTypePV, Path: v1alpha1.VolumePathDirect}
	if r.CSI != nil {
		d, _ := s.driver(r.CSI.Driver)
		d.Name = r.CSI.Driver
		p.Details, _ = json.Marshal(details{record: s.begun(r, d), Path: s.path(r.Key)}) // strings only
	}
	return p
}

// Release implements volume.Source.
func (s *Source) Release(ctx context.Context, p volume.Prepared) error {
	d, err := parseDetails(p)
	if err != nil {
		return err
	}
	done, err := s.turns.Take(ctx, p.Key)
	if err != nil {
		return err
	}
	defer done()
	if err := s.release(ctx, p.Key, d.record); err != nil {
		return fmt.Errorf("unpublish volume %q of CSI driver %s: %w", d.Handle, d.Driver, err)
	}
	return nil
}

// release undoes the publication of a volume, whatever is left of it. want is what it is where its folder does not say.
func (s *Source) release(ctx context.Context, key string, want record) error {
	rec, known, err := s.sys.Load(s.dir(key))
	if err != nil {
		return err
	}
	if !known {
		rec = want
	}
	at, there, err := s.sys.At(s.path(key))
	if err != nil {
		return err
	}
	if known || there {
		if err := s.checkUnused(ctx, rec, at, there); err != nil {
			return err
		}
		if err := failpoint.Step(releaseSteps, "unpublish", func() error { return s.unpublish(ctx, key, rec) }); err != nil {
			return err
		}
	}
	return failpoint.Step(releaseSteps, "forget", func() error { return s.sys.Forget(s.dir(key)) })
}

// heldPoll is after what time it is looked again whether other mount namespaces have let go of a volume; doubled from look
// to look, as each looks through all namespaces of the node.
const heldPoll = 20 * time.Millisecond

// checkUnused refuses to unpublish what other mount namespaces have, and do not let go of soon.
func (s *Source) checkUnused(ctx context.Context, rec record, at mount.Info, there bool) error {
	var match mount.Match
	switch {
	case there:
		match = mount.Match{Device: at.Device, Root: at.Root}
	case rec.Mount != nil:
		// Somebody unmounted it. Who has a clone of it has it still.
		match = mount.Match{Device: rec.Mount.Device, Root: rec.Mount.Root}
	default:
		return nil
	}
	waiting, cancel := context.WithTimeout(ctx, s.config.Timeouts.Held)
	defer cancel()
	for delay := heldPoll; ; delay *= 2 {
		held, err := s.sys.HeldElsewhere(ctx, match, at)
		if err != nil || len(held) == 0 {
			return err
		}
		timer := time.NewTimer(delay)
		select {
		case <-timer.C:
			continue
		case <-waiting.Done():
		}
		timer.Stop()
		return volume.StillHeld(held)
	}
}

// unpublish has the driver undo its work, and looks whether it did.
func (s *Source) unpublish(ctx context.Context, key string, rec record) error {
	d, ok := s.driver(rec.Driver)
	switch {
	case rec.Driver == "":
		return fault.New(errdefs.ErrInternal, fault.Internal, "%s is mounted, and there is no record of its driver: unmount it", s.path(key))
	case !ok:
		d = Driver{Name: rec.Driver, Socket: rec.Socket}
	}
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeouts.Unpublish)
	defer cancel()
	failed := s.sys.Unpublish(ctx, d, &csiv1.NodeUnpublishVolumeRequest{VolumeId: rec.Handle, TargetPath: s.path(key)})
	if failed != nil && !isNotFound(failed) {
		return failed
	}
	_, there, err := s.sys.At(s.path(key))
	switch {
	case err != nil:
		return err
	case there && failed != nil:
		return failed
	case there:
		return fault.New(errdefs.ErrInternal, fault.DriverFailed, "CSI driver %s answered OK and left the volume mounted at %s: it is asked again", d.Name, s.path(key))
	}
	return nil // a volume that the driver does not know is not published
}

// Sweep implements volume.Source. What it cannot undo in time (a driver may be away, and a start must not wait for it) stays
// for the next Prepare of that volume, or the next Sweep.
func (s *Source) Sweep(ctx context.Context, inUse []volume.Prepared) error {
	keys, err := s.sys.List(s.config.Dir)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeouts.Sweep)
	defer cancel()
	var all sync.WaitGroup
	for _, key := range keys {
		if slices.ContainsFunc(inUse, func(p volume.Prepared) bool { return p.Key == key }) {
			continue
		}
		all.Go(func() {
			if err := s.sweep(ctx, key); err != nil {
				s.log.Warn("a published volume that no record owns could not be unpublished; it is tried again at the next start", "volumeKey", key, "error", err)
			}
		})
	}
	all.Wait()
	return nil
}

func (s *Source) sweep(ctx context.Context, key string) error {
	done, err := s.turns.Take(ctx, key)
	if err != nil {
		return err
	}
	defer done()
	return s.release(ctx, key, record{})
}
