// Package csidriver is flux-sandbox-csi, the CSI driver local.csi.sandbox.flux.io for size-limited volumes of one node.
//
// # Volumes
//
// A volume is two files in the pool's folder: the disk image ID.img (package capacity) and its record ID.json. The
// record is what makes the volume: it is written, synced and renamed after the image is whole, and removed before the
// image is. So an image without a record is what a torn create or delete left: New removes it, and a create removes
// it before it makes its own, so that no volume shows another's data. A record without its image is a damaged volume:
// it stays until it is deleted, and is not published.
//
// A standalone server has the driver in its own process, and its volumes as named ones (Volumes, ParameterTenant).
//
// One process at a time has the pool (flock on the file "lock"). Within it one call at a time has a volume; another is
// Aborted, as CSI wants it.
//
// # Publishing
//
// There is no staging. A publish gives the image a loop device and mounts it on the target; a second target shares the
// superblock, which is always writable: read-only is a property of each mount. Which mounts are ours is read off the
// kernel (the loop device of the image against mountinfo), never off a record: a reboot, a killed driver and an
// operator's umount leave nothing to be repaired, and devices clear themselves with their last mount.
//
// A volume lives on one node (TopologyNode); the node's topology domain is a second segment where it is known.
//
// # Errors
//
// Every error is of package fault or below, and one interceptor makes the gRPC status of it (fault.ToGRPC).
package csidriver
