// Package callers says who calls the gRPC API on Kubernetes and what they may do, in Kubernetes' own words: it is the
// Authenticator and the Authorizer of package grpcapi there.
//
// # Who
//
// A bearer token, checked by the API server (TokenReview), tells the user: a ServiceAccount's token, or that of any
// user the API server takes tokens of (OpenID Connect, webhook). It must be meant for our audience (Options.Audience);
// where the operator allows it, one that is meant for the API server does as well, so that `kubectl create token NAME`
// and a token out of a kubeconfig work as they are. Client certificates of the API server do not work here.
//
// # What
//
// A SubjectAccessReview in the sandbox's namespace, for sandboxes.sandbox.flux.io, or sandboxclaims and sandboxsets of
// agents.kruise.io, so the same Roles that hold for kubectl hold for gRPC:
//
//	call                            verb                     resource
//	Create, Get, List, Watch,       create, get, list,       sandboxes
//	Delete, PauseSandbox            watch, delete, update
//	Add, Remove, ListSandVolumes    create, delete, get      sandboxes/volumes
//	Exec                            create                   sandboxes/exec
//	Logs                            get                      sandboxes/log
//	images, Doctor                  update, in the cluster   sandboxes/node
//	Create, Get, List,              create, get, list,       sandboxclaims
//	DeleteSandboxClaim              delete
//	Get, List, DeleteSandboxSet     get, list, delete        sandboxsets
//
// The three subresources do not exist as URLs: RBAC does not mind, and so a Role can allow volumes or exec without
// allowing to change a Sandbox. Listing or watching all namespaces needs the right in all namespaces.
//
// # Tenants
//
// A caller has no tenant of its own: in a namespace it acts for the namespace's (label sandbox.flux.io/tenant-id), and
// RBAC decides who may act there. So a sandbox that is created there gets that tenant, and one that says another is
// refused. In a namespace without the label nothing is said here; admission decides which tenant may be named there.
//
// # What is remembered
//
// Answers are remembered for a short time, bounded in number, never longer than the token lives: whose a token is for
// 30 s, that something is allowed for 10 s, that it is not for 2 s (somebody may just have been given the right).
// A token that is not valid is not remembered. Taking a right away thus takes effect within 10 s, withdrawing a token
// within 30 s; a stream (exec, watch, logs) that runs is not ended, as with the API server. Tokens are kept as hashes.
//
// While the API server does not answer, reads go on for callers that it knew: its last answers, a tenant among them, hold
// for get, list and watch, for ten minutes and never longer than the token lives. Nothing that changes anything does.
//
// Whoever can reach the port can make us ask the API server about a token. The client given in Options should have its
// own rate limit (rest.Config), apart from the controllers', so that such questions starve nobody else.
package callers
