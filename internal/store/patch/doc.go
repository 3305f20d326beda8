// Package patch computes what changed between two states of an object, as an RFC 6902 JSON Patch, and
// applies it to the object as it is stored.
//
// An object may hold fields that this build does not know, written by a newer one. Its typed form has
// lost them, so it is never written back whole. The patch says only what changed:
//
//   - Objects are compared member by member.
//   - Lists whose entries have a key (the +listType=map lists of the API) are compared by key, so that an
//     entry keeps its unknown fields when another member of it changes, or when it moves. Each operation
//     on such an entry comes after a "test" of the key at that index: a patch made from a stale list
//     fails and does not hit another entry.
//   - All other lists, and keyed ones in which a key is missing or comes twice, are replaced as a whole.
//
// Indices are those of the stored list; a typed reader sees the same order and length. A member that is
// null counts as missing.
//
// Go writes an empty struct as {}, whether or not the stored object has that member; "add" into a parent
// that is missing fails. With the stored JSON at hand (WithRaw) the patch fits it exactly. Without, a parent
// in which nothing is set is written as a whole: that never fails, but drops what unknown fields are in it.
package patch
