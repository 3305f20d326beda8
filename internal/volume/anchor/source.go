package anchor

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/folder"
)

// Config is what a Source needs.
type Config struct {
	// Dir is the folder of the volumes. It ends with the boot, and is outside of kubelet's.
	Dir string
	// Kubelet is kubelet's folder (--root-dir).
	Kubelet string
	// Timeout bounds what is asked of a filesystem; 30 s when zero.
	Timeout time.Duration
	// Log is told of what a Sweep cannot clean up; nil for nobody.
	Log *slog.Logger
}

// DefaultKubelet is kubelet's folder nearly everywhere.
const DefaultKubelet = "/var/lib/kubelet"

const defaultTimeout = 30 * time.Second

// Source is the volume.Source of volumes that kubelet publishes for anchors. What it knows of volumes is in their folders.
type Source struct {
	config Config
	log    *slog.Logger
	sys    system
	turns  folder.Turns
}

var (
	_ volume.Source = (*Source)(nil)
	_ volume.Undoer = (*Source)(nil)
)

var (
	prepareSteps = failpoint.Steps("anchor-prepare", []string{"record", "guard", "recorded"})
	releaseSteps = failpoint.Steps("anchor-release", []string{"drop-guard", "forget"})
)

// New makes the Source, and its folder.
func New(config Config) (*Source, error) {
	if config.Kubelet == "" {
		config.Kubelet = DefaultKubelet
	}
	if config.Timeout == 0 {
		config.Timeout = defaultTimeout
	}
	dir, err := folder.Make(config.Dir)
	if err != nil {
		return nil, err
	}
	config.Dir = dir
	// The kernel shows real paths. It may not be there yet.
	if real, err := filepath.EvalSymlinks(config.Kubelet); err == nil {
		config.Kubelet = real
	}
	s := &Source{config: config, log: config.Log, sys: kernel{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s, nil
}

func (s *Source) dir(key string) string   { return filepath.Join(s.config.Dir, key) }
func (s *Source) guard(key string) string { return filepath.Join(s.dir(key), guardDir) }

// isName says whether a word of a request is one element of a path.
func isName(word string) bool {
	return word != "" && word != "." && word != ".." && !strings.ContainsAny(word, "/\x00")
}

// check refuses a request of which no path can be made, and sets its key.
func (s *Source) check(r *volume.Request) error {
	v := r.Anchor
	switch {
	case v == nil:
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "the request names no anchor")
	case !isName(v.PodUID) || !isName(r.PersistentVolume) || !isName(strings.ReplaceAll(v.Plugin, "/", "~")):
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource,
			"the anchor's Pod UID %q, PersistentVolume %q and plugin %q must be names", v.PodUID, r.PersistentVolume, v.Plugin)
	case v.Driver != "" && (!isName(v.Driver) || v.Handle == "") || v.Driver == "" && v.Handle != "":
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "CSI driver %q and volume handle %q: both are needed, or neither", v.Driver, v.Handle)
	}
	r.Key = volume.AnchorKey(r.PersistentVolume)
	if v.Driver != "" {
		r.Key = volume.CSIKey(v.Driver, v.Handle)
	}
	return nil
}

// Resolve implements volume.Source.
func (s *Source) Resolve(_ context.Context, r *volume.Request) (string, error) {
	if err := s.check(r); err != nil {
		return "", err
	}
	return r.Key, nil
}

// Prepare implements volume.Source.
func (s *Source) Prepare(ctx context.Context, r volume.Request) (volume.Prepared, error) {
	none := volume.Prepared{}
	if err := s.check(&r); err != nil {
		return none, err
	}
	failed := func(err error) error {
		return fmt.Errorf("take over PersistentVolume %s from kubelet: %w", r.PersistentVolume, err)
	}
	if ctx.Err() != nil {
		return none, failed(context.Cause(ctx))
	}
	done, err := s.turns.Take(ctx, r.Key)
	if err != nil {
		return none, err
	}
	defer done()
	p, err := s.prepare(ctx, r)
	if err != nil {
		return none, failed(err)
	}
	return p, nil
}

