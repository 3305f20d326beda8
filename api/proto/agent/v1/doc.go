// Package agentv1 is the gRPC contract between a scheduler runtime, which dials, and a node's agent, which
// serves: sandboxes are created, started and ended by it, and volumes attached and detached. It is generated
// from agent.proto, whose comments say what each call promises.
package agentv1

// CapabilityDynamicVolumes is the capability, in an agent's inventory, of attaching volumes to running sandboxes.
const CapabilityDynamicVolumes = "dynamic-volumes"
