#!/bin/bash
# Generates the code below api/ (Go from the protobuf files, deepcopy functions of the API types) and, from the API
# types, the CRDs in config/crd.
#
#   hack/generate.sh           in place
#   hack/generate.sh --check   change nothing; fail with a diff if the checkout is not up to date
set -euo pipefail

cd "$(dirname "$0")/.."
module=$(go list -m)
tools=$(hack/tools.sh)
mkdir -p bin/hack
go build -o bin/hack/ ./hack/crds
crds=$PWD/bin/hack/crds

generate() (
	cd "$1"
	PATH=$tools:$PATH protoc -I api/proto -I /usr/include \
		--go_out=. --go_opt=module="$module" \
		--go-grpc_out=. --go-grpc_opt=module="$module" \
		$(cd api/proto && find . -name '*.proto' | sed 's|^\./||' | sort)
	"$tools/controller-gen" object crd:generateEmbeddedObjectMeta=true paths=./api/... output:crd:dir=config/crd
	"$crds" config/crd
)

if [ "${1:-}" != --check ]; then
	generate .
	exit
fi

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/config"
cp -r go.mod go.sum api "$copy/"
cp -r config/crd "$copy/config/"
find "$copy" \( -name '*.pb.go' -o -name 'zz_generated.*.go' -o -path '*/crd/*_*.yaml' \) -delete
generate "$copy"
# Which protoc was used is in a comment; it is the machine's, and does not matter.
if ! diff -r -u -I '^// .*protoc  *v' "$copy/api" api || ! diff -r -u "$copy/config/crd" config/crd; then
	echo "generated code is not up to date: run make generate" >&2
	exit 1
fi
