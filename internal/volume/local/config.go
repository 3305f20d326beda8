package local

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// TenantComponent is the component of a root's path that stands for the tenant.
const TenantComponent = "{tenantId}"

// Backing says what the sources below a root are.
type Backing string

// The backings; see the package comment.
const (
	BackingDirectory Backing = "directory"
	BackingImage     Backing = "image"
)

// Root is a place on the node whose content may become volumes.
type Root struct {
	// Path is absolute and clean. One whole component may be {tenantId}. What stands before it must exist and lead
	// through no symlink; it is never made.
	Path string `json:"path"`
	// Modes are the allowed modes; ro and rw when empty.
	Modes []v1alpha1.VolumeMode `json:"modes,omitempty"`
	// Shared lets tenants use, read-only, what another tenant or nobody owns.
	Shared bool `json:"shared,omitempty"`
	// Backing is directory or image; directory when empty.
	Backing Backing `json:"backing,omitempty"`
	// Filesystem of new images is ext4 or xfs; ext4 when empty.
	Filesystem capacity.Filesystem `json:"filesystem,omitempty"`
	// Preallocate takes the space of a new image from the disk at once.
	Preallocate bool `json:"preallocate,omitempty"`
	// Overcommit is by what factor sparse images may promise more space than is free; 1 when zero.
	Overcommit float64 `json:"overcommit,omitempty"`
}

// root is a Root that was checked and taken apart.
type root struct {
	Root
	components []string
	// tenant is the index of {tenantId} in components, or -1.
	tenant int
	// static is how many components stand before {tenantId}: all, where there is none.
	static int
}

// compile checks the roots and brings them into the order in which they are tried.
func compile(roots []Root) ([]root, error) {
	compiled := make([]root, 0, len(roots))
	for _, r := range roots {
		c, err := r.compile()
		if err != nil {
			return nil, fmt.Errorf("local root %q: %w", r.Path, err)
		}
		for _, other := range compiled {
			if err := conflict(c, other); err != nil {
				return nil, fmt.Errorf("local roots %q and %q: %w", other.Path, c.Path, err)
			}
		}
		compiled = append(compiled, c)
	}
	slices.SortStableFunc(compiled, root.compare)
	return compiled, nil
}

func (r Root) compile() (root, error) {
	c := root{Root: r, tenant: -1}
	switch {
	case !path.IsAbs(r.Path), path.Clean(r.Path) != r.Path, strings.ContainsRune(r.Path, 0):
		return c, fmt.Errorf(`path must be absolute and clean: no "." or "..", no double or final slash`)
	case r.Path == "/":
		return c, fmt.Errorf("the whole node cannot be allowed: name a directory")
	}
	c.components = split(r.Path)
	c.static = len(c.components)
	for i, part := range c.components {
		switch {
		case part == TenantComponent && c.tenant >= 0:
			return c, fmt.Errorf("%s may stand once only", TenantComponent)
		case part == TenantComponent:
			c.tenant, c.static = i, i
		case strings.ContainsAny(part, "{}"):
			return c, fmt.Errorf("%s must be a whole component, and no other braces are known", TenantComponent)
		}
	}
	if c.static == 0 {
		return c, fmt.Errorf("%s cannot be the first component: tenants would name directories of the node", TenantComponent)
	}
	if c.Backing == "" {
		c.Backing = BackingDirectory
	}
	if c.Backing != BackingDirectory && c.Backing != BackingImage {
		return c, fmt.Errorf("backing %q is not known: write directory or image", c.Backing)
	}
	if len(c.Modes) == 0 {
		c.Modes = []v1alpha1.VolumeMode{v1alpha1.VolumeModeReadOnly, v1alpha1.VolumeModeReadWrite}
	}
	for _, m := range c.Modes {
		if m != v1alpha1.VolumeModeReadOnly && m != v1alpha1.VolumeModeReadWrite {
			return c, fmt.Errorf("mode %q is not known: write ro or rw", m)
		}
	}
	return c, c.checkImage()
}

// checkImage checks the fields that images alone have.
func (c *root) checkImage() error {
	if c.Backing == BackingDirectory {
		if c.Filesystem != "" || c.Preallocate || c.Overcommit != 0 {
			return fmt.Errorf("filesystem, preallocate and overcommit are for backing: image only")
		}
		return nil
	}
	if c.Filesystem == "" {
		c.Filesystem = capacity.Ext4
	}
	if c.Filesystem.MinSize() == 0 {
		return fmt.Errorf("filesystem %q is not known: write %s or %s", c.Filesystem, capacity.Ext4, capacity.XFS)
	}
	if c.Overcommit < 0 || c.Preallocate && c.Overcommit > 1 {
		return fmt.Errorf("overcommit must not be negative, and preallocated images cannot be overcommitted")
	}
	return nil
}

func split(p string) []string { return strings.Split(strings.TrimPrefix(p, "/"), "/") }

// compare sorts roots by the order in which they are tried: more components first, then the one whose {tenantId}
// stands later or not at all.
func (c root) compare(other root) int {
	return cmp.Or(
		cmp.Compare(len(other.components), len(c.components)),
		cmp.Compare(other.static, c.static),
	)
}

// matches says whether a source, by its components, lies at or below the root for some tenant.
func (c root) matches(source []string) bool {
	if len(source) < len(c.components) {
		return false
	}
	for i, part := range c.components {
		if i == c.tenant && volume.ValidateTenant(source[i]) != nil || i != c.tenant && part != source[i] {
			return false
		}
	}
	return true
}

// conflict refuses two roots that cannot stand side by side: the same path twice; or a pool of images that overlaps
// with another root, for a sandbox could then write to the image files themselves.
func conflict(a, b root) error {
	if a.Path == b.Path {
		return fmt.Errorf("the path stands twice")
	}
	for _, pair := range [][2]root{{a, b}, {b, a}} {
		image, other := pair[0], pair[1]
		if image.Backing != BackingImage {
			continue
		}
		// Images are counted and swept in all of the static prefix, whoever's they are.
		pool, reach := image.components[:image.static], other.components
		if other.Backing == BackingImage {
			pool = image.components
		}
		if overlap(pool, reach) {
			return fmt.Errorf("a root with backing: image must not contain, or lie in, another root")
		}
	}
	return nil
}

// overlap says whether one of the two paths lies in the other, {tenantId} being any tenant.
func overlap(a, b []string) bool {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] && !standsFor(a[i], b[i]) && !standsFor(b[i], a[i]) {
			return false
		}
	}
	return true
}

// standsFor says whether a is {tenantId} and b could be a tenant.
func standsFor(a, b string) bool {
	return a == TenantComponent && volume.ValidateTenant(b) == nil
}
