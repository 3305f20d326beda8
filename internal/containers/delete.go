package containers

import (
	"context"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
)

// Delete removes a sandbox and everything that is made of it, running or not, complete or not. Its log goes too. A UID
// of which there is nothing is a success. The order is such that at every moment what is left is found again: the task
// goes before the container, the container before the snapshot it refers to, the files last.
func (r *Runtime) Delete(ctx context.Context, uid string) error {
	unlock, err := r.lock(ctx, uid)
	if err != nil {
		return err
	}
	defer unlock()
	return errorf(r.delete(ctx, uid), "delete sandbox %s", uid)
}

// delete is Delete for a caller that holds the lock of uid.
func (r *Runtime) delete(ctx context.Context, uid string) error {
	snapshotter := r.config.Snapshotter
	record, err := r.record(ctx, uid)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if record.Snapshotter != "" {
		snapshotter = record.Snapshotter // made under another configuration
	}
	if err := r.removeTask(ctx, uid); err != nil {
		return err
	}
	if err := r.step(StepDeleteContainer, func() error {
		err := r.client.ContainerService().Delete(r.context(ctx), uid)
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	}); err != nil {
		return err
	}
	// A creation that a killed process left under way may have finished meanwhile.
	if err := r.removeTask(ctx, uid); err != nil {
		return err
	}
	if err := r.step(StepDeleteSnapshot, func() error { return r.removeSnapshot(ctx, snapshotter, uid) }); err != nil {
		return err
	}
	if err := r.step(StepDeleteLease, func() error { return r.deleteLease(ctx, uid) }); err != nil {
		return err
	}
	if err := r.step(StepDeleteCgroup, func() error {
		if err := cgroup.Remove(ctx, r.cgroups, r.cgroupPath(uid)); err != nil {
			return err
		}
		r.removeEmptyParents()
		return nil
	}); err != nil {
		return err
	}
	return r.step(StepDeleteFiles, func() error { return r.removeFiles(uid) })
}

// removeTask kills and deletes the task. It is deleted also where containerd shows none: a delete that was cut off with
// its caller leaves the shim, which containerd hides and another delete finds.
func (r *Runtime) removeTask(ctx context.Context, uid string) error {
	process, err := r.process(ctx, uid)
	if err != nil {
		return err
	}
	if process != nil && stateOf(process) != Stopped {
		if err := r.step(StepDeleteKill, func() error {
			if err := r.kill(ctx, uid, unix.SIGKILL); err != nil {
				return err
			}
			return <-r.waitEnd(ctx, uid)
		}); err != nil {
			return err
		}
	}
	return r.step(StepDeleteTask, func() error { return r.deleteTask(ctx, uid) })
}
