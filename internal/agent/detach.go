package agent

import (
	"context"
	"errors"
	"time"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// Detached says how a detach ended.
type Detached struct {
	// Record is what was to be detached; zero when there was nothing.
	Record  journal.Volume
	Outcome mount.Outcome
	// Busy: nothing was changed, as Holders use the volume.
	Busy    bool
	Holders []mount.Holder
	// ReleasePending: it is gone from the sandbox's tree, but something on the node still has it.
	ReleasePending bool
}

// Detach takes a volume out of a sandbox. With an entry hash, only the volume of that entry; no such volume is
// success. A volume in use is left as it is, unless force is set. fence is as in Attachment.
func (u *ContainerMountUpdater) Detach(ctx context.Context, sb *sandbox, target, entryHash string, force bool, fence func() (*passage, error)) (Detached, error) {
	unlock, err := sb.lockTarget(ctx, target)
	if err != nil {
		return Detached{}, err
	}
	defer unlock()
	passed, err := fence()
	if err != nil {
		return Detached{}, err
	}
	out, err := u.detachAt(ctx, sb, target, entryHash, force, passed)
	return out, passed.answered(err)
}

// detachAt does the work of Detach. The caller holds the target's lock.
func (u *ContainerMountUpdater) detachAt(ctx context.Context, sb *sandbox, target, entryHash string, force bool, passed *passage) (Detached, error) {
	// Before the record is read: a restart of the sandbox mounts the volume anew.
	release, err := sb.share(ctx)
	if err != nil {
		return Detached{}, err
	}
	defer release()
	record, ok := u.journal.VolumeAt(sb.uid, target)
	if !ok || (entryHash != "" && record.EntryHash != entryHash) {
		return Detached{Outcome: mount.Absent, ReleasePending: u.lingers(sb.uid, target, entryHash)}, nil
	}
	result, err := u.detach(context.WithoutCancel(ctx), sb, record, force, passed)
	result.Record = record
	u.changed(sb.uid)
	return result, err
}

// lingers says whether a volume that was detached lazily from this target is still held.
func (u *ContainerMountUpdater) lingers(uid, target, entryHash string) bool {
	for _, v := range u.journal.Volumes(uid) {
		if v.Phase == journal.Lazy && v.Target == target && (entryHash == "" || v.EntryHash == entryHash) {
			return true
		}
	}
	return false
}

// detach detaches the volume of a record. The caller holds the target's lock and the life lock.
func (u *ContainerMountUpdater) detach(ctx context.Context, sb *sandbox, record journal.Volume, force bool, passed *passage) (Detached, error) {
	c, ok := sb.seen()
	if !ok || !hasTask(c) || record.Mount.IsZero() {
		return Detached{Outcome: mount.Detached}, u.forgetBy(passed.write, record) // it was never mounted, or its task is gone
	}
	ns, err := sb.enter()
	if err != nil {
		return Detached{}, err
	}
	timing := newStages(u.clock, detachFailpoints)
	before := record
	record.Phase = journal.Detaching
	if err := timing.do(stepJournalDetaching, func() error { return passed.write(putting(record)) }); err != nil {
		return Detached{}, err
	}
	result, err := u.unmount(ctx, sb, ns, record, mount.DetachOptions{Force: force, Steps: timing.observe})
	var busy *mount.BusyError
	switch {
	case errors.As(err, &busy):
		return Detached{Busy: true, Holders: busy.Holders}, u.put(before)
	case outcomeUnknown(err):
		return Detached{}, err
	case err != nil:
		if putErr := u.put(before); putErr != nil {
			err = incomplete(err, putErr)
		}
		return Detached{}, err
	}
	out := Detached{Outcome: result.Outcome, Holders: result.Holders}
	if result.Outcome != mount.Lazy {
		// A mount namespace that the sandbox made for itself may have a copy, out of reach of the detach.
		if out.ReleasePending, err = u.nested(sb, record.Mount); err != nil {
			u.log.Warn("cannot tell whether a nested mount namespace still has the volume", append(about(record), "error", err)...)
		}
	}
	err = timing.do(stepJournalDetached, func() error {
		if result.Outcome == mount.Lazy || out.ReleasePending {
			record.Phase, record.DetachState = journal.Lazy, v1alpha1.DetachLazy
			if result.Outcome != mount.Lazy {
				record.DetachState = v1alpha1.DetachReleasePending
			}
			return u.put(record)
		}
		return u.forget(record)
	})
	if result.Outcome == mount.Lazy || out.ReleasePending {
		out.ReleasePending = true
		u.unused(record.Request.Key)
	}
	return out, err
}

// helperDeadline bounds how long a helper may take to unmount a volume whose file server may be dead.
const helperDeadline = 30 * time.Second

// unmount takes the mount of a record out of the namespace. A volume on a filesystem that may hang is unmounted by a
// helper process, which can be abandoned.
func (u *ContainerMountUpdater) unmount(ctx context.Context, sb *sandbox, ns *mount.Namespace, record journal.Volume, opts mount.DetachOptions) (mount.DetachResult, error) {
	opts.NoHang = true
	result, err := ns.Detach(ctx, record.Target, record.Mount, opts)
	if fault.ReasonOf(err) != mount.ReasonMayHang {
		return result, err
	}
	ctx, cancel := context.WithTimeout(ctx, helperDeadline)
	defer cancel()
	// Seen from here the helper is the unmount.
	err = failpoint.Step(opts.Steps, mount.StepUmount, func() (err error) {
		result, err = mount.DetachInHelper(ctx, sb.init(), record.Target, record.Mount, mount.DetachOptions{Force: opts.Force})
		return err
	})
	return result, err
}
