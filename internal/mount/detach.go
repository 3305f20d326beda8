package mount

import (
	"context"
	"errors"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// detachAttempts bounds the rounds of a detach whose mount keeps moving.
	detachAttempts = 256
	// busyAttempts bounds the retries of an unmount that is busy although no
	// holder is found: its holder was just leaving.
	busyAttempts = 3
)

// Outcome says what a detach came to.
type Outcome string

const (
	// Detached: the mount is gone from the namespace and nobody uses it.
	Detached Outcome = "DETACHED"
	// Lazy: it is gone from the namespace, but processes go on using it.
	Lazy Outcome = "LAZY"
	// Absent: it was gone before.
	Absent Outcome = "ABSENT"
)

// DetachOptions are the options of a detach.
type DetachOptions struct {
	// Force detaches a busy mount lazily: new lookups no longer see it, processes
	// that use it keep it.
	Force bool
	// NoHang refuses (MAY_HANG) a mount of a filesystem whose unmount may wait for a dead server: such a mount is for
	// DetachInHelper.
	NoHang bool
	// Steps is told of every step.
	Steps Observer
}

// DetachResult says how a detach ended.
type DetachResult struct {
	Outcome Outcome `json:"outcome"`
	// MountPoint is where the mount was found; empty when Absent.
	MountPoint string `json:"mountPoint,omitempty"`
	// Holders go on using a mount that was detached lazily.
	Holders []Holder `json:"holders,omitempty"`
}

// errBusy travels from the thread to the caller's goroutine,
// where the host's /proc can be read.
var errBusy = errors.New("busy")

// Detach removes a recorded mount, wherever it is by now; target is used in
// messages only. A mount that is gone is a success (Absent). Detached means
// that the namespace has it no more; others may (see Holding).
//
// Errors: *BusyError (FailedPrecondition, BUSY) names the processes that use it;
// NESTED_MOUNT when another mount lies in or on it, also when forced;
// MAY_HANG, before anything was tried; DETACH_RACED (Aborted), OUTCOME_UNKNOWN, NAMESPACE_OCCUPIED (Unavailable).
// That the container's init is gone is no obstacle.
func (ns *Namespace) Detach(ctx context.Context, target string, id Identity, opts DetachOptions) (DetachResult, error) {
	if id.IsZero() {
		return DetachResult{}, &Error{Op: "detach", Path: target, Code: ReasonInvalidTarget, Kind: errdefs.ErrInvalidArgument, Message: "no mount was recorded"}
	}
	for attempt := 1; ; attempt++ {
		result, err := ns.detachOnce(ctx, target, id, false, opts)
		if !errors.Is(err, errBusy) {
			return result, err
		}
		opts.Steps.before(StepHolders)
		holders, err := Users(ctx, id)
		opts.Steps.after(StepHolders)
		if err != nil {
			return DetachResult{}, err
		}
		if len(holders) == 0 && attempt < busyAttempts {
			continue
		}
		if !opts.Force {
			return DetachResult{}, &BusyError{Target: result.MountPoint, Holders: holders}
		}
		result, err = ns.detachOnce(ctx, target, id, true, opts)
		if err != nil || result.Outcome == Absent {
			return result, err
		}
		// Read again: only who holds it now will go on holding it.
		opts.Steps.before(StepHolders)
		result.Holders, err = Users(ctx, id)
		opts.Steps.after(StepHolders)
		if err != nil || len(result.Holders) > 0 || len(holders) == 0 {
			// Without a visible holder the kernel holds it: still lazy.
			result.Outcome = Lazy
		}
		return result, nil
	}
}

func (ns *Namespace) detachOnce(ctx context.Context, target string, id Identity, lazy bool, opts DetachOptions) (DetachResult, error) {
	var result DetachResult
	j, err := ns.submit(ctx, "detach", target, func(t *thread) (err error) {
		result, err = t.detach(target, id, lazy, opts)
		return err
	})
	if err != nil {
		return DetachResult{}, err
	}
	err = j.wait(ctx)
	if isOutcomeUnknown(err) {
		return DetachResult{}, err
	}
	return result, err
}

func isOutcomeUnknown(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == ReasonOutcomeUnknown
}

