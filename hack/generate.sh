#!/bin/bash
# Generates the code below api/: Go from the protobuf files, deepcopy functions of the API types.
#
#   hack/generate.sh           in place
#   hack/generate.sh --check   change nothing; fail with a diff if the checkout is not up to date
set -euo pipefail

cd "$(dirname "$0")/.."
module=$(go list -m)
tools=$(hack/tools.sh)

generate() (
	cd "$1"
	PATH=$tools:$PATH protoc -I api/proto -I /usr/include \
		--go_out=. --go_opt=module="$module" \
		--go-grpc_out=. --go-grpc_opt=module="$module" \
		$(cd api/proto && find . -name '*.proto' | sed 's|^\./||' | sort)
	"$tools/controller-gen" object paths=./api/...
)

if [ "${1:-}" != --check ]; then
	generate .
	exit
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r go.mod go.sum api "$copy/"
find "$copy/api" \( -name '*.pb.go' -o -name 'zz_generated.*.go' \) -delete
generate "$copy"
# Which protoc was used is in a comment; it is the machine's, and does not matter.
if ! diff -r -u -I '^// .*protoc  *v' "$copy/api" api; then
	echo "generated code is not up to date: run make generate" >&2
	exit 1
fi
