// Package journal is the agent's memory of what it did to the node in this boot: which volumes are on
// their way into which sandbox, which are there, and which sources are prepared for them.
//
// Every step with a side effect is written down before it is taken and its result after it, so that at
// every instant a SIGKILL leaves a journal from which, together with mountinfo and containerd, the next
// start repairs the node (design, section 6, rule 8).
//
// It is a bbolt file in a folder that is emptied by a reboot (/run), as mounts are. Commits are not
// synced: a process that dies loses nothing that it wrote, and a machine that dies loses the mounts
// together with the records. A journal of another boot, which a folder that is no tmpfs can still hold, is
// moved aside and begun anew.
//
// Records are JSON. A field that this build does not know is ignored; a record that does not decode is an
// error that names it, never skipped: a mount that nobody remembers would be a leak.
package journal
