// Package kube is the store of a cluster: the Kubernetes API server, with the objects as custom resources.
//
// # Reads
//
// All objects are kept decoded in memory, with their index by UID, and beside each the JSON that it came in (record).
// A watch per kind keeps them up to date (client-go's Reflector; no resync, no polling); while the API server is away
// they are as they were, and reads go on. What others write is seen some milliseconds later. Where that matters it is
// made up for: what is not there is asked for once before it is said not to exist; and a write that is refused (by a
// precondition, by the caller's own function), or finds nothing to do, is computed again from the object as the API
// server has it now, if that is another.
//
// An object that the API server accepts and this build cannot read, as its schema cannot say all that Go wants of a quantity
// or a time, is left out, or stays as it was before, and the log says so: whoever may make one object must not keep all
// others from being seen.
//
// # Versions
//
// The watch is not the only source: the answer to a write, and that to a question, is taken over as well, so that who
// wrote something reads it, and followers hear of it at once. resourceVersions of one resource can be compared as
// integers (Kubernetes 1.35, KEP-5504; in all versions before they are etcd's revisions), so the newest of several
// states is known whichever way it comes: an older one is dropped. An object that a write has removed is remembered as
// gone by its UID until the watch has said so too, since older states of it may still be on their way.
//
// # Writes
//
// Creation apart, every write is a JSON Patch (package patch) that begins with tests of the UID and the resourceVersion
// that it was made from, on the object or on its status subresource: what this build does not know is never touched.
// When a test fails, the object is read from the API server and the change computed again. Writers of one object in
// this process wait for each other, so that only those of other processes can get in between.
//
// A write whose answer does not come (a broken connection, an ended context, a time-out of the API server) may have
// taken effect; its error says so. It is not sent again: a patch that did take effect would be computed twice.
package kube
