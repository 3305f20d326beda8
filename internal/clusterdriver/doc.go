// Package clusterdriver is the process of the CSI driver on a cluster's node: the driver (internal/csidriver), kubelet's
// way to it, and the provisioner of the node's volumes (internal/kube/provisioner).
//
// As a Pod it is privileged, has the host's PID namespace, and works in the host's mount namespace, into which it executes
// itself again, as the agent does: volumes are published where kubelet and the agent see them, without mount propagation;
// filesystems are made by the host's mkfs; pool and sockets need no hostPath. The ServiceAccount's token and CA, which are
// out of sight there, are read through their folder, which is opened before and follows what kubelet puts there.
//
// Volumes are published as soon as the pool is open. Kubelet may register the driver once the node's topology domain is
// known, so once the API server has answered; a label that changes later is followed, and told to kubelet when it registers
// the driver the next time. When the process ends, published volumes stay.
package clusterdriver
