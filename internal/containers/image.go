package containers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Image is an image in the containerd namespace.
type Image struct {
	Name      string
	Digest    string
	CreatedAt time.Time
	// SizeBytes is the size of its content as it was imported or pulled; 0 if it cannot be told.
	SizeBytes int64
}

// ImportOptions are the options of ImportImage.
type ImportOptions struct {
	// Name is a further name for the image; needed if the archive gives none.
	Name string
}

// imageCache keeps what is read from an image's content, which its digest fixes.
type imageCache struct {
	mu       sync.Mutex // guards byDigest
	byDigest map[digest.Digest]imageInfo
}

type imageInfo struct {
	parent string // the snapshot of the image's top layer
	config ocispec.ImageConfig
}

// ImportImage loads the images of a docker-archive or OCI layout tar, and unpacks them.
func (r *Runtime) ImportImage(ctx context.Context, archive io.Reader, opts ImportOptions) ([]Image, error) {
	ctx = r.context(ctx)
	var importOpts []containerd.ImportOpt
	if opts.Name != "" {
		name, err := normalise(opts.Name)
		if err != nil {
			return nil, err
		}
		importOpts = append(importOpts, containerd.WithIndexName(name))
	}
	imported, err := r.client.Import(ctx, archive, importOpts...)
	if isBroken(err) {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage, "the image archive cannot be read, or is cut off: give one as docker save or an OCI tool writes it: %w", err)
	}
	if err != nil {
		return nil, errorf(err, "import the image archive")
	}
	if len(imported) == 0 {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage, "import: the archive names no image: give a name")
	}
	var found []Image
	for _, image := range imported {
		if err := r.unpack(ctx, image); err != nil {
			return nil, err
		}
		found = append(found, r.describe(ctx, image))
	}
	return found, nil
}

// isBroken tells that an import failed by the archive: what containerd or a context refuse has a kind, and what the parser
// of archives says has none.
func isBroken(err error) bool {
	return err != nil && errdefs.Resolve(err) == errdefs.ErrUnknown && !errors.Is(err, errdefs.ErrUnknown)
}

// ListImages lists the images.
func (r *Runtime) ListImages(ctx context.Context) ([]Image, error) {
	list, err := r.client.ImageService().List(r.context(ctx))
	if err != nil {
		return nil, errorf(err, "list the images")
	}
	var found []Image
	for _, image := range list {
		found = append(found, r.describe(ctx, image))
	}
	slices.SortFunc(found, func(a, b Image) int { return strings.Compare(a.Name, b.Name) })
	return found, nil
}

// PullImage pulls an image from its registry, and unpacks it.
func (r *Runtime) PullImage(ctx context.Context, ref string) (Image, error) {
	name, err := normalise(ref)
	if err != nil {
		return Image{}, err
	}
	options := []containerd.RemoteOpt{containerd.WithPullUnpack, containerd.WithPullSnapshotter(r.config.Snapshotter)}
	if dir := r.config.RegistryConfig; dir != "" {
		hosts := config.ConfigureHosts(ctx, config.HostOptions{HostDir: config.HostDirFromRoot(dir)})
		options = append(options, containerd.WithResolver(docker.NewResolver(docker.ResolverOptions{Hosts: hosts})))
	}
	image, err := r.client.Pull(r.context(ctx), name, options...)
	switch {
	case errdefs.IsNotFound(err):
		return Image{}, fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "pull image %s: its registry does not have it: %w", name, err)
	case ctx.Err() != nil:
		return Image{}, errorf(err, "pull image %s", name)
	case err != nil: // the registry is away, or wants to know who asks: it may be otherwise the next time
		return Image{}, fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "pull image %s: %w", name, err)
	}
	return r.describe(ctx, image.Metadata()), nil
}

func (r *Runtime) describe(ctx context.Context, image images.Image) Image {
	// For this machine's platform only: content of others is usually not there. Without it the size is not told.
	size, err := image.Size(r.context(ctx), r.client.ContentStore(), platforms.Default())
	if err != nil {
		size = 0
	}
	return Image{Name: image.Name, Digest: image.Target.Digest.String(), CreatedAt: image.CreatedAt, SizeBytes: size}
}

func normalise(ref string) (string, error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return "", fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage, "image %q is no image reference: %w", ref, err)
	}
	return named.String(), nil
}

// image finds an image, pulling it if it is missing and that is allowed.
func (r *Runtime) image(ctx context.Context, ref string) (images.Image, imageInfo, error) {
	name, err := normalise(ref)
	if err != nil {
		return images.Image{}, imageInfo{}, err
	}
	ctx = r.context(ctx)
	image, err := r.client.ImageService().Get(ctx, name)
	if errdefs.IsNotFound(err) && r.config.AllowPull {
		if _, err := r.PullImage(ctx, ref); err != nil {
			return images.Image{}, imageInfo{}, err
		}
		image, err = r.client.ImageService().Get(ctx, name)
	}
	if errdefs.IsNotFound(err) {
		return images.Image{}, imageInfo{}, fault.New(errdefs.ErrNotFound, fault.ImageNotFound,
			"image %s is not on this node, and pulling is off: load it with `fluxctl image import`, or let the operator set containerd.allowPull", name)
	}
	if err != nil {
		return images.Image{}, imageInfo{}, errorf(err, "find image %s", name)
	}
	info, err := r.imageInfo(ctx, image)
	return image, info, err
}

func (r *Runtime) imageInfo(ctx context.Context, image images.Image) (imageInfo, error) {
	r.images.mu.Lock()
	info, ok := r.images.byDigest[image.Target.Digest]
	r.images.mu.Unlock()
	if ok {
		return info, nil
	}
	handle := containerd.NewImage(r.client, image)
	config, err := handle.Config(ctx)
	if err != nil {
		return info, errorf(err, "read image %s", image.Name)
	}
	blob, err := content.ReadBlob(ctx, handle.ContentStore(), config)
	if err != nil {
		return info, errorf(err, "read the configuration of image %s", image.Name)
	}
	var parsed ocispec.Image
	if err := json.Unmarshal(blob, &parsed); err != nil {
		return info, fault.New(errdefs.ErrInvalidArgument, fault.InvalidImage, "the configuration of image %s: %w", image.Name, err)
	}
	info = imageInfo{parent: identity.ChainID(parsed.RootFS.DiffIDs).String(), config: parsed.Config}

	r.images.mu.Lock()
	defer r.images.mu.Unlock()
	if r.images.byDigest == nil {
		r.images.byDigest = map[digest.Digest]imageInfo{}
	}
	r.images.byDigest[image.Target.Digest] = info
	return info, nil
}

func (r *Runtime) unpack(ctx context.Context, image images.Image) error {
	if err := containerd.NewImage(r.client, image).Unpack(ctx, r.config.Snapshotter); err != nil {
		return fmt.Errorf("unpack image %s with snapshotter %s: %w", image.Name, r.config.Snapshotter, err)
	}
	return nil
}
