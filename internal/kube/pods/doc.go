// Package pods is a scheduler.Pods on the API server: the Pods that sandboxes own (spec.template), and those that belong to
// somebody else and get volumes all the same (spec.podRef).
//
// # What is watched
//
// A Pod that a sandbox owns bears the label sandbox.flux.io/sandbox, and one watch follows all that do: what it costs grows with the
// sandboxes, not with the cluster. The label only finds them; who owns a Pod is said by its controller reference, by UID,
// so that a Pod of the right name and label that somebody else made is never taken for ours.
//
// A Pod of podRef cannot bear our label, as it is not ours to write. It gets a watch of its own, by namespace and name,
// for as long as a sandbox names it. The API server keeps such watches in a map by namespace and name and tells each only
// what it asked for, while one watch on all Pods would have the leader decode every change of every Pod of the cluster, and
// hold a hundred thousand of them, for the few that are adopted. Each costs a stream on a connection that is there anyway.
//
// Of a Pod only what scheduler.Pod says is kept (facts). There is no resync and no polling; only the leader watches.
//
// # What is written
//
// Owned Pods are created, with the claims of the sandbox's volumeClaimTemplates (package kube/claimtemplates) as volumes, and
// deleted, at once where their node does not run any more: with the sandbox as controller (blockOwnerDeletion), so that
// Kubernetes' garbage collector takes what a crash left behind, and deleted with the UID as precondition. A Pod of podRef is
// never written to or deleted: nothing here can.
//
// When the images, CPU or memory of the template are changed, the sandbox's own Pod gets them in place (Update): resources by the
// subresource resize, images by a patch, of which kubelet restarts the containers. Whether the Pod has what the template
// says is told by an annotation with a hash, since admission may have made something else of image and resources; which
// containers have to go, by another one.
package pods
