// Package certificates is the certificate authority of an installation on Kubernetes: where its keys are, how every
// replica of the controller comes to the same ones, who gets a certificate, and how the controller has its own. What
// certificates say and how long they live is package identity's.
//
// # Where the CA is
//
// In a Secret of the controller's namespace: for each CA <name>.crt and <name>.key. The first replica to start makes
// it, by a create that only one can win; the others read what that one wrote. Later changes (a successor, two years
// before the end) are updates that name the version they were made from. Nobody but the controller needs to read it.
//
// The certificates alone are in a ConfigMap (key ca.crt), which agents mount and users may read. It is made from the
// Secret, and made again when somebody changes it.
//
// Both are watched, not polled. To replace a CA whose key is in wrong hands: delete the Secret. A new CA is made at
// once and the old one is trusted by nobody from then on; controller and agents get new certificates as soon as they
// see the new bundle, which on a node is when kubelet has refreshed the ConfigMap, a minute or two. Until then
// commands to that node fail and are repeated.
//
// # Who gets a certificate
//
// [Service] signs for a node's agent what the API server says its token is: a token for our audience, of the agents'
// ServiceAccount, bound to a Pod on a node (claims node-name, pod-name and pod-uid, which the API server writes and
// kubelet cannot choose for another node than its own). The certificate names that node and nothing else. So whoever
// takes over a node gets the identity of this node only; and an agent needs no right on the Kubernetes API.
//
// A deleted Pod's token ends with it, but for the seconds that the API server remembers its last answer.
//
// The service has a gRPC server and a port of its own ([NewServer]), apart from the API for users: other callers,
// other tokens, small limits. Each replica serves it.
//
// # Rights
//
// In its own namespace: create secrets and configmaps; get, list, watch and update the two by name. In the cluster:
// create tokenreviews.
package certificates
