package containers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// cgroupRoot is one mounted cgroup hierarchy.
type cgroupRoot struct {
	path        string
	v2          bool
	controllers []string // v1 only
}

// cgroupRoots finds the hierarchies: on cgroup v2 one, on v1 one per controller, on a hybrid machine both.
func cgroupRoots() ([]cgroupRoot, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	var roots []cgroupRoot
	for _, m := range mounts {
		root := cgroupRoot{path: m.Mountpoint, v2: m.FSType == "cgroup2"}
		if !root.v2 {
			root.controllers = strings.Split(m.VFSOptions, ",")
		}
		// A hierarchy may be mounted more than once, and a container's view of one is not a root.
		if m.Root == "/" && !slices.ContainsFunc(roots, func(r cgroupRoot) bool { return r.path == root.path }) {
			roots = append(roots, root)
		}
	}
	if len(roots) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted: mount cgroup2 at /sys/fs/cgroup")
	}
	return roots, nil
}

// controllerRoot is the hierarchy that has a controller: its v1 hierarchy if there is one, else cgroup v2.
func controllerRoot(roots []cgroupRoot, controller string) (cgroupRoot, bool) {
	for _, root := range roots {
		if slices.Contains(root.controllers, controller) {
			return root, true
		}
	}
	i := slices.IndexFunc(roots, func(r cgroupRoot) bool { return r.v2 })
	if i < 0 {
		return cgroupRoot{}, false
	}
	return roots[i], true
}

// swapLimited says that the kernel can limit swap; without it a limit would be refused by the runtime.
func swapLimited(roots []cgroupRoot) bool {
	memory, ok := controllerRoot(roots, "memory")
	if !ok || memory.v2 {
		return ok
	}
	_, err := os.Stat(filepath.Join(memory.path, "memory.memsw.limit_in_bytes"))
	return err == nil
}

func (r *Runtime) cgroupPath(uid string) string { return path.Join(r.config.CgroupParent, uid) }

// oomKills is the number of the sandbox's processes that the kernel killed for lack of memory; 0 if it cannot be told.
func (r *Runtime) oomKills(uid string) int {
	root, ok := controllerRoot(r.cgroups, "memory")
	if !ok {
		return 0
	}
	file := "memory.oom_control"
	if root.v2 {
		file = "memory.events"
	}
	data, err := os.ReadFile(filepath.Join(root.path, r.cgroupPath(uid), file))
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

// cgroupProcesses are the host PIDs in a cgroup and below it, over all hierarchies.
func cgroupProcesses(roots []cgroupRoot, cgroup string) []int {
	var pids []int
	for _, root := range roots {
		walkCgroups(filepath.Join(root.path, cgroup), func(dir string) {
			// As a blocking descriptor: the runtime's poller can wait for such a file, and setting that up takes longer
			// than to read it.
			fd, err := unix.Open(filepath.Join(dir, "cgroup.procs"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return
			}
			f := os.NewFile(uintptr(fd), "cgroup.procs")
			defer f.Close()
			data, _ := io.ReadAll(f)
			for line := range strings.Lines(string(data)) {
				if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 0 && !slices.Contains(pids, pid) {
					pids = append(pids, pid)
				}
			}
		})
	}
	return pids
}

// walkCgroups visits a cgroup and all below it. One that vanishes meanwhile has no processes. Most have none below them,
// which their link count tells without reading the names of their dozens of files.
func walkCgroups(dir string, visit func(dir string)) {
	var st unix.Stat_t
	if unix.Lstat(dir, &st) != nil {
		return
	}
	visit(dir)
	const alone = 2 // links: its own name and "."
	if st.Nlink == alone {
		return
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			walkCgroups(filepath.Join(dir, e.Name()), visit)
		}
	}
}

// cgroupPollInterval and cgroupPatience bound the wait for the last processes of a cgroup to be gone: the kernel tells
// v1 users nothing of it.
const (
	cgroupPollInterval = 5 * time.Millisecond
	cgroupPatience     = 10 * time.Second
)

// removeCgroup kills what is left in a cgroup and removes it, with all below it, from every hierarchy.
func removeCgroup(ctx context.Context, roots []cgroupRoot, cgroup string) error {
	ctx, cancel := context.WithTimeout(ctx, cgroupPatience)
	defer cancel()
	for _, root := range roots {
		dir := filepath.Join(root.path, cgroup)
		for {
			err := removeCgroupTree(dir)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.EBUSY) {
				return fmt.Errorf("remove cgroup %s: %w", dir, err)
			}
			for _, pid := range cgroupProcesses([]cgroupRoot{root}, cgroup) {
				_ = unix.Kill(pid, unix.SIGKILL) // gone already, or in the next round
			}
			select {
			case <-time.After(cgroupPollInterval):
			case <-ctx.Done():
				return fmt.Errorf("remove cgroup %s: it still has processes %v after SIGKILL: %w", dir,
					cgroupProcesses([]cgroupRoot{root}, cgroup), context.Cause(ctx))
			}
		}
	}
	return nil
}

// removeCgroupTree removes a cgroup's directories, the deepest first: their files cannot be unlinked and need not be.
func removeCgroupTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroupTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
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
			if unix.Rmdir(filepath.Join(root.path, parent)) != nil {
				break
			}
		}
	}
}
