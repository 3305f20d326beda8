package provisioner

import (
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v11/controller"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

const (
	// parameterPrefix is that of a class's parameters that are for Kubernetes, not for the driver.
	parameterPrefix = "csi.storage.k8s.io/"
	// parameterFilesystem is one of them: the filesystem.
	parameterFilesystem = parameterPrefix + "fstype"
	// defaultFilesystem is written down, as kubelet wants to know that there is one.
	defaultFilesystem = "ext4"
)

// accessModes are what a volume of one node can do.
var accessModes = map[corev1.PersistentVolumeAccessMode]csi.VolumeCapability_AccessMode_Mode{
	corev1.ReadWriteOnce:    csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
	corev1.ReadWriteOncePod: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
}

// isPopulated says whether a claim's content is made by somebody who brings a volume of his own: one that is empty must not
// be bound to it.
func isPopulated(claim *corev1.PersistentVolumeClaim) bool {
	ref := claim.Spec.DataSourceRef
	if ref == nil {
		return false
	}
	group := ""
	if ref.APIGroup != nil {
		group = *ref.APIGroup
	}
	return !(group == "" && ref.Kind == "PersistentVolumeClaim" || group == "snapshot.storage.k8s.io" && ref.Kind == "VolumeSnapshot")
}

// refuse says why a claim cannot be served, or nil. What the driver refuses itself is left to it.
func refuse(claim *corev1.PersistentVolumeClaim) error {
	no := func(reason fault.Reason, format string, args ...any) error {
		return fault.New(errdefs.ErrInvalidArgument, reason, format, args...)
	}
	spec := claim.Spec
	switch {
	case spec.VolumeMode != nil && *spec.VolumeMode == corev1.PersistentVolumeBlock:
		return no(fault.InvalidMode, "volumeMode Block is not possible, as volumes of %s are filesystems: leave volumeMode out", csidriver.Name)
	case spec.DataSource != nil || spec.DataSourceRef != nil:
		return no(fault.InvalidSource, "a volume of %s cannot be made from another volume or a snapshot: leave dataSource out", csidriver.Name)
	case spec.Selector != nil:
		return no(fault.InvalidRequest, "a volume that is made cannot be selected: leave selector out, or storageClassName to choose among existing ones")
	case spec.VolumeAttributesClassName != nil && *spec.VolumeAttributesClassName != "":
		return no(fault.InvalidRequest, "volumes of %s have no attributes to change: leave volumeAttributesClassName out", csidriver.Name)
	case len(spec.AccessModes) == 0:
		return no(fault.InvalidMode, "the claim has no access mode: ask for ReadWriteOnce or ReadWriteOncePod")
	}
	for _, mode := range spec.AccessModes {
		if _, ok := accessModes[mode]; !ok {
			return no(fault.InvalidMode, "access mode %s is not possible, as a volume of %s lies on one node: ask for ReadWriteOnce or ReadWriteOncePod", mode, csidriver.Name)
		}
	}
	return nil
}

// request is what the driver is asked for.
func (p *Provisioner) request(o controller.ProvisionOptions) (*csi.CreateVolumeRequest, error) {
	if err := refuse(o.PVC); err != nil {
		return nil, err
	}
	parameters := maps.Clone(o.StorageClass.Parameters)
	maps.DeleteFunc(parameters, func(key, _ string) bool { return strings.HasPrefix(key, parameterPrefix) })
	size := &csi.CapacityRange{}
	var err error
	if size.RequiredBytes, err = bytesOf(o.PVC.Spec.Resources.Requests); err != nil {
		return nil, err
	}
	if size.LimitBytes, err = bytesOf(o.PVC.Spec.Resources.Limits); err != nil {
		return nil, err
	}
	request := &csi.CreateVolumeRequest{
		Name: o.PVName, CapacityRange: size, Parameters: parameters,
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{csidriver.TopologyNode: p.config.Node}}}},
	}
	for _, mode := range o.PVC.Spec.AccessModes {
		request.VolumeCapabilities = append(request.VolumeCapabilities, &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{
				FsType: filesystem(o.StorageClass), MountFlags: o.StorageClass.MountOptions}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: accessModes[mode]},
		})
	}
	return request, nil
}

// bytesOf is how much storage is named, zero for none. What an int64 cannot hold would come out of a quantity as any number.
func bytesOf(list corev1.ResourceList) (int64, error) {
	q := list[corev1.ResourceStorage]
	if q.CmpInt64(math.MaxInt64) > 0 {
		return 0, fault.New(errdefs.ErrOutOfRange, fault.InvalidSize, "%s bytes is more than any volume has: ask for less", q.String())
	}
	return q.Value(), nil
}

func filesystem(class *storagev1.StorageClass) string {
	if f := class.Parameters[parameterFilesystem]; f != "" {
		return f
	}
	return defaultFilesystem
}

// persistentVolume is the volume for Kubernetes. The library adds the claim, the class and the finalizer.
func (p *Provisioner) persistentVolume(o controller.ProvisionOptions, request *csi.CreateVolumeRequest, volume *csi.Volume) *corev1.PersistentVolume {
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: o.PVName},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(volume.GetCapacityBytes(), resource.BinarySI)},
			AccessModes:                   slices.Clone(o.PVC.Spec.AccessModes),
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			MountOptions:                  slices.Clone(o.StorageClass.MountOptions),
			VolumeMode:                    new(corev1.PersistentVolumeFilesystem),
			NodeAffinity:                  affinityTo(p.config.Node),
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: csidriver.Name, VolumeHandle: volume.GetVolumeId(), VolumeAttributes: volume.GetVolumeContext(),
				FSType: request.GetVolumeCapabilities()[0].GetMount().GetFsType()}},
		},
	}
	if policy := o.StorageClass.ReclaimPolicy; policy != nil {
		pv.Spec.PersistentVolumeReclaimPolicy = *policy
	}
	if domain := o.SelectedNode.Labels[p.config.DomainKey]; domain != "" {
		pv.Labels = map[string]string{p.config.DomainKey: domain}
	}
	return pv
}
