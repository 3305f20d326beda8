// Package store says how FluxSandbox keeps its objects: sandboxes and groups, and the leader's epoch.
//
// It holds the contract only. Backends implement it (embedded: one bbolt file; kube: the API server),
// package storetest is the suite that each of them passes, package parts has what they must know of a kind,
// package follow is the queue behind Follow, package patch the one way in which an object is changed.
//
// The rules that hold in every backend:
//
//   - There is one write path for spec and metadata (UpdateSpec) and one for status (UpdateStatus). Each
//     reads the object, lets the caller change a copy, computes a patch from old to new, and applies it
//     to the object as it is stored: fields that this build does not know are never erased (design,
//     ruling 11).
//   - A write that is acknowledged is durable. A write that failed changed nothing, and can be tried
//     again. Only a context that ends while a write is under way, or an API server that does not answer it,
//     leaves its outcome open; the error says so.
//   - Whoever would make a write again if a crash took it back may say so (LateWriter), and a backend may then answer
//     before it is durable, and show it. After a crash the object is as after one of its earlier writes, no earlier
//     than the last one that had to be durable; its resourceVersions are not given out again.
//   - Concurrency is optimistic. A write is made against the version that was read; if another came in
//     between, the object is read again and the caller's function is called again.
//   - Who wrote something, reads it: a Get after a write returns that write or a later one. What other
//     processes write, where there are others, may be read some milliseconds later; a write never rests on less
//     than all of it.
//   - Objects handed out are the caller's own copies, with apiVersion and kind set.
//   - The content of objects is not looked at, but for names: they must be names that Kubernetes takes,
//     so that the same objects can move there. The API server does look, by the CRDs' rules and its admission
//     policies: there every write may also fail with ErrInvalidArgument or ErrPermissionDenied.
//
// Errors have a kind of errdefs and a reason of internal/fault; kind.go makes them all.
package store
