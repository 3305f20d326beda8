// Package identity is the trust between the controller and the agents: what a certificate says, who signs it, who
// accepts it, and how it is kept fresh. It knows TLS and nothing of Kubernetes; whoever starts the parts gives it
// certificates and bundles by functions.
//
// # What a certificate says
//
// One URI names its holder, and nothing else in it counts:
//
//	spiffe://sandbox.flux.io/controller     may command every agent of the installation
//	spiffe://sandbox.flux.io/node/<name>    is the agent of that node
//
// A server that users and agents call by name, the controller's gRPC API, has DNS names instead and no such URI. Each
// kind has one extended key usage: the controller's is for clients, both others for servers. So no certificate can be
// used as one of another kind, even where only one of the two is looked at.
//
//	who dials         whom                 shows                  accepts
//	the controller    the agent of node N  the controller's       exactly N's; not another node's
//	                                                              (the agent: exactly the controller's)
//	an agent          the controller       a ServiceAccount token the DNS name, signed by a CA of the bundle
//	a user            the controller       a token                the same, or a CA of the machine
//
// TLS 1.3 only, and no resumption: each connection is verified in full.
//
// # Lifetimes
//
// There is no revocation list; a certificate that is not renewed ends.
//
//   - The controller's live an hour ([ControllerValidity]): its own process signs them, so renewal depends on nobody.
//   - An agent's live six hours ([AgentValidity]): to be renewed it needs the controller and the API server's
//     TokenReview. Renewal begins at two thirds, so both may be away for two hours at any time before an agent is cut
//     off, and a key that is stolen from a node is of no use the same day. At 10,000 nodes that is a signature every
//     1.4 seconds.
//   - A CA lives ten years ([CAValidity]). Its successor is made two years before its end, is in everybody's bundle at
//     once, and signs from a day later ([Settle]): by then everybody has the bundle that it is in. Package
//     internal/kube/certificates stores them.
//
// Clocks may differ: a certificate is valid from [Skew] before it was signed, and a third of its life is left when it
// is replaced.
//
// # Rotation
//
// Certificates and bundles are read by functions at every handshake; nothing is restarted. What is established goes
// on: a certificate is looked at in the handshake only. So that a connection cannot outlive its peer's right to it for
// long, an agent's server ends each one after [ConnectionAge] with GOAWAY: calls move to a new connection, with a new
// handshake, and none fails. A stream that runs at that time (a command in a sandbox, an inventory) stays on the old
// connection until it ends: it was allowed when it began, and cutting somebody's exec would be worse.
//
// A [Renewer] looks once a minute, locally, whether the bundle it is given still vouches for its certificate, and asks
// for a new one if not. So a CA that is replaced by force (its Secret deleted) is followed within minutes.
package identity
