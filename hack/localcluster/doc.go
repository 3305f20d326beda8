// Localcluster starts a real Kubernetes of one node on this machine, for development and for the end-to-end tests,
// and takes it away without a trace.
//
//	make cluster-up                   builds what is missing, then "localcluster up"
//	make cluster-down                 "localcluster down"
//	bin/hack/localcluster status      what runs, and where everything is
//	bin/hack/localcluster check       prove with Pods that it works
//	bin/hack/localcluster stop NAME…  take a component away, as a drill; "start NAME…" brings it back
//
// # What there is
//
// Stock programs, built once from source by build.sh and hack/containerd/build.sh: etcd, kube-apiserver,
// kube-controller-manager, kube-scheduler, containerd with its CRI, kubelet, kube-proxy; and a loopback registry,
// which is this program. They are started detached, each with its log in a file, and everything they write is
// below two folders that have the same place whatever checkout they were started from: /var/lib/flux-localcluster
// and /run/flux-localcluster. Down finds it all there again, and each process by a mark in its environment, so
// both commands may be given twice, from different checkouts, and after an up that failed half-way.
//
// As on any cluster: certificates of an own CA everywhere, the authorizers Node and RBAC, the default admission
// plugins and NodeRestriction, projected tokens of ServiceAccounts, an audit log (every request at level
// Metadata), NRI at its default socket, etcd that waits for the disk.
//
// What differs, and why:
//   - Every listener is at the node's address, 10.213.5.1 on an interface of its own, so that no port of the
//     machine's is taken and the cluster is the same whatever network the machine is in. Only etcd (a Unix
//     socket) and the registry (loopback, plain HTTP) are elsewhere.
//   - Pods are joined by the CNI plugin ptp, not bridge: without a bridge, the way to a Service and back always leads
//     through the host, whether or not the kernel shows bridged packets to its filter. No plugin serves hostPort.
//   - kube-proxy is in nftables mode and kubelet makes no chains of its own: the rules are in tables of their own,
//     nobody else's are touched, and removing them is removing the tables.
//   - Pods' cgroups are below /flux-localcluster.
//   - There is no DNS for Services (no CoreDNS): programs use the addresses that kubelet puts into their
//     environment, as client libraries do for the API server.
//   - No Pod is evicted and no image removed because the disk is rather full, and pulls are not limited: tests would
//     fail at random.
//
// # Images
//
// There is no way to a registry from where this must run. The one here stands in for all of them: containerd asks
// it whatever an image's name says. It has test images made of the machine's static busybox under the names that
// people use (ubuntu, debian, alpine, busybox, python, node, …: a shell and busybox's programs, whatever the tag;
// nginx: busybox's web server on port 80) and the pause image; anything else that is pushed to it can be pulled.
// What it has is in memory.
//
// # How it is left
//
// Up writes down what it will change of the machine (sysctls, folders outside of its own) before it changes anything.
// Down kills what runs, unmounts what is mounted below the two folders, removes cgroups, tables, interface and
// folders, and puts the sysctls back. Nothing else on the machine is looked at, so a containerd or containers of
// somebody else's are safe.
package main
