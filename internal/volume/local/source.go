package local

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// Source is the volume.Source of type local. It keeps no state of its own.
type Source struct {
	roots []root
	// persistent: the paths of PersistentVolumes are accepted, but for denied.
	persistent bool
	denied     []string
	sys        system
}

var (
	_ volume.Source = (*Source)(nil)
	_ volume.Prompt = (*Source)(nil)
)

// New makes the Source of the roots. It looks at no path: a root may come to be later. limiter holds directories to
// a sizeLimit; nil is the kernel's project quota.
func New(roots []Root, limiter capacity.Limiter, options ...Option) (*Source, error) {
	compiled, err := compile(roots)
	if err != nil {
		return nil, err
	}
	if limiter == nil {
		limiter = capacity.ProjectQuota{}
	}
	s := &Source{roots: compiled, sys: newKernel(limiter)}
	for _, o := range options {
		o(s)
	}
	return s, nil
}

// details is the record in Prepared.Details.
type details struct {
	Backing Backing `json:"backing"`
	// Prefix and Rel are the directory of the volume, or of its image: opened as Rel beneath Prefix.
	Prefix string `json:"prefix"`
	Rel    string `json:"rel"`
	// Image is the image's name, Filesystem what is in it.
	Image      string              `json:"image,omitempty"`
	Filesystem capacity.Filesystem `json:"filesystem,omitempty"`
}

func (d details) path() string { return path.Join(d.Prefix, d.Rel) }

func (p *place) details() details {
	d := details{Backing: p.root.Backing, Prefix: p.prefix, Rel: p.rel}
	if d.Backing == BackingImage {
		d.Rel, d.Image = path.Dir(p.rel), path.Base(p.rel)
	}
	return d
}

func parseDetails(p volume.Prepared) (details, error) {
	var d details
	if err := json.Unmarshal(p.Details, &d); err != nil || d.Prefix == "" || d.Rel == "" {
		return d, fault.New(errdefs.ErrInternal, fault.Internal, "the record of volume %s is damaged: %q", p.Key, p.Details)
	}
	return d, nil
}

// Resolve implements volume.Source.
func (s *Source) Resolve(_ context.Context, r *volume.Request) (string, error) {
	p, err := s.locate(r)
	if err != nil {
		return "", err
	}
	r.Key = p.key(r)
	return r.Key, nil
}

// Prepare implements volume.Source.
func (s *Source) Prepare(ctx context.Context, r volume.Request) (volume.Prepared, error) {
	p, err := s.locate(&r)
	if err != nil {
		return volume.Prepared{}, err
	}
	r.Key = p.key(&r)
	prepared := volume.Prepared{Key: r.Key, Type: v1alpha1.VolumeTypeLocal, Path: v1alpha1.VolumePathLocal}
	d := p.details()
	hangs, err := s.mayHang(d)
	if err != nil {
		return volume.Prepared{}, lift(err, "source %s", r.Source)
	}
	switch {
	case d.Backing == BackingImage && hangs:
		err = fault.New(errdefs.ErrFailedPrecondition, fault.InvalidSource,
			"%s lies on a filesystem that waits for a server: disk images need a local one", d.Prefix)
	case d.Backing == BackingImage:
		err = s.prepareImage(ctx, r, p, &d, &prepared)
	case hangs:
		err = s.prepareRemoteDirectory(ctx, r, d, &prepared)
	default:
		err = s.prepareDirectory(r, d, &prepared)
	}
	if err != nil {
		return volume.Prepared{}, lift(err, "%s", r.Source)
	}
	if prepared.Details, err = json.Marshal(d); err != nil {
		return volume.Prepared{}, fmt.Errorf("record source %s: %w", r.Source, err)
	}
	return prepared, nil
}

func (s *Source) mayHang(d details) (bool, error) {
	fsType, err := s.sys.FilesystemType(d.path())
	return err == nil && mount.MayHang(fsType), err
}

