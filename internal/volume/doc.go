// Package volume says what a volume is: which entries are valid, which targets and sizes are allowed, when
// two entries are the same volume, and what turns one into something that can be mounted (Source).
//
// # One validator
//
// An entry is checked by the gRPC front, by the scheduler and by the agent, since none trusts another
// (contracts, "Small decisions"). They call the same functions: Default, then ValidateEntry or
// ValidateStatic for one entry, ValidateTargets for all of a sandbox; ValidateSandbox does all of it. These
// look at nothing but their arguments. Errors carry a kind and a reason (package fault), and the message says
// what to do.
//
// # Targets
//
// CheckTarget allows clean absolute paths of at most 1,024 bytes outside of the denied directories: for each
// of these the directory itself, everything below it and every directory that contains it. Paths are compared
// by components and case-sensitively: "/etcetera" is not below "/etc". The list's "/lib*" means the loader's
// directories /lib, /lib32, /lib64 and /libx32, not every name that starts so: "/library" is allowed.
//
// # Identity
//
// EntryHash tells one entry of a sandbox from another at the same target, over everything in it that cannot be
// changed. SameVolume says whether a request asks for what is there already. Key names what a Source prepares
// on a node, whoever uses it: subPath, mode and tenant are no part of it.
//
// # Sources
//
// Source is the seam to the packages below this one, one for each volumeType. See its comment for the life
// cycle. Each passes the suite of package sourcetest.
//
// The package imports no Kubernetes client and no containerd client; k8s.io/apimachinery alone, for sizes.
package volume
