package csidriver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

const (
	recordSuffix = ".json"
	tempSuffix   = ".tmp"
)

// record is what makes an image a volume.
type record struct {
	Name         string              `json:"name"`
	Size         int64               `json:"size"`
	Filesystem   capacity.Filesystem `json:"filesystem"`
	Preallocated bool                `json:"preallocated,omitempty"`
	// TenantID is whose it is, where the driver is told (ParameterTenant).
	TenantID string `json:"tenantId,omitempty"`
}

// validID is what can be a volume's id, and so a file name: no path, and CSI's 128 bytes at most.
var validID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// idOf is the id of the volume of that name: the name itself where it can be, so that an operator finds the file. The
// record has the name, so a name that looks like another's hash is told from it.
func idOf(name string) string {
	if validID.MatchString(name) {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return "name-" + hex.EncodeToString(sum[:])
}

// load reads a volume's record. An id that no volume can have is one that does not exist.
func (d *Driver) load(id string) (record, error) {
	notFound := fault.New(errdefs.ErrNotFound, fault.VolumeNotFound, "there is no volume %q on node %s", id, d.config.Node)
	if !validID.MatchString(id) {
		return record{}, notFound
	}
	data, err := d.records.ReadFile(id + recordSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, notFound
	}
	if err != nil {
		return record{}, fmt.Errorf("read the record of the volume %s: %w", id, err)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil || idOf(r.Name) != id || r.Size <= 0 || r.Filesystem.MinSize() == 0 {
		return record{}, damaged(id, "its record %s%s says %.200q", id, recordSuffix, data)
	}
	return r, nil
}

// damaged says what is wrong with a volume. It is tried again: an operator may put it right.
func damaged(id, format string, args ...any) error {
	return fault.New(errdefs.ErrDataLoss, fault.VolumeGone, "the volume %s is damaged: %w", id, fmt.Errorf(format, args...))
}

// save writes a volume's record: once it returns, the volume is there after any crash.
func (d *Driver) save(id string, r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp := id + recordSuffix + tempSuffix
	err = d.writeSynced(temp, data)
	if err == nil {
		err = d.records.Rename(temp, id+recordSuffix)
	}
	if err == nil {
		err = d.pool.Dir.Sync()
	}
	if err != nil {
		return fmt.Errorf("write the record of the volume %s: %w", id, err)
	}
	return nil
}

func (d *Driver) writeSynced(name string, data []byte) error {
	f, err := d.records.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// forget removes a volume's record, durably.
func (d *Driver) forget(id string) error {
	err := d.records.Remove(id + recordSuffix)
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = d.pool.Dir.Sync()
	}
	if err != nil {
		return fmt.Errorf("remove the record of the volume %s: %w", id, err)
	}
	return nil
}

// Space is what the pool's filesystem has free, how much of that its volumes were promised and do not use yet, and how much
// can be promised to new ones; in bytes.
func (d *Driver) Space() (free, promised, available int64, err error) {
	if free, promised, err = d.pool.Space(); err != nil {
		return 0, 0, 0, err
	}
	return free, promised, d.pool.AvailableOf(free, promised), nil
}

// checkOwn refuses a folder that was never a pool and has disk images: repair would take them for what a torn create left.
func (d *Driver) checkOwn() error {
	if _, err := d.records.Lstat(LockFile); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	names, err := d.unrecorded()
	if err != nil || len(names) == 0 {
		return err
	}
	return fault.New(errdefs.ErrFailedPrecondition, fault.InvalidRequest,
		"the folder %s is no pool yet (it has no file %q), and has disk images that are not the driver's, such as %s%s: they would be deleted; use a folder of its own",
		d.config.Pool, LockFile, names[0], capacity.ImageSuffix)
}

// unrecorded are the ids of the images that have no record.
func (d *Driver) unrecorded() ([]string, error) {
	entries, err := fs.ReadDir(d.records.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("list the pool: %w", err)
	}
	var ids []string
	for _, e := range entries {
		id, image := strings.CutSuffix(e.Name(), capacity.ImageSuffix)
		if !image || !validID.MatchString(id) || !e.Type().IsRegular() {
			continue
		}
		if _, err := d.records.Lstat(id + recordSuffix); errors.Is(err, fs.ErrNotExist) {
			ids = append(ids, id)
		} else if err != nil {
			return nil, fmt.Errorf("look for the record of the volume %s: %w", id, err)
		}
	}
	return ids, nil
}

// repair removes what torn creates and deletes left. An orphan that is still mounted cannot be: it stays for the next
// start, or for a create of its name. So does whatever else is wrong with one volume: the others are served.
func (d *Driver) repair(ctx context.Context) error {
	if _, err := d.pool.Sweep(ctx); err != nil {
		return err
	}
	entries, err := fs.ReadDir(d.records.FS(), ".")
	if err != nil {
		return fmt.Errorf("list the pool: %w", err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), recordSuffix+tempSuffix) && e.Type().IsRegular() {
			if err := d.records.Remove(e.Name()); err != nil {
				return fmt.Errorf("repair the pool: %w", err)
			}
		}
	}
	ids, err := d.unrecorded()
	if err != nil {
		return fmt.Errorf("repair the pool: %w", err)
	}
	for _, id := range ids {
		if err := d.pool.Remove(ctx, d.pool.Dir, id); err != nil && !errdefs.IsUnavailable(err) {
			return fmt.Errorf("repair the pool: %w", err)
		}
	}
	return nil
}
