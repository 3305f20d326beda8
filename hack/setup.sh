#!/bin/bash
# Installs what building, testing and the demo need and this machine lacks. Silent when nothing is missing.
#
#   hack/setup.sh          for make build, test, demo, bench
#   hack/setup.sh lint     also for make lint and make generate
#   hack/setup.sh cluster  also for make cluster-up
#
# Packages are installed on Debian and its kin, as root; elsewhere it says what is missing and fails. It starts
# and stops no service: the project runs a containerd of its own, whatever Debian's package does with its one.
set -euo pipefail

export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
packages=()

# need PACKAGE TEST…: the package is missing if the test fails.
need() {
	local package=$1
	shift
	"$@" >/dev/null 2>&1 || packages+=("$package")
}

have() { command -v "$1"; }

# The demo's image is made of it: a program that needs no library.
static_busybox() { have busybox && ! LC_ALL=C ldd "$(command -v busybox)" | grep -q '=>'; }

c_compiler() { have gcc && echo '#include <stdlib.h>' | gcc -E -; }

well_known_protos() { have protoc && echo 'syntax="proto3"; import "google/protobuf/timestamp.proto";' >"$tmp/x.proto" && protoc -I "$tmp" -I /usr/include -o /dev/null "$tmp/x.proto"; }

if ! command -v go >/dev/null; then
	echo "setup: Go is missing: install the version that go.mod names, or a later one" >&2
	exit 1
fi

need containerd have containerd
need runc have runc
need busybox-static static_busybox
need e2fsprogs have mkfs.ext4
need xfsprogs have mkfs.xfs
need gcc c_compiler # the race detector needs cgo
case " ${packages[*]-} " in *" gcc "*) packages+=(libc6-dev) ;; esac
case "${1:-}" in
lint)
	tmp=$(mktemp -d)
	trap 'rm -rf "$tmp"' EXIT
	need protobuf-compiler have protoc
	need libprotobuf-dev well_known_protos
	;;
cluster)
	need containernetworking-plugins test -x /usr/lib/cni/ptp
	need nftables have nft
	need iproute2 have ip
	;;
esac

[ ${#packages[@]} -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
	echo "setup: missing on this machine, by the names of Debian's packages: ${packages[*]}" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "setup: missing; run as root: apt-get install ${packages[*]}" >&2
	exit 1
fi
echo "setup: installing ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >&2
apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2
