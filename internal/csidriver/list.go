package csidriver

import (
	"cmp"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
)

// Volume is a volume of the pool.
type Volume struct {
	// ID is its handle.
	ID, Name, TenantID string
	Size               int64
	Filesystem         capacity.Filesystem
	Preallocated       bool
}

// IDs are the handles of the volumes in the pool, sorted.
func (d *Driver) IDs() ([]string, error) {
	entries, err := fs.ReadDir(d.records.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("list the pool: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), recordSuffix); ok && validID.MatchString(id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Volumes lists the volumes by name. One whose record is damaged has no size.
func (d *Driver) Volumes() ([]Volume, error) {
	ids, err := d.IDs()
	if err != nil {
		return nil, err
	}
	var all []Volume
	for _, id := range ids {
		r, err := d.load(id)
		if errdefs.IsNotFound(err) {
			continue // deleted meanwhile
		}
		if errdefs.IsDataLoss(err) {
			r, err = record{Name: id}, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, r.volume(id))
	}
	slices.SortFunc(all, func(a, b Volume) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

// Volume finds a volume by its name. The error of one that is not there is ErrNotFound; of one whose record is damaged it is
// ErrDataLoss, and all there is of it is its ID.
func (d *Driver) Volume(name string) (Volume, error) {
	id := idOf(name)
	r, err := d.load(id)
	return r.volume(id), err
}

func (r record) volume(id string) Volume {
	return Volume{ID: id, Name: r.Name, TenantID: r.TenantID, Size: r.Size, Filesystem: r.Filesystem, Preallocated: r.Preallocated}
}
