package csi

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/folder"
)

// Source is the volume.Source of PersistentVolumes of CSI drivers. What it knows of volumes is in their folders.
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
	publishSteps = failpoint.Steps("direct-publish", []string{"record", "publish", "recorded"})
	releaseSteps = failpoint.Steps("direct-release", []string{"unpublish", "forget"})
)

// New makes the Source, and its folder. It calls no driver: one may come later.
func New(config Config) (*Source, error) {
	if err := CheckDrivers(config.Drivers); err != nil {
		return nil, err
	}
	dir, err := folder.Make(config.Dir)
	if err != nil {
		return nil, err
	}
	config.Dir, config.Timeouts = dir, config.Timeouts.withDefaults()
	s := &Source{config: config, log: config.Log, sys: kernel{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s, nil
}

func (s *Source) dir(key string) string  { return filepath.Join(s.config.Dir, key) }
func (s *Source) path(key string) string { return filepath.Join(s.dir(key), mountDir) }

// driver is a configured one.
func (s *Source) driver(name string) (Driver, bool) {
	i := slices.IndexFunc(s.config.Drivers, func(d Driver) bool { return d.Name == name })
	if i < 0 {
		return Driver{}, false
	}
	return s.config.Drivers[i], true
}

// about names a request's volume in messages.
func about(r volume.Request) string {
	if r.PersistentVolume != "" {
		return "PersistentVolume " + r.PersistentVolume
	}
	return fmt.Sprintf("volume %q of CSI driver %s", r.CSI.Handle, r.CSI.Driver)
}

// check finds the driver of a request, and sets its key.
func (s *Source) check(r *volume.Request) (Driver, error) {
	v := r.CSI
	if v == nil || v.Driver == "" || v.Handle == "" || strings.ContainsRune(v.Handle, 0) {
		return Driver{}, fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "the request names no volume of a CSI driver: driver and volume handle are needed")
	}
	d, ok := s.driver(v.Driver)
	switch {
	case !ok:
		return d, fault.New(errdefs.ErrPermissionDenied, fault.SourceDenied,
			"%s is of CSI driver %s, which is not among those that this node's agent may call: its operator can add it (csi.drivers)", about(*r), v.Driver)
	case v.AccessMode != readWriteOnce && v.AccessMode != readWriteMany && v.AccessMode != readOnlyMany:
		return d, fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource,
			"%s has access mode %q: %s, %s and %s can be published", about(*r), v.AccessMode, readWriteOnce, readWriteMany, readOnlyMany)
	case publishedReadOnly(v) && !r.ReadOnly:
		return d, fault.New(errdefs.ErrPermissionDenied, fault.ModeDenied, "%s is read-only: ask for mode ro", about(*r))
	}
	r.Key = volume.CSIKey(v.Driver, v.Handle)
	return d, nil
}

// Resolve implements volume.Source.
func (s *Source) Resolve(_ context.Context, r *volume.Request) (string, error) {
	if _, err := s.check(r); err != nil {
		return "", err
	}
	return r.Key, nil
}

// Prepare implements volume.Source.
func (s *Source) Prepare(ctx context.Context, r volume.Request) (volume.Prepared, error) {
	d, err := s.check(&r)
	if err != nil {
		return volume.Prepared{}, err
	}
	if err := ctx.Err(); err != nil {
		return volume.Prepared{}, fmt.Errorf("publish %s: %w", about(r), context.Cause(ctx))
	}
	done, err := s.turns.Take(ctx, r.Key)
	if err != nil {
		return volume.Prepared{}, err
	}
	defer done()
	p, err := s.prepare(ctx, r, d)
	if err != nil {
		return volume.Prepared{}, fmt.Errorf("publish %s: %w", about(r), err)
	}
	return p, nil
}

func (s *Source) prepare(ctx context.Context, r volume.Request, d Driver) (volume.Prepared, error) {
	none := volume.Prepared{}
	rec, known, err := s.sys.Load(s.dir(r.Key))
	if err != nil {
		return none, volume.Unfinished(err, nil)
	}
	at, there, err := s.sys.At(s.path(r.Key))
	if err != nil {
		return none, volume.Unfinished(err, nil)
	}
	terms := termsOf(r.CSI)
	if ready := known && there && rec.Mount != nil && at.Identity() == *rec.Mount; ready {
		if rec.Terms != terms {
			return none, fault.New(errdefs.ErrConflict, fault.Conflict,
				"it is published on this node with other attributes, mount options or access mode: it is tried again when nobody uses it any more")
		}
		return s.prepared(ctx, r, d, rec)
	}
	if known && rec.Terms != terms || there && !known {
		// Left by one that was cut off and asked for something else.
		if err := s.release(ctx, r.Key, s.begun(r, d)); err != nil {
			return none, volume.Unfinished(err, nil)
		}
	}
	p := none
	if rec, err = s.publish(ctx, r, d); err == nil {
		p, err = s.prepared(ctx, r, d, rec)
	}
	if err != nil {
		return none, s.undo(ctx, r, d, err)
	}
	return p, nil
}

// prepared is the result of a Prepare.
func (s *Source) prepared(ctx context.Context, r volume.Request, d Driver, rec record) (volume.Prepared, error) {
	p := volume.Prepared{Key: r.Key, Type: v1alpha1.VolumeTypePV, Path: v1alpha1.VolumePathDirect, Limit: v1alpha1.LimitNone, CapacityBytes: rec.Bytes}
	var err error
	if r.SizeLimitBytes > 0 {
		if p.Limit, p.CapacityBytes, err = s.limit(ctx, r, d, rec); err != nil {
			return p, err
		}
	}
	if p.Details, err = json.Marshal(details{record: rec, Path: s.path(r.Key)}); err != nil {
		return p, fmt.Errorf("record the volume: %w", err)
	}
	return p, nil
}

// helper says whether the filesystem of a volume is touched by a helper.
func helper(d Driver, fsType string) bool { return !d.NodeLocal || mount.MayHang(fsType) }

// Tree implements volume.Source.
func (s *Source) Tree(ctx context.Context, p volume.Prepared, subPath string) (*mount.Tree, error) {
	d, err := parseDetails(p)
	if err != nil {
		return nil, err
	}
	if d.Mount == nil {
		return nil, fault.New(errdefs.ErrInternal, fault.Internal, "volume %s was not published", p.Key)
	}
	if err := volume.CheckSubPath(subPath); err != nil {
		return nil, err
	}
	driver, _ := s.driver(d.Driver) // one that is not configured any more is a foreign one
	tree, err := s.sys.Clone(ctx, d.Path, *d.Mount, subPath, helper(driver, d.FSType))
	if err != nil {
		return nil, fmt.Errorf("mount volume %q of CSI driver %s: %w", d.Handle, d.Driver, err)
	}
	return tree, nil
}
