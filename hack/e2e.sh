#!/bin/bash
# Runs the end-to-end tests on a fresh local cluster, and takes it away whatever becomes of them. KEEP=1 leaves it.
set -uo pipefail

cd "$(dirname "$0")/.."
[ -n "${KEEP:-}" ] || trap 'make -s cluster-down' EXIT
make -s cluster-up && make -s deploy && hack/test.sh e2e
