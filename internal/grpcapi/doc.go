// Package grpcapi is the public gRPC API: SandboxVolumeService, SandboxService, SandboxClaimService,
// SandboxSetService, VolumeService, ImageService and NodeService.
//
// A call is authenticated, authorised (the caller's tenant is the sandbox's, and an Authorizer agrees) and validated; then it
// changes the wish, spec, in the store, and waits until the scheduler runtime has written to status what
// came of it. It never speaks to the scheduler, and to an agent only to pass on what is no state: exec,
// logs, images, probes. So it runs on every replica of a controller, and a call that breaks off takes
// nothing back: what was asked for goes on, and asking again joins it.
//
// # Waiting
//
// One follower of the store serves all waiting calls (waiter.go). A call subscribes to one UID, and looks
// at each state of the sandbox from its own write on (compared by generation). Conditions are
// level-triggered: they are decided on a state alone, so a state that is left out in between does no harm.
// The end of the client's deadline is answered a moment before it, while the client still listens, with
// OPERATION_PENDING and how to look; a call without a deadline waits as long as Options.MaxWait.
//
// A call that waits for a SandboxClaim follows that one object of the store; its phases Completed and Failed are final.
//
// # Checks of a change
//
// What can be said of the request alone is said first. Everything that depends on the sandbox is checked
// in the function given to the store's UpdateSpec, on the copy that is written, so that no two calls can
// both pass a check that they pass only alone. plan.go holds these decisions as plain functions.
//
// # Choices
//
//   - A sandbox that is Pending takes volumes, and the call waits for it. One that is paused or has ended
//     refuses them (SANDBOX_NOT_RUNNING): the answer would not come before somebody resumes it. Removing is
//     possible in both.
//   - Removing joins a removal under way; force turns a removal that is not forced into one that is.
//   - A request id that the sandbox has seen already is replaced by a fresh one in the entry, so that the
//     result of the earlier request is never taken for that of the later.
//   - A claim is checked here only where that gives a better answer: its schema and the admission policies have the say, and
//     their words come through. Whose it is only its Namespace says, so its calls need an Authorizer, or a caller without a tenant.
//   - A claim that is Failed is an error, and kept: the answer says what its condition says, with its reason where that is one
//     of ours. One that is Completed with fewer sandboxes than asked for is an answer, and says so itself (PartiallyClaimed).
//
// # Errors
//
// Handlers return errors of internal/fault. One interceptor makes gRPC statuses of them; a panic becomes
// Internal. Details beyond google.rpc.ErrorInfo: BusyInfo on BUSY.
package grpcapi
