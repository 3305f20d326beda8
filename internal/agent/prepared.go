package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/time/rate"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// preparedVolumes has the sources that are ready on this node, by volume key. Each key has one operation at a
// time; different keys never wait for each other.
//
// A prepare runs on its own: whoever asked may give up waiting for it, and one that never ends keeps nobody but
// those who want that volume. When it does end and nobody wants it any more, it is released.
type preparedVolumes struct {
	sources map[v1alpha1.VolumeType]volume.Source
	journal *journal.Journal
	// bucket bounds how often sources are prepared; those that are ready already cost nothing.
	bucket *rate.Limiter
	log    *slog.Logger
	// stopping ends when the agent stops.
	stopping context.Context
	// unused is told of a key that may have lost its last user, changed of one that was prepared or released.
	unused, changed func(key string)

	mu   sync.Mutex              // guards the fields below
	busy map[string]*preparation // the operation under way, by key
	pins map[string]int          // attaches under way, which have no record yet, by key
}

// preparation is an operation under way on one volume.
type preparation struct {
	done chan struct{} // closed at the end
	// check: the volume is ready, and is only held against a request.
	check bool
	// fresh: the volume was not ready before, so that a failure is the answer for all who ask for the same.
	fresh   bool
	request volume.Request
	// The fields below are written before done is closed and read after.
	prepared volume.Prepared
	err      error
}

// resolve checks a request against the node's policy, and finds its key.
func (p *preparedVolumes) resolve(ctx context.Context, r volume.Request) (volume.Request, error) {
	src, ok := p.sources[r.Type]
	if !ok {
		return r, unavailableType(r.Type)
	}
	key, err := src.Resolve(ctx, &r)
	r.Key = key
	return r, err
}

// tree is a new detached tree of a prepared volume. Like a prepare it runs on its own: whoever asked may give up waiting
// for a source that hangs. A tree that comes too late is closed, and the volume is not released before it came.
func (p *preparedVolumes) tree(ctx context.Context, r volume.Request, prepared volume.Prepared) (*mount.Tree, error) {
	src, ok := p.sources[r.Type]
	if !ok {
		return nil, unavailableType(r.Type)
	}
	ctx, cancel := joined(ctx, p.stopping)
	defer cancel()
	type result struct {
		tree *mount.Tree
		err  error
	}
	results := make(chan result)
	unpin := p.pin(r.Key)
	go func() {
		defer unpin()
		tree, err := src.Tree(ctx, prepared, r.SubPath)
		select {
		case results <- result{tree, err}:
		case <-ctx.Done():
			if err == nil {
				tree.Close()
			}
		}
	}()
	select {
	case got := <-results:
		return got.tree, got.err
	case <-ctx.Done():
		return nil, p.gaveUp(ctx, r, "still being mounted")
	}
}

