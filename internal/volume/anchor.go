package volume

import "github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"

// AnchorVolume is a PersistentVolume that kubelet published on the node for a Pod of ours, its anchor.
type AnchorVolume struct {
	// PodUID is the anchor's; Pod is its namespace and name, for messages.
	PodUID string `json:"podUID"`
	Pod    string `json:"pod,omitempty"`
	// Plugin is kubelet's name of the volume's plugin, such as kubernetes.io/csi.
	Plugin string `json:"plugin"`
	// Driver and Handle are those of a CSI volume, else empty.
	Driver string `json:"driver,omitempty"`
	Handle string `json:"handle,omitempty"`
}

// AnchorKey is the key of a PersistentVolume that is of no CSI driver and that kubelet publishes.
func AnchorKey(pv string) string {
	return Key(v1alpha1.VolumeTypePVC, "persistentVolume", pv)
}