// Tree implements volume.Source.
func (s *Source) Tree(ctx context.Context, p volume.Prepared, subPath string) (*mount.Tree, error) {
	d, err := parseDetails(p)
	if err != nil {
		return nil, err
	}
	// Checked before anything joins it to another path, which would take its ".." away.
	if err := volume.CheckSubPath(subPath); err != nil {
		return nil, err
	}
	var tree *mount.Tree
	if d.Backing == BackingImage {
		tree, err = s.imageTree(ctx, d, subPath)
	} else {
		tree, err = s.directoryTree(ctx, d, subPath)
	}
	if err != nil {
		return nil, lift(err, "mount %s", path.Join(d.path(), d.Image))
	}
	return tree, nil
}

// PromptTree implements volume.Prompt, for directories on local filesystems that are held to no size. All that Prepare
// looks at is that such a directory is there, which opening it finds out as well; and who may use it is checked here
// again.
func (s *Source) PromptTree(r volume.Request) (*mount.Tree, volume.Prepared, error) {
	none := volume.Prepared{}
	p, err := s.locate(&r)
	if err != nil {
		return nil, none, err
	}
	if err := volume.CheckSubPath(r.SubPath); err != nil {
		return nil, none, err
	}
	d := p.details()
	if d.Backing != BackingDirectory || r.SizeLimitBytes != 0 {
		return nil, none, nil
	}
	hangs, err := s.mayHang(d)
	if err == nil && !hangs && r.SubPath != "" {
		hangs, err = s.mayHang(details{Prefix: d.Prefix, Rel: path.Join(d.Rel, r.SubPath)})
	}
	if err != nil || hangs {
		return nil, none, lift(err, "source %s", r.Source)
	}
	record, err := json.Marshal(d)
	if err != nil {
		return nil, none, fmt.Errorf("record source %s: %w", r.Source, err)
	}
	tree, err := s.localTree(d, r.SubPath)
	if err != nil {
		return nil, none, lift(err, "mount %s", d.path())
	}
	return tree, volume.Prepared{Key: p.key(&r), Type: v1alpha1.VolumeTypeLocal, Path: v1alpha1.VolumePathLocal,
		Limit: v1alpha1.LimitNone, Details: record}, nil
}

// Release implements volume.Source.
func (s *Source) Release(ctx context.Context, p volume.Prepared) error {
	if len(p.Details) == 0 {
		return nil // a prepare without a result left nothing (see Prepare)
	}
	d, err := parseDetails(p)
	if err != nil {
		return err
	}
	switch {
	case d.Backing == BackingImage:
		err = s.releaseImage(ctx, d)
	case p.Limit == v1alpha1.LimitQuota:
		err = s.releaseQuota(d, p.Key)
	}
	if err != nil {
		return lift(err, "release %s", path.Join(d.path(), d.Image))
	}
	return nil
}

// Sweep implements volume.Source. It removes images that a killed process was making.
func (s *Source) Sweep(ctx context.Context, _ []volume.Prepared) error {
	var errs []error
	swept := map[string]bool{}
	for i := range s.roots {
		r := &s.roots[i]
		prefix := "/" + path.Join(r.components[:r.static]...)
		if r.Backing != BackingImage || swept[prefix] {
			continue
		}
		swept[prefix] = true
		if err := s.sweepPool(ctx, prefix); err != nil {
			errs = append(errs, lift(err, "sweep %s", prefix))
		}
	}
	return errors.Join(errs...)
}

// lift says what was done when a call of a lower package failed. It keeps the kind and the reason, and carries the
// figures of capacity's errors over to where fault finds them.
func lift(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	what := fmt.Sprintf(format, args...)
	var e *capacity.Error
	if !errors.As(err, &e) || len(e.Facts()) == 0 {
		return fmt.Errorf("%s: %w", what, err)
	}
	lifted := fault.New(e.Kind(), fault.Reason(e.Reason()), "%s: %w", what, err)
	for k, v := range e.Facts() {
		lifted = lifted.With(k, v)
	}
	return lifted
}
