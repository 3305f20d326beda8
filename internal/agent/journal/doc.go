// Package journal is the agent's memory of what it did to the node in this boot: which volumes are on
// their way into which sandbox, which are there, and which sources are prepared for them.
//
// Every step with a side effect is written down before it is taken and its result after it, so that at
// every instant a SIGKILL leaves a journal from which, together with mountinfo and containerd, the next
// start repairs the node (design, section 6, rule 8).
//
// # The file
//
// journal.log is a log of changes in a folder that is emptied by a reboot (/run), as mounts are. A change is one record,
// appended by one write(2), so that it holds as a whole or not at all. Nothing is synced: a process that dies loses
// nothing that it wrote, and a machine that dies loses the mounts together with the records. A journal of another boot,
// which a folder that is no tmpfs can still hold, is moved aside and begun anew.
//
// A record is a line of text, which the tools of the shell can read:
//
//	length crc32c check {"volumes":[…],…}
//
// The numbers are eight hexadecimal digits each: the length of what follows them and its checksum, then a checksum of
// these two, so that the length can be believed before the rest was read. The first record names the format and the
// boot. How it is framed is the same in all formats.
//
// # What can go wrong
//
//   - A SIGKILL, or a full filesystem, in the middle of a write leaves a beginning of the last record. It was never
//     acknowledged, and is dropped when the journal is opened. All else that does not fit is damage: ErrDataLoss, which
//     names the place. Nothing is skipped: a mount that nobody remembers would be a leak.
//   - A write that fails leaves file and memory as they were: its beginning is cut off again. Until that works, writes
//     are refused.
//   - Records that later ones have overtaken are left behind when the file is written anew, beside the old one, which it
//     then replaces (rename(2)). It is done at every open, and when more was appended than was left the last time.
//
// The contents are kept in memory; reading costs nothing. One process owns the folder, by a lock (flock(2)) on
// journal.lock.
//
// # Why not a library
//
// It was bbolt first, without syncing. The two commits of an attach took 54 and 26 µs of the agent's time there, and take
// 13 and 10 µs here, in runs that alternated, where the bare system calls of an attach took 80 µs in all. (One commit of a
// small record in a loop: 52 µs, and 26 µs in the same minute.) What is needed is a small part of what a database does: no
// queries, one writer, contents of a few hundred kilobytes that are in memory anyway. What it takes is this package, whose
// tests cut the file off, and flip every bit of it, at every byte.
//
// # Versions
//
// Records are JSON. A field that this build does not know is ignored, and lost when the file is written anew; a build
// that writes what an older one must not lose raises the format. A newer format is refused.
package journal
