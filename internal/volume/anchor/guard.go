package anchor

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// guarded says which folder is to be guarded for a request, empty for none, and whether it is.
func (s *Source) guarded(r volume.Request) (staged string, guarded bool, err error) {
	staged = s.stagedOf(r.Anchor)
	there := false
	if staged != "" {
		if there, err = s.sys.Exists(staged); err != nil {
			return "", false, fault.New(errdefs.ErrUnavailable, fault.AnchorPending, "look for what the driver staged: %w", err)
		}
	}
	if !there {
		return "", true, nil
	}
	guard, guarded, err := s.sys.At(s.guard(r.Key))
	if err != nil || !guarded {
		return staged, false, err
	}
	at, mounted, err := s.sys.At(staged)
	// A volume that was lost and staged anew is another filesystem. What is not mounted there is a folder of kubelet's
	// disk, of which there is one.
	return staged, !mounted || at.Device == guard.Device && at.Root == guard.Root, err
}

// takeGuard mounts the guard, in place of one of something else.
func (s *Source) takeGuard(ctx context.Context, key, staged string) error {
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeout)
	defer cancel()
	err := s.sys.Unbind(s.guard(key))
	if err == nil {
		err = s.sys.Bind(ctx, staged, s.guard(key))
	}
	if err != nil {
		return fault.New(errdefs.ErrUnavailable, fault.AnchorPending, "guard what the driver staged at %s: %w", staged, err)
	}
	return nil
}

// size asks the volume's filesystem for its size.
func (s *Source) size(ctx context.Context, rec record) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeout)
	defer cancel()
	tree, err := s.sys.Clone(ctx, rec.Path, *rec.Mount, "")
	if err != nil {
		return 0, err
	}
	defer tree.Close()
	return s.sys.Size(ctx, tree)
}

// limit says what holds a volume to its sizeLimit. The size is asked for again, as a volume may be expanded.
func (s *Source) limit(ctx context.Context, r volume.Request, rec record) (v1alpha1.LimitEnforcement, int64, error) {
	total, err := s.size(ctx, rec)
	if err != nil {
		return "", 0, err
	}
	return volume.LimitOf(r, total, isOwn(*rec.Mount), rec.Bytes)
}

// Release implements volume.Source.
func (s *Source) Release(ctx context.Context, p volume.Prepared) error {
	done, err := s.turns.Take(ctx, p.Key)
	if err != nil {
		return err
	}
	defer done()
	if err := s.release(ctx, p.Key); err != nil {
		return fmt.Errorf("give volume %s back to kubelet: %w", p.Key, err)
	}
	return nil
}

// release drops the guard of a volume and forgets it.
func (s *Source) release(ctx context.Context, key string) error {
	rec, known, err := s.sys.Load(s.dir(key))
	if err != nil {
		return err
	}
	if known && rec.Mount != nil {
		if err := s.checkUnused(ctx, rec); err != nil {
			return err
		}
	}
	if err := failpoint.Step(releaseSteps, "drop-guard", func() error { return s.sys.Unbind(s.guard(key)) }); err != nil {
		return err
	}
	return failpoint.Step(releaseSteps, "forget", func() error { return s.sys.Forget(s.dir(key)) })
}

// checkUnused refuses to let go what other mount namespaces have, but for those of Pods for which kubelet has published it:
// it is kubelet's to know when they have ended.
func (s *Source) checkUnused(ctx context.Context, rec record) error {
	held, err := s.sys.HeldElsewhere(ctx, mount.Match{Device: rec.Mount.Device, Root: rec.Mount.Root})
	if err != nil || len(held) == 0 {
		return err
	}
	pods, err := s.podsOf(rec)
	if err != nil {
		return err
	}
	held = slices.DeleteFunc(held, func(ref mount.NamespaceRef) bool {
		return slices.ContainsFunc(ref.PIDs, func(pid int) bool {
			return slices.ContainsFunc(pods, func(pod string) bool { return s.sys.InPod(pid, pod) })
		})
	})
	if len(held) == 0 {
		return nil
	}
	return volume.StillHeld(held)
}
