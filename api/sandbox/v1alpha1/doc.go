// Package v1alpha1 holds the API types of sandbox.flux.io/v1alpha1: Sandbox and SandboxGroup.
//
// They are Kubernetes API types, and the same objects are what the standalone server keeps in its
// embedded database: one schema, one meaning, in both. Fields are only ever added. Enumerations are
// open strings: a reader shows a value that it does not know as it is.
//
// A Sandbox has two lists of volumes. spec.volumeMounts (static) is bound when the sandbox is created
// and lives as long as it does. spec.dynamicVolumes is edited while the sandbox runs: an added entry
// is attached, a removed one detached. What really holds is in status.volumes, a row per volume.
//
// +kubebuilder:object:generate=true
// +groupName=sandbox.flux.io
package v1alpha1