func (s *Source) prepare(ctx context.Context, r volume.Request) (volume.Prepared, error) {
	none := volume.Prepared{}
	rec, known, err := s.sys.Load(s.dir(r.Key))
	if err != nil {
		return none, volume.Unfinished(err, nil)
	}
	known = known && rec.Mount != nil
	at, err := s.find(r, rec, known)
	if err == nil {
		if rec, err = s.take(ctx, r, rec, known, at); err == nil {
			var p volume.Prepared
			if p, err = s.prepared(ctx, r, rec); err == nil {
				return p, nil
			}
		}
	}
	if known {
		return none, err // what it was before it is still
	}
	// The caller's end is no reason to leave anything.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.config.Timeout)
	defer cancel()
	if undone := s.release(undo, r.Key); undone != nil {
		return none, volume.Unfinished(err, undone)
	}
	return none, err
}

// find is where the volume of a request is published.
func (s *Source) find(r volume.Request, rec record, known bool) (place, error) {
	at, there, err := s.publishedFor(r.Anchor.PodUID, r.Anchor.Plugin, r.PersistentVolume)
	if err == nil && !there && known {
		at, there, err = s.recorded(rec, r.ReadOnly)
	}
	switch {
	case err != nil:
		return place{}, err
	case !there && known:
		return place{}, lost(rec)
	case !there && s.isEmpty(r):
		return place{}, fault.New(errdefs.ErrInternal, fault.DriverFailed,
			"CSI driver %s answered OK to kubelet and mounted nothing for Pod %s (%s), or what it mounted is gone: see the driver's log; it is tried again with a new Pod",
			r.Anchor.Driver, r.Anchor.Pod, s.volumeOf(r.Anchor.PodUID, r.Anchor.Plugin, r.PersistentVolume))
	case !there:
		return place{}, fault.New(errdefs.ErrUnavailable, fault.AnchorPending,
			"kubelet has not published it for Pod %s yet (%s): it is tried again", r.Anchor.Pod, s.volumeOf(r.Anchor.PodUID, r.Anchor.Plugin, r.PersistentVolume))
	case at.at.ReadOnly && !r.ReadOnly:
		return place{}, fault.New(errdefs.ErrPermissionDenied, fault.ModeDenied, "it is published read-only: ask for mode ro")
	}
	return at, nil
}

func lost(rec record) error {
	return fault.New(errdefs.ErrUnavailable, fault.AnchorLost,
		"kubelet does not have it on this node any more: its anchor Pod %s is gone, or what was mounted for it is; it is tried again with a new one", rec.Pod)
}

// isEmpty says that the place is there at which a CSI driver was to publish a volume: it makes it, and a Pod that runs has
// been through that. Nothing is mounted there, as the caller has found.
func (s *Source) isEmpty(r volume.Request) bool {
	if r.Anchor.Driver == "" {
		return false
	}
	there, err := s.sys.Exists(filepath.Join(s.volumeOf(r.Anchor.PodUID, r.Anchor.Plugin, r.PersistentVolume), "mount"))
	return err == nil && there
}

