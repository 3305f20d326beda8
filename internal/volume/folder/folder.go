// Package folder keeps what a volume.Source records of its volumes: each has a folder of its own, named by its key, with one
// record in it and the places where something of the volume is mounted. The folders lie in the agent's run folder, as they
// end with the boot, like mounts.
package folder

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// RecordFile is the name of the record in a volume's folder.
const RecordFile = "volume.json"

// Load reads the record in a folder; there may be none.
func Load[T any](dir string) (record T, known bool, err error) {
	data, err := os.ReadFile(filepath.Join(dir, RecordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return record, false, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &record)
	}
	if err != nil {
		return record, false, fault.New(errdefs.ErrInternal, fault.Internal, "read the record of a volume: %w", err)
	}
	return record, true, nil
}

// Save writes the record in a folder, which is made if it is not there. A process that is killed leaves the old one or the new
// one; nothing has to outlive the boot.
func Save[T any](dir string, record T) error {
	data, err := json.Marshal(record)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		name := filepath.Join(dir, RecordFile)
		if err = os.WriteFile(name+".tmp", data, 0o600); err == nil {
			err = os.Rename(name+".tmp", name)
		}
	}
	if err != nil {
		return fault.New(errdefs.ErrInternal, fault.Internal, "record a volume: %w", err)
	}
	return nil
}

// Forget removes a folder with the places that were made in it, at which nothing is mounted any more. Only what is ours is
// removed: what somebody wrote to a place while nothing was mounted there stays, and is an error.
func Forget(dir string, places ...string) error {
	type removal struct {
		name string
		do   func(string) error
	}
	var all []removal
	for _, place := range places {
		all = append(all, removal{place, unix.Rmdir})
	}
	all = append(all, removal{RecordFile + ".tmp", unix.Unlink}, removal{RecordFile, unix.Unlink}, removal{"", unix.Rmdir})
	for _, r := range all {
		name := filepath.Join(dir, r.name)
		if err := r.do(name); err != nil && !errors.Is(err, unix.ENOENT) {
			return fault.New(errdefs.ErrInternal, fault.Internal, "remove %s of a volume that is not mounted any more: %w", name, err)
		}
	}
	return nil
}

// List are the names of the folders of volumes.
func List(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the volumes' folders: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Make makes the folder of all volumes, and returns its real path, which is the one that the kernel shows.
func Make(dir string) (string, error) {
	err := os.MkdirAll(dir, 0o711)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	if err != nil {
		return "", fmt.Errorf("make the folder of volumes: %w", err)
	}
	return dir, nil
}
