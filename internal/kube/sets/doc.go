// Package sets is the SandboxSet controller: it keeps as many sandboxes warm as a set asks for. It runs on the leader.
//
// # Whose a sandbox is
//
// A set's pool are the sandboxes whose controller ownerReference is the set, by UID. A claim takes one by putting itself
// there (package claims), in one write on the sandbox; from then on the set does not see it, whatever its labels say, and
// makes another. Every deletion asks for the UID and the resourceVersion that was looked at: a sandbox that was taken
// meanwhile is left alone. When the set is deleted, the garbage collector deletes what it owns, which is the pool.
//
// # Revisions
//
// A revision is a hash of template, claim templates and runtimes, and a label of every sandbox. Sandboxes of an older one
// are replaced, not available ones first, while no more than updateStrategy.maxUnavailable of replicas are missing. Those
// that are not available are replaced whatever is missing, within that bound, and unless somebody uses them: a template that never worked would else stay for good.
//
// # Bounds
//
// What is on its way is bounded by scaleStrategy.maxUnavailable: sandboxes that are not available yet count against
// creations, those that are being deleted against deletions. So a set never has more than replicas and its bounds, and a
// template that does not work costs no more than replicas sandboxes that do not run. A sandbox that ended (its Pod's restart
// policy lets it), or of which a claim of its own was deleted, so that its data goes with its Pod, is removed and replaced, with
// a pause that doubles up to five minutes until the set is whole again. So is one that somebody used without a claim (Used), once
// he has nothing of it any more: it is given to nobody.
// plan.go decides and is pure.
//
// A removed sandbox's claims are what whenScaled says: where that differs from whenDeleted, it is written to the sandbox
// first, with a mark. A marked sandbox is claimed by nobody, counts as one that is being deleted, and is deleted by whoever
// leads, whatever the set asks for by then.
//
// # What is told
//
// The condition Ready has the reason and the words of the API server's refusal (a quota, an admission policy), or those of
// the first sandbox that is not available.
//
// # Calls
//
// A pool is filled up a moment after a claim, so that claims that come at once cost one pass, and have the machine to themselves.
// One creation, after a look at the leaders' Lease, or one deletion for a sandbox, one status write for a change of the counts,
// and none in steady state. A creation without an answer is done again under the same name.
package sets
