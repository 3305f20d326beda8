package volumes

import (
	"context"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

// What a PersistentVolume is on its nodes: a path (local, hostPath), or a volume of a CSI driver that the agent publishes
// itself (direct).

// keyOf is a volume's identity on its nodes, as the agents make it of the path that it takes; empty for what none attaches.
func (v *Volumes) keyOf(claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) string {
	if c := pv.Spec.CSI; c != nil {
		return volume.CSIKey(c.Driver, c.VolumeHandle)
	}
	if pluginOf(pv) != "" && !hasPath(pv) || v.byAnchor(claim, pv) != "" {
		return volume.AnchorKey(pv.Name)
	}
	p, err := pathOf(pv)
	if err != nil {
		return ""
	}
	return volume.PersistentPathKey(p)
}

// supported refuses a volume that no agent attaches.
func (v *Volumes) supported(f *found, w scheduler.Wish) error {
	if f.unbound {
		return nil
	}
	if v.byAnchor(f.claim, f.pv) != "" {
		return f.anchorable(w)
	}
	c := f.pv.Spec.CSI
	if c == nil {
		if _, err := pathOf(f.pv); err != nil {
			return err
		}
		return f.writable(w)
	}
	switch {
	case !slices.Contains(v.options.DirectDrivers, c.Driver):
		return fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
			"PersistentVolume %s is of the CSI driver %s: this version attaches those of the drivers that the operator lists for it (%s; flag direct-drivers), local and hostPath ones; use one of them, or mount it in a Pod",
			f.pv.Name, c.Driver, orNone(v.options.DirectDrivers))
	case v.needsAttach(c.Driver):
		return fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
			"PersistentVolume %s is of the CSI driver %s, whose volumes have to be attached to a node (attachRequired in its CSIDriver), which no agent does: its operator has to take it off the list (flag direct-drivers); mount it in a Pod",
			f.pv.Name, c.Driver)
	}
	if err := f.writable(w); err != nil {
		return err
	}
	return fits(f.pv, w.Volume.SizeLimit)
}

// writable refuses to write to a volume that is read-only, whatever its access modes are.
func (f *found) writable(w scheduler.Wish) error {
	if isReadOnly(f.pv) && w.Volume.Mode != v1alpha1.VolumeModeReadOnly {
		return fault.New(errdefs.ErrPermissionDenied, fault.ModeDenied, "PersistentVolume %s is read-only (csi.readOnly, or mount option ro): ask for mode ro", f.pv.Name)
	}
	return nil
}

func orNone(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}

// fits refuses a sizeLimit below what the volume says to have. Whether its filesystem is no larger is for the node to see.
func fits(pv *corev1.PersistentVolume, sizeLimit string) error {
	if sizeLimit == "" {
		return nil
	}
	limit, err := volume.ParseSize(sizeLimit)
	if err != nil {
		return err
	}
	capacity := pv.Spec.Capacity[corev1.ResourceStorage]
	if capacity.CmpInt64(limit) > 0 {
		return fault.New(errdefs.ErrFailedPrecondition, fault.LimitNotEnforced,
			"nothing enforces a sizeLimit of %d bytes on PersistentVolume %s, which has %s: ask for at least that, leave sizeLimit out, or use a smaller volume", limit, pv.Name, bytesOf(capacity)).
			With("requested", strconv.FormatInt(limit, 10)).With("actual", bytesOf(capacity))
	}
	return nil
}

// bytesOf is a quantity as a number of bytes, or as it is written where an int64 cannot hold it: Value is any number then.
func bytesOf(q resource.Quantity) string {
	if q.CmpInt64(math.MaxInt64) > 0 {
		return q.String()
	}
	return strconv.FormatInt(q.Value(), 10)
}

// source says how an agent gets a volume that is supported. Secrets are read now and kept nowhere.
func (v *Volumes) source(ctx context.Context, f *found) (v1alpha1.VolumePath, func(*agentv1.AttachRequest), error) {
	c := f.pv.Spec.CSI
	if c == nil {
		p, err := pathOf(f.pv)
		return v1alpha1.VolumePathLocal, func(r *agentv1.AttachRequest) {
			r.Source = &agentv1.AttachRequest_Local{Local: &agentv1.LocalSource{Path: p, PersistentVolume: f.pv.Name}}
		}, err
	}
	secrets, err := v.secrets(ctx, f.pv)
	if err != nil {
		return "", nil, err
	}
	return v1alpha1.VolumePathDirect, func(r *agentv1.AttachRequest) {
		r.Source = &agentv1.AttachRequest_Csi{Csi: &agentv1.CSISource{
			Driver: c.Driver, VolumeHandle: c.VolumeHandle, Attributes: c.VolumeAttributes, FsType: c.FSType, MountOptions: f.pv.Spec.MountOptions,
			AccessMode: string(accessMode(f.pv)), ReadOnly: isReadOnly(f.pv), Secrets: secrets, PersistentVolume: f.pv.Name,
		}}
	}, nil
}

