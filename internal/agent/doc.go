// Package agent runs the sandboxes of one node and attaches volumes to them. It is driven through the gRPC
// contract api/proto/agent/v1 and trusts nobody: every command is validated and fenced again here.
//
// # Who does what
//
//   - ContainerMountUpdater attaches and detaches one volume of one sandbox, as a transaction: it records
//     its intent, acts, verifies, records the result; a failure undoes every step before it.
//   - preparedVolumes has the sources that are ready on this node, each prepared once however many
//     sandboxes use it. Users are the journal's records, never a counter.
//   - lifecycle creates, starts, stops, restarts and deletes containers. Every start of a task goes through
//     it: created, then all volumes attached, then started.
//   - reaper finishes what could not be finished at once: volumes that processes still hold, sources that
//     nobody uses any more.
//   - recover repairs the node from journal × mountinfo × containerd before the first request is served.
//   - inventory tells followers what the node really has.
//   - offline finds out which mounted volumes have a dead filesystem, for the inventory to say so.
//
// # Pods
//
// A sandbox may be a container of a Pod, which internal/pods finds and tells of. It has no create, start or stop here; what
// its containers do is read (readPod), and noted together with the journal's records (adopt): a volume of a container that
// ended waits for the next, which is another one for containerd. podStarting attaches before a process begins, within the
// hook's time; lookAtPod whatever that missed. Deleting the sandbox detaches and touches nothing else.
//
// # Locks, from the outside in
//
//  1. a sandbox's target lock: one operation per target at a time; it honours its context.
//  2. a sandbox's life lock: lifecycle operations hold it alone, volume operations share it, and only for
//     the moment in which they touch the container. Never held while a source is prepared, so that a source
//     that hangs keeps no sandbox from being stopped or deleted.
//  3. a prepared volume's state; 4. the journal's mutex.
//
// Nothing waits for a network or a file server while it holds a lock of another sandbox.
//
// # The way of an attach
//
// Of a volume that is ready it makes two records, each one write: the intent, with which also stands that the command
// passed the fence, and the result. Sources that cannot hang (volume.Prompt) are mounted on the caller's goroutine; all
// others on one that can be given up. The only hand-off is that to the thread in the sandbox's mount namespace. What is
// for others, the inventory and the container object, other goroutines write.
package agent