// prompt is the source of a request whose volume is ready, if there may be trees of it without waiting (volume.Prompt).
// The caller holds a pin, or a record of the volume, so that it stays ready.
func (p *preparedVolumes) prompt(r volume.Request) (volume.Prompt, bool) {
	src, ok := p.sources[r.Type].(volume.Prompt)
	if !ok {
		return nil, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	rec, known := p.journal.Prepared(r.Key)
	// What is under way may be a release that began before the caller's pin.
	op := p.busy[r.Key]
	return src, known && rec.Phase == journal.Ready && (op == nil || op.check)
}

// gaveUp is the error of who waits no longer for a source.
func (p *preparedVolumes) gaveUp(ctx context.Context, r volume.Request, doing string) error {
	if p.stopping.Err() != nil {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping")
	}
	return fault.New(context.Cause(ctx), fault.OperationPending, "source %s is %s; other volumes are not delayed by it", r.Source, doing)
}

// pin keeps a volume from being released until unpin.
func (p *preparedVolumes) pin(key string) (unpin func()) {
	p.mu.Lock()
	p.pins[key]++
	p.mu.Unlock()
	return func() {
		p.mu.Lock()
		if p.pins[key]--; p.pins[key] == 0 {
			delete(p.pins, key)
		}
		wanted := p.wanted(key)
		p.mu.Unlock()
		if !wanted {
			p.unused(key)
		}
	}
}

// acquire is the prepared volume of a request, which is prepared if it is not yet; one that is ready is checked
// against the request. The caller holds a pin, or a record of it.
func (p *preparedVolumes) acquire(ctx context.Context, r volume.Request) (volume.Prepared, error) {
	for {
		p.mu.Lock()
		op, other := p.busy[r.Key]
		if !other {
			rec, ok := p.journal.Prepared(r.Key)
			if ok && rec.Request.Type != r.Type {
				p.mu.Unlock()
				return volume.Prepared{}, fault.New(errdefs.ErrConflict, fault.Conflict,
					"the volume of %s was prepared another way on this node, for its present users: it is tried again when nobody uses it any more", r.Source)
			}
			op = &preparation{done: make(chan struct{}), fresh: !ok || rec.Phase != journal.Ready, request: r}
			op.check = !op.fresh
			p.busy[r.Key] = op
			go p.run(op, r.Key, func() (volume.Prepared, error) {
				if !op.fresh {
					return p.sources[r.Type].Prepare(p.stopping, r)
				}
				return p.prepare(r)
			})
		}
		p.mu.Unlock()
		if err := p.wait(ctx, op, r); err != nil {
			return volume.Prepared{}, err
		}
		if !other || (op.fresh && op.err != nil && op.request.Equal(r)) {
			return op.prepared, op.err
		}
	}
}

func (p *preparedVolumes) wait(ctx context.Context, op *preparation, r volume.Request) error {
	select {
	case <-op.done:
		return nil
	case <-ctx.Done():
	case <-p.stopping.Done():
	}
	return p.gaveUp(ctx, r, "still being prepared")
}

// run carries out an operation that is in busy already.
func (p *preparedVolumes) run(op *preparation, key string, f func() (volume.Prepared, error)) {
	op.prepared, op.err = f()
	if !op.check {
		p.changed(key) // before who waits for it goes on, so that nobody reads what was true of the former
	}
	p.mu.Lock()
	delete(p.busy, key)
	p.mu.Unlock()
	close(op.done)
	// A release that failed is the reaper's own, which tries it again in its time.
	if op.fresh {
		p.unused(key)
	}
}

// prepare prepares a source that is not ready.
func (p *preparedVolumes) prepare(r volume.Request) (volume.Prepared, error) {
	if err := p.bucket.Wait(p.stopping); err != nil {
		return volume.Prepared{}, fault.New(errdefs.ErrUnavailable, fault.RateLimited, "waiting for a turn to prepare %s: %w", r.Source, err)
	}
	src := p.sources[r.Type]
	rec := journal.Prepared{Key: r.Key, Phase: journal.Preparing, Request: r}
	if old, ok := p.journal.Prepared(r.Key); ok {
		rec.Mounts = old.Mounts
	}
	if err := failpoint.Step(sourceFailpoints, stepJournalPreparing, func() error { return p.put(rec) }); err != nil {
		return volume.Prepared{}, err
	}
	err := failpoint.Step(sourceFailpoints, stepSourcePrepare, func() (err error) {
		rec.Prepared, err = src.Prepare(p.stopping, r)
		return err
	})
	if err == nil {
		rec.Phase = journal.Ready
		if err = failpoint.Step(sourceFailpoints, stepJournalReady, func() error { return p.put(rec) }); err == nil {
			return rec.Prepared, nil
		}
		if releaseErr := src.Release(p.stopping, rec.Prepared); releaseErr != nil {
			// The record says that it is being prepared, by which the reaper undoes it.
			return volume.Prepared{}, incomplete(err, releaseErr)
		}
	}
	if errors.Is(err, volume.ErrUnfinished) {
		return volume.Prepared{}, err // likewise
	}
	if forgetErr := p.journal.Write(journal.Change{DeletePrepared: []string{r.Key}}); forgetErr != nil {
		err = incomplete(err, forgetErr)
	}
	return volume.Prepared{}, err
}

func (p *preparedVolumes) put(rec journal.Prepared) error {
	return p.journal.Write(journal.Change{PutPrepared: []journal.Prepared{rec}})
}

func unavailableType(t v1alpha1.VolumeType) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
		"volumes of type %s are not available on this node: its agent has no source for them", t)
}

// wanted says whether a volume has users, or attaches under way.
func (p *preparedVolumes) wanted(key string) bool {
	return p.pins[key] > 0 || p.journal.Used(key)
}

// release undoes a preparation that nobody uses. It is true when nothing is left to do, be it that the volume is in
// use again; false asks for another call: an operation is under way, the kernel still holds the volume, or the
// source could not release it.
func (p *preparedVolumes) release(ctx context.Context, key string) bool {
	p.mu.Lock()
	rec, ok := p.journal.Prepared(key)
	if !ok || p.wanted(key) {
		p.mu.Unlock()
		return true
	}
	if p.busy[key] != nil {
		p.mu.Unlock()
		return false
	}
	op := &preparation{done: make(chan struct{})}
	p.busy[key] = op
	p.mu.Unlock()
	// On its own: a release that hangs keeps nothing but its own volume.
	go p.run(op, key, func() (volume.Prepared, error) { return volume.Prepared{}, p.releaseOnce(rec) })
	select {
	case <-op.done:
	case <-ctx.Done():
		return false
	}
	if op.err != nil && !errors.Is(op.err, errHeld) && fault.ReasonOf(op.err) != fault.Busy {
		p.log.Error("a source that nobody uses could not be released; it is tried again", "volumeKey", key, "error", op.err)
	}
	return op.err == nil
}

