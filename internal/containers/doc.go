// Package containers runs container-backed sandboxes in containerd: create, start, stop, exec, logs, find, watch,
// delete. It knows sandboxes by their UID and nothing of volumes but an opaque record (RecordVolumes).
//
// # What a sandbox is made of
//
// Everything is named by the sandbox's UID, so that whatever a crash left can be found without a record of it:
//
//	containerd, in its own namespace: a lease "flux-create-UID" (during creation only), a snapshot UID,
//	                                  a container UID with the one label DescriptorLabel, a task UID
//	StateDir/UID                      hosts, hostname, resolv.conf (bound into the sandbox), log/, exit.json
//	RunDir/exec/UID/EXEC              the FIFOs of running execs
//	CgroupParent/UID                  its cgroup, in every hierarchy
//
// containerd is the registry: List reads the sandboxes and their identity (Descriptor) back from it. Events are hints,
// as containerd may lose them; state is always read.
//
// # Life
//
// Create prepares everything up to a *created* task: namespaces, root filesystem and PID 1 (runc's init, waiting)
// exist, and the sandbox's process does not. The caller attaches the volumes, then calls Start. CreateTask does the
// same for a sandbox whose task has ended, on the same root filesystem. Restart policy is the caller's.
//
// Every function may be repeated, and every function may be killed between any two of its steps: called again it
// finishes, and Delete removes what there is. Steps tells an observer about every step, before and after; the lists
// CreateSteps, StartSteps and so on name them all. Sweep removes what has no owner any more.
//
// Operations on one sandbox are serialised by a lock per UID; Exec, Logs, Get and List take none.
//
// # Confinement
//
// containerd's default seccomp profile, no_new_privs, Docker's default capability set without CAP_MKNOD (a device node
// made on a volume would be usable on the host) and so without CAP_SYS_ADMIN (design section 6, rule 10), masked and
// read-only paths, own network, PID, IPC, UTS and mount namespace, the root mount private. The network namespace has
// only a loopback interface. The three files of /etc are bound read-only: they lie on the host's disk, where no limit of
// the sandbox's holds. On cgroup v2 the sandbox has a cgroup namespace and sees its own limits in /sys/fs/cgroup; on v1
// they hold as well, but it does not see the files.
//
// Memory is limited without swap. The helper processes are small: PID 1 (flux-sandbox-init, bound at InitTarget) counts
// within the sandbox's limits, with four or five threads; the logger does not.
//
// # Its own containerd
//
// Where no containerd is to be shared, StartContainerd runs one with a root, state and socket of its own, which
// outlives the caller.
package containers
