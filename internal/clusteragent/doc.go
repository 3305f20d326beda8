// Package clusteragent is the agent process of a cluster's node: the node as every mode has it (internal/node), its
// certificate, and the gRPC server that the controller dials over mutual TLS.
//
// As a Pod it is privileged, has the host's PID namespace and network, and works in the host's mount namespace, into which
// it executes itself again. There the Pod's own files are out of sight: configuration, token and trust bundle are read
// through their directories, which are opened before and follow what kubelet puts there; the programs that sandboxes need
// (init, logger) are copied to the host, since containers outlive the Pod.
//
// It has no right on the Kubernetes API and no client for it. Its ServiceAccount token, bound to the Pod and so to the node,
// is shown to the controller alone, and only for a certificate.
package clusteragent
