package volume

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strconv"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// join makes one byte string of several strings, so that different lists never give the same.
func join(parts ...string) []byte {
	var b []byte
	for _, p := range parts {
		b = binary.AppendUvarint(b, uint64(len(p)))
		b = append(b, p...)
	}
	return b
}

// EntryHash identifies an entry among those that its sandbox has, or had, at the same target: 16 hexadecimal
// digits over all that cannot be changed in it. An entry with or without its defaults has the same hash. The
// tenant is no part of it, as an entry can only name its sandbox's own; the request id is, so that the same
// volume removed and added again is another entry.
func EntryHash(e *v1alpha1.DynamicVolume) string {
	d := *e
	Default(&d, d.TenantID)
	sum := sha256.Sum256(join(string(d.VolumeType), d.Source, d.Target, string(d.Mode), canonicalSize(d.SizeLimit), d.SubPath, d.RequestID))
	return hex.EncodeToString(sum[:8])
}

// StaticHash is EntryHash for a static volume, which is one of type local without further fields.
func StaticHash(v *v1alpha1.VolumeMount) string {
	e := FromStatic(v)
	return EntryHash(&e)
}

// canonicalSize makes equal sizes equal strings: 1Gi and 1024Mi. What is no size stays as it is.
func canonicalSize(s string) string {
	if n, err := ParseSize(s); err == nil {
		return strconv.FormatInt(n, 10)
	}
	return s
}

// SameVolume says whether two entries at one target ask for the same volume in the same way; who asked for it
// (requestId), and the fields that may be changed, do not count.
func SameVolume(a, b *v1alpha1.DynamicVolume) bool {
	x, y := *a, *b
	x.RequestID, y.RequestID = "", ""
	return EntryHash(&x) == EntryHash(&y)
}

// Immutable refuses a change of a field that cannot be changed. The entries have the same target. Writing out a
// default is no change. A new request id makes an entry another one, for the same volume: removed and added in one
// write. The rules of the Sandbox's CRD say the same.
func Immutable(old, updated *v1alpha1.DynamicVolume) error {
	a, b := *old, *updated
	Default(&a, "")
	Default(&b, "")
	changed := func(field, from, to string) error {
		return fault.New(errdefs.ErrInvalidArgument, fault.Immutable,
			"%s of the volume at %s cannot be changed from %q to %q: remove the volume and add it again", field, old.Target, from, to).
			With("field", field)
	}
	fields := []struct{ name, from, to string }{
		{"volumeType", string(a.VolumeType), string(b.VolumeType)},
		{"source", a.Source, b.Source},
		{"target", a.Target, b.Target},
		{"mode", string(a.Mode), string(b.Mode)},
		{"subPath", a.SubPath, b.SubPath},
	}
	for _, f := range fields {
		if f.from != f.to {
			return changed(f.name, f.from, f.to)
		}
	}
	if canonicalSize(a.SizeLimit) != canonicalSize(b.SizeLimit) {
		return changed("sizeLimit", a.SizeLimit, b.SizeLimit)
	}
	// Empty means the sandbox's tenant, which is the only other value that passes ValidateEntry.
	if a.TenantID != b.TenantID && a.TenantID != "" && b.TenantID != "" {
		return changed("tenantId", a.TenantID, b.TenantID)
	}
	return nil
}
