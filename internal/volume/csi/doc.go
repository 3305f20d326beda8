// Package csi is the Source of PersistentVolumes of CSI drivers on the direct path: the agent calls the driver's node
// service itself, as kubelet does for Pods. It is for drivers that need no staging and work outside of kubelet's folders,
// which the operator lists (Driver).
//
// # A volume
//
// A volume is published once on the node, for all its users:
//
//	DIR/KEY/volume.json   what is published, by which driver, and the identity of its mount
//	DIR/KEY/mount         where the driver mounts it
//
// KEY is made of the driver and the handle. The file is written before the driver is called and again when the mount was
// verified; it is removed after the driver undid its work. So whatever instant the process ends at, the next one knows what
// may be there. Both lie in the agent's run folder, as they end with the boot, like mounts. Every Tree is a clone of that
// one mount, with the subPath and the mode that its user asked for: no driver is trusted with either. So the volume is
// published writable, unless its access modes forbid it.
//
// # Publishing
//
// The driver is asked for its name, which must be the configured one, and for its abilities: one that wants to stage is
// refused. What it answers is not believed but looked up: at the path must be a mount where there was none, and its unique id
// is recorded. A Tree is made of the mount with that id only, so that a volume whose mount is gone never shows the node's
// own disk.
//
// A mount with a recorded id needs no call at all. A mount without one, as the process was killed in between, is taken over
// after NodePublishVolume was called again, which is idempotent. The same volume with other attributes, mount options
// or access mode than it is published with has to wait until it is released.
//
// A call that failed is undone by NodeUnpublishVolume, whatever the error says, since no error proves that nothing was done.
// When that fails too, as with a driver that hangs, Prepare says volume.ErrUnfinished, and the agent keeps its record.
//
// # Releasing
//
// The driver is asked to unpublish only when no other mount namespace of the node has the filesystem any more (BUSY until
// then): what it does beside the unmount, such as ending a session with a server, would hit them. Copies of the
// published mount that propagation made in other namespaces do not count, as they go with it; so its propagation is left
// as the node has it. Other mounts in our own namespace, such as kubelet's of the same volume, do not count either. A driver
// that answers and leaves the mount has failed, and is asked again.
//
// # What may hang
//
// Every call of a driver has a deadline and keeps nobody but its own volume. The filesystems of drivers are touched by a
// helper process (package mount), unless the driver is configured as one of this node's own disks and the filesystem is
// none that waits for a server.
//
// # Limits
//
// A sizeLimit is kept by the volume's filesystem if that is one of its own (its root is mounted) and no larger (Capacity);
// what the volume claims to have says nothing.
//
// # Secrets
//
// They are in the request and in the call, and nowhere else: in no file, log, record, or error, not even where the driver
// repeats them. A volume that needs some and has to be published again after a restart of the agent waits for the
// controller's next command.
package csi
