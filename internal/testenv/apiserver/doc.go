// Package apiserver gives tests a real Kubernetes API server: stock kube-apiserver and etcd, alone, without a
// node, for what is better not faked: CRDs with their CEL rules, admission policies, patches, conflicts,
// watches, RBAC, audit.
//
//	func TestMain(m *testing.M) { apiserver.Main(m) }
//
//	func TestX(t *testing.T) {
//		server := apiserver.Shared(t)                        // one for the whole test binary, on first use
//		admin := server.Config()                             // may do everything
//		alice := server.As("alice", "readers")               // may do what RBAC says
//	}
//
// It takes a few seconds to start, so one server for a test binary is the norm, and tests keep out of each
// other's way by namespaces. [Start] gives a test one of its own: for drills that take it away ([Server.Stop],
// [Server.Restart]), and for other flags.
//
// What differs from a cluster: there is no controller-manager, so nothing is garbage-collected, a deleted
// Namespace stays Terminating, and no ServiceAccount is made by itself (for that reason the admission plugin of
// this name is off, or no Pod could be created); no scheduler and no kubelet, so no Pod ever runs.
// Tokens of ServiceAccounts work, and TokenReview.
//
// The binaries are those of hack/localcluster/build.sh: in the directory that the environment variable [BinEnv]
// names, or where that script leaves them. Where there are none, tests are skipped, in CI failed (package
// testenv).
//
// Nothing outlives the test binary: both processes are told by the kernel to die with it, even when it is
// killed. Everything they write is in a temporary directory, and etcd does not wait for the disk.
package apiserver
