package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/containerd/errdefs"
	"k8s.io/utils/clock"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// Attachment is a validated request to attach a volume.
type Attachment struct {
	// OperationID names the operation in logs and becomes the id of the record.
	OperationID string
	// AtCreate: prepare now, attach when the sandbox's next task is created.
	AtCreate  bool
	Kind      v1alpha1.VolumeKind
	Target    string
	EntryHash string
	// Request is what the source is asked for. Its key is found by the updater.
	Request volume.Request
	// Fence refuses the command if it is out of date. It is asked when it is this operation's turn at its target, so
	// that nothing newer can have come before it unseen.
	Fence func() (*passage, error)
}

// ContainerMountUpdater changes what is mounted in the sandboxes of this node. Each change is a transaction: it
// happens as a whole, or every step that was taken is taken back and the error says what was and, if so, what
// could not be.
//
// It has the name that the specification gives it. containerd's UpdateContainer, from which the name comes, cannot
// mount anything into a live task; here it only records afterwards what is mounted (design, ruling 3).
type ContainerMountUpdater struct {
	journal  *journal.Journal
	prepared *preparedVolumes
	clock    clock.PassiveClock
	log      *slog.Logger
	// changed is told of a sandbox whose volumes changed, unused of a volume key that may have lost its last user.
	changed func(uid string)
	unused  func(key string)
	// nested says whether a mount namespace inside the sandbox still has a mount.
	nested func(sb *sandbox, m mount.Identity) (bool, error)
}

// Attach makes a volume visible in a sandbox and returns its record; true when it was so already. The same entry
// again is a no-op, another one at the same target is AlreadyExists.
func (u *ContainerMountUpdater) Attach(ctx context.Context, sb *sandbox, a Attachment) (journal.Volume, bool, error) {
	unlock, err := sb.lockTarget(ctx, a.Target)
	if err != nil {
		return journal.Volume{}, false, err
	}
	defer unlock()
	passed, err := a.Fence()
	if err != nil {
		return journal.Volume{}, false, err
	}
	record, already, err := u.attachAt(ctx, sb, a, passed)
	return record, already, passed.answered(err)
}

// attachAt does the work of Attach. The caller holds the target's lock.
func (u *ContainerMountUpdater) attachAt(ctx context.Context, sb *sandbox, a Attachment, passed *passage) (journal.Volume, bool, error) {
	if current, ok := u.journal.VolumeAt(sb.uid, a.Target); ok {
		if err := passed.record(); err != nil {
			return journal.Volume{}, false, err
		}
		current, done, err := u.settle(ctx, sb, current, a)
		if err != nil || done {
			return current, done, err
		}
	}
	if err := u.checkNesting(sb.uid, a.Target); err != nil {
		return journal.Volume{}, false, err
	}
	record, err := u.attach(ctx, sb, a, passed)
	if err != nil {
		return journal.Volume{}, false, err
	}
	u.changed(sb.uid)
	return record, false, nil
}

// settle decides what an attach means for a record that holds its target already: done with it, refused, or (false,
// nil) that the way is free because the record's mount is gone.
func (u *ContainerMountUpdater) settle(ctx context.Context, sb *sandbox, current journal.Volume, a Attachment) (journal.Volume, bool, error) {
	if current.EntryHash != a.EntryHash {
		return current, false, fault.New(errdefs.ErrAlreadyExists, fault.TargetInUse,
			"%s of sandbox %s holds another volume (%s): remove it first, or choose another target", a.Target, sb.uid, current.Request.Source)
	}
	release, err := sb.share(ctx)
	if err != nil {
		return current, false, err
	}
	defer release()
	// While it waited, the sandbox may have been restarted, and the volume mounted anew.
	current, ok := u.journal.VolumeAt(sb.uid, a.Target)
	if !ok {
		return current, false, nil
	}
	c, ok := sb.seen()
	alive := ok && hasTask(c)
	switch current.Phase {
	case journal.Waiting:
		if !alive {
			return current, a.AtCreate, nil
		}
	case journal.Mounted:
		if !alive {
			return current, a.AtCreate, nil
		}
		ns, err := sb.enter()
		if err != nil {
			return current, false, err
		}
		if _, there, err := ns.Find(current.Mount); err != nil || there {
			return current, there, err
		}
		u.log.Warn("a volume was gone from its sandbox and is attached again", about(current)...)
	case journal.Intent, journal.Detaching:
		// Left by an operation whose outcome was unknown.
		if alive {
			if err := u.clear(ctx, sb, current); err != nil {
				return current, false, err
			}
		}
	}
	return current, false, u.forget(current)
}

// clear takes a record's mount out of the sandbox, if it is there.
func (u *ContainerMountUpdater) clear(ctx context.Context, sb *sandbox, record journal.Volume) error {
	ns, err := sb.enter()
	if err != nil {
		return err
	}
	_, err = u.unmount(ctx, sb, ns, record, mount.DetachOptions{Force: true})
	return err
}

