package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// recover makes the journal, the mounts and containerd agree again, whatever the last process was doing when it ended.
// Each step is idempotent, as recovery may be cut off too. It waits for no source: what must be released is left to
// the reaper.
func (a *Agent) recover(ctx context.Context) error {
	for _, s := range []struct {
		name string
		do   func(context.Context) error
	}{
		{stepRecoverContainers, a.recoverContainers},
		{stepRecoverDeletions, a.recoverDeletions},
		{stepRecoverVolumes, a.recoverVolumes},
		{stepRecoverPrepared, a.recoverPrepared},
		{stepRecoverSources, a.recoverSources},
		{stepRecoverTasks, a.recoverTasks},
	} {
		if err := failpoint.Step(recoverFailpoints, s.name, func() error { return s.do(ctx) }); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// recoverContainers removes what belongs to no sandbox and reads the sandboxes that there are.
func (a *Agent) recoverContainers(ctx context.Context) error {
	a.sweep(ctx)
	list, err := a.config.Containers.List(ctx)
	if err != nil {
		return err
	}
	for i := range list {
		a.sandbox(list[i].UID).see(&list[i])
	}
	return a.recoverPods(ctx)
}

// sweep removes what belongs to no sandbox. What cannot be removed, as a shim that does not answer, is tried again beside
// everything else: it keeps nobody from being served.
func (a *Agent) sweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, recoverPatience)
	defer cancel()
	removed, err := a.config.Containers.Sweep(ctx)
	for _, l := range removed {
		a.log.Warn("removed what a creation, deletion or command that was cut off had left", "leftover", fmt.Sprint(l))
	}
	if err == nil || a.stopping.Err() != nil {
		return
	}
	a.log.Error("what was left of something that was cut off could not be removed; it is tried again", "error", err)
	a.after(sweepAgain, func() { a.sweep(a.stopping) })
}

// sweepAgain is the time after which a sweep that left something is tried again.
const sweepAgain = 10 * time.Second

// recoverPatience bounds what recovery does for one sandbox: a process that cannot die (in the kernel, on a dead file
// server) must not keep the others from being served. What was not finished in time is finished later.
const recoverPatience = 15 * time.Second

// recoverDeletions ends deletions that had begun.
func (a *Agent) recoverDeletions(ctx context.Context) error {
	for _, s := range a.journal.Sandboxes() {
		if s.Desired == journal.DesiredGone && s.DeletedAt.IsZero() {
			a.bounded(ctx, a.sandbox(s.UID), "deletion", func(ctx context.Context, sb *sandbox) error { return a.finishDeletion(ctx, sb, 0) })
		}
	}
	return nil
}

// bounded does something for one sandbox within recoverPatience. What fails is tried again until it does not.
func (a *Agent) bounded(ctx context.Context, sb *sandbox, what string, do func(context.Context, *sandbox) error) {
	ctx, cancel := context.WithTimeout(ctx, recoverPatience)
	defer cancel()
	err := do(ctx, sb)
	if err == nil || a.stopping.Err() != nil {
		return
	}
	a.log.Error("the "+what+" of a sandbox could not be finished; it is tried again", "sandbox", sb.uid, "error", err)
	sb.setTrouble(err)
	a.after(restartBase, func() {
		a.bounded(a.stopping, sb, what, func(ctx context.Context, sb *sandbox) error {
			release, err := sb.alone(ctx)
			if err != nil {
				return err
			}
			defer release()
			defer a.changed(sb.uid)
			return do(ctx, sb)
		})
	})
}

// recoverVolumes holds every volume record against the kernel. A record that cannot be is left for the next operation on
// it, which looks too.
func (a *Agent) recoverVolumes(ctx context.Context) error {
	for _, v := range a.journal.AllVolumes() {
		err := a.recoverVolume(ctx, v)
		if fault.ReasonOf(err) == fault.SandboxNotRunning {
			// Its process ended since the containers were read.
			if err = a.refresh(ctx, a.sandbox(v.SandboxUID)); err == nil {
				err = a.recoverVolume(ctx, v)
			}
		}
		if err != nil {
			a.log.Error("a volume could not be verified", append(about(v), "error", err)...)
			a.sandbox(v.SandboxUID).setTrouble(fmt.Errorf("verify %s: %w", v.Target, err))
		}
	}
	return nil
}

