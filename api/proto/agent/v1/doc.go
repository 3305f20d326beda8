// Package agentv1 is the gRPC contract between a scheduler runtime, which dials, and a node's agent, which
// serves: sandboxes are created, started and ended by it, and volumes attached and detached. It is generated
// from agent.proto, whose comments say what each call promises.
package agentv1

import "time"

// CapabilityDynamicVolumes is the capability, in an agent's inventory, of attaching volumes to running sandboxes.
const CapabilityDynamicVolumes = "dynamic-volumes"

// CapabilityPods is that of attaching volumes to containers of Pods: commands with Workload.pod.
const CapabilityPods = "pods"

// Window is the size of the flow-control windows of an agent's connections, in bytes. It is fixed, as finding out a better
// one costs every call pings and window updates, which together take longer than the call.
const Window = 1 << 20

// KeepAlive is how often a controller on another machine pings an agent's connection that is otherwise quiet, to notice
// that the node is gone. An agent takes such pings, and closes a connection that is pinged more than twice as often.
const KeepAlive = 10 * time.Second
