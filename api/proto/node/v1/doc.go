// Package nodev1 is the gRPC contract by which a node's agent gets its certificate from the controller. It is
// generated from node.proto, whose comments say what each call promises.
package nodev1
