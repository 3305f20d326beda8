// Package claimtemplates is a scheduler.Claims on the API server: the claims that sandboxes have of their
// volumeClaimTemplates, one named <template>-<sandbox> of each.
//
// # Whose a claim is
//
// A name can be guessed and taken before, so a claim is a sandbox's by UID: it bears the label sandbox.flux.io/sandbox-uid, or
// the sandbox as its controller. The label, and under Delete the owner, are there from the write that makes it, so that no crash
// leaves one that is nobody's.
// Any other claim of the name is an error, with one exception: a claim whose label sandbox.flux.io/adopt names the sandbox is
// taken over by a patch that puts our labels on it (guarded by its resourceVersion), and outlives the sandbox whatever the
// retention policy says, until somebody takes that label away. One that another object controls is never taken over.
//
// # What becomes of it
//
// Under Delete the claim has an ownerReference to its sandbox, and Kubernetes' garbage collector deletes it after the sandbox;
// under Retain it has none. The policy may change at any time; the leader has the references follow it, once more right before
// the sandbox goes (Settle). Nothing here deletes a claim.
//
// # Calls
//
// The claims with our label are followed by one watch, on the leader alone, and only what scheduler.Claim says is kept of
// them. That the claims are there is asked of the API server itself whenever a Pod is to be made: one call for each claim.
package claimtemplates
