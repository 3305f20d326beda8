// Package e2e tests the shipped programs on a real Kubernetes: the local cluster ("make cluster-up") with our deployment on
// it (hack/deploy.sh); "make e2e" does it all. The node is this machine, so what the tests assert is what the API server
// says and what this machine's kernel shows: mountinfo of the sandboxes' processes, loop devices, cgroups, folders.
//
// Every test has a namespace, and so a tenant, of its own. What a test leaves on the node fails it.
package e2e
