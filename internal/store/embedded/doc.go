// Package embedded is the store of the standalone server: one bbolt file.
//
// # The file
//
// A bucket per kind holds each object as JSON, under namespace/name. The bucket "meta" holds the format of
// the file, the epoch, and a resourceVersion that none is higher than that was ever shown: each commit puts some aside
// for what is shown before it is durable, and a process begins behind them. A build refuses a format
// that is newer than its own, and a file in which anything cannot be read: nothing is skipped, nothing is
// repaired by guessing, nothing is written to it. bbolt locks the file, so a second process is refused.
//
// # Reads
//
// All objects are kept decoded in memory, rebuilt when the file is opened, with their index by UID: an
// index in the file could only disagree. Reads and Follow see what is shown: what is committed, and late writes.
//
// # Writes
//
// A write is staged and then committed. Staging (collection.stage) makes the new state the base of the
// next write of that object, if nobody staged another since it was computed; it takes no I/O, so writers
// of one object conflict for microseconds, not for the length of an fsync. The committer, one goroutine,
// takes all that is staged, writes it in one transaction with one sync, and only then shows it to readers
// and wakes the writers. While it syncs, the next batch gathers: a lone writer waits for one commit and
// for nothing else, a hundred writers share one.
//
// An answer that rests on a staged state ("nothing to change", "exists already") waits for its commit.
// When a commit fails, everything that is staged is dropped: the writers of that batch get the error, and
// those that had staged on top start over. A commit that fails after it may have reached the disk leaves
// no way to tell what is durable (a second fsync can succeed without the data of the first); then the
// store refuses every further write until it is opened again.
//
// The patch is computed only for an object in which something is stored that this build does not know. For any other
// the patched object is the encoding of the new one (collection.rewrite).
//
// # Late writes
//
// A late write (store.LateWriter; late.go) is shown at once and answered, and its state is kept as late until a commit
// has it: the next one, whoever causes it, or after 50 ms one of its own, or that of Close. An object is written as a
// whole, so that its next durable write has what was late of it. A late write on top of a staged state takes that
// state's way, so that nothing is shown before what it rests on; so does one that would remove the object.
//
// When a commit fails, what is late stays shown, and is tried again with the next commit or after a second. That is
// logged, and until it succeeds no more is shown early: writers wait for the commit of their own write, and get its
// error. Close returns an error if something was still late then.
package embedded
