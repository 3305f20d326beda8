// Package e2e tests the shipped programs on a real Kubernetes: the local cluster ("make cluster-up") with our deployment on
// it (hack/deploy.sh); "make e2e" does it all. The node is this machine, so what the tests assert is what the API server
// says and what this machine's kernel shows: mountinfo of the sandboxes' processes, loop devices, cgroups, folders.
//
// More nodes than the machine has are further agents, each the shipped program in a process of its own with its own name,
// containerd namespace, folders and address, and the objects that kubelet and the DaemonSet would make (nodes_test.go).
//
// Every test has a namespace, and so a tenant, of its own. What a test leaves on the node fails it.
package e2e
