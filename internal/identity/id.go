package identity

import (
	"crypto/x509"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// trustDomain is the authority of every URI. Installations are kept apart by their CAs, not by it.
const trustDomain = "sandbox.flux.io"

const (
	controllerPath = "/controller"
	nodePath       = "/node/"
)

// nodeName is a DNS subdomain, as the names of Kubernetes' nodes are (at most 253 characters).
var nodeName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

// ID is who a certificate says its holder is: the controller, or the agent of a node. The zero ID is nobody. IDs can
// be compared with ==.
type ID struct{ path string }

// Controller is the ID of the controller.
func Controller() ID { return ID{controllerPath} }

// Agent is the ID of the agent of a node. The error is of the kind ErrInvalidArgument: no node can have that name.
func Agent(node string) (ID, error) {
	if len(node) > 253 || !nodeName.MatchString(node) {
		return ID{}, fault.New(errdefs.ErrInvalidArgument, fault.InvalidName,
			"%q is no name of a node: lower-case letters, digits, - and ., at most 253 characters", node)
	}
	return ID{nodePath + node}, nil
}

// Node is the name of the agent's node; empty for the controller.
func (id ID) Node() string {
	node, _ := strings.CutPrefix(id.path, nodePath)
	if node == id.path {
		return ""
	}
	return node
}

// URI is how a certificate says it; nil for nobody.
func (id ID) URI() *url.URL {
	if id == (ID{}) {
		return nil
	}
	return &url.URL{Scheme: "spiffe", Host: trustDomain, Path: id.path}
}

// String is how a sentence says it.
func (id ID) String() string {
	switch {
	case id == (ID{}):
		return "nobody"
	case id == Controller():
		return "the controller"
	}
	return "the agent of node " + id.Node()
}

// Of is who a certificate names. One with no URI of ours, or with more than one URI, names nobody.
func Of(cert *x509.Certificate) (ID, error) {
	if len(cert.URIs) != 1 {
		return ID{}, fmt.Errorf("the certificate %q has %d URIs where one names its holder", cert.Subject.CommonName, len(cert.URIs))
	}
	return parse(cert.URIs[0])
}

func parse(uri *url.URL) (ID, error) {
	id := ID{uri.Path}
	if id != Controller() {
		var err error
		if id, err = Agent(strings.TrimPrefix(uri.Path, nodePath)); err != nil || id.path != uri.Path {
			return ID{}, fmt.Errorf("the URI %s names neither the controller nor an agent", uri)
		}
	}
	// The one spelling: no port, user, query or escape beside it.
	if uri.String() != id.URI().String() {
		return ID{}, fmt.Errorf("the URI %s names neither the controller nor an agent", uri)
	}
	return id, nil
}
