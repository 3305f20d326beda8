// Package cgroup finds the cgroup hierarchies of the machine, v1, v2 or both, and reads and removes cgroups in them. A
// cgroup is named by its path within each hierarchy, as /proc/PID/cgroup shows it. What limits there are is the container
// runtime's business.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Root is one mounted cgroup hierarchy.
type Root struct {
	// Path is where it is mounted.
	Path string
	V2   bool
	// Controllers are those of a v1 hierarchy.
	Controllers []string
}

// Roots finds the hierarchies: on cgroup v2 one, on v1 one per controller, on a hybrid machine both.
func Roots() ([]Root, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	var roots []Root
	for _, m := range mounts {
		root := Root{Path: m.Mountpoint, V2: m.FSType == "cgroup2"}
		if !root.V2 {
			root.Controllers = strings.Split(m.VFSOptions, ",")
		}
		// A hierarchy may be mounted more than once, and a container's view of one is not a root.
		if m.Root == "/" && !slices.ContainsFunc(roots, func(r Root) bool { return r.Path == root.Path }) {
			roots = append(roots, root)
		}
	}
	if len(roots) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted: mount cgroup2 at /sys/fs/cgroup")
	}
	return roots, nil
}

// Controller is the hierarchy that has a controller: its v1 hierarchy if there is one, else cgroup v2.
func Controller(roots []Root, controller string) (Root, bool) {
	for _, root := range roots {
		if slices.Contains(root.Controllers, controller) {
			return root, true
		}
	}
	i := slices.IndexFunc(roots, func(r Root) bool { return r.V2 })
	if i < 0 {
		return Root{}, false
	}
	return roots[i], true
}

// Processes are the host PIDs in a cgroup and below it, over all hierarchies.
func Processes(roots []Root, cgroup string) []int {
	var pids []int
	for _, root := range roots {
		walk(filepath.Join(root.Path, cgroup), func(dir string) {
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

// walk visits a cgroup and all below it. One that vanishes meanwhile has no processes. Most have none below them,
// which their link count tells without reading the names of their dozens of files.
func walk(dir string, visit func(dir string)) {
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
			walk(filepath.Join(dir, e.Name()), visit)
		}
	}
}

// pollInterval and patience bound the wait for the last processes of a cgroup to be gone: the kernel tells
// v1 users nothing of it.
const (
	pollInterval = 5 * time.Millisecond
	patience     = 10 * time.Second
)

// Remove kills what is left in a cgroup and removes it, with all below it, from every hierarchy.
func Remove(ctx context.Context, roots []Root, cgroup string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for _, root := range roots {
		dir := filepath.Join(root.Path, cgroup)
		for {
			err := removeTree(dir)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.EBUSY) {
				return fmt.Errorf("remove cgroup %s: %w", dir, err)
			}
			for _, pid := range Processes([]Root{root}, cgroup) {
				_ = unix.Kill(pid, unix.SIGKILL) // gone already, or in the next round
			}
			select {
			case <-time.After(pollInterval):
			case <-ctx.Done():
				return fmt.Errorf("remove cgroup %s: it still has processes %v after SIGKILL: %w", dir,
					Processes([]Root{root}, cgroup), context.Cause(ctx))
			}
		}
	}
	return nil
}

// removeTree removes a cgroup's directories, the deepest first: their files cannot be unlinked and need not be.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}
