// Package v1alpha1 holds the API types of agents.kruise.io/v1alpha1: SandboxSet and SandboxClaim, with the fields that
// OpenKruise Agents gave them. What they create are sandbox.flux.io Sandboxes.
//
// A SandboxSet keeps a number of sandboxes warm that nobody has claimed. A SandboxClaim takes some of them, for good: a
// sandbox that was taken belongs to the claim and never goes back. Which is whose is written on the Sandbox alone: its
// controller ownerReference is the set until it is the claim, and the labels say the same for people.
//
// The two kinds are an option: a cluster that runs OpenKruise Agents, which has kinds of these names, leaves them out. Ours
// are told by their category, flux.
//
// Fields are only ever added. Enumerations are open strings.
//
// +kubebuilder:object:generate=true
// +groupName=agents.kruise.io
package v1alpha1
