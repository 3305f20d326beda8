#!/bin/bash
# Builds the image of the cluster's programs and deploys them to the local cluster: "make cluster-up" first. Other clusters
# take the image from their registry: hack/image pushes it, and "kubectl apply -k config/kubernetes" does the rest.
set -euo pipefail

cd "$(dirname "$0")/.."
kubectl=$(hack/localcluster/build.sh -n)/kubectl
export KUBECONFIG=${KUBECONFIG:-/var/lib/flux-localcluster/kubeconfig/admin}
registry=127.0.0.1:5055

image=$(go run ./hack/image -bin bin -insecure -push "$registry/library/flux-sandbox:dev")
# By its digest: a Pod runs what was built, and nothing is pulled twice.
digest=${image#*@}
mkdir -p /var/lib/flux-localcluster/volumes/{tenants,models,scratch}
overlay=$(mktemp -d -p bin) # kustomize wants relative paths, and git leaves bin alone
KUBECACHEDIR=$(mktemp -d)
export KUBECACHEDIR
trap 'rm -rf "$overlay" "$KUBECACHEDIR"' EXIT
cat >"$overlay/kustomization.yaml" <<YAML
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
- ../../hack/localcluster/deploy
images:
- name: flux-sandbox
  newName: docker.io/library/flux-sandbox
  digest: $digest
YAML
# Twice if need be: the API server serves a new kind a moment after it has taken its definition.
"$kubectl" apply --server-side --force-conflicts -k "$overlay" || { sleep 2 && "$kubectl" apply --server-side --force-conflicts -k "$overlay"; }
"$kubectl" -n flux-sandbox rollout status --timeout=180s deployment/flux-sandbox-controller
"$kubectl" -n flux-sandbox rollout status --timeout=180s daemonset/flux-sandbox-agent
"$kubectl" -n flux-sandbox rollout status --timeout=180s daemonset/flux-sandbox-csi
