// Package mount is the mount engine: it makes volumes visible in, and removes
// them from, the mount namespace of a container that is running. It speaks to
// the kernel alone (design section 6): it knows no sandbox, no volume and no
// runtime, and imports nothing of ours.
//
// # The way of a volume
//
//	source                        OpenRoot, OpenBeneath: descriptors, never strings
//	  │ Clone / NewFilesystem     a detached Tree, nosuid,nodev,private from birth
//	  │ Tree.SetAttributes        ro, noexec, idmap: while nobody can see it
//	  ▼
//	Namespace.Attach              resolve → move → verify, on a thread that lives
//	  │                           in the container's mount namespace
//	  ▼
//	Placed.Identity               what Detach, Find and Holding look for later
//
// # Rules
//
// A Tree has no place in any namespace: when the process dies before the move,
// the kernel destroys it and nothing is left. After the move the mount is known
// by its Identity. It is never looked for by path, for whoever may rename
// directories in the container may move it (a mount follows the directory that
// it lies on). "Moved" and "gone" are states, not errors.
//
// Targets are resolved one component at a time with no symlink followed, from
// the root of the container's namespace. A mount may still land on a directory
// that was renamed between the lookup and the move. So every placement is read
// back; a wrong one is moved to the right place or taken away.
//
// A thread that entered a container's namespace does nothing else until it
// ends. Inside, paths are the container's: code on such a thread uses
// descriptors that were opened before, and never /proc. This package's init
// locks the main goroutine to the main thread, because the main thread cannot
// end and would stay in the container; importing the package has that effect.
//
// Calls that may wait for a dead file server (see MayHang) are made by a helper
// process with a deadline: CloneInHelper, CloneMountedInHelper, StatfsInHelper,
// OnlineInHelper, DetachInHelper. The binary must call RunHelperIfAsked first thing in main.
//
// # Kernels
//
// The floor is Linux 5.15. Unique mount ids, statmount and listmount (6.8) are
// used when they work; else mount ids are the reusable ones and the text of
// mountinfo is parsed. Probe reports what this kernel has.
package mount
