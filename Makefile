# FluxSandbox. "make help" lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := build

MODULE  := github.com/flux-sandbox/flux-sandbox
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
STAMP   := -s -w -X $(MODULE)/internal/version.stamped=$(VERSION)

# Two compilers at a time: a build next to running sandboxes should not take the whole machine.
export GOFLAGS := $(strip $(shell go env GOFLAGS) -p=2)

.PHONY: help
help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

.PHONY: demo
demo: setup build ## show what it does, for real, on this machine (root)
	@hack/clean-run.sh hack/demo.sh

.PHONY: test
test: setup build ## run all tests: unit, house rules, API server, churn, integration (root), containerd 2.x, crash matrix
	@hack/clean-run.sh hack/test.sh unit apiserver churn integration containerd2 crash

.PHONY: test-unit
test-unit: ## run the tests that need nothing of the machine
	@hack/test.sh unit

.PHONY: crash
crash: setup ## run the crash matrix alone (root)
	@hack/clean-run.sh hack/test.sh crash

.PHONY: churn
churn: setup ## have everything go wrong at once on simulated nodes (FLUX_CHURN_TIME=2m, FLUX_CHURN_SEED)
	@hack/clean-run.sh hack/test.sh churn

.PHONY: soak
soak: setup build ## run the long forms of the integration tests, of the churn and of the fuzzers (root; hours)
	@FLUX_SOAK=1 TESTFLAGS='-count=1 -timeout=6h' hack/clean-run.sh hack/test.sh integration churn crash
	@FUZZTIME=10m hack/fuzz.sh

.PHONY: fuzz
fuzz: ## run every fuzz target for a short time (FUZZTIME=10s)
	@hack/fuzz.sh

.PHONY: bench
bench: setup build ## measure, and print a table with its baselines (root)
	@hack/clean-run.sh go run ./test/bench

# The helpers run inside sandboxes, in an image that has no libraries: they are static.
.PHONY: build
build: ## build the binaries into bin/
	@mkdir -p bin
	@CGO_ENABLED=0 go build -trimpath -ldflags "$(STAMP)" -o bin/ ./cmd/...

.PHONY: cluster-up
cluster-up: setup-cluster bin/hack/localcluster ## start a real one-node Kubernetes here, built from source once (root)
	@kube=$$(hack/localcluster/build.sh) && containerd=$$(hack/containerd/build.sh cri) && \
		bin/hack/localcluster up -kube $$kube -containerd $$containerd

.PHONY: cluster-down
cluster-down: bin/hack/localcluster ## take it away, and everything that it left
	@bin/hack/localcluster down

.PHONY: deploy
deploy: build ## build our image and deploy it to the local cluster
	@hack/deploy.sh

.PHONY: e2e
e2e: ## run the end-to-end tests: starts the local cluster, deploys, tests, takes it away (root)
	@hack/clean-run.sh hack/e2e.sh

.PHONY: bin/hack/localcluster
bin/hack/localcluster:
	@mkdir -p bin/hack
	@CGO_ENABLED=0 go build -C hack/localcluster -o ../../$@ .

.PHONY: generate
generate: setup-lint ## generate code from the protobuf files and the API types
	@hack/generate.sh

.PHONY: lint
lint: setup-lint ## run the static checks: gofmt, vet, staticcheck, generated code up to date
	@hack/lint.sh

.PHONY: setup
setup: ## install what this machine lacks (Debian, root); silent if nothing
	@hack/setup.sh

.PHONY: setup-lint
setup-lint:
	@hack/setup.sh lint

.PHONY: setup-cluster
setup-cluster:
	@hack/setup.sh cluster

.PHONY: clean
clean: ## remove what was built
	@rm -rf bin dist
