// Package capacity holds volumes to a size: disk images with loop devices, and project quota.
//
// # Images
//
// A volume with a limit of its own is a file of exactly that size with a filesystem in it (Pool). The
// file is made under a temporary name, formatted, initialised, synced and only then linked to its own
// name, so that a process that is killed in between leaves a temporary file and nothing else; Sweep
// removes those whose maker is gone. A sparse image promises space that is not yet used: Pool checks the
// promises of all images against what is free before it makes another.
//
// # Loop devices
//
// One image never has two loop devices: two superblocks on it would destroy it (contracts, "Small
// decisions"). Loops keeps that across processes, the agent and the CSI driver alike, with three facts
// that the kernel keeps and that no crash can leave behind:
//
//   - an open-file-description lock on byte 0 of the image: held while somebody looks for, or makes, its device;
//   - a flock on the image, taken by the very open file that the loop device is then given. The kernel
//     drops it when the device lets go of its backing file, and not before: whoever gets the lock knows
//     that the device, and every superblock on it, is gone;
//   - the device's backing inode, as LOOP_GET_STATUS64 tells it.
//
// Byte 1 is locked by the maker of a temporary image for as long as it lives.
//
// Devices clear themselves with their last user (LO_FLAGS_AUTOCLEAR): the open Device at first, the
// superblock after that. Nothing has to be undone by hand, and nothing is left by a killed process.
//
// # Quota
//
// A Limiter holds a directory to a limit by the project quota of its filesystem. See Bind for how a
// project id is tied to its volume.
//
// The package imports nothing of ours. Its errors carry a kind of containerd's errdefs and a reason
// (Error.Reason). It starts mkfs.ext4 and mkfs.xfs and no other program.
package capacity
