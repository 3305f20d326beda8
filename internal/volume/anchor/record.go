package anchor

import (
	"encoding/json"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// guardDir is where the guard is mounted in a volume's folder.
const guardDir = "guard"

// record is what a volume's folder says of it.
type record struct {
	PersistentVolume string `json:"persistentVolume"`
	Plugin           string `json:"plugin"`
	// Pod is the UID of the Pod for which it is published, Path where.
	Pod  string `json:"pod"`
	Path string `json:"path,omitempty"`
	// Mount is what was found there; nil before.
	Mount  *mount.Identity `json:"mount,omitempty"`
	FSType string          `json:"fsType,omitempty"`
	// Staged is the folder that is guarded; empty where there is nothing to guard.
	Staged string `json:"staged,omitempty"`
	// Bytes is the size of the filesystem if it is the volume's own, else zero.
	Bytes int64 `json:"bytes,omitempty"`
}

func parseDetails(p volume.Prepared) (record, error) {
	var r record
	if err := json.Unmarshal(p.Details, &r); err != nil || r.PersistentVolume == "" || r.Plugin == "" {
		return r, fault.New(errdefs.ErrInternal, fault.Internal, "the record of volume %s is damaged: %q", p.Key, p.Details)
	}
	return r, nil
}

// isOwn says whether a mount shows a whole filesystem.
func isOwn(id mount.Identity) bool { return id.Root == "/" }
