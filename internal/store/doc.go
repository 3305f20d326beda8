// Package store says how FluxSandbox keeps its objects: sandboxes and groups, and the leader's epoch.
//
// It holds the contract only. Backends implement it (embedded: one bbolt file; kube: the API server),
// package storetest is the suite that each of them passes, package follow is the queue behind Follow,
// package patch the one way in which an object is changed.
//
// The rules that hold in every backend:
//
//   - There is one write path for spec and metadata (UpdateSpec) and one for status (UpdateStatus). Each
//     reads the object, lets the caller change a copy, computes a patch from old to new, and applies it
//     to the object as it is stored: fields that this build does not know are never erased (design,
//     ruling 11).
//   - A write that is acknowledged is durable. A write that failed changed nothing, and can be tried
//     again. Only a context that ends while a write is under way leaves its outcome open; the error says so.
//   - Concurrency is optimistic. A write is made against the version that was read; if another came in
//     between, the object is read again and the caller's function is called again.
//   - Who wrote something, reads it: a Get after a write returns that write or a later one.
//   - Objects handed out are the caller's own copies, with apiVersion and kind set.
//   - The content of objects is not looked at, but for names: they must be names that Kubernetes takes,
//     so that the same objects can move there.
//
// Errors have a kind of errdefs and a reason of internal/fault; kind.go makes them all.
package store
