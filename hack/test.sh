#!/bin/bash
# hack/test.sh STAGE… runs stages of tests, and prints the sum of them as its last line: N passed, N failed.
#
#   unit          packages that need nothing of the machine, and the house rules; with the race detector
#   apiserver     packages that need a Kubernetes API server, which is built; with the race detector
#   integration   packages that need root, the kernel's mounts and containerd; with the race detector
#   containerd2   internal/containers once more, with containerd 2.x built from source
#   e2e           the shipped programs on the local cluster, which runs and has them (make e2e)
#   churn         the controller on simulated nodes, for two minutes (with FLUX_SOAK=1, an hour); without the race detector
#   crash         the crash matrix and whatever else is tested with failpoints; without the race detector
#
# With CI=true a skipped test is a failed one. TESTFLAGS is handed to go test (-run, -v, -count).
set -uo pipefail

cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

mkdir -p bin/hack
go build -o bin/hack/ ./hack/testsummary || exit
tally=$(mktemp) || exit
trap 'rm -f "$tally"' EXIT
failed=()

# Packages whose tests change the machine: one at a time.
integration_dirs='^(internal/(mount|capacity|containers|pods|agent|csidriver)|test)(/|$)'

# packages PATTERN: our packages whose path below the module matches, without those of the stage apiserver.
packages() { go list -f '{{.ImportPath}}' ./... | sed "s|^$module/||" | grep -E "$1" | sed 's|^|./|' | grep -vxFf <(apiserver_packages); }
module=$(go list -m) || exit

# Packages whose tests start a Kubernetes API server, but for test/churn, which has a stage of its own.
apiserver_packages() {
	go list -f '{{.ImportPath}} {{join .TestImports " "}} {{join .XTestImports " "}}' ./... |
		grep -F "$module/internal/testenv/apiserver" | sed "s| .*||; s|^$module/|./|" | grep -vx ./test/churn
}

tests() { # tests NAME GO-TEST-ARGUMENT…; in the module in $dir, if it is set
	local name=$1 start=$SECONDS
	shift
	echo "== $name"
	go test ${dir:+-C "$dir"} -json -timeout 30m $flags ${TESTFLAGS:-} "$@" 2>&1 | bin/hack/testsummary -tally "$tally"
	[ "${PIPESTATUS[*]}" = "0 0" ] || failed+=("$name")
	echo "== $name: $((SECONDS - start)) s"
}

# with_cri STAGE: the containerd that tests of Pods run, internal/pods/podstest.
with_cri() {
	local bin
	bin=$(hack/containerd/build.sh cri) || { failed+=("$1: no containerd with CRI"); return 1; }
	export FLUX_TEST_CONTAINERD_CRI=$bin/containerd
}

stage() {
	local flags= dir=
	case $1 in
	unit)
		flags='-race -p 2'
		tests unit $(packages . | grep -vE "^\./${integration_dirs#^}") ./test/house
		dir=hack/localcluster tests "unit, localcluster" ./...
		;;
	apiserver)
		local bin
		if ! bin=$(hack/localcluster/build.sh kube-apiserver etcd); then
			failed+=("apiserver: no kube-apiserver")
			return
		fi
		flags='-race -p 1 -count=1'
		FLUX_TEST_KUBE_BIN=$bin tests "API server" $(apiserver_packages)
		;;
	integration)
		with_cri integration || return
		flags='-race -p 1 -count=1'
		tests integration $(packages "$integration_dirs" | grep -vE '^\./test/(house|crash|churn|e2e)')
		dir=test/csisanity tests "CSI sanity" ./...
		;;
	containerd2)
		local bin
		if ! bin=$(hack/containerd/build.sh); then
			failed+=("containerd2: no containerd")
			return
		fi
		flags='-race -p 1 -count=1'
		FLUX_TEST_CONTAINERD=$bin/containerd PATH=$bin:$PATH tests "containerd 2.x" ./internal/containers/...
		;;
	e2e)
		local bin
		bin=$(hack/localcluster/build.sh -n) || exit
		flags='-p 1 -count=1 -parallel 8'
		FLUX_E2E_KUBECONFIG=/var/lib/flux-localcluster/kubeconfig/admin FLUX_E2E_KUBECTL=$bin/kubectl \
			FLUX_E2E_LOCALCLUSTER=$PWD/bin/hack/localcluster FLUX_E2E_FLUXCTL=$PWD/bin/fluxctl tests e2e ./test/e2e
		;;
	churn)
		local kube kwok
		if ! kube=$(hack/localcluster/build.sh kube-apiserver etcd kube-controller-manager kube-scheduler) || ! kwok=$(hack/kwok/build.sh); then
			failed+=("churn: no Kubernetes or no kwok")
			return
		fi
		flags='-p 1 -count=1'
		FLUX_TEST_KUBE_BIN=$kube FLUX_TEST_KWOK=$kwok/kwok FLUX_CHURN_REPORT=$tally.churn tests churn ./test/churn
		cat "$tally.churn" && rm -f "$tally.churn"
		;;
	crash)
		# Packages with test files that are built only with the tag, wherever they are.
		local tagged bin
		if ! bin=$(hack/localcluster/build.sh kube-apiserver etcd); then
			failed+=("crash: no kube-apiserver")
			return
		fi
		tagged=$(grep -rlE --include='*_test.go' '^//go:build .*failpoint' internal test 2>/dev/null | xargs -r dirname | sed 's|^|./|' | sort -u)
		with_cri crash || return
		flags='-tags failpoint -p 1 -count=1'
		FLUX_TEST_KUBE_BIN=$bin tests "crash matrix" $(printf '%s\n' ./test/crash $tagged | sort -u)
		;;
	*)
		echo "test.sh: no stage $1" >&2
		exit 2
		;;
	esac
}

for s in "$@"; do
	stage "$s"
done
[ ${#failed[@]} -eq 0 ] || printf 'failed: %s\n' "${failed[@]}"
bin/hack/testsummary -tally "$tally" -close && [ ${#failed[@]} -eq 0 ]
