// Package connect is the way of a person with a kubeconfig to the gRPC API of a cluster, without an address to know: what
// fluxctl does there.
//
// # The way
//
// The API server forwards a port of a ready controller Pod (pods/portforward), as kubectl port-forward does. Inside of that is
// the same TLS as everywhere, from end to end: the certificate must have the name of the controller's Service, signed by a CA
// of the ConfigMap flux-sandbox-ca-bundle. Both are in the controller's namespace, and the Role flux-sandbox-connect there
// allows both.
//
// # Who calls
//
// The API wants a token (package callers). A person's own proof is of no use there: a client certificate proves something
// to whoever holds the connection, and that is the API server; and a token that is meant for the API server would let the
// controller act as its owner. So a token is asked for (TokenRequest) of a ServiceAccount of the person's namespace, for
// the API's audience alone and for ten minutes: who may make tokens of a ServiceAccount may act as it already, and what it may
// do, a RoleBinding says. Where the operator accepts tokens that are meant for the API server (api-server-tokens), the
// kubeconfig's own can be used instead.
package connect
