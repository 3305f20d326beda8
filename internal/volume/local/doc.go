// Package local is the Source of volumes of type local: directories of the node, and disk images with a size of
// their own, below roots that the operator allowed.
//
// # Roots
//
// A Root is a path in which one whole component may be {tenantId}. It allows the sources that it matches by
// components: longest match first, and a literal component before {tenantId}. Everything between a root's static
// prefix (what stands before {tenantId}) and the source is opened by descriptor beneath that prefix, with no symlink
// followed. Nothing is ever made outside of it.
//
// # Tenants
//
// A source has an owner: the tenant in the place of {tenantId}, or nobody where the root has no such component.
// A sandbox may use what its own tenant owns; a sandbox without a tenant, what nobody owns. All else crosses tenants:
// it is allowed where the root is shared, and then read-only. So a root without {tenantId} that is not shared
// serves sandboxes without a tenant only, and a sandbox without a tenant gets nothing below {tenantId} unless it
// is shared.
//
// # Backing
//
// directory: the source exists, or the volume is refused; it is never made. A sizeLimit is enforced by the project
// quota of its filesystem (Quota), or by a filesystem that is no larger itself (Capacity). Where neither can, the
// volume is refused unless the policy says BestEffort. A quota goes with the last user. One that a killed process set
// and nobody recorded stays on its directory: the next Prepare takes it over if it asks for the same limit, and is
// refused with both figures if it does not.
//
// image: the source <root>/<name> is the file <root>/<name>.img, a filesystem of its own that is made at first use
// by its owner, in mode rw, with sizeLimit as its size. A later request asks for that size or for none. The root
// directory of a new volume has mode 0777, as nobody knows as whom its sandboxes will run; the file itself and the
// tenant's folder are root's alone. The folder stays when an image could not be made: another volume may be about to
// be made in it. Every Tree is another mount of the one superblock, which stays writable for the others.
//
// # PersistentVolumes
//
// Where the node allows it (Option PersistentVolumes), a source may be the path of a local or hostPath PersistentVolume
// instead, which then vouches for it in place of a root: it is a directory, opened beneath / with no symlink followed, and
// never made. DeniedPaths and what the node adds to them are refused. Who may use the volume, and how, is for the
// controller to know. A sizeLimit holds if a whole filesystem is mounted at the path and is no larger (Capacity).
//
// # Images and servers
//
// An image has its loop device while it is mounted somewhere, and no longer: Prepare does not attach it, so there is
// nothing to release but to wait until the kernel let go. Data is never deleted.
//
// Sources on filesystems that may hang (mount.MayHang) are touched by a helper process only, images on them are
// refused.
package local
