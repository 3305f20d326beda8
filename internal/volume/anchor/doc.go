// Package anchor is the Source of volumes that kubelet publishes for an anchor: a Pod of ours that does nothing but have the
// volume on the node. It needs no line of code for any driver, as kubelet does all that a volume needs. The controller makes
// anchors (package kube/anchors); this package finds what kubelet mounted, and keeps it while it is used.
//
// # A volume
//
//	DIR/KEY/volume.json   which mount of kubelet's it is, and what is guarded
//	DIR/KEY/guard         the guard
//
// KEY is made of the driver and the handle, or of the PersistentVolume's name. A Tree is a clone of kubelet's published
// mount at KUBELET/pods/UID/volumes/PLUGIN/PV/mount (without /mount for what is no CSI volume), with subPath and mode
// applied by us. The mount's unique id is recorded, and a clone is made of the mount with that id only: what lies below the
// place of a mount that is gone is never taken for it.
//
// # Anchors come and go
//
// A Prepare with another anchor's UID moves the record to what is published for that one. Where the request's anchor
// is gone, as when a sandbox restarts without the controller, what is published on the node for any Pod from the same
// PersistentVolume will do: a PersistentVolume's name is the volume's. A volume that was known and of which nothing is
// published any more is ANCHOR_LOST until a new anchor has it.
//
// # The guard
//
// Between the forced deletion of an anchor and its successor nothing tells kubelet that the volume is in use, and it would
// unstage and detach it under the sandboxes. The guard is a bind of the folder in which the driver staged it, outside of
// kubelet's plugins: kubelet unstages nothing that is still mounted elsewhere, and tries again. It bridges seconds, not
// hours: a kubelet that restarts without an anchor forgets the volume. A driver that does not stage has no such folder, and
// there is nothing to guard.
//
// # Releasing
//
// The guard is dropped when no other mount namespace of the node has the volume's filesystem any more (BUSY until then):
// once it is dropped and the anchor is gone, kubelet takes the device away. Copies that propagation made of mounts of the
// node do not count, nor do the namespaces of Pods for which kubelet has published the volume, which it waits for itself.
//
// # What may hang
//
// All filesystems here are foreign ones: what touches them is done by a helper process (package mount).
package anchor
