// Package agents finds the agents of a cluster's nodes and keeps a connection to each.
//
// An agent is where the agents' Service has an endpoint with a nodeName: the EndpointSlices are followed, no Pod is
// listed. What is known of its node (labels, capacity, whether it is dead) comes from the Node object. Both are watches
// that begin once and are never repeated by the clock.
//
// Absence is not death. An endpoint that disappears (the agent's Pod is replaced, or not ready) changes nothing: the
// connection says for itself that it is down, and the sandboxes go on. An agent is gone when its Node is, and a Node is
// dead when it is deleted or carries the taint node.kubernetes.io/out-of-service, which an administrator puts on a node
// of which it is certain that it does not run any more (design, section 8; Kubernetes, "Non-graceful node shutdown").
//
// Connections are authenticated by whoever gives Config.Credentials: the certificate of the other side must name the node.
package agents
