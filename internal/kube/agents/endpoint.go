package agents

import (
	"iter"
	"net"
	"strconv"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// byNode is the index of the EndpointSlices by the nodes that they have an endpoint on.
const byNode = "node"

// nodesOf is the index function of byNode.
func nodesOf(o any) ([]string, error) {
	var nodes []string
	for node := range endpointsOf(o) {
		nodes = append(nodes, node)
	}
	return nodes, nil
}

// endpointsOf are node and address of each agent in an EndpointSlice. While a Pod is replaced there are two on its node, and
// the old one, which is on its way out, is left out.
func endpointsOf(o any) iter.Seq2[string, string] {
	return func(yield func(node, address string) bool) {
		slice, ok := o.(*discoveryv1.EndpointSlice)
		if !ok || len(slice.Ports) == 0 || slice.Ports[0].Port == nil {
			return
		}
		port := strconv.Itoa(int(*slice.Ports[0].Port))
		for _, e := range slice.Endpoints {
			if e.NodeName == nil || len(e.Addresses) == 0 || e.Conditions.Terminating != nil && *e.Conditions.Terminating {
				continue
			}
			if !yield(*e.NodeName, net.JoinHostPort(e.Addresses[0], port)) {
				return
			}
		}
	}
}

// addressOf is where a node's agent is by the EndpointSlices as they are now; empty when it is nowhere.
func (a *Agents) addressOf(node string) string {
	slices, _ := a.slices.GetIndexer().ByIndex(byNode, node) // fails without the index, which New makes
	for _, slice := range slices {
		for name, address := range endpointsOf(slice) {
			if name == node {
				return address
			}
		}
	}
	return ""
}
