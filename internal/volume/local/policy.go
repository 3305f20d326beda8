package local

import (
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// place is where a source lies.
type place struct {
	root *root
	// owner is the tenant that owns it; empty for nobody.
	owner string
	// prefix is the root's static prefix, rel what follows of the source, "." for nothing.
	prefix, rel string
}

// find is the place of a source by the longest root that matches it, or nil.
func (s *Source) find(source string) *place {
	parts := split(source)
	for i := range s.roots {
		r := &s.roots[i]
		if !r.matches(parts) {
			continue
		}
		p := &place{root: r, prefix: "/" + path.Join(r.components[:r.static]...), rel: path.Join(parts[r.static:]...)}
		if p.rel == "" {
			p.rel = "."
		}
		if r.tenant >= 0 {
			p.owner = parts[r.tenant]
		}
		return p
	}
	return nil
}

// locate finds the place of a request's source and checks that the sandbox may use it so.
func (s *Source) locate(r *volume.Request) (*place, error) {
	if r.Type != v1alpha1.VolumeTypeLocal {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidVolumeType, "a volume of type %q is not local", r.Type)
	}
	if !path.IsAbs(r.Source) || path.Clean(r.Source) != r.Source || strings.ContainsRune(r.Source, 0) {
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource,
			"source %q is not valid: a local source is a clean absolute path", r.Source)
	}
	if r.PersistentVolume != "" {
		return s.vouched(r)
	}
	p := s.find(r.Source)
	if p == nil {
		return nil, fault.New(errdefs.ErrPermissionDenied, fault.SourceDenied,
			"source %s is below none of this node's allowed roots: use a directory that the operator allowed", r.Source)
	}
	if err := p.checkAccess(r); err != nil {
		return nil, err
	}
	if p.root.Backing == BackingImage {
		return p, p.checkName(r.Source)
	}
	return p, nil
}

// key is the identity of the source's volume on the node.
func (p *place) key(r *volume.Request) string {
	if r.PersistentVolume != "" {
		return volume.PersistentPathKey(r.Source)
	}
	return volume.Key(v1alpha1.VolumeTypeLocal, string(p.root.Backing), r.Source)
}

func (p *place) checkAccess(r *volume.Request) error {
	foreign := p.owner != r.TenantID
	if foreign && !p.root.Shared {
		if p.owner == "" {
			return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
				"source %s belongs to no tenant and is not shared, and the sandbox is of tenant %q: the operator may set shared on its root", r.Source, r.TenantID)
		}
		return fault.New(errdefs.ErrPermissionDenied, fault.TenantMismatch,
			"source %s belongs to tenant %q, and the sandbox is of tenant %q: a sandbox uses its own tenant's data only", r.Source, p.owner, r.TenantID)
	}
	mode := v1alpha1.VolumeModeReadWrite
	if r.ReadOnly {
		mode = v1alpha1.VolumeModeReadOnly
	}
	switch {
	case foreign && !r.ReadOnly:
		return fault.New(errdefs.ErrPermissionDenied, fault.ModeDenied,
			"source %s is shared with tenant %q read-only: ask for mode ro", r.Source, r.TenantID)
	case !slices.Contains(p.root.Modes, mode):
		return fault.New(errdefs.ErrPermissionDenied, fault.ModeDenied,
			"source %s does not allow mode %s: its root allows %v", r.Source, mode, p.root.Modes)
	}
	return nil
}

// checkName checks that an image's source is a name directly below the root.
func (p *place) checkName(source string) error {
	name := path.Base(source)
	if len(split(source)) != len(p.root.components)+1 {
		return fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource,
			"source %s names no volume: below %s each volume is one name", source, p.root.Path)
	}
	if err := capacity.CheckImageName(name); err != nil {
		return lift(err, "source %s", source)
	}
	return nil
}
