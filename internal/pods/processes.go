package pods

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/flux-sandbox/flux-sandbox/internal/cgroup"
)

// Processes are the host PIDs of a container that is Alive.
func (r *Runtime) Processes(c Container) []int {
	if group, ok := r.cgroupOf(c); ok {
		return cgroup.Processes([]cgroup.Root{r.pids}, group)
	}
	return processesOf(c.ID)
}

// InCgroup says whether the text of a /proc/PID/cgroup is that of a process of a container: a component of its path has
// the container's id, by itself (cgroupfs) or as in cri-containerd-ID.scope (systemd). A container that manages cgroups of
// its own has further components below.
func InCgroup(text, containerID string) bool {
	if containerID == "" {
		return false
	}
	for line := range strings.Lines(text) {
		_, where, _ := strings.Cut(strings.TrimSpace(line), ":/")
		for part := range strings.SplitSeq(where, "/") {
			part = strings.TrimSuffix(part, ".scope")
			if part == containerID || strings.HasSuffix(part, "-"+containerID) || strings.HasSuffix(part, ":"+containerID) {
				return true
			}
		}
	}
	return false
}

// cgroupOf is a container's cgroup in the hierarchy of the pids controller, which every process of it is in.
func (r *Runtime) cgroupOf(c Container) (string, bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(c.PID) + "/cgroup")
	if err != nil {
		return "", false
	}
	for line := range strings.Lines(string(text)) {
		id, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, where, _ := strings.Cut(rest, ":")
		// Seen from a cgroup namespace of our own the path begins above its root, and is of no use.
		if strings.Contains(where, "..") || !InCgroup(line, c.ID) {
			continue
		}
		if r.pids.V2 != (id == "0") || !r.pids.V2 && !slices.Contains(strings.Split(controllers, ","), "pids") {
			continue
		}
		for path.Base(path.Dir(where)) != "." && path.Dir(where) != "/" && InCgroup("0::"+path.Dir(where), c.ID) {
			where = path.Dir(where)
		}
		if _, err := os.Stat(filepath.Join(r.pids.Path, where, "cgroup.procs")); err == nil {
			return where, true
		}
	}
	return "", false
}

// processesOf looks at every process of the node.
func processesOf(containerID string) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if text, err := os.ReadFile("/proc/" + e.Name() + "/cgroup"); err == nil && InCgroup(string(text), containerID) {
			pids = append(pids, pid)
		}
	}
	return pids
}