// take records where the volume is, and guards it. rec is what was known of it.
func (s *Source) take(ctx context.Context, r volume.Request, rec record, known bool, at place) (record, error) {
	id := at.at.Identity()
	now := record{PersistentVolume: r.PersistentVolume, Plugin: r.Anchor.Plugin, Pod: at.pod, Path: at.path, Mount: &id, FSType: at.at.FSType}
	staged, guarded, err := s.guarded(r)
	if err != nil {
		return rec, err
	}
	now.Staged = staged
	same := known && rec.Pod == now.Pod && rec.Path == now.Path && *rec.Mount == id && rec.Staged == staged
	if same && guarded {
		return rec, nil
	}
	if !known {
		// So that the guard has an owner.
		begun := now
		begun.Mount = nil
		if err := failpoint.Step(prepareSteps, "record", func() error { return s.sys.Save(s.dir(r.Key), begun) }); err != nil {
			return rec, err
		}
	}
	if !guarded {
		if err := failpoint.Step(prepareSteps, "guard", func() error { return s.takeGuard(ctx, r.Key, staged) }); err != nil {
			return rec, err
		}
	}
	if same {
		return rec, nil
	}
	size, err := s.size(ctx, now)
	if err != nil {
		return rec, err
	}
	if isOwn(id) {
		now.Bytes = size
	}
	if err := failpoint.Step(prepareSteps, "recorded", func() error { return s.sys.Save(s.dir(r.Key), now) }); err != nil {
		return rec, err
	}
	return now, nil
}

// prepared is the result of a Prepare.
func (s *Source) prepared(ctx context.Context, r volume.Request, rec record) (volume.Prepared, error) {
	p := volume.Prepared{Key: r.Key, Type: v1alpha1.VolumeTypePVC, Path: v1alpha1.VolumePathAnchor, Limit: v1alpha1.LimitNone, CapacityBytes: rec.Bytes}
	var err error
	if r.SizeLimitBytes > 0 {
		if p.Limit, p.CapacityBytes, err = s.limit(ctx, r, rec); err != nil {
			return p, err
		}
	}
	if p.Details, err = json.Marshal(rec); err != nil {
		return p, fmt.Errorf("record the volume: %w", err)
	}
	return p, nil
}

// Tree implements volume.Source.
func (s *Source) Tree(ctx context.Context, p volume.Prepared, subPath string) (*mount.Tree, error) {
	was, err := parseDetails(p)
	if err != nil {
		return nil, err
	}
	if err := volume.CheckSubPath(subPath); err != nil {
		return nil, err
	}
	// The anchor may be another by now.
	rec, known, err := s.sys.Load(s.dir(p.Key))
	if err != nil {
		return nil, err
	}
	if !known || rec.Mount == nil {
		rec = was
	}
	tree, err := s.tree(ctx, rec, subPath)
	if err != nil {
		return nil, fmt.Errorf("mount PersistentVolume %s: %w", rec.PersistentVolume, err)
	}
	return tree, nil
}

func (s *Source) tree(ctx context.Context, rec record, subPath string) (*mount.Tree, error) {
	at, there, err := s.recorded(rec, false)
	switch {
	case err != nil:
		return nil, err
	case !there:
		return nil, lost(rec)
	}
	return s.sys.Clone(ctx, at.path, at.at.Identity(), subPath)
}

// Unfinished implements volume.Undoer.
func (s *Source) Unfinished(r volume.Request) volume.Prepared {
	p := volume.Prepared{Key: r.Key, Type: v1alpha1.VolumeTypePVC}
	if r.Anchor != nil {
		p.Details, _ = json.Marshal(record{PersistentVolume: r.PersistentVolume, Plugin: r.Anchor.Plugin}) // strings only
	}
	return p
}

// Sweep implements volume.Source.
func (s *Source) Sweep(ctx context.Context, inUse []volume.Prepared) error {
	keys, err := s.sys.List(s.config.Dir)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeout)
	defer cancel()
	for _, key := range keys {
		if slices.ContainsFunc(inUse, func(p volume.Prepared) bool { return p.Key == key }) {
			continue
		}
		if err := s.sweep(ctx, key); err != nil {
			s.log.Warn("the guard of a volume that no record owns could not be removed; it is tried again at the next start", "volumeKey", key, "error", err)
		}
	}
	return nil
}

func (s *Source) sweep(ctx context.Context, key string) error {
	done, err := s.turns.Take(ctx, key)
	if err != nil {
		return err
	}
	defer done()
	return s.release(ctx, key)
}
