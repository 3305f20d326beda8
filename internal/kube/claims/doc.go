// Package claims is the SandboxClaim controller: it takes sandboxes out of a SandboxSet's pool, with volumes mounted into
// them. It runs on the leader.
//
// # Before anything is taken
//
// All that can be known is checked first, so that a claim that cannot work leaves the pool alone: that the set exists and
// has the runtime csi when volumes are asked for, that paths and labels are valid and apart from each other and from what
// the set's container mounts, that each PersistentVolume exists and may be used from here (package volumes). What does not
// change by waiting ends the claim at once; a volume that is not bound yet is waited for.
//
// # Taking
//
// Taking is one write on the Sandbox, with the version that was looked at: the controller ownerReference becomes the claim,
// the label agents.kruise.io/claim-name is set, and what the claim asks for is added (dynamicVolumes, labels, annotations,
// shutdownTime). So the ledger is the sandboxes themselves: two claims cannot have one, and a controller that starts again
// reads off who has what. Two claims of one process do not even try for the same. Taken first are those that run, then those
// that are starting, of both the set's revision first and those on a node near to the volumes; none on a node from
// which a volume cannot be used. When there is none, one is made that is the claim's from its first write on
// (createOnNoStock), for the nodes that its volumes allow. Its name follows from the claim, so that a creation without an
// answer is never made twice.
//
// A process that runs cannot be given an environment, so a claim with envVars has its sandboxes made for it. inplaceUpdate is
// part of the taking: the sandbox's template is changed, and its Pod gets that in place (condition Updated).
//
// # After
//
// A sandbox is claimed when it runs, what inplaceUpdate asked for too, and every volume that the claim asked for is Mounted. The claim is Completed when all
// are. A volume that cannot be mounted is told in the condition Claimed and an Event, in the words of the sandbox's status; the
// scheduler tries it again in that same sandbox, which is never replaced for it: so a bad volume costs no more than the
// sandboxes that were asked for. A sandbox that somebody deletes is replaced. At claimTimeout the claim is Completed with
// the condition PartiallyClaimed, or Failed if none was claimed, and what was taken beside that is deleted. What was
// taken never goes back to the pool. When there can be no more, as the set is gone, that is so as soon as what was taken is claimed.
//
// The phases Completed and Failed are final. What becomes of the sandboxes of a Completed claim is its condition SandboxesReady, which
// is looked at with every change of one of them, and written when it turns, or for another reason. A claim that is deleted takes its sandboxes with it (the garbage collector);
// one that ttlAfterCompleted deletes leaves them.
//
// # Calls
//
// A claim of a warm sandbox costs two writes, the taking and the claim's status, and with volumes the sandbox's status
// beside; each volume that nobody else uses is marked as in use while the sandbox is being taken (Keeper). What is under way
// and well is told in the status only after a while (quiet), and the pool is filled up a little later (package sets): so a
// claim has the API server and the node to itself.
package claims