// detach finds and unmounts until the mount is gone. errBusy comes with the
// place where it was busy.
func (t *thread) detach(target string, id Identity, lazy bool, opts DetachOptions) (DetachResult, error) {
	step, steps := StepUmount, opts.Steps
	if lazy {
		step = StepUmountLazy
	}
	var was string
	var last error
	for range detachAttempts {
		steps.before(StepDetachFind)
		info, found, err := t.find(id)
		steps.after(StepDetachFind)
		switch {
		case err != nil:
			return DetachResult{}, failed("detach", target, "cannot look the mount up", err)
		case !found && was == "":
			return DetachResult{Outcome: Absent}, nil
		case !found:
			return DetachResult{Outcome: Detached, MountPoint: was}, nil
		}
		if opts.NoHang && MayHang(info.FSType) {
			return DetachResult{}, &Error{Op: "detach", Path: target, Code: ReasonMayHang, Kind: errdefs.ErrFailedPrecondition,
				Message: "unmounting a filesystem of type " + info.FSType + " may wait for its server; it needs a helper process"}
		}
		if info.MountPoint == "" {
			return DetachResult{}, &Error{Op: "detach", Path: target, Code: ReasonDetachRaced, Kind: errdefs.ErrAborted,
				Message: "the mount cannot be reached from the sandbox's root"}
		}
		if nested, err := t.nested(info); err != nil {
			return DetachResult{}, failed("detach", target, "cannot look for nested mounts", err)
		} else if len(nested) > 0 {
			return DetachResult{}, &Error{Op: "detach", Path: info.MountPoint, Code: ReasonNestedMount, Kind: errdefs.ErrFailedPrecondition,
				Message: "other mounts lie in or on it: " + strings.Join(nested, ", ") + "; detach them first"}
		}
		steps.before(step)
		err = t.umount(info, lazy)
		steps.after(step)
		switch {
		case err == nil:
			was = info.MountPoint
		case errors.Is(err, unix.EBUSY):
			return DetachResult{MountPoint: info.MountPoint}, errBusy
		case isMoving(err):
			last = err
			continue
		default:
			return DetachResult{}, failed("detach", info.MountPoint, "umount failed", err)
		}
		steps.before(StepDetachVerify)
		_, found, err = t.find(id)
		steps.after(StepDetachVerify)
		if err != nil {
			return DetachResult{}, failed("detach", target, "cannot read back that the mount is gone", err)
		}
		if !found {
			return DetachResult{Outcome: Detached, MountPoint: was}, nil
		}
	}
	return DetachResult{}, &Error{Op: "detach", Path: target, Code: ReasonDetachRaced, Kind: errdefs.ErrAborted,
		Message: "directories around the mount are being renamed; it is still mounted", Err: last}
}

// errElsewhere tells that another mount, or none, was found at the place.
var errElsewhere = errors.New("the mount is no longer at that place")

// isMoving tells errors that a rename between lookup and unmount explains.
func isMoving(err error) bool {
	return errors.Is(err, errElsewhere) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ELOOP) ||
		errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EAGAIN)
}

// umount unmounts what lies at info's place if that is still info's mount.
func (t *thread) umount(info Info, lazy bool) error {
	parentPath, leaf := splitPlace(info.MountPoint)
	parent, err := openat2(t.root, parentPath, directoryPath, beneath)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	if lazy {
		return t.umountLazy(parent, leaf, info)
	}
	// By name below the parent: an open descriptor on the mount itself would make
	// it busy. In the sandbox a mount point cannot be renamed (EBUSY), so name and
	// parent stay together from here on. Only from a nested namespace that does
	// not have the mounts can they be parted between this look and the unmount,
	// which then hits another volume of the same sandbox; detach reads back, and
	// the agent's inventory repairs.
	id, err := t.mountID(parent, leaf, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return err
	}
	if id != t.idOf(info) {
		return errElsewhere
	}
	if err := unix.Fchdir(parent); err != nil {
		return err
	}
	defer t.home()
	return unix.Unmount(leaf, unix.UMOUNT_NOFOLLOW)
}

// umountLazy needs no name: a lazy unmount does not mind an open descriptor.
func (t *thread) umountLazy(parent int, leaf string, info Info) error {
	fd, err := openat2(parent, leaf, directoryPath, beneath)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	id, err := t.mountID(fd, "", unix.AT_EMPTY_PATH)
	if err != nil {
		return err
	}
	if id != t.idOf(info) {
		return errElsewhere
	}
	if err := unix.Fchdir(fd); err != nil {
		return err
	}
	defer t.home()
	return unix.Unmount(".", unix.MNT_DETACH)
}

// nested returns the places of mounts that lie in or on this one. A lazy
// unmount would take them along.
func (t *thread) nested(info Info) ([]string, error) {
	var places []string
	if t.modern {
		ids, err := listmount(info.UniqueID, 0)
		if err == unix.ENOENT {
			return nil, nil // gone meanwhile: the unmount will tell
		}
		if err != nil {
			return nil, err
		}
		for _, id := range ids {
			if child, err := t.stat.stat(id, 0, statmountPlace); err == nil {
				places = append(places, child.MountPoint)
			}
		}
		return places, nil
	}
	list, err := readMountinfo(t.mountinfo)
	if err != nil {
		return nil, err
	}
	for _, m := range list {
		if m.ParentID == info.MountID && m.MountID != info.MountID {
			places = append(places, m.MountPoint)
		}
	}
	return places, nil
}
