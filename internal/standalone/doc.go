// Package standalone puts FluxSandbox together on one Linux machine without Kubernetes: the scheduler runtime with
// one sub-group and one agent, the gRPC API, and the state in an embedded database, in one process.
//
// The parts are the ones that a cluster has, and they talk as they do there: the scheduler reaches the agent through
// its gRPC contract. Only the store differs, and that unary calls do not take the way through the agent's socket
// (direct.go): there, the hand-offs from goroutine to goroutine take as long as an attach. Streams do.
//
// The process may end at any time, and its sandboxes go on: they are containers of a containerd that outlives it. At
// the next start the agent repairs the node, the scheduler reads the store and the agent's inventory, and only then
// are requests served.
package standalone
