// Package node puts a node together: its containerd, the sources of its volumes, and the agent, which repairs the node
// before Open returns. The standalone server and the agent of a cluster are both made of it.
package node
