// Package volumes finds out what the claims (pvc) and PersistentVolumes (pv) that sandboxes ask for are on a node. It is the
// scheduler's Resolver in a cluster.
//
// A PersistentVolume of type local or hostPath is a path, and it vouches for that path on the node in place of the agent's
// own configuration. One of a CSI driver that the operator lists (Options.DirectDrivers) is published by the node's agent,
// with what the PersistentVolume says of it, unless its volumes have to be attached to nodes (attachRequired in its CSIDriver,
// which is watched): that is done for Pods only. All others are mounted by kubelet for a Pod of ours on the sandbox's node (package
// kube/anchors), from where the agent has them; so are those of one Pod alone (ReadWriteOncePod), and those whose claim or
// StorageClass asks for it.
// Without anchors (Options.Anchors) these are refused by name.
//
// # Who may use what
//
// A claim is one of the sandbox's namespace, and must be bound, or wait for its first consumer, which an anchor is then; the volume must say the same (claimRef, with its UID):
// everybody may write a volume's name into a claim. A PersistentVolume that is named itself must be free or bound to a
// claim of the sandbox's namespace, to which all that is said here of claims then applies. One that is free gets a claim in
// that namespace first: that is Kubernetes' own way of giving a volume to one namespace alone. We never delete it once it is bound;
// one that another was faster than is withdrawn, and the sandbox refused. Only
// where kubelet does not have to mount it and a label says that it is the sandbox's tenant's, or shared, it is used as it is. A label
// sandbox.flux.io/tenant-id on either serves that tenant only; with sandbox.flux.io/shared: "true" it serves all others
// read-only. What is not labelled belongs to the namespace, which decides the tenant (design, ruling 16).
//
// rw needs ReadWriteOnce or ReadWriteMany. ReadWriteOnce is one node, which the node affinity of a local volume is as well;
// a hostPath volume without one has no data that two nodes could share. ReadWriteOncePod is one sandbox's, for which an
// anchor is the one Pod: only kubelet can keep others away from a volume.
//
// # Secrets
//
// A volume may name a Secret with which it is published (csi.nodePublishSecretRef). It is read with one GET for the command
// that needs it, and not kept; the controller may read no Secret but those that somebody gave it a Role for.
//
// # Where it is
//
// The volume's node affinity says which nodes can use it (scheduler.Reach): a sandbox is placed there, and a volume that is
// added to a sandbox elsewhere is refused. Its topology domains are ruling 15's.
//
// # Calls
//
// Claims and volumes are watched, once, and read from memory. What is not there yet is asked for once, as it may be new.
// A change is told to the scheduler, so that who waits for a claim to be bound tries again at once.
//
// # In use
//
// While a sandbox uses a volume, its claim has the finalizer sandbox.flux.io/in-use (Kubernetes protects the claims of Pods
// only), and so has a PersistentVolume that no claim has: on one that is bound it would be of no use, as it does not keep
// the storage from being reclaimed when the claim goes. A claim that is being deleted is attached to nobody more, and goes
// after the last detach. The scheduler says what is used (scheduler.Keeper); this package writes the finalizer, and nothing
// else: one patch for the first user, one after the last. Until the watch tells of a patch, its answer counts.
package volumes
