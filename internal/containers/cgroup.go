package containers

import (
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
)

// swapLimited says that the kernel can limit swap; without it a limit would be refused by the runtime.
func swapLimited(roots []cgroup.Root) bool {
	memory, ok := cgroup.Controller(roots, "memory")
	if !ok || memory.V2 {
		return ok
	}
	_, err := os.Stat(filepath.Join(memory.Path, "memory.memsw.limit_in_bytes"))
	return err == nil
}

func (r *Runtime) cgroupPath(uid string) string { return path.Join(r.config.CgroupParent, uid) }

// oomKills is the number of the sandbox's processes that the kernel killed for lack of memory; 0 if it cannot be told.
func (r *Runtime) oomKills(uid string) int {
	root, ok := cgroup.Controller(r.cgroups, "memory")
	if !ok {
		return 0
	}
	file := "memory.oom_control"
	if root.V2 {
		file = "memory.events"
	}
	data, err := os.ReadFile(filepath.Join(root.Path, r.cgroupPath(uid), file))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if count, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			n, _ := strconv.Atoi(count)
			return n
		}
	}
	return 0
}

// removeEmptyParents removes the parent cgroup, and those above it, where no cgroup is left in them. It does nothing
// while a task is being created, which makes them again.
func (r *Runtime) removeEmptyParents() {
	if !r.cgroupParent.TryLock() {
		return
	}
	defer r.cgroupParent.Unlock()
	for _, root := range r.cgroups {
		for parent := r.config.CgroupParent; parent != "/"; parent = path.Dir(parent) {
			if unix.Rmdir(filepath.Join(root.Path, parent)) != nil {
				break
			}
		}
	}
}
