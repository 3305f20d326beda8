package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// up starts the cluster, or what of it does not run.
func (l layout) up(ctx context.Context, kube, containerd string) error {
	s, err := l.load()
	fresh := errors.Is(err, fs.ErrNotExist)
	if err != nil && !fresh {
		return err
	}
	if fresh {
		if err := l.mayStart(); err != nil {
			return errors.Join(err, os.Remove(l.dir)) // it was made for the lock
		}
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	if s.Before.Boot != boot {
		if s.Before, err = remember(); err != nil {
			return err
		}
	}
	s.Kube, s.Containerd = kube, containerd
	if err := l.save(s); err != nil { // before anything is changed: down starts from it
		return err
	}
	if err := l.prepare(); err != nil {
		return err
	}
	for _, c := range l.components(s) {
		if err := l.start(ctx, c); err != nil {
			return err
		}
	}
	return l.serving(ctx, s)
}

// mayStart looks for what would be in the way of a new cluster.
func (l layout) mayStart() error {
	for _, tool := range []string{"ip", "nft", "runc", cniPlugin + "/ptp"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: run hack/setup.sh cluster", err)
		}
	}
	routes, err := run("ip", "-4", "route", "show", "table", "all")
	if err != nil {
		return err
	}
	if err := collision(routes); err != nil {
		return err
	}
	tables, err := run("nft", "list", "tables")
	if err != nil {
		return err
	}
	if strings.Contains(tables, " kube-proxy\n") {
		return errors.New("a kube-proxy has its table on this machine: it is a node of another cluster")
	}
	if c, err := net.Dial("unix", "/var/run/nri/nri.sock"); err == nil {
		_ = c.Close()
		return errors.New("another containerd serves /var/run/nri/nri.sock, which the cluster's needs: stop it, or disable NRI there")
	}
	return nil
}

// prepare makes what the components need.
func (l layout) prepare() error {
	if err := l.writePKI(); err != nil {
		return err
	}
	if err := l.writeConfigs(); err != nil {
		return err
	}
	for _, dir := range []string{l.run, l.kubelet(), l.path("pod-logs"), l.path("log")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := shareMounts(l.kubelet()); err != nil {
		return err
	}
	hierarchies, err := cgroupMounts()
	if err != nil {
		return err
	}
	for _, h := range hierarchies {
		if err := os.MkdirAll(filepath.Join(h, cgroup), 0o755); err != nil {
			return err
		}
	}
	return l.network()
}

// network makes the interface with the node's address and the rule for Pods that reach out.
func (l layout) network() error {
	if _, err := net.InterfaceByName(link); err != nil {
		if _, err := run("ip", "link", "add", link, "type", "bridge"); err != nil { // a bridge without ports: every kernel has it
			return err
		}
	}
	for _, command := range []string{
		"ip addr replace " + nodeIP + "/32 dev " + link,
		"ip link set " + link + " up",
		"nft -f " + l.config("rules.nft"),
	} {
		words := strings.Fields(command)
		if _, err := run(words[0], words[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// shareMounts makes a folder a mount whose mounts are seen by Pods that ask for it; where the root is shared, as
// systemd makes it, any folder is.
func shareMounts(dir string) error {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	if len(mounts) == 0 || mounts[0] != dir {
		if err := syscall.Mount(dir, dir, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s to itself: %w", dir, err)
		}
	}
	if err := syscall.Mount("", dir, "", syscall.MS_SHARED|syscall.MS_REC, ""); err != nil {
		return fmt.Errorf("make the mount %s shared: %w", dir, err)
	}
	return nil
}

// serving waits until the cluster takes Pods.
func (l layout) serving(ctx context.Context, s state) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	kubectl := l.kubectl(s)
	err := until(ctx, func() error {
		ready, err := kubectl("get", "node", nodeName, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		if err == nil && ready != "True" {
			why, _ := kubectl("get", "node", nodeName, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].message}`)
			err = fmt.Errorf("node %s is not ready: %s", nodeName, why)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%w (log: %s)", err, l.log("kubelet"))
	}
	return until(ctx, func() error { // without it no Pod is admitted
		_, err := kubectl("get", "serviceaccount", "default")
		return err
	})
}

// kubectl runs kubectl as the administrator.
func (l layout) kubectl(s state) func(args ...string) (string, error) {
	return func(args ...string) (string, error) {
		return run(filepath.Join(s.Kube, "kubectl"), append([]string{"--kubeconfig=" + l.admin(), "--cache-dir=" + l.path("kubectl")}, args...)...)
	}
}
