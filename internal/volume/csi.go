package volume

import (
	"log/slog"
	"reflect"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// CSIVolume is a volume of a CSI driver, as its PersistentVolume describes it.
type CSIVolume struct {
	Driver string `json:"driver"`
	// Handle is the driver's name of the volume.
	Handle     string            `json:"handle"`
	Attributes map[string]string `json:"attributes,omitempty"`
	// FSType is empty for the driver's default.
	FSType       string   `json:"fsType,omitempty"`
	MountOptions []string `json:"mountOptions,omitempty"`
	// AccessMode is one of Kubernetes' words: ReadWriteOnce, ReadWriteMany, ReadOnlyMany.
	AccessMode string `json:"accessMode"`
	// ReadOnly says that the volume may be published read-only only.
	ReadOnly bool `json:"readOnly,omitempty"`
	// Secrets are for the driver alone. NeedsSecrets says that there are some, also where they are not known any more: a
	// record does not have them.
	Secrets      Secrets `json:"-"`
	NeedsSecrets bool    `json:"needsSecrets,omitempty"`
}

// CSIKey is the key of a volume of a CSI driver.
func CSIKey(driver, handle string) string {
	return Key(v1alpha1.VolumeTypePV, "csi", driver, handle)
}

// Secrets are values that are shown nowhere, however they are printed.
type Secrets map[string]string

const redacted = "[secret]"

// String implements fmt.Stringer.
func (Secrets) String() string { return redacted }

// GoString implements fmt.GoStringer.
func (Secrets) GoString() string { return redacted }

// LogValue implements slog.LogValuer.
func (Secrets) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalJSON implements json.Marshaler.
func (Secrets) MarshalJSON() ([]byte, error) { return []byte("null"), nil }

// Equal says whether two requests ask for the same.
func (r Request) Equal(other Request) bool { return reflect.DeepEqual(r, other) }
