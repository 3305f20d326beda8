#!/bin/bash
# Builds the development tools that hack/tools/go.mod pins (protoc-gen-go, protoc-gen-go-grpc, controller-gen,
# staticcheck), once, into a cache outside the checkout, and prints the directory they are in.
set -euo pipefail

cd "$(dirname "$0")/tools"
key=$( (go version; cat go.mod go.sum) | sha256sum | cut -c1-12)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/flux-sandbox/tools/$key

if [ ! -d "$dir" ]; then
	mkdir -p "$(dirname "$dir")"
	tmp=$(mktemp -d "$dir.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	echo "building the development tools (once) ..." >&2
	go build -trimpath -o "$tmp/" tool >&2
	chmod 755 "$tmp"
	mv -T "$tmp" "$dir" 2>/dev/null || [ -d "$dir" ] # another build may have won the race
fi
echo "$dir"
