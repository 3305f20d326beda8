#!/bin/bash
# Builds kwok, the nodes that test/churn simulates, from source, once, and prints the directory it is in.
set -euo pipefail

cd "$(dirname "$0")"
version=$(go list -m -f '{{.Version}}' sigs.k8s.io/kwok)
key=$(cat go.sum build.sh | sha256sum | cut -c1-12)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/flux-sandbox/kwok/$version-$key

if [ ! -x "$dir/kwok" ]; then
	mkdir -p "$(dirname "$dir")"
	tmp=$(mktemp -d "$dir.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	echo "building kwok $version (once; a few minutes) ..." >&2
	CGO_ENABLED=0 nice -n 10 go build -p "${BUILD_PARALLEL:-2}" -buildvcs=false -trimpath -ldflags "-s -w" \
		-o "$tmp/" sigs.k8s.io/kwok/cmd/kwok >&2
	chmod 755 "$tmp"
	# Another build may have won the race: its result is as good.
	mv -T "$tmp" "$dir" 2>/dev/null || [ -x "$dir/kwok" ]
fi
echo "$dir"
