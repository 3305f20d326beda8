#!/bin/bash
# Builds stock Kubernetes and etcd from source, once, and prints the directory they are in.
#
#   hack/localcluster/build.sh                       all of them
#   hack/localcluster/build.sh kube-apiserver etcd   these alone, in this order
#   hack/localcluster/build.sh -n                    build nothing, just print the directory
#
# Versions are those of build/go.mod. The directory is outside of the checkout and keyed by version and recipe.
# Each binary gets its place the moment it is complete, and a second build waits for the first one binary by
# binary: who needs the API server alone does not wait for the rest. Cold, on two cores, all of it takes a
# quarter of an hour, two thirds of it for the first binary: they share most of their packages.
set -euo pipefail

cd "$(dirname "$0")/build"
all=(kube-apiserver etcd kube-controller-manager kubelet kube-proxy kube-scheduler kubectl)

# build NAME FILE
build() {
	local package=k8s.io/kubernetes/cmd/$1 stamp=() p
	case $1 in
	etcd) package=go.etcd.io/etcd/server/v3 ;;
	*) # a Kubernetes that was not built from its repository has no version, and its clients refuse or warn
		for p in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
			stamp+=(-X "$p.gitVersion=$version" -X "$p.gitMajor=1" -X "$p.gitMinor=${minor%%.*}")
		done
		;;
	esac
	CGO_ENABLED=0 nice -n 10 go build -p "${BUILD_PARALLEL:-2}" -buildvcs=false -trimpath \
		-ldflags "-s -w ${stamp[*]}" -o "$2" "$package" >&2
}

version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
minor=${version#v1.}
key=$({ cat go.sum && declare -f build; } | sha256sum | cut -c1-12)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/flux-sandbox/kubernetes/$version-$key

if [ "${1:-}" = -n ]; then
	echo "$dir"
	exit
fi
[ $# -gt 0 ] || set -- "${all[@]}"
for name in "$@"; do
	case " ${all[*]} " in
	*" $name "*) ;;
	*)
		echo "build.sh: no $name: there are ${all[*]}" >&2
		exit 2
		;;
	esac
done

for name in "$@"; do
	[ ! -x "$dir/$name" ] || continue
	mkdir -p "$dir"
	(
		flock 9
		[ ! -x "$dir/$name" ] || exit 0 # somebody else built it meanwhile
		echo "$(date +%T) building $name for Kubernetes $version (once) ..." >&2
		start=$SECONDS
		build "$name" "$dir/.$name.new"
		mv -T "$dir/.$name.new" "$dir/$name"
		echo "$(date +%T) built $name in $((SECONDS - start)) s" >&2
	) 9>"$dir/.lock"
done
echo "$dir"