// checkNesting refuses a target that lies in, or around, another volume of the sandbox.
func (u *ContainerMountUpdater) checkNesting(uid, target string) error {
	var taken []string
	for _, v := range u.journal.Volumes(uid) {
		if v.Phase != journal.Lazy && v.Target != target {
			taken = append(taken, v.Target)
		}
	}
	return volume.CheckConflict(taken, target)
}

// attach does the work of Attach for a target that is free. That the command passed the fence is recorded with the first
// record of the volume: before it nothing was done that anybody can see.
func (u *ContainerMountUpdater) attach(ctx context.Context, sb *sandbox, a Attachment, passed *passage) (journal.Volume, error) {
	request, err := u.prepared.resolve(ctx, a.Request)
	if err != nil {
		return journal.Volume{}, err
	}
	// Until there is a record that says so, the pin says that the volume has a user.
	defer u.prepared.pin(request.Key)()
	wait, cancel := joined(ctx, sb.ctx)
	defer cancel()
	r := &readyVolume{timing: newStages(u.clock, attachFailpoints)}
	defer r.close()
	record, release, err := u.begin(wait, sb, a, request, r)
	if err != nil {
		if sb.ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(sb.ctx), err)
		}
		err = fmt.Errorf("attach %s: %w", a.Target, err)
		if r.acquired {
			err = fmt.Errorf("%w; undone: %s", err, r.timing.undone())
		}
		return journal.Volume{}, err
	}
	defer release()
	if r.tree == nil {
		err := r.timing.do(stepJournalWaiting, func() error { return passed.write(putting(record)) })
		return record, err
	}
	placed, err := u.place(wait, sb, record, r, passed.write)
	if err == nil || mayBeMounted(err) {
		return placed, err
	}
	if _, recorded := u.journal.VolumeAt(sb.uid, a.Target); recorded { // not if that was what failed
		if forgetErr := u.forget(record); forgetErr != nil {
			return record, incomplete(err, forgetErr)
		}
	}
	return record, fmt.Errorf("%w; undone: %s", err, r.timing.undone())
}

// begin makes the source ready, then takes a share of the sandbox's life lock. Where the volume has to wait for a task
// that does not exist yet, it is ready without a tree.
func (u *ContainerMountUpdater) begin(ctx context.Context, sb *sandbox, a Attachment, request volume.Request, r *readyVolume) (journal.Volume, func(), error) {
	wantTree := !a.AtCreate
	for {
		if err := u.ready(ctx, request, r, wantTree); err != nil {
			return journal.Volume{}, nil, err
		}
		release, err := sb.share(ctx)
		if err != nil {
			return journal.Volume{}, nil, err
		}
		if sb.ctx.Err() != nil {
			release()
			return journal.Volume{}, nil, context.Cause(sb.ctx)
		}
		if err := sb.takesVolume(a.Target); err != nil {
			release()
			return journal.Volume{}, nil, err
		}
		c, ok := sb.seen()
		if alive := ok && hasTask(c); alive && r.tree == nil {
			release() // the task came meanwhile
			wantTree = true
			continue
		}
		return journal.Volume{SandboxUID: sb.uid, ID: a.OperationID, Target: a.Target, EntryHash: a.EntryHash, Kind: a.Kind,
			Request: request, Phase: journal.Waiting, Path: r.prepared.Path, Limit: r.prepared.Limit,
			CapacityBytes: r.prepared.CapacityBytes}, release, nil
	}
}

// readyVolume is a volume of which nothing is left to do that could hang on its source.
type readyVolume struct {
	timing   *stages
	prepared volume.Prepared
	acquired bool
	tree     *mount.Tree // with its attributes set
	// attached is when it is attached, where that is not to be read off the task's state.
	attached v1alpha1.AttachTime
}

func (r *readyVolume) close() {
	if r.tree != nil {
		_ = r.tree.Close()
	}
}

// ready prepares a volume and, if wanted, makes a tree of it. It may wait for the source for as long as the context
// allows, so no lock is held but the target's. The caller holds a pin or a record of the volume.
func (u *ContainerMountUpdater) ready(ctx context.Context, request volume.Request, r *readyVolume, wantTree bool) error {
	if wantTree && r.tree == nil && !r.acquired {
		if err := u.readyAtOnce(request, r); err != nil {
			return err
		}
	}
	if !r.acquired {
		if err := r.timing.do(stepPrepare, func() (err error) {
			r.prepared, err = u.prepared.acquire(ctx, request)
			return err
		}); err != nil {
			return fmt.Errorf("prepare the source: %w", err)
		}
		r.acquired = true
	}
	if !wantTree {
		return nil
	}
	if r.tree == nil {
		if err := r.timing.do(stepTree, func() (err error) {
			r.tree, err = u.prepared.tree(ctx, request, r.prepared)
			return err
		}); err != nil {
			return err
		}
	}
	return r.timing.do(stepAttributes, func() error {
		return r.tree.SetAttributes(mount.Attributes{ReadOnly: request.ReadOnly})
	})
}

