package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// state is what must be known later: where the programs are, and what the machine was like.
type state struct {
	Kube       string `json:"kube"`       // folder of etcd, kube-apiserver, …
	Containerd string `json:"containerd"` // folder of containerd and its shim
	Before     before `json:"before"`
}

// before is what the cluster changes outside of its own folders, as it was.
type before struct {
	Boot    string            `json:"boot"`    // the boot that it is about
	Sysctls map[string]string `json:"sysctls"` // by path below /proc/sys
	Absent  []string          `json:"absent"`  // folders that were not there
}

// sysctls that kubelet and the CNI plugins set.
var sysctls = []string{
	"vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
	"net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet",
}

// outside are the folders in places that cannot be configured, in which components make files, parents first; with
// the patterns of the files that are the cluster's.
var outside = []struct{ dir, ours string }{
	{"/var/lib/kubelet", ""},
	{"/var/lib/kubelet/device-plugins", "*"},
	{"/var/log/containers", "*_*_*-*.log"}, // links to logs
	{"/var/lib/cni", ""},
	{"/var/lib/cni/results", cniNetwork + "-*"},
	{"/run/containerd", ""}, // the shims': their files have no such name, and are removed one by one
	{"/run/containerd/s", ""},
	{"/run/containerd/fifo", ""},
	{"/run/containerd/runc", ""},
	{"/run/nri", "nri.sock"},
}

func (l layout) stateFile() string { return l.path("state.json") }

// load reads the state; fs.ErrNotExist: there is no cluster.
func (l layout) load() (state, error) {
	var s state
	content, err := os.ReadFile(l.stateFile())
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(content, &s); err != nil {
		return s, fmt.Errorf("%s: %w", l.stateFile(), err)
	}
	return s, nil
}

func (l layout) save(s state) error {
	content, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(l.stateFile(), append(content, '\n'))
}

// writeFile puts a file in place as a whole, and its folder before it.
func writeFile(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// remember looks at the machine before the cluster changes it.
func remember() (before, error) {
	boot, err := bootID()
	if err != nil {
		return before{}, err
	}
	b := before{Boot: boot, Sysctls: map[string]string{}}
	for _, name := range sysctls {
		if value, err := os.ReadFile(filepath.Join("/proc/sys", name)); err == nil { // not every kernel has them all
			b.Sysctls[name] = strings.TrimSpace(string(value))
		}
	}
	for _, o := range outside {
		if _, err := os.Lstat(o.dir); errors.Is(err, fs.ErrNotExist) {
			b.Absent = append(b.Absent, o.dir)
		}
	}
	return b, nil
}

func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
}

// lock keeps a second up or down out until this process ends. The lock is on the folder, which down removes: who
// waited for one that is gone by now takes that of the new one.
func (l layout) lock() error {
	for {
		if err := os.MkdirAll(l.dir, 0o700); err != nil {
			return err
		}
		fd, err := syscall.Open(l.dir, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", l.dir, err)
		}
		if err := syscall.Flock(fd, syscall.LOCK_EX); err != nil {
			return fmt.Errorf("lock %s: %w", l.dir, err)
		}
		var held, there syscall.Stat_t
		if err := syscall.Fstat(fd, &held); err != nil {
			return err
		}
		if err := syscall.Stat(l.dir, &there); err == nil && there.Ino == held.Ino {
			return nil // never closed: the kernel does when this process ends
		}
		_ = syscall.Close(fd)
	}
}
