#!/bin/bash
# Builds containerd 2.x and its runc shim from source, once, and prints the directory they are in.
#
#   hack/containerd/build.sh        without what serves Kubernetes and other snapshotters, most of the build
#   hack/containerd/build.sh cri    with the CRI, for hack/localcluster
#
# The integration tests run against the containerd that the machine has and against this one. Use it as
#   dir=$(hack/containerd/build.sh)
#   FLUX_TEST_CONTAINERD=$dir/containerd PATH=$dir:$PATH go test ./internal/containers/...
# (containerd finds its shim through PATH).
set -euo pipefail

tags=no_btrfs,no_devmapper,no_zfs
case ${1:-} in
"") variant= tags=no_cri,$tags ;;
cri) variant=-cri ;;
*)
	echo "build.sh: no variant $1: there is cri" >&2
	exit 2
	;;
esac

cd "$(dirname "$0")"
version=$(go list -m -f '{{.Version}}' github.com/containerd/containerd/v2)
key=$(cat go.sum build.sh | sha256sum | cut -c1-12)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/flux-sandbox/containerd/$version$variant-$key

if [ ! -x "$dir/containerd-shim-runc-v2" ]; then
	mkdir -p "$(dirname "$dir")"
	tmp=$(mktemp -d "$dir.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	echo "building containerd $version$variant (once; a few minutes) ..." >&2
	CGO_ENABLED=0 nice -n 10 go build -p "${BUILD_PARALLEL:-2}" -buildvcs=false -trimpath \
		-tags "$tags" \
		-ldflags "-s -w -X github.com/containerd/containerd/v2/version.Version=$version" \
		-o "$tmp/" \
		github.com/containerd/containerd/v2/cmd/containerd \
		github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2 >&2
	chmod 755 "$tmp"
	# Another build may have won the race: its result is as good.
	mv -T "$tmp" "$dir" 2>/dev/null || [ -x "$dir/containerd-shim-runc-v2" ]
fi
echo "$dir"
