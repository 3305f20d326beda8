package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// down takes away everything that up and the cluster made. Each step looks at the machine and not at what earlier
// ones did, and a step that fails does not keep the next from being tried: what is left is in the error, and the
// state is kept for another down.
func (l layout) down() error {
	s, err := l.load()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	components := l.components(s)
	slices.Reverse(components)
	var errs []error
	for _, c := range components {
		errs = append(errs, c.stop())
		if c.name == "containerd" { // which would notice and clean up by itself
			errs = append(errs, l.removeContainers())
		}
	}
	errs = append(errs,
		end(func() []process { return marked("/proc") }),
		removeCgroups(),
		l.unmountAll(),
		removeTables(),
		removeLink(),
		l.removeOutside(s.Before),
		restoreSysctls(s.Before),
	)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, dir := range []string{l.run, l.dir} {
		if mounts, err := mountsBelow(dir); err != nil || len(mounts) > 0 {
			return errors.Join(err, fmt.Errorf("still mounted: %v", mounts)) // never remove files through a mount
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// removeContainers kills the containers of the cluster's containerd and then their shims, whatever namespace they
// are in. Each has a bundle: a folder that only this containerd makes.
func (l layout) removeContainers() error {
	bundles, err := filepath.Glob(filepath.Join(l.containerdState(), "io.containerd.runtime.v2.task", "*", "*"))
	if err != nil {
		return err
	}
	var errs []error
	var sockets []string
	for _, bundle := range bundles {
		namespace, id := filepath.Base(filepath.Dir(bundle)), filepath.Base(bundle)
		// runc's own folder for those whose creator did not name one
		for _, root := range []string{l.runc(), "/run/containerd/runc"} {
			errs = append(errs, removeContainer(filepath.Join(root, namespace), id, bundle))
		}
		var shim struct{ Address string }
		if content, err := os.ReadFile(filepath.Join(bundle, "bootstrap.json")); err == nil && json.Unmarshal(content, &shim) == nil {
			sockets = append(sockets, strings.TrimPrefix(shim.Address, "unix://"))
		}
	}
	errs = append(errs, end(func() []process {
		return slices.DeleteFunc(marked("/proc"), func(p process) bool { return !strings.HasPrefix(p.program(), "containerd-shim") })
	}))
	for _, socket := range sockets { // a shim that is killed leaves it
		errs = append(errs, ignoreMissing(os.Remove(socket)))
	}
	return errors.Join(errs...)
}

// removeContainer lets runc kill and forget a container, if it is the one with this bundle.
func removeContainer(root, id, bundle string) error {
	if _, err := os.Stat(filepath.Join(root, id)); err != nil {
		return ignoreMissing(err) // asked for it, runc would make the root
	}
	out, err := exec.Command("runc", "--root", root, "state", id).Output()
	var known struct{ Bundle string }
	if err != nil || json.Unmarshal(out, &known) != nil || known.Bundle != bundle {
		return nil // runc does not know it
	}
	_, err = run("runc", "--root", root, "delete", "--force", id)
	return errors.Join(err, removeEmpty(root)) // the namespace's
}

// removeCgroups kills what is still in the cluster's control groups, and removes them.
func removeCgroups() error {
	hierarchies, err := cgroupMounts()
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range hierarchies {
		top := filepath.Join(h, cgroup)
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		errs = append(errs, until(ctx, func() error { return removeCgroup(top) }))
		cancel()
	}
	return errors.Join(errs...)
}

// removeCgroup tries once.
func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ignoreMissing(err)
	}
	var errs []error
	for _, e := range entries {
		if e.IsDir() {
			errs = append(errs, removeCgroup(filepath.Join(dir, e.Name())))
		}
	}
	members, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	for member := range strings.Lines(string(members)) {
		if pid, err := strconv.Atoi(strings.TrimSpace(member)); err == nil && pid > 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return errors.Join(append(errs, ignoreMissing(os.Remove(dir)))...)
}

// unmountAll unmounts what is mounted in the cluster's folders, last first.
func (l layout) unmountAll() error {
	for range 100 { // mounts may lie on top of each other
		var mounts []string
		for _, dir := range []string{l.run, l.dir} {
			below, err := mountsBelow(dir)
			if err != nil {
				return err
			}
			mounts = append(mounts, below...)
		}
		if len(mounts) == 0 {
			return nil
		}
		for _, m := range slices.Backward(mounts) {
			if syscall.Unmount(m, 0) != nil { // in use, or already gone with another one
				_ = syscall.Unmount(m, syscall.MNT_DETACH)
			}
		}
	}
	return errors.New("mounts do not go away")
}

// removeTables removes kube-proxy's rules and the cluster's own.
func removeTables() error {
	if _, err := exec.LookPath("nft"); err != nil {
		return nil // then up did not get that far
	}
	tables, err := run("nft", "list", "tables")
	if err != nil {
		return err
	}
	var errs []error
	for line := range strings.Lines(tables) { // "table FAMILY NAME"
		if f := strings.Fields(line); len(f) == 3 && (f[2] == nftTable || f[2] == "kube-proxy") {
			_, err := run("nft", "delete", "table", f[1], f[2])
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// removeLink removes the interface with the node's address, and waits for the Pods': the kernel removes a
// network namespace some time after its last user.
func removeLink() error {
	if _, err := net.InterfaceByName(link); err == nil {
		if _, err := run("ip", "link", "del", link); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	return until(ctx, func() error {
		addresses, err := net.InterfaceAddrs()
		if err != nil {
			return err
		}
		for _, a := range addresses {
			if n, ok := a.(*net.IPNet); ok && n.IP.String() == podGateway {
				return fmt.Errorf("an interface still has the Pods' gateway address %s", podGateway)
			}
		}
		return nil
	})
}

// removeOutside removes the cluster's files from folders that are not its own, and those folders that it made.
func (l layout) removeOutside(b before) error {
	var errs []error
	for _, o := range slices.Backward(outside) {
		var ours []string
		if o.ours != "" {
			ours, _ = filepath.Glob(filepath.Join(o.dir, o.ours))
		}
		for _, file := range ours {
			if target, err := os.Readlink(file); err == nil && !within(target, l.dir) {
				continue // another kubelet's log
			}
			errs = append(errs, ignoreMissing(os.Remove(file)))
		}
		if slices.Contains(b.Absent, o.dir) {
			errs = append(errs, removeEmpty(o.dir)) // one that is not empty has got another user
		}
	}
	return errors.Join(errs...)
}

// restoreSysctls puts back what was there, if it was in this boot.
func restoreSysctls(b before) error {
	boot, err := bootID()
	if err != nil || b.Boot != boot {
		return err
	}
	var errs []error
	for name, value := range b.Sysctls {
		path := filepath.Join("/proc/sys", name)
		if now, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(now)) != value {
			errs = append(errs, os.WriteFile(path, []byte(value), 0))
		}
	}
	return errors.Join(errs...)
}

// removeEmpty removes a folder if there is nothing in it.
func removeEmpty(dir string) error {
	if err := os.Remove(dir); !errors.Is(err, syscall.ENOTEMPTY) {
		return ignoreMissing(err)
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