// isReadOnly says whether a volume can be written by nobody, whatever its access modes are.
func isReadOnly(pv *corev1.PersistentVolume) bool {
	return pv.Spec.CSI != nil && pv.Spec.CSI.ReadOnly || slices.ContainsFunc(pv.Spec.MountOptions, func(o string) bool {
		return slices.Contains(strings.Split(o, ","), "ro") // one may be several, as in mount -o
	})
}

// accessMode is the one with which a volume is published for all its users on a node: the first that lets somebody write.
func accessMode(pv *corev1.PersistentVolume) corev1.PersistentVolumeAccessMode {
	modes := pv.Spec.AccessModes
	for _, m := range modes {
		if m == corev1.ReadWriteOnce || m == corev1.ReadWriteMany {
			return m
		}
	}
	if len(modes) == 0 {
		return ""
	}
	return modes[0]
}

// secrets are what the volume's driver needs to publish it, by the reference in the volume. The controller may read only
// the Secrets that somebody gave it a Role for.
func (v *Volumes) secrets(ctx context.Context, pv *corev1.PersistentVolume) (map[string]string, error) {
	ref := pv.Spec.CSI.NodePublishSecretRef
	if ref == nil {
		return nil, nil
	}
	secret, err := v.client.CoreV1().Secrets(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	unusable := func(format string, args ...any) error {
		return fault.New(errdefs.ErrUnavailable, fault.SecretUnavailable,
			"PersistentVolume %s is published with the Secret %s/%s (csi.nodePublishSecretRef): "+format, append([]any{pv.Name, ref.Namespace, ref.Name}, args...)...)
	}
	switch {
	case apierrors.IsForbidden(err):
		return nil, unusable("the controller may not read it; make a Role in namespace %s with verb get on secrets, resourceNames [%s], and bind it to the controller's ServiceAccount; it is tried again", ref.Namespace, ref.Name)
	case apierrors.IsNotFound(err):
		return nil, unusable("it does not exist; create it, it is tried again")
	case err != nil:
		return nil, unanswered(ctx, err, "read", "Secret "+ref.Namespace+"/"+ref.Name)
	}
	values := make(map[string]string, len(secret.Data))
	for key, value := range secret.Data {
		if !utf8.Valid(value) {
			return nil, unusable("the value of its key %s is no text (UTF-8), and a CSI driver can be told nothing else; encode it as the driver wants it; it is tried again", key)
		}
		values[key] = string(value)
	}
	return values, nil
}

// pathOf is the path of a local or hostPath volume on its nodes.
func pathOf(pv *corev1.PersistentVolume) (string, error) {
	var p string
	switch s := pv.Spec.PersistentVolumeSource; {
	case s.Local != nil:
		p = s.Local.Path
	case s.HostPath != nil:
		p = s.HostPath.Path
		if t := s.HostPath.Type; t != nil && !slices.Contains([]corev1.HostPathType{corev1.HostPathUnset, corev1.HostPathDirectory, corev1.HostPathDirectoryOrCreate}, *t) {
			return "", fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "PersistentVolume %s is a hostPath of type %s: use a directory", pv.Name, *t)
		}
	case s.NFS != nil:
		return "", unsupported(pv, "on NFS")
	default:
		return "", unsupported(pv, "of another kind")
	}
	// A final slash is allowed there.
	clean := path.Clean(p)
	if !path.IsAbs(p) || slices.Contains(strings.Split(p, "/"), "..") {
		return "", fault.New(errdefs.ErrInvalidArgument, fault.InvalidSource, "PersistentVolume %s has the path %q: must be absolute and without ..", pv.Name, p)
	}
	return clean, nil
}

func unsupported(pv *corev1.PersistentVolume, what string) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.VolumeTypeOff,
		"PersistentVolume %s is %s: this version attaches those of type local, hostPath and csi; use one, or mount it in a Pod", pv.Name, what)
}
