package csi

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

const (
	recordFile = "volume.json"
	mountDir   = "mount"
)

// record is what a volume's folder says of it.
type record struct {
	Driver string `json:"driver"`
	// Socket is where the driver was called, for when it is not configured any more.
	Socket string `json:"socket"`
	Handle string `json:"handle"`
	// Terms tell what else the driver was told apart from other such things.
	Terms string `json:"terms"`
	// Mount is what was verified to be published; nil before.
	Mount  *mount.Identity `json:"mount,omitempty"`
	FSType string          `json:"fsType,omitempty"`
	// Bytes is the size of the filesystem if it is the volume's own, else zero.
	Bytes int64 `json:"bytes,omitempty"`
}

// details is the record in Prepared.Details.
type details struct {
	record
	// Path is where it is published.
	Path string `json:"path"`
}

func parseDetails(p volume.Prepared) (details, error) {
	var d details
	if err := json.Unmarshal(p.Details, &d); err != nil || d.Driver == "" || d.Handle == "" || d.Path == "" {
		return d, fault.New(errdefs.ErrInternal, fault.Internal, "the record of volume %s is damaged: %q", p.Key, p.Details)
	}
	return d, nil
}

// termsOf are a volume's terms. Secrets may change while it is published. A field that is added to CSIVolume must be left
// out of its JSON when it is empty, or what is published when the agent is updated has other terms.
func termsOf(v *volume.CSIVolume) string {
	terms := *v
	terms.Secrets, terms.NeedsSecrets = nil, false
	// Maps are written in the order of their keys.
	data, err := json.Marshal(terms)
	if err != nil {
		panic(err) // strings only
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:16])
}

// load reads the record in a folder; there may be none.
func load(dir string) (record, bool, error) {
	var r record
	data, err := os.ReadFile(filepath.Join(dir, recordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return r, false, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		return r, false, fault.New(errdefs.ErrInternal, fault.Internal, "read the record of a published volume: %w", err)
	}
	return r, true, nil
}

// save writes the record in a folder, which is made if it is not there. A process that is killed leaves the old one or the new
// one; nothing has to outlive the boot.
func save(dir string, r record) error {
	data, err := json.Marshal(r)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		name := filepath.Join(dir, recordFile)
		if err = os.WriteFile(name+".tmp", data, 0o600); err == nil {
			err = os.Rename(name+".tmp", name)
		}
	}
	if err != nil {
		return fault.New(errdefs.ErrInternal, fault.Internal, "record a volume that is published: %w", err)
	}
	return nil
}

// forget removes a folder in which nothing is mounted any more. Only what is ours is removed: what somebody wrote to the
// place while it was not mounted stays, and is an error.
func forget(dir string) error {
	for _, remove := range []struct {
		name string
		do   func(string) error
	}{{mountDir, unix.Rmdir}, {recordFile + ".tmp", unix.Unlink}, {recordFile, unix.Unlink}, {"", unix.Rmdir}} {
		name := filepath.Join(dir, remove.name)
		if err := remove.do(name); err != nil && !errors.Is(err, unix.ENOENT) {
			return fault.New(errdefs.ErrInternal, fault.Internal, "remove %s of a volume that is not published any more: %w", name, err)
		}
	}
	return nil
}

// list are the names of the folders of volumes.
func list(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the published volumes: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
