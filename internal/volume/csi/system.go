package csi

import (
	"context"

	csiv1 "github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/folder"
)

// system is what a Source does to the machine and asks of drivers. It is a seam for tests, which let each call fail.
type system interface {
	Load(dir string) (record, bool, error)
	Save(dir string, r record) error
	Forget(dir string) error
	List(dir string) ([]string, error)
	// At is what is mounted at a path, found without touching it.
	At(path string) (mount.Info, bool, error)
	// HeldElsewhere are the other mount namespaces that have what is mounted.
	HeldElsewhere(ctx context.Context, m mount.Match, at mount.Info) ([]mount.NamespaceRef, error)
	// Clone is a tree of a directory of what is mounted at a path, Size the size of its filesystem. helper has another
	// process touch it.
	Clone(ctx context.Context, path string, id mount.Identity, subPath string, helper bool) (*mount.Tree, error)
	Size(ctx context.Context, tree *mount.Tree, helper bool) (int64, error)

	Ask(ctx context.Context, d Driver) (abilities, error)
	Publish(ctx context.Context, d Driver, r *csiv1.NodePublishVolumeRequest) error
	Unpublish(ctx context.Context, d Driver, r *csiv1.NodeUnpublishVolumeRequest) error
}

// kernel is the real system.
type kernel struct{}

func (kernel) Load(dir string) (record, bool, error)    { return folder.Load[record](dir) }
func (kernel) Save(dir string, r record) error          { return folder.Save(dir, r) }
func (kernel) Forget(dir string) error                  { return folder.Forget(dir, mountDir) }
func (kernel) List(dir string) ([]string, error)        { return folder.List(dir) }
func (kernel) At(path string) (mount.Info, bool, error) { return mount.At(path) }

func (kernel) HeldElsewhere(ctx context.Context, m mount.Match, at mount.Info) ([]mount.NamespaceRef, error) {
	return mount.HeldElsewhere(ctx, m, at)
}

func (kernel) Clone(ctx context.Context, path string, id mount.Identity, subPath string, helper bool) (*mount.Tree, error) {
	if helper {
		return mount.CloneMountedInHelper(ctx, path, id, subPath)
	}
	return mount.CloneMounted(path, id, subPath)
}

func (kernel) Size(ctx context.Context, tree *mount.Tree, helper bool) (int64, error) {
	var usage mount.Usage
	var err error
	if helper {
		usage, err = mount.StatfsInHelper(ctx, tree)
	} else {
		usage, err = tree.Statfs()
	}
	return int64(usage.TotalBytes), err
}

func (kernel) Ask(ctx context.Context, d Driver) (abilities, error) { return d.ask(ctx) }

func (kernel) Publish(ctx context.Context, d Driver, r *csiv1.NodePublishVolumeRequest) error {
	return d.publish(ctx, r)
}

func (kernel) Unpublish(ctx context.Context, d Driver, r *csiv1.NodeUnpublishVolumeRequest) error {
	return d.unpublish(ctx, r)
}