func (a *Agent) recoverVolume(ctx context.Context, v journal.Volume) error {
	sb := a.sandbox(v.SandboxUID)
	c, ok := sb.seen()
	if sb.isPod() && (!ok || !hasTask(c)) {
		return nil // readPod has its volumes wait
	}
	if !ok || !hasTask(c) {
		// The mounts went with the task. A sandbox that is to run again wants its volumes again.
		if record, _ := a.journal.Sandbox(v.SandboxUID); !ok || record.Desired != journal.DesiredRunning || v.Phase == journal.Lazy {
			if v.Phase == journal.Waiting && record.Desired != journal.DesiredStopped && record.Desired != journal.DesiredGone {
				return nil // attached before its container exists
			}
			return a.updater.forget(v)
		}
		return a.updater.put(waiting(v))
	}
	if v.Phase == journal.Waiting || v.Phase == journal.Lazy {
		a.reaper.wake(v.Request.Key)
		return nil
	}
	ns, err := sb.enter()
	if err != nil {
		return err
	}
	info, there, err := ns.Find(v.Mount)
	switch {
	case err != nil:
		return err
	case !there && sb.isPod() && v.Phase != journal.Detaching:
		return a.updater.put(waiting(v)) // it may have been cut off on its way into a container that went on
	case !there:
		return a.updater.forget(v)
	case v.Phase == journal.Mounted:
		return nil
	case info.MountPoint == v.Target:
		// An attach that was cut off after the move, or a detach before the unmount: it is there and whole, its
		// attributes were set before anyone could see it.
		v.Phase, v.Mount = journal.Mounted, info.Identity()
		if v.Attached == "" {
			v.Attached = v1alpha1.AttachedLive
		}
		return a.updater.put(v)
	}
	// It landed on a directory that was moved meanwhile.
	if _, err := a.updater.unmount(ctx, sb, ns, v, mount.DetachOptions{Force: true}); err != nil {
		return err
	}
	if sb.isPod() && v.Phase == journal.Intent {
		return a.updater.put(waiting(v))
	}
	return a.updater.forget(v)
}

// recoverPrepared settles what was being prepared or released: both are idempotent, so either is done again, and undone
// when nobody uses it. That is the reaper's work, as sources may hang.
func (a *Agent) recoverPrepared(context.Context) error {
	for _, p := range a.journal.AllPrepared() {
		if len(a.journal.Users(p.Key)) == 0 {
			a.reaper.wake(p.Key)
		} else if p.Phase == journal.Releasing {
			return fault.New(errdefs.ErrInternal, fault.Internal, "volume %s was being released while it had users", p.Key)
		}
	}
	return nil
}

// recoverSources lets every source remove what no record owns.
func (a *Agent) recoverSources(ctx context.Context) error {
	inUse := map[v1alpha1.VolumeType][]volume.Prepared{}
	for _, p := range a.journal.AllPrepared() {
		prepared := p.Prepared
		prepared.Key, prepared.Type = p.Key, p.Request.Type // also of one that was cut off, which is the reaper's
		inUse[p.Request.Type] = append(inUse[p.Request.Type], prepared)
	}
	var errs []error
	for t, src := range a.config.Sources {
		if err := src.Sweep(ctx, inUse[t]); err != nil {
			errs = append(errs, fmt.Errorf("sweep the source of %s volumes: %w", t, err))
		}
	}
	return errors.Join(errs...)
}

// recoverTasks brings what is asked of each sandbox together with what its task does.
func (a *Agent) recoverTasks(ctx context.Context) error {
	for _, sb := range a.all() {
		c, ok := sb.seen()
		if !ok || sb.isPod() {
			continue
		}
		record, _ := a.journal.Sandbox(sb.uid)
		wanted := record.Desired != journal.DesiredStopped && record.Desired != journal.DesiredGone
		switch {
		case c.State == containers.Running && wanted && (record.Desired != journal.DesiredRunning || record.ExitCode != nil):
			// Killed between a start, or a restart after an exit that was recorded, and its record.
			if err := a.updateSandbox(sb.uid, journal.Change{}, func(s *journal.Sandbox) {
				if s.Desired == journal.DesiredRunning {
					s.Restarts++
				}
				s.Desired, s.StartedAt, s.ExitCode, s.ExitReason, s.ExitedAt = journal.DesiredRunning, a.config.Clock.Now(), nil, "", time.Time{}
			}); err != nil {
				return err
			}
		case record.Desired == journal.DesiredStopped && c.State != containers.NoTask:
			a.bounded(ctx, sb, "end", func(ctx context.Context, sb *sandbox) error {
				if s, _ := a.journal.Sandbox(sb.uid); s.Desired != journal.DesiredStopped {
					return nil // created again meanwhile
				}
				return a.endTask(ctx, sb, 0)
			})
		case record.Desired == journal.DesiredRunning && c.State == containers.Created:
			a.after(0, func() { a.restart(sb) }) // a restart that was cut off
		case record.Desired == journal.DesiredRunning && !hasTask(c):
			a.look(sb.uid)
		}
	}
	return nil
}
