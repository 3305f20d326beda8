package csi

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// mountDir is where a volume is published in its folder.
const mountDir = "mount"

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
