// Package provisioner makes the volumes of the driver local.csi.sandbox.flux.io that claims ask for, and deletes them: what
// otherwise a sidecar does. One runs on each node, beside the node's driver and in its process, on the library of the
// Kubernetes CSI project's own provisioner (sig-storage-lib-external-provisioner).
//
// # Whose work it is
//
// A volume lies on one node, so its StorageClass has volumeBindingMode WaitForFirstConsumer: the scheduler chooses the node
// and writes it into the claim (volume.kubernetes.io/selected-node). That node's provisioner acts on the claim, and the one
// whose node the PersistentVolume's node affinity names deletes it. Nobody is elected, as no two ever want the same. It is
// more than a division of labour: to a driver a volume that it does not know is one that is gone already, so a provisioner
// that acted on another node's PersistentVolume would delete the object and leave the data, without an error. Hence three
// looks: foreign objects do not get into the queues, ShouldProvision and ShouldDelete refuse them, and so do Provision and
// Delete.
//
// # What is made
//
// The volume is named as its PersistentVolume, pvc-UID: a second try makes no second volume, whatever instant a crash came
// at. Its node affinity names the node and nothing else, so that a node that is given another topology domain keeps its
// volumes; the domain that the node has now is a label of the PersistentVolume. The finalizer of the library keeps a
// PersistentVolume that is deleted by hand until its data is deleted too.
//
// A node without the space gives the claim back to the scheduler (selected-node is taken away). Whatever else fails is an
// Event of the claim (ProvisioningFailed) and tried again, at last every few minutes: a class can be replaced.
//
// # Calls
//
// A volume costs three calls, the PersistentVolume and two Events; deleting one costs two. Nothing is called periodically:
// there is no resync, and claims, volumes, classes and the one node are watched. Of what is another node's only the name is
// kept in memory.
package provisioner
