// Package pods knows the containers of Pods on this node, which kubelet has containerd's CRI run: where they are in
// containerd, what their specification lets them do, and, through NRI, the moment before each starts.
//
// # Reading
//
// A container of a Pod is found in the CRI's namespace of containerd by the labels that the CRI gives it: the Pod's UID and
// the container's name. A restarted container is another one of the same labels, so that callers ask for a Ref and get
// the one that lives, or else the newest. Nothing there is changed.
//
// # NRI
//
// Run keeps a plugin connected to containerd's NRI socket: the stub of the library does not connect again by itself. Its
// StartContainer comes when runc's init has pivoted and waits; the container starts when it returns. containerd calls all
// plugins one after another, for one Pod of the node at a time, and starts the container all the same when a plugin takes
// longer than its timeout (2 s by default). So the hook has HookBudget, and never answers with an error. It may ask
// containerd's own API, but never the CRI, which would wait for the hook itself.
//
// # Containers that require volumes
//
// A container whose Pod says so does not start without its volumes, whatever becomes of the plugin: when it is made
// (CreateContainer), it gets an OCI hook that waits for the agent (package createhook), and that attaches while runc's init
// waits in front of its pivot. Nothing else is ever changed in a container. One that is made while no plugin is connected
// has no hook: NRI's default validator can refuse that (annotation required-plugins.noderesource.dev).
//
// Two plugins would each get every event. Run holds a lock (flock(2)) on the directory of the socket; a second agent's Run
// follows containerd's events alone until the first ends.
//
// # Events are hints
//
// containerd's events of the namespace and NRI's others only say which Pod to look at again. Whoever looks reads the state
// anew; what no event told of is found by looking at all Pods now and then, which is the caller's to do.
package pods
