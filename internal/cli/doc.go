// Package cli is fluxctl, the command line of FluxSandbox: sandboxes, their volumes, and what a node can do.
//
// It is a client of the public gRPC API and nothing more. Main runs one command line and returns the exit code:
// 0, 1 for what failed, 2 for a command line that is wrong; exec returns the command's own. Results go to stdout,
// as a table, or with -o json|yaml as the Kubernetes objects of sandbox.flux.io/v1alpha1; errors and warnings go
// to stderr. An error is one line: what failed, why, what to do, and its reason in brackets for programs.
package cli
