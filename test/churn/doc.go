// Package churn holds the promises of the whole controller against a cluster in which everything goes wrong at once.
//
// # What is real, and what is played
//
// Real are etcd, the API server with our custom resources, roles and admission policies, the controller manager (garbage
// collection, binding and protection of claims, eviction), the scheduler, and the controller as it is shipped, in two
// replicas, of which one leads. Nodes are simulated by kwok: a Pod that has a node comes to run, one that is deleted goes
// (testdata/stages.yaml). Agents are fakes in one process that speak the real protocol, each with its node's certificate,
// and that keep mounts in memory; a fake provisioner makes the volumes of claims. Of kubelet there is that a container with
// another image is restarted, that resources are changed while it runs, and that an anchor's claim is mounted, now and then
// not.
//
// # What happens
//
// Twenty nodes, three Namespaces of two tenants, six sets of some twenty-five sandboxes, up to forty claims at once. At
// each step one thing, by a dice whose seed is printed: claims are made (some for volumes that are not there or another
// tenant's, some that may not have sandboxes made, some with another image, CPU and memory, environment, labels) and
// deleted, sets scaled and their templates changed, sandboxes deleted, Pods lost in four ways, volumes of claimed sandboxes
// changed, their images too, claims of a sandbox's name made by somebody else, retention policies changed, claims that were
// kept taken over or deleted, nodes drained, not ready, out of service or deleted, agents cut off, everybody's objects
// written to by somebody else, the controller killed. Its way to the API server (way) refuses or drops one request in twenty-five,
// loses the answer of three writes in a hundred, and cuts watches; agents fail and lose answers likewise.
//
// # What is held
//
// Against every state that there was, in the order of the versions (ledger): a sandbox has one claim in its life and never
// goes back; neither a set nor a claim ever has more than it asked for; what is final stays; a sandbox has one Pod at a
// time, which mounts no claim that was not made for it; whose a claim is never changes, unless it is handed on; what is to
// be kept is never deleted, what is in use neither, and a set removes a sandbox only as whenScaled says; a sandbox has from
// its first moment what its claim gives it, and a Completed claim's ran as it asks; nobody has another tenant's volume, and
// a volume that is no tenant's is one Namespace's for good. By the agents: a volume is attached only where the sandbox's
// Pod is, and nowhere else at that time, of the right tenant and claim, and of an anchor that runs there. In the end all is
// as wished (settle), then the controller writes nothing for a minute, and when all is deleted nothing is left. What was
// asked of the API server is counted from its audit log, printed, and bounded by what was to be done.
package churn
