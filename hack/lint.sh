#!/bin/bash
# All static checks. Runs every one, then fails if any failed.
set -uo pipefail

cd "$(dirname "$0")/.."
failed=()

# check NAME COMMAND…
check() {
	local name=$1 start=$SECONDS
	shift
	if "$@"; then
		printf 'ok    %s  %ds\n' "$name" $((SECONDS - start))
	else
		printf 'FAIL  %s  %ds\n' "$name" $((SECONDS - start))
		failed+=("$name")
	fi
}

formatted() {
	local bad
	bad=$(find . -name '*.go' -not -path './bin/*' -not -path './dist/*' -print0 | xargs -0 gofmt -l) || return
	[ -z "$bad" ] || { printf 'not formatted: %s\n' $bad; return 1; }
}

tools=$(hack/tools.sh) || exit
check "gofmt" formatted
check "go vet" go vet ./...
check "go vet, tag failpoint" go vet -tags failpoint ./...
check "staticcheck" "$tools/staticcheck" ./...
check "staticcheck, tag failpoint" "$tools/staticcheck" -tags failpoint ./...
check "go vet, localcluster" go vet -C hack/localcluster ./...
check "staticcheck, localcluster" env -C hack/localcluster "$tools/staticcheck" ./...
check "go vet, csisanity" go vet -C test/csisanity ./...
check "staticcheck, csisanity" env -C test/csisanity "$tools/staticcheck" ./...
check "go vet, foreigndriver" go vet -C test/foreigndriver ./...
check "staticcheck, foreigndriver" env -C test/foreigndriver "$tools/staticcheck" ./...
check "generated code is up to date" hack/generate.sh --check

[ ${#failed[@]} -eq 0 ] || { echo "lint: ${#failed[@]} failed" >&2; exit 1; }
