// Package clustercontroller is the controller process of a cluster: the store on the API server, the agents' certificates, the
// gRPC API, and the scheduler.
//
// Every replica serves gRPC and signs certificates, and reads what the API shows: sandboxes, and SandboxSets and SandboxClaims
// from when the cluster has them (pools.go). One replica leads (package leader), and only there the scheduler runs.
// A caller of the API waits for the status that the leader writes, so it does not matter which replica it calls; a change of
// leaders costs a waiting caller time and nothing else. A replica that loses its lease ends its scheduler: commands in flight
// are abandoned, and the epoch of the next leader keeps agents from taking them.
//
// When the API server is away, running sandboxes and their volumes go on, and so do reads of the API, from memory; what
// would have to be written waits or fails by name. A leader that cannot renew its lease steps down, and is elected again
// when the API server is back.
package clustercontroller
