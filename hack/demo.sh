#!/bin/bash
# The demo: the standalone flux-sandbox in a scratch folder, and its main job step by step. Every step is checked; the
# demo fails when one does not hold. "make demo" sets up, builds and runs it; it needs root.
set -euo pipefail

cd "$(dirname "$0")/.."
bin=$PWD/bin
scratch=$(mktemp -d /tmp/flux-demo.XXXX)
export FLUX_ADDRESS=unix://$scratch/run/flux-sandbox.sock
export PATH=$bin:$PATH
server=

# --- telling and checking -------------------------------------------------------------------------------------------

if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' off=$'\e[0m'; else bold='' dim='' off=''; fi
now() { date +%s%N; }
step() { printf '\n%s%s%s\n' "$bold" "$*" "$off"; }
fail() {
	printf '\nDEMO FAILED: %s\n' "$*" >&2
	[ ! -f "$scratch/server.log" ] || tail -n 20 "$scratch/server.log" >&2
	exit 1
}

# show COMMAND…: run it, show it and its time, and leave its output in $out and its exit code in $code.
show() {
	local begin end
	printf '%s$ %s%s\n' "$dim" "$*" "$off"
	begin=$(now)
	out=$("$@" 2>&1) && code=0 || code=$?
	end=$(now)
	[ -z "$out" ] || sed 's/^/    /' <<<"$out"
	printf '%s    (%d ms)%s\n' "$dim" $(((end - begin) / 1000000)) "$off"
}
works() { show "$@"; [ "$code" = 0 ] || fail "exit code $code: $*"; }
refused() { # refused WORD COMMAND…: it must fail, and say WORD
	local word=$1
	shift
	show "$@"
	[ "$code" != 0 ] || fail "this should have been refused: $*"
	grep -q -- "$word" <<<"$out" || fail "the refusal does not say $word: $out"
}
# attaches COMMAND…: works, and the time that the attach itself took in the agent, which logs it.
attaches() {
	works "$@"
	printf '%s    (of which the attach itself: %s)%s\n' "$dim" "$(grep -E 'volume attached.*component=agent' "$scratch/server.log" | tail -n 1 | grep -oE 'duration=[^ ]+' | cut -d= -f2)" "$off"
}
says() { grep -q -- "$1" <<<"$out" || fail "expected \"$1\" in: $out"; }

# --- what is on the machine, before and after -----------------------------------------------------------------------

snapshot() {
	echo "mounts: $(grep -c . /proc/self/mountinfo)"
	grep -F "$scratch" /proc/self/mountinfo || true
	grep -sF "$scratch" /sys/block/loop*/loop/backing_file || true
	find /sys/fs/cgroup -type d -name '*flux-demo*' 2>/dev/null || true
	pgrep -af "$scratch" | grep -v "^$$ " | grep -E 'containerd|flux-sandbox' || true
}

start_server() {
	flux-sandbox serve --config "$scratch/flux-sandbox.yaml" >>"$scratch/server.log" 2>&1 &
	server=$!
	local begin
	begin=$(now)
	until fluxctl ps >/dev/null 2>&1; do
		kill -0 "$server" 2>/dev/null || fail "the server does not start"
		sleep 0.02
	done
	printf '%s    (serving after %d ms)%s\n' "$dim" $((($(now) - begin) / 1000000)) "$off"
}

clean_up() {
	local status=$?
	trap - EXIT
	[ -z "$server" ] || { kill -9 "$server" && wait "$server"; } 2>/dev/null || true
	[ ! -f "$scratch/flux-sandbox.yaml" ] || flux-sandbox reset --yes --config "$scratch/flux-sandbox.yaml" >/dev/null 2>&1 || true
	rm -rf "$scratch"
	exit $status
}
trap clean_up EXIT

# --- the demo -------------------------------------------------------------------------------------------------------

started=$(now)
before=$(snapshot)
mkdir -p "$scratch"/data/tenants/{alice,bob}/{workspace,private} "$scratch"/data/{models,scratch}
echo 'weights of a model' >"$scratch/data/models/weights"
cat >"$scratch/flux-sandbox.yaml" <<EOF
node: demo
stateDir: $scratch/state
runDir: $scratch/run
sandboxes:
  cgroupParent: /$(basename "$scratch")
volumes:
  local:
  - path: $scratch/data/tenants/{tenantId}   # each tenant its own
  - path: $scratch/data/models               # everybody, read-only
    shared: true
  - path: $scratch/data/scratch/{tenantId}   # size-limited disk images, made at first use
    backing: image
EOF

step '1. The server, with a containerd of its own'
start_server
go run ./hack/demoimage >"$scratch/busybox.tar"
works fluxctl image import "$scratch/busybox.tar"

step '2. Two sandboxes of two tenants, each with a process that runs all along'
# The process does what it is told through a FIFO, so that it is always the same one that reads and writes.
resident='mkfifo /tmp/do; echo ready; while read -r line </tmp/do; do { eval "$line"; echo "exit $?"; } >/tmp/said 2>&1; mv /tmp/said /tmp/done; done'
for tenant in alice bob; do
	works fluxctl run --name "$tenant" --tenant "$tenant" --image busybox -- sh -c "$resident"
done
works fluxctl ps
pid_of() { fluxctl exec "$1" -- sh -c 'for p in /proc/[0-9]*; do tr "\0" " " <$p/cmdline 2>/dev/null | grep -q "^sh -c mkfifo" && echo "${p#/proc/} $(cut -d" " -f22 $p/stat)"; done; true'; }
alice=$(pid_of alice)
bob=$(pid_of bob)
[ -n "$alice" ] && [ -n "$bob" ] || fail 'the resident processes are not there'
tell() { # tell SANDBOX LINE: its resident process runs the line; what it says is in $out
	printf '%s  %s'"'"'s process: %s%s\n' "$dim" "$1" "$2" "$off"
	out=$(fluxctl exec "$1" -- sh -c 'rm -f /tmp/done; echo "$1" >/tmp/do; while [ ! -e /tmp/done ]; do sleep 0.01; done; cat /tmp/done' sh "$2")
	sed 's/^/    /' <<<"$out"
}

step '3. Volumes into the running processes: her own, a shared one, a size-limited one'
attaches fluxctl volume add alice --source "$scratch/data/tenants/alice/workspace" --target /workspace
attaches fluxctl volume add alice --source "$scratch/data/models" --target /models --ro
attaches fluxctl volume add alice --source "$scratch/data/scratch/alice/cache" --target /cache --size 64Mi
works fluxctl volume ls alice
tell alice 'echo "written by the running process" >/workspace/result'
says 'exit 0'
[ "$(cat "$scratch/data/tenants/alice/workspace/result")" = 'written by the running process' ] || fail 'the host does not see the file'
tell alice 'cat /models/weights'
says 'weights of a model'
tell alice 'echo mine >/models/weights'
says 'Read-only file system'
tell alice 'df -h /cache | tail -n 1'
grep -Eq ' (5[0-9]|6[0-4])\.[0-9]M ' <<<"$out" || fail "df does not show the size: $out"
tell alice 'dd if=/dev/zero of=/cache/fill bs=1M count=100'
says 'No space left on device'

step "4. Another tenant's directory"
refused TENANT fluxctl volume add alice --source "$scratch/data/tenants/bob/private" --target /bob
refused READ_ONLY\\\|MODE\\\|read-only fluxctl volume add bob --source "$scratch/data/models" --target /models --mode rw

step '5. The server is killed, and finds everything again'
printf '%s$ kill -9 %s%s\n' "$dim" "$server" "$off"
kill -9 "$server"
wait "$server" 2>/dev/null || true
[ "$(cat "$scratch"/data/tenants/alice/workspace/result)" ] || fail 'the data is gone'
start_server
works fluxctl volume ls alice
[ "$(grep -c Mounted <<<"$out")" = 3 ] || fail 'not every volume is mounted'
tell alice 'cat /workspace/result'
says 'written by the running process'

step '6. Detaching a volume that is in use'
tell alice 'cd /workspace && pwd'
refused BUSY fluxctl volume rm alice /workspace
says 'sh'
host_pid=$(grep -oE '[0-9]{2,}' <<<"$(grep -E 'cwd' <<<"$out")" | head -n 1)
[ -n "$host_pid" ] && [ -d "/proc/$host_pid" ] || fail "the holder's PID is not named: $out"
works fluxctl volume rm alice /workspace --force
tell alice 'cd / && ls -A /workspace'
[ "$out" = 'exit 0' ] || fail 'the volume is still visible'
works fluxctl volume rm alice /models
works fluxctl volume rm alice /cache

step '7. The processes were never restarted, and their logs have no error'
[ "$(pid_of alice)" = "$alice" ] && [ "$(pid_of bob)" = "$bob" ] || fail 'a process was restarted'
works fluxctl logs alice
[ "$(grep -vc ready <<<"$out" || true)" = 0 ] || fail 'the log has more than its first line'

step '8. Nothing is left'
works fluxctl rm alice bob
works fluxctl ps
kill "$server"
wait "$server" || fail 'the server did not stop cleanly'
server=
works flux-sandbox reset --yes --config "$scratch/flux-sandbox.yaml"
left=$(find "$scratch" -mindepth 1 ! -path "$scratch/data*" ! -name flux-sandbox.yaml ! -name server.log ! -name busybox.tar)
[ -z "$left" ] || fail "files are left: $left"
after=$(snapshot)
[ "$before" = "$after" ] || fail "the machine is not as it was: before: $before; after: $after"
echo '    no mount, loop device, container, cgroup, process or file'
printf '\n%sAll of it held, in %d s.%s\n' "$bold" $((($(now) - started) / 1000000000)) "$off"
