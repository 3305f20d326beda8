// Package anchors makes and removes anchors: Pods that do nothing but have kubelet mount a claim on a node, from where the
// node's agent takes it over (package volume/anchor). So volumes of every driver can be used by sandboxes without a line of
// code for one, and a claim that waits for its first consumer is bound on a sandbox's node.
//
// # An anchor
//
// There is one for each claim and node. It lies in the claim's namespace and is owned by the claim; it is pinned by
// affinity to the node's name, so that the scheduler binds the volume, tolerates all taints, has
// the volume read-only in its container (kubelet mounts only what a container has) and needs no rights, so that the strictest namespace admits it. It goes on for half a minute after SIGTERM, so that its
// deletion by anybody is a warning: a successor is made at once, and runs before the old one ends (make before break).
// It ends by itself, as kubelet shortens no grace period once it has begun, however the Pod is deleted then. A ReadWriteOncePod
// volume has its successor only when the old one is gone; meanwhile, as after a forced deletion, the agent's guard keeps the
// volume on the node.
//
// # What is known
//
// Everything is read off the Pods, which are found by the label sandbox.flux.io/anchor and watched by it: a new leader adopts
// them. What is only remembered may be lost: since when one is unused (it is kept the grace time again), and who asked for one
// last. Who needs one is told with every call of Settle: the nodes that have the claim's volume ready, and those of sandboxes
// that may use it.
//
// An anchor is deleted with a second's grace, not forced: then its end tells that kubelet has unpublished the volume.
// One that runs and for which the agent finds nothing mounted is replaced, as kubelet does not look again at what a Pod has
// (Replace). One that nobody uses is kept for a grace time, as the next attach of a volume that is attached to the node is ten seconds
// faster.
//
// # Calls
//
// One creation for each claim and node, through a token bucket, and one deletion. Nothing is asked for in steady state.
package anchors
