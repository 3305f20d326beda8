#!/bin/bash
# Runs every fuzz target for FUZZTIME (default 10s) each.
set -uo pipefail

cd "$(dirname "$0")/.."
status=0
found=0
while IFS=: read -r file target; do
	found=$((found + 1))
	echo "== $(dirname "$file") $target"
	go test -run='^$' -fuzz="^$target\$" -fuzztime="${FUZZTIME:-10s}" -parallel=2 "./$(dirname "$file")" || status=1
done < <(grep -roE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' internal api cmd test 2>/dev/null | sed 's/func //' | sort)
echo "$found fuzz targets"
[ $found -gt 0 ] && exit $status
