// Package scheduler is the one reconciler: it places sandboxes on nodes, has their agents run them, and attaches
// and detaches their volumes, until what is equals what the specs say. It is pure Go: the store, the agents, time
// and the sources of volumes come in as interfaces.
//
// # Parts
//
//   - Scheduler follows groups, sandboxes and agents, and hands what changed to a few workers by a queue that
//     never gives one sandbox to two of them.
//   - SSGRuntime is one sub-group: its Engine places, its VolumeManager attaches and detaches.
//   - InMemoryRegistry knows what nodes have room for and, by their agents' inventories, what they really have.
//   - TopologyDomainCache knows the topology domain of each node.
//
// # One look at a sandbox
//
// Reconciling is level-triggered. A look (type pass) takes over the results of commands that ended, compares the
// spec with the inventory, orders the commands that are missing, and writes the status if it changed. It never
// waits for an agent: every command runs in a goroutine of its own, leaves its result in the sandbox's inbox and
// has the sandbox looked at again. There is one command at a time per sandbox and target, and one about the sandbox
// as a whole; a call that hangs delays only its own target. A look at a sandbox at rest writes nothing.
//
// What is remembered between looks (type actor) can be lost: rows of status carry what failed and when it is tried
// again, and the inventory says what is mounted.
//
// # Order of writes
//
//   - The node is in status before anything is made on it, and our finalizer on the sandbox before that.
//   - An attach costs one write of status, when it has ended; an Attaching row is written only after 250 ms.
//   - A detach that left nothing takes the entry out of the spec first, then its row out of status.
//   - A detach that was refused (busy) or is not over (lazy, release pending), and an entry with onFailure Remove
//     that failed, get their row first; then the spec follows. A crash in between is repaired from the row.
//
// # Pods
//
// A sandbox with spec.template or spec.podRef is a Pod (podlife.go). It is not placed: Kubernetes does that, and node, stage
// and phase are read off the Pod; it takes nothing of a group's capacity, and obeys the group's gate, or its
// SandboxSet's, the runtime csi. As soon as the Pod has a node, its volumes are sent there to be prepared (AT_CREATE), and its
// agent attaches them at every start of the container; into a container that runs they are attached at once. Which of the two
// it is may be misjudged at no cost.
// What an agent has is of one Pod, by its UID. When the sandbox's own Pod is made again, what its node still has of the
// former one is detached before anything of the new one is attached, and the agent forgets by itself what it has of a Pod
// that is gone: the sandbox is never deleted on a node to which its next Pod may come. Only when it goes itself is its own
// Pod deleted, first, so that processes end while their volumes are there, and then, or with the Pod of podRef running on,
// the agent is told to detach and forget.
//
// A Pod of its own that is lost is made again, at once the first time and later and later when it goes on (notePod); that of a
// node that is known to be dead is taken away first. Its claims (claims.go, Claims) are made before every Pod, in the same
// operation, and what becomes of them is settled before the finalizer goes. What of its template was changed the Pod gets in
// place; which Pod has it is the Pods' to tell (Pod.Outdated).
//
// # Volumes in use
//
// A volume that lives outside of its node is held (Keeper) from before the first attach that is sent to a node, over all
// sandboxes, until nobody uses it any more (holds.go).
//
// # What is durable
//
// What can be found out again need not be durable at once, and a write that waits for no disk is answered sooner
// (store.LateWriter): that a volume is mounted, as the inventory says so; and the end of an entry and a row whose volume
// was detached, as the request for that is in the spec, is carried out again, and finds that it has happened. Durable
// before anybody sees it is what decides something (pass.decides): node and phase, that a volume has failed, and
// answers that the spec follows.
//
// # Fencing
//
// Every command carries the leader's epoch and the sandbox's UID and generation; an agent refuses what is older
// than it has seen. A sandbox whose agent is away is left where it is: away is not dead (design, section 8).
package scheduler
