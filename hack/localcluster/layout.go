package main

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
)

// Addresses. They are from a block that nobody uses by default; up refuses if the machine has a route into it.
const (
	nodeName   = "flux-local"
	block      = "10.213.0.0/16"
	podCIDR    = "10.213.0.0/22" // a thousand Pods on one node
	podGateway = "10.213.0.1"    // of every Pod
	services   = "10.213.4.0/24"
	firstIP    = "10.213.4.1" // of the Service kubernetes
	nodeIP     = "10.213.5.1"
	apiPort    = "6443"
	registry   = "127.0.0.1:5055"

	link       = "flux-node" // the interface with the node's address
	nftTable   = "flux-localcluster"
	cgroup     = "flux-localcluster"
	cniNetwork = "flux-localcluster"

	apiURL    = "https://" + nodeIP + ":" + apiPort
	cniPlugin = "/usr/lib/cni" // where Debian's containernetworking-plugins puts them
)

// layout is where things are. There is one: a second up, or a down from another checkout, must find them.
type layout struct {
	dir string // what is kept over a reboot
	run string // sockets and what is of this boot; short, as sockets have 107 bytes for their names
}

var place = layout{dir: "/var/lib/flux-localcluster", run: "/run/flux-localcluster"}

func (l layout) path(elem ...string) string {
	return filepath.Join(append([]string{l.dir}, elem...)...)
}

func (l layout) pki(name string) string        { return l.path("pki", name) }
func (l layout) kubeconfig(user string) string { return l.path("kubeconfig", user) }
func (l layout) config(name string) string     { return l.path("config", name) }
func (l layout) log(name string) string        { return l.path("log", name+".log") }
func (l layout) auditLog() string              { return l.path("log", "audit.log") }
func (l layout) kubelet() string               { return l.path("kubelet") }
func (l layout) containerd() string            { return filepath.Join(l.run, "containerd.sock") }
func (l layout) containerdState() string       { return filepath.Join(l.run, "containerd") }
func (l layout) runc() string                  { return filepath.Join(l.run, "runc") }
func (l layout) etcd() string                  { return "unix://" + filepath.Join(l.run, "etcd.sock") }

// admin is the kubeconfig that may do everything.
func (l layout) admin() string { return l.kubeconfig("admin") }

// collision returns an error if one of the machine's routes, in the form of "ip route", leads into the cluster's
// block. Wider ones, as those of a VPN, do not matter: the cluster's own are more specific.
func collision(routes string) error {
	ours := netip.MustParsePrefix(block)
	for route := range strings.Lines(routes) {
		to, _, _ := strings.Cut(route, " ")
		prefix, err := netip.ParsePrefix(to)
		if address, notPrefix := netip.ParseAddr(to); notPrefix == nil {
			prefix, err = netip.PrefixFrom(address, address.BitLen()), nil
		}
		if err == nil && prefix.Bits() >= ours.Bits() && ours.Contains(prefix.Addr()) {
			return fmt.Errorf("this machine has a route into %s, the addresses of the cluster's Pods and Services: %s", block, route)
		}
	}
	return nil
}
