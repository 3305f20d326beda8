package local

import (
	"context"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// rootMode is the mode of a new volume's root directory (see the package comment).
const rootMode fs.FileMode = 0o777

// prepareImage finds the image or makes it, and completes the record. Nothing can fail once an image was made: a failed
// Prepare leaves none behind.
func (s *Source) prepareImage(ctx context.Context, r volume.Request, p *place, d *details, prepared *volume.Prepared) error {
	prepared.Limit = v1alpha1.LimitImage
	image, err := s.findImage(*d, r.SizeLimitBytes)
	if errdefs.IsNotFound(err) {
		d.Filesystem, prepared.CapacityBytes = p.root.Filesystem, r.SizeLimitBytes
		return s.makeImage(ctx, r, p, *d)
	}
	if err != nil {
		return err
	}
	defer image.Close()
	if d.Filesystem, err = s.sys.DetectFilesystem(image); err != nil {
		return err
	}
	prepared.CapacityBytes, err = s.sys.ImageSize(image)
	return err
}

// findImage opens an existing image that has the size, zero being any.
func (s *Source) findImage(d details, size int64) (*os.File, error) {
	dir, err := s.sys.OpenDir(d.Prefix, d.Rel)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	image, err := s.sys.OpenImage(dir, d.Image)
	if err != nil {
		return nil, err
	}
	if err := capacity.CheckSize(image, size); err != nil {
		image.Close()
		return nil, err
	}
	return image, nil
}

// makeImage makes the image of a volume that does not exist yet.
func (s *Source) makeImage(ctx context.Context, r volume.Request, p *place, d details) error {
	switch {
	case r.ReadOnly:
		return fault.New(errdefs.ErrNotFound, fault.SourceNotFound,
			"the volume %s does not exist, and is not made for a volume that could only be read: attach it with mode rw first", r.Source)
	case r.SizeLimitBytes == 0:
		return fault.New(errdefs.ErrFailedPrecondition, fault.SizeRequired,
			"the volume %s does not exist, and is made with sizeLimit as its size: set one", r.Source)
	}
	pool, err := s.sys.OpenDir(d.Prefix, ".")
	if err != nil {
		return err
	}
	defer pool.Close()
	dir, err := s.sys.MakeDirs(pool, d.Rel)
	if err != nil {
		return err
	}
	defer dir.Close()
	return s.sys.CreateImage(ctx, &capacity.Pool{Dir: pool, Overcommit: p.root.Overcommit}, dir, d.Image, capacity.Spec{
		Size: r.SizeLimitBytes, Filesystem: p.root.Filesystem, Preallocate: p.root.Preallocate, RootMode: rootMode,
	})
}

// imageTree mounts the image once more. The device stays for as long as any such mount does.
func (s *Source) imageTree(ctx context.Context, d details, subPath string) (*mount.Tree, error) {
	image, err := s.findImage(d, 0)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	device, err := s.sys.AttachLoop(ctx, image)
	if err != nil {
		return nil, err
	}
	defer device.Close()
	tree, err := s.sys.NewFilesystem(filesystem(d.Filesystem, device.Path))
	if err != nil || subPath == "" {
		return tree, err
	}
	defer tree.Close()
	return s.sys.Sub(tree, subPath)
}

func filesystem(t capacity.Filesystem, device string) mount.Filesystem {
	f := mount.Filesystem{Type: string(t), Source: device}
	if t == capacity.Ext4 {
		// An overcommitted pool that is full shows as I/O errors: stop before they do harm.
		f.Options = []mount.Option{{Key: "errors", Value: "remount-ro"}}
	}
	return f
}

// releaseImage waits until the kernel let go of the image. An image that is gone is not held by us.
func (s *Source) releaseImage(ctx context.Context, d details) error {
	image, err := s.findImage(d, 0)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer image.Close()
	return s.sys.WaitLoopGone(ctx, image)
}

// sweepPool removes the images below a static prefix that killed processes were making.
func (s *Source) sweepPool(ctx context.Context, prefix string) error {
	pool, err := s.sys.OpenDir(prefix, ".")
	if errdefs.IsNotFound(err) {
		return nil // nothing was ever made there
	}
	if err != nil {
		return err
	}
	defer pool.Close()
	return s.sys.SweepImages(ctx, &capacity.Pool{Dir: pool})
}
