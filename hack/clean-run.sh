#!/bin/bash
# hack/clean-run.sh COMMAND… runs a command and fails if it leaves anything on the machine: a mount, a loop
# device, a process, a cgroup, a file. The command gets a temporary directory of its own in TMPDIR, whose name
# tells hack/leftovers that what is in it is ours; it is on a disk, as disk images cannot be on a tmpfs.
set -uo pipefail

cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
mkdir -p bin/hack
go build -o bin/hack/ ./hack/leftovers || exit

work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT
# A short path: sockets have 107 bytes for theirs.
TMPDIR=$(mktemp -d "${TMPDIR:-/var/tmp}/flux.XXX") || exit
chmod 0711 "$TMPDIR" # the users of a user namespace come through to their container's root filesystem
export TMPDIR
unset GOTMPDIR

bin/hack/leftovers | grep -vxF "file: $TMPDIR" >"$work/before"
"$@"
status=$?

left=$(ls -A "$TMPDIR")
if [ -n "$left" ]; then
	printf 'left behind: %s/%s\n' $(for f in $left; do echo "$TMPDIR" "$f"; done)
	status=1
fi
# Never through a mount that was left there: it may show the data of something else.
grep -qF " $TMPDIR/" /proc/self/mountinfo || rm -rf "$TMPDIR"
bin/hack/leftovers -since "$work/before" || status=1
exit $status
