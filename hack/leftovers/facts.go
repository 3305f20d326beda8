package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// mark is in the name of everything that the project makes.
const mark = "flux"

// host is a machine to look at. Facts are read best-effort: a process that ends while it is looked at, or a
// folder that this user may not read, is passed over.
type host struct {
	root string // "/"; in tests a folder with the files of a made-up machine
	self int    // own process, which is no leftover
}

func (h host) path(elem ...string) string {
	return filepath.Join(append([]string{h.root}, elem...)...)
}

// facts are all leftovers, one line each, sorted.
func (h host) facts() []string {
	var all []string
	for _, look := range []func() []string{h.mounts, h.loops, h.interfaces, h.processes, h.cgroups, h.files, h.staleSockets} {
		all = append(all, look()...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// pids are all processes but this one.
func (h host) pids() []string {
	entries, _ := os.ReadDir(h.path("proc"))
	var pids []string
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil && n != h.self {
			pids = append(pids, e.Name())
		}
	}
	return pids
}

// mounts looks in every mount namespace that a process holds; also for network namespaces, which are kept by
// a mount.
func (h host) mounts() []string {
	own, _ := os.Readlink(h.path("proc", "self", "ns", "mnt"))
	facts := h.mountsOf("self", "mount")
	seen := map[string]bool{own: true}
	for _, pid := range h.pids() {
		ns, err := os.Readlink(h.path("proc", pid, "ns", "mnt"))
		if err != nil || seen[ns] {
			continue
		}
		seen[ns] = true
		facts = append(facts, h.mountsOf(pid, "mount in another namespace")...)
	}
	return facts
}

// mountsOf reads a process's mountinfo: ID PARENT DEV ROOT POINT OPTIONS [TAGS…] - FSTYPE SOURCE OPTIONS.
func (h host) mountsOf(pid, word string) []string {
	b, _ := os.ReadFile(h.path("proc", pid, "mountinfo"))
	var facts []string
	for line := range strings.Lines(string(b)) {
		left, right, _ := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if len(l) < 5 || len(r) < 2 {
			continue
		}
		root, point, fstype, source := l[3], l[4], r[0], r[1]
		if strings.Contains(root+" "+point+" "+source, mark) {
			facts = append(facts, fmt.Sprintf("%s: %s (%s of %s, root %s)", word, point, fstype, source, root))
		}
	}
	return facts
}

func (h host) loops() []string {
	files, _ := filepath.Glob(h.path("sys", "block", "loop*", "loop", "backing_file"))
	var facts []string
	for _, f := range files {
		b, err := os.ReadFile(f)
		if image := strings.TrimSpace(string(b)); err == nil && strings.Contains(image, mark) {
			facts = append(facts, fmt.Sprintf("loop device: %s of %s", filepath.Base(filepath.Dir(filepath.Dir(f))), image))
		}
	}
	return facts
}

func (h host) interfaces() []string {
	return h.named("network interface", h.path("sys", "class", "net", "*"+mark+"*"))
}

// processes are our own programs, containerd, its shims and runc if they work for us, and whatever runs in a
// cgroup of ours.
func (h host) processes() []string {
	var facts []string
	for _, pid := range h.pids() {
		b, err := os.ReadFile(h.path("proc", pid, "cmdline"))
		if err != nil || len(b) == 0 {
			continue
		}
		args := strings.Split(string(bytes.TrimRight(b, "\x00")), "\x00")
		exe, _ := os.Readlink(h.path("proc", pid, "exe"))
		cgroup, _ := os.ReadFile(h.path("proc", pid, "cgroup"))
		name := filepath.Base(args[0])
		runtime := strings.HasPrefix(name, "containerd") || name == "runc"
		if strings.Contains(exe, mark) || strings.HasPrefix(name, mark) || bytes.Contains(cgroup, []byte(mark)) ||
			runtime && strings.Contains(strings.Join(args, " "), mark) {
			facts = append(facts, fmt.Sprintf("process: %s %s", pid, strings.Join(args, " ")))
		}
	}
	return facts
}

func (h host) cgroups() []string {
	var facts []string
	top := h.path("sys", "fs", "cgroup")
	_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if d.IsDir() && strings.Contains(d.Name(), mark) {
			facts = append(facts, "cgroup: "+path)
		}
		return nil
	})
	return facts
}

// files looks where programs of the project keep state, sockets, logs and temporary files by default.
func (h host) files() []string {
	var facts []string
	for _, dir := range []string{
		"run", "run/netns", "run/containerd/runc", "run/containerd/io.containerd.runtime.v2.task", "run/runc",
		"var/lib", "var/log", "var/tmp", "tmp", "dev/shm",
	} {
		facts = append(facts, h.named("file", h.path(dir, "*"+mark+"*"))...)
	}
	return append(facts, h.named("fifo", h.path("run", "containerd", "fifo", "*"))...)
}

// staleSockets are sockets of shims that nobody listens on any more. Their names are hashes.
func (h host) staleSockets() []string {
	listening, err := os.ReadFile(h.path("proc", "net", "unix"))
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(h.named("stale socket", h.path("run", "containerd", "s", "*")), func(fact string) bool {
		return bytes.Contains(listening, []byte(filepath.Base(fact)))
	})
}

// named are the paths that match a pattern.
func (h host) named(word, pattern string) []string {
	paths, _ := filepath.Glob(pattern)
	for i, p := range paths {
		paths[i] = word + ": " + p
	}
	return paths
}
