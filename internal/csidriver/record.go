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
	"path/filepath"
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

func (d *Driver) path(id, suffix string) string { return filepath.Join(d.config.Pool, id+suffix) }

// load reads a volume's record. An id that no volume can have is one that does not exist.
func (d *Driver) load(id string) (record, error) {
	notFound := fault.New(errdefs.ErrNotFound, fault.VolumeNotFound, "there is no volume %q on node %s", id, d.config.Node)
	if !validID.MatchString(id) {
		return record{}, notFound
	}
	data, err := os.ReadFile(d.path(id, recordSuffix))
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, notFound
	}
	if err != nil {
		return record{}, fmt.Errorf("read the record of the volume %s: %w", id, err)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, fmt.Errorf("read the record of the volume %s: %w", id, err)
	}
	return r, nil
}

// save writes a volume's record: once it returns, the volume is there after any crash.
func (d *Driver) save(id string, r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp := d.path(id, recordSuffix+tempSuffix)
	err = writeSynced(temp, data)
	if err == nil {
		err = os.Rename(temp, d.path(id, recordSuffix))
	}
	if err == nil {
		err = d.pool.Dir.Sync()
	}
	if err != nil {
		return fmt.Errorf("write the record of the volume %s: %w", id, err)
	}
	return nil
}

func writeSynced(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
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
	err := os.Remove(d.path(id, recordSuffix))
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

// repair removes what torn creates and deletes left. An orphan that is still mounted cannot be: it stays for the next
// start, or for a create of its name.
func (d *Driver) repair(ctx context.Context) error {
	if _, err := d.pool.Sweep(ctx); err != nil {
		return err
	}
	entries, err := os.ReadDir(d.config.Pool)
	if err != nil {
		return fmt.Errorf("list the pool: %w", err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), recordSuffix+tempSuffix) {
			if err := os.Remove(filepath.Join(d.config.Pool, e.Name())); err != nil {
				return fmt.Errorf("repair the pool: %w", err)
			}
		}
		id, image := strings.CutSuffix(e.Name(), capacity.ImageSuffix)
		if !image || !validID.MatchString(id) {
			continue
		}
		_, err := d.load(id)
		if errdefs.IsNotFound(err) {
			err = d.pool.Remove(ctx, d.pool.Dir, id)
			if errdefs.IsUnavailable(err) {
				continue
			}
		}
		if err != nil {
			return fmt.Errorf("repair the pool: %w", err)
		}
	}
	return nil
}
