package local

import (
	"context"
	"errors"
	"os"
	"path"
	"strconv"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// prepareDirectory checks that the directory is there and holds it to the limit.
func (s *Source) prepareDirectory(r volume.Request, d details, p *volume.Prepared) error {
	dir, err := s.sys.OpenDir(d.Prefix, d.Rel)
	if err != nil {
		return err
	}
	defer dir.Close()
	p.Limit = v1alpha1.LimitNone
	if r.SizeLimitBytes == 0 {
		return nil
	}
	return s.limit(r, dir, p)
}

// limit enforces a sizeLimit on a directory, by what its filesystem has for that.
func (s *Source) limit(r volume.Request, dir *os.File, p *volume.Prepared) error {
	total, err := s.sys.Size(dir)
	if err != nil {
		return err
	}
	if r.PersistentVolume != "" {
		return s.limitPersistent(r, total, p)
	}
	if holds(total, r.SizeLimitBytes) {
		p.Limit, p.CapacityBytes = v1alpha1.LimitCapacity, total
		return nil
	}
	err = s.sys.Limit(dir, r.Key, r.SizeLimitBytes)
	var e *capacity.Error
	if errors.As(err, &e) && e.Reason() == capacity.ReasonQuotaUnsupported {
		return notEnforceable(r, total, p, err)
	}
	if err == nil {
		p.Limit = v1alpha1.LimitQuota
	}
	return err
}

// limitPersistent accepts a limit that the volume's own filesystem, of total bytes, keeps. The capacity that it declares
// says nothing, and neither does a filesystem that is not the volume's, as when its disk is not mounted. No quota is set
// on what others administer.
func (s *Source) limitPersistent(r volume.Request, total int64, p *volume.Prepared) error {
	own, err := s.sys.OwnFilesystem(r.Source)
	if err != nil {
		return err
	}
	switch {
	case own && holds(total, r.SizeLimitBytes):
		p.Limit, p.CapacityBytes = v1alpha1.LimitCapacity, total
		return nil
	case r.BestEffort:
		p.Limit = v1alpha1.LimitBestEffort
		return nil
	}
	is := "is larger"
	if !own {
		is = "is not mounted there as a whole (is the volume's disk mounted?)"
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.LimitNotEnforced,
		"nothing enforces a sizeLimit of %d bytes on PersistentVolume %s: the filesystem at %s has %d bytes and %s; ask for at least its size, leave sizeLimit out, or let the operator allow BestEffort",
		r.SizeLimitBytes, r.PersistentVolume, r.Source, total, is).
		With("requested", strconv.FormatInt(r.SizeLimitBytes, 10)).With("actual", strconv.FormatInt(total, 10))
}

// holds says whether a filesystem of that size enforces the limit by itself. Some (tmpfs without a size, some FUSE)
// give zero, and have none.
func holds(total, limit int64) bool { return total > 0 && total <= limit }

// notEnforceable is for a limit that nothing enforces: refused, or accepted by the operator's policy.
func notEnforceable(r volume.Request, total int64, p *volume.Prepared, cause error) error {
	if r.BestEffort {
		p.Limit = v1alpha1.LimitBestEffort
		return nil
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.LimitNotEnforced,
		"nothing enforces a sizeLimit of %d bytes on %s, whose filesystem has %d: use a root with backing: image, leave sizeLimit out, or let the operator allow BestEffort (%w)",
		r.SizeLimitBytes, r.Source, total, cause)
}

// prepareRemoteDirectory does the same where the filesystem may hang.
func (s *Source) prepareRemoteDirectory(ctx context.Context, r volume.Request, d details, p *volume.Prepared) error {
	tree, err := s.sys.CloneInHelper(ctx, d.Prefix, d.Rel)
	if err != nil {
		return err
	}
	defer tree.Close()
	p.Limit = v1alpha1.LimitNone
	if r.SizeLimitBytes == 0 {
		return nil
	}
	total, err := s.sys.SizeInHelper(ctx, tree)
	if err != nil {
		return err
	}
	if r.PersistentVolume != "" {
		return s.limitPersistent(r, total, p)
	}
	if !holds(total, r.SizeLimitBytes) {
		return notEnforceable(r, total, p, errors.New("a network filesystem has no project quota"))
	}
	p.Limit, p.CapacityBytes = v1alpha1.LimitCapacity, total
	return nil
}

func (s *Source) directoryTree(ctx context.Context, d details, subPath string) (*mount.Tree, error) {
	hangs, err := s.mayHang(details{Prefix: d.Prefix, Rel: path.Join(d.Rel, subPath)})
	if err != nil {
		return nil, err
	}
	if hangs {
		// No symlink is followed and Tree refused "..": beneath the prefix is beneath the volume.
		return s.sys.CloneInHelper(ctx, d.Prefix, path.Join(d.Rel, subPath))
	}
	return s.localTree(d, subPath)
}

// localTree clones a directory that cannot hang.
func (s *Source) localTree(d details, subPath string) (*mount.Tree, error) {
	dir, err := s.sys.OpenDir(d.Prefix, d.Rel)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if subPath == "" {
		return s.sys.Clone(dir)
	}
	sub, err := s.sys.OpenSubPath(dir, subPath)
	if err != nil {
		return nil, err
	}
	defer sub.Close()
	return s.sys.Clone(sub)
}

// releaseQuota removes the limit; the data stays. A directory that is gone has none.
func (s *Source) releaseQuota(d details, key string) error {
	dir, err := s.sys.OpenDir(d.Prefix, d.Rel)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return s.sys.Unlimit(dir, key)
}