// errHeld: a mount namespace still has a volume that has no user.
var errHeld = errors.New("a mount namespace of the node still has it")

func (p *preparedVolumes) releaseOnce(rec journal.Prepared) error {
	src, ok := p.sources[rec.Request.Type]
	if !ok {
		return unavailableType(rec.Request.Type)
	}
	undoer, undoes := src.(volume.Undoer)
	switch {
	case rec.Phase != journal.Preparing:
	case undoes:
		rec.Prepared = undoer.Unfinished(rec.Request)
	default:
		// Cut off by the end of the process. How far it came is known when it is done again.
		var err error
		if rec.Prepared, err = src.Prepare(p.stopping, rec.Request); err != nil {
			p.log.Info("a preparation that was cut off cannot be done again, and left nothing behind", "volumeKey", rec.Key, "error", err)
			return p.journal.Write(journal.Change{DeletePrepared: []string{rec.Key}})
		}
	}
	if held, err := p.held(rec); err != nil {
		return err
	} else if held {
		return errHeld
	}
	rec.Phase = journal.Releasing
	if err := failpoint.Step(sourceFailpoints, stepJournalReleasing, func() error { return p.put(rec) }); err != nil {
		return err
	}
	if err := failpoint.Step(sourceFailpoints, stepSourceRelease, func() error { return src.Release(p.stopping, rec.Prepared) }); err != nil {
		return err
	}
	return failpoint.Step(sourceFailpoints, stepJournalReleased, func() error {
		return p.journal.Write(journal.Change{DeletePrepared: []string{rec.Key}})
	})
}

// held says whether a mount namespace still has what users had mounted of a volume: a namespace that was made inside
// a sandbox keeps a copy of everything that the sandbox had then. A filesystem that the host has mounted itself is
// left out: its other users cannot be told from ours, and there is no device to take away under them.
func (p *preparedVolumes) held(rec journal.Prepared) (bool, error) {
	if len(rec.Mounts) == 0 {
		return false, nil
	}
	own, err := mount.Mounts()
	if err != nil {
		return false, err
	}
	for _, m := range rec.Mounts {
		if slices.ContainsFunc(own, func(i mount.Info) bool { return i.Device == m.Device }) {
			continue
		}
		refs, err := mount.Holding(p.stopping, m)
		if err != nil || len(refs) > 0 {
			return err == nil, err
		}
	}
	return false, nil
}

// space is how full a prepared volume's filesystem is. hangs says that it may wait for a server, until ctx ends. A volume
// that is being released is not asked.
func (p *preparedVolumes) space(ctx context.Context, r volume.Request, hangs bool) (usage mount.Usage, err error) {
	err = p.look(ctx, r, func(tree *mount.Tree) (err error) {
		if hangs {
			usage, err = mount.StatfsInHelper(ctx, tree)
		} else {
			usage, err = tree.Statfs()
		}
		return err
	})
	return usage, err
}

// online is an error with reason VOLUME_OFFLINE if a prepared volume's filesystem is of no use any more; likewise.
func (p *preparedVolumes) online(ctx context.Context, r volume.Request, hangs bool) error {
	return p.look(ctx, r, func(tree *mount.Tree) error {
		if hangs {
			return mount.OnlineInHelper(ctx, tree)
		}
		return tree.Online()
	})
}

// look looks at a prepared volume by a tree of its own.
func (p *preparedVolumes) look(ctx context.Context, r volume.Request, at func(*mount.Tree) error) error {
	unpin := p.pin(r.Key)
	defer unpin()
	p.mu.Lock()
	rec, ok := p.journal.Prepared(r.Key)
	op := p.busy[r.Key]
	p.mu.Unlock()
	if !ok || rec.Phase != journal.Ready || op != nil && !op.check {
		return fault.New(errdefs.ErrUnavailable, fault.OperationPending, "source %s is being prepared or released", r.Source)
	}
	src, ok := p.sources[r.Type]
	if !ok {
		return unavailableType(r.Type)
	}
	tree, err := src.Tree(ctx, rec.Prepared, "")
	if err != nil {
		return err
	}
	defer tree.Close()
	return at(tree)
}