// readyAtOnce makes the tree of a volume that is ready and waits for nothing. Of others it makes none.
func (u *ContainerMountUpdater) readyAtOnce(request volume.Request, r *readyVolume) error {
	src, ok := u.prepared.prompt(request)
	if !ok {
		return nil
	}
	return r.timing.do(stepTree, func() error {
		tree, prepared, err := src.PromptTree(request)
		if err == nil && tree != nil {
			r.tree, r.prepared, r.acquired = tree, prepared, true
		}
		return err
	})
}

// place attaches the volume of a record, which is ready, to the sandbox's task. The caller holds the life lock. When it
// fails the sandbox is as before and the caller puts the journal right, except when the volume may be mounted all the
// same: then the record stays, for the next operation, or the next start, to find out. write writes the intent.
func (u *ContainerMountUpdater) place(ctx context.Context, sb *sandbox, record journal.Volume, r *readyVolume, write func(journal.Change) error) (journal.Volume, error) {
	timing, tree := r.timing, r.tree
	failed := func(err error) (journal.Volume, error) {
		return record, naming(record.Target, sb.unlessGone(err))
	}
	ns, err := sb.enter()
	if err != nil {
		return failed(err)
	}
	// The tree keeps its identity when it is moved: recorded now, it is found again whatever happens.
	if record.Mount, err = tree.Identity(); err != nil {
		return failed(err)
	}
	record.Phase, record.Attached, record.Left = journal.Intent, v1alpha1.AttachedLive, mount.Identity{}
	if c, _ := sb.seen(); c.State == containers.Created || sb.isCreating(c.ID) {
		record.Attached = v1alpha1.AttachedBeforeStart
	}
	if r.attached != "" {
		record.Attached = r.attached
	}
	if err := timing.do(stepJournalIntent, func() error { return write(putting(record)) }); err != nil {
		return failed(err)
	}
	// From here on, that the caller has gone is no reason to stop half-way.
	ctx = context.WithoutCancel(ctx)
	placed, err := ns.Attach(ctx, tree, record.Target, timing.observe)
	if err != nil {
		return failed(err)
	}
	record.Phase, record.Mount = journal.Mounted, placed.Identity
	if err := timing.do(stepJournalMounted, func() error {
		record.Stages = timing.Results
		return u.put(record)
	}); err != nil {
		if _, detachErr := ns.Detach(ctx, record.Target, record.Mount, mount.DetachOptions{Force: true}); detachErr != nil {
			err = incomplete(err, detachErr)
		}
		return failed(err)
	}
	record.Stages = timing.Results // with this last one
	return record, nil
}

// naming says on which target an attach failed, unless the error says it already.
func naming(target string, err error) error {
	var known *mount.Error
	if errors.As(err, &known) && known.Op == "attach" && known.Path == target {
		return err
	}
	return fmt.Errorf("attach %s: %w", target, err)
}

// incomplete is the error of a rollback that could not be finished.
func incomplete(cause, err error) error {
	return fault.New(errdefs.ErrInternal, fault.RollbackFailed, "%w; undoing it failed too: %v", cause, err)
}

func putting(record journal.Volume) journal.Change {
	return journal.Change{PutVolumes: []journal.Volume{record}}
}

func (u *ContainerMountUpdater) put(record journal.Volume) error {
	return u.journal.Write(putting(record))
}

// forget deletes records whose mounts are gone from their sandbox. What they had mounted is noted on the prepared volume,
// which is not released before no mount namespace has it any more.
func (u *ContainerMountUpdater) forget(records ...journal.Volume) error {
	return u.forgetBy(u.journal.Write, records...)
}

// forgetBy is forget by a way to write of the caller's.
func (u *ContainerMountUpdater) forgetBy(write func(journal.Change) error, records ...journal.Volume) error {
	change := journal.Change{DeleteVolumes: records}
	prepared := map[string]journal.Prepared{}
	for _, r := range records {
		p, ok := prepared[r.Request.Key]
		if !ok {
			p, ok = u.journal.Prepared(r.Request.Key)
		}
		if !ok || r.Mount.IsZero() || slices.Contains(p.Mounts, content(r.Mount)) {
			continue
		}
		p.Mounts = append(p.Mounts, content(r.Mount))
		prepared[r.Request.Key] = p
	}
	for _, p := range prepared {
		change.PutPrepared = append(change.PutPrepared, p)
	}
	if err := write(change); err != nil {
		return err
	}
	for _, r := range records {
		u.unused(r.Request.Key)
	}
	return nil
}

// content is what a mount shows, wherever it is mounted.
func content(m mount.Identity) mount.Match { return mount.Match{Device: m.Device, Root: m.Root} }

// mayBeMounted: a failed attach that may have left the volume in the sandbox.
func mayBeMounted(err error) bool {
	return outcomeUnknown(err) || fault.ReasonOf(err) == fault.RollbackFailed
}

// outcomeUnknown: the deadline passed while the kernel worked; what it did must be looked up.
func outcomeUnknown(err error) bool {
	var e *mount.Error
	return errors.As(err, &e) && (e.Code == mount.ReasonOutcomeUnknown || e.Code == mount.ReasonHelperDeadline)
}

// joined is a context that ends with either of two.
func joined(ctx, other context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(other, func() { cancel(context.Cause(other)) })
	return ctx, func() { stop(); cancel(nil) }
}
