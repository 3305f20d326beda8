package mount

import (
	"context"
	"errors"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Steps of Attach and Detach, as the Observer is told them.
const (
	StepTargetResolve = "target-resolve" // the target is opened and checked
	StepTargetMkdir   = "target-mkdir"   // one missing directory is made; within target-resolve
	StepMove          = "move"           // the tree is moved onto the target
	StepVerify        = "verify"         // it is read back where the tree lies
	StepAttachUndo    = "attach-undo"    // a failed attach takes away what it did

	StepDetachFind   = "detach-find"   // the mount is looked up by its identity
	StepUmount       = "umount"        // it is unmounted
	StepDetachVerify = "detach-verify" // it is read back that it is gone
	StepHolders      = "holders"       // it is busy: the processes are looked for
	StepUmountLazy   = "umount-lazy"   // it is busy and the detach is forced
	StepDetachHelper = "detach-helper" // DetachInHelper: all of it, in a helper
)

var (
	// AttachSteps are all steps of Attach, in their order. The last comes on
	// failure only, StepTargetMkdir only where directories are missing.
	AttachSteps = []string{StepTargetResolve, StepTargetMkdir, StepMove, StepVerify, StepAttachUndo}
	// DetachSteps are all steps of Detach, in their order. StepHolders comes for a
	// busy mount only, StepUmountLazy when it is forced too.
	DetachSteps = []string{StepDetachFind, StepUmount, StepDetachVerify, StepHolders, StepUmountLazy}
)

// Observer is told of every step before (done false) and after (done true) it
// is tried; a step may come several times. It runs on the thread inside the
// container's namespace: it may kill, count or measure, but must not open
// anything by path. nil observes nothing.
type Observer func(step string, done bool)

func (o Observer) before(step string) {
	if o != nil {
		o(step, false)
	}
}

func (o Observer) after(step string) {
	if o != nil {
		o(step, true)
	}
}

// attachAttempts bounds the rounds of an attach whose target keeps moving.
// Under attack up to a third of the rounds fail; an honest sandbox needs one.
const attachAttempts = 24

// Placed is an attached volume as it was read back from the kernel.
type Placed struct {
	Identity Identity
	// Target is where the mount lies.
	Target string
	// ReadOnly is what the kernel says about the mount or its superblock.
	ReadOnly bool
}

// Attach moves the tree onto the target and reads back that it lies there.
// Missing directories are made (0755) on the sandbox's root filesystem or below
// a tmpfs; an existing one must be empty. The tree is used up, also by a
// failure. On a failure nothing is left mounted, and the directories that were
// made are removed, except with OUTCOME_UNKNOWN: then Find the mount later. (A
// process that dies in between leaves them, empty, in the sandbox's own layer
// or tmpfs, where they do no harm.)
//
// Reasons: INVALID_TARGET, TARGET_SYMLINK, TARGET_NOT_DIRECTORY,
// TARGET_NOT_EMPTY, TARGET_ON_VOLUME, TARGET_SHARED, TARGET_READ_ONLY (permanent
// until somebody changes something), ATTACH_RACED, MOUNT_LIMIT,
// OUTCOME_UNKNOWN, NAMESPACE_GONE.
func (ns *Namespace) Attach(ctx context.Context, tree *Tree, target string, steps Observer) (Placed, error) {
	if err := tree.open("attach"); err != nil {
		return Placed{}, err
	}
	if err := ns.alive("attach"); err != nil {
		tree.Close()
		return Placed{}, err
	}
	// The thread owns the descriptor from here on: an attach that outlives its
	// caller must not find it closed or, worse, reused.
	file := tree.file
	tree.file = nil
	var placed Placed
	job, err := ns.submit(ctx, "attach", target, func(t *thread) error {
		defer file.Close()
		var err error
		placed, err = t.attach(ctx, int(file.Fd()), target, steps)
		return err
	})
	if err != nil {
		file.Close()
		return Placed{}, err
	}
	if err := job.wait(ctx); err != nil {
		return Placed{}, err
	}
	return placed, nil
}

func (ns *Namespace) alive(op string) error {
	if ns.process != nil && !ns.process.Alive() {
		return ns.gone(op)
	}
	return nil
}

func (t *thread) attach(ctx context.Context, tree int, target string, steps Observer) (Placed, error) {
	w, err := newWalker(t, target, steps)
	if err != nil {
		return Placed{}, err
	}
	p := placement{walker: w, tree: tree}
	if p.id, err = t.mountID(tree, "", unix.AT_EMPTY_PATH); err != nil {
		return Placed{}, failed("attach", target, "statx of the tree failed", err)
	}
	w.own = p.id
	info, err := p.place(ctx)
	defer w.close()
	if err != nil {
		steps.before(StepAttachUndo)
		p.undo()
		w.removeMade()
		steps.after(StepAttachUndo)
		return Placed{}, err
	}
	return Placed{Identity: info.Identity(), Target: target, ReadOnly: info.ReadOnly || info.SuperblockReadOnly}, nil
}

// placement is one tree on its way to its target.
type placement struct {
	*walker
	tree  int
	id    uint64 // in the sense of thread.mountID
	moved bool   // the tree is attached, somewhere
}

// place moves the tree until it is seen to lie on the target. An attached tree
// can be moved again, so a wrong place is left in the same call that goes to
// the right one.
func (p *placement) place(ctx context.Context) (Info, error) {
	last := p.raced(nil)
	for range attachAttempts {
		if err := ctx.Err(); err != nil {
			return Info{}, &Error{Op: "attach", Path: p.target, Code: ReasonAttachRaced, Kind: errdefs.ErrAborted,
				Message: "the deadline passed before the volume was in its place; nothing was left mounted", Err: err}
		}
		if p.moved {
			// Whoever renamed the directory may have renamed it back.
			info, done, err := p.verify()
			if done || err != nil {
				return info, err
			}
		}
		p.steps.before(StepTargetResolve)
		at, err := p.resolve()
		p.steps.after(StepTargetResolve)
		if errdefs.IsAborted(err) {
			last = err
			continue
		}
		if err != nil {
			return Info{}, err
		}
		p.steps.before(StepMove)
		err = unix.MoveMount(p.tree, "", at.leaf, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
		p.steps.after(StepMove)
		unix.Close(at.leaf)
		switch {
		case err == nil:
			p.moved = true
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ELOOP):
			// The directory was removed, or its mount; or, after a wrong placement,
			// it lies in the tree itself by now.
			last = p.raced(err)
			continue
		case errors.Is(err, unix.ENOSPC):
			return Info{}, &Error{Op: "attach", Path: p.target, Code: ReasonMountLimit, Kind: errdefs.ErrResourceExhausted,
				Message: "the sandbox's mount namespace is full (sysctl fs.mount-max)", Err: err}
		default:
			return Info{}, failed("attach", p.target, "move_mount failed", err)
		}
		p.steps.before(StepVerify)
		info, done, err := p.verify()
		p.steps.after(StepVerify)
		if done || err != nil {
			return info, err
		}
	}
	return Info{}, last
}

// verify reads back where the tree lies.
func (p *placement) verify() (Info, bool, error) {
	info, found, err := p.describe(p.id, statmountPlace)
	switch {
	case err != nil:
		return Info{}, false, failed("attach", p.target, "cannot read the mount back", err)
	case !found:
		// Its directory was removed from a nested namespace, which unmounts.
		p.moved = false
		return Info{}, false, p.raced(nil)
	}
	return info, info.MountPoint == p.target, nil
}

// undo takes the tree away by its descriptor, wherever it lies.
func (p *placement) undo() {
	if p.moved && unix.Fchdir(p.tree) == nil {
		_ = unix.Unmount(".", unix.MNT_DETACH)
		p.home()
	}
}
