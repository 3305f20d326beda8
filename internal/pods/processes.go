package pods

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

const cgroupRoot = "/sys/fs/cgroup"

// Processes are the host PIDs of a container that is Alive.
func (r *Runtime) Processes(c Container) []int {
	if dir, ok := cgroupDir(c); ok {
		return processesBelow(dir)
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

// cgroupDir is the directory of a container's cgroup in the unified hierarchy, or in that of the pids controller.
func cgroupDir(c Container) (string, bool) {
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
		root := cgroupRoot
		if id != "0" {
			if controllers != "pids" {
				continue
			}
			root = filepath.Join(cgroupRoot, "pids")
		}
		for path.Base(path.Dir(where)) != "." && path.Dir(where) != "/" && InCgroup("0::"+path.Dir(where), c.ID) {
			where = path.Dir(where)
		}
		dir := filepath.Join(root, where)
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
			return dir, true
		}
	}
	return "", false
}

// processesBelow are the processes of a cgroup and those below it. A cgroup that vanishes meanwhile has none.
func processesBelow(dir string) []int {
	var pids []int
	_ = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(p, "cgroup.procs"))
		if err != nil {
			return nil
		}
		for field := range strings.FieldsSeq(string(text)) {
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
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
