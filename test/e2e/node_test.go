package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// state is what sandboxes can leave on the node, as lines.
type state []string

// nodeState reads the state off the kernel and the file systems.
func nodeState(t *testing.T) state {
	t.Helper()
	s := state{}
	for line := range strings.Lines(read(t, "/proc/self/mountinfo")) {
		if fields := strings.Fields(line); strings.HasPrefix(fields[4], publishedDir) || strings.Contains(line, "flux-localcluster/volumes") || strings.HasPrefix(fields[4], "/var/lib/flux-localcluster/") && strings.Contains(fields[4], "/kubernetes.io~csi/") || strings.Contains(line, "/run/flux-localcluster/containerd/") && strings.Contains(line, "/flux-sandbox/") {
			s = append(s, "mount "+fields[4])
		}
	}
	for _, file := range testenv.LoopDevices() {
		if strings.Contains(file, "flux-localcluster/volumes") || strings.HasPrefix(file, poolDir) {
			s = append(s, "loop "+file)
		}
	}
	for _, pattern := range []string{
		stateDir + "/sandboxes/*", "/run/flux-localcluster/flux-sandbox/containers/*", "/run/flux-localcluster/runc/flux-sandbox/*",
		"/run/flux-localcluster/containerd/io.containerd.runtime.v2.task/flux-sandbox/*",
		"/sys/fs/cgroup/" + cgroupDir + "/*/", "/sys/fs/cgroup/*/" + cgroupDir + "/*/", volumesDir + "/*/*",
		poolDir + "/*.img", poolDir + "/*.json", publishedDir + "*",
	} {
		found, err := filepath.Glob(pattern)
		must(t, err)
		for _, f := range found {
			s = append(s, "path "+f)
		}
	}
	slices.Sort(s)
	return s
}

// awaitState waits until the node is as it was before; what follows the deletion of a sandbox (the reaper, autoclear) takes
// a moment. It returns what differs.
func awaitState(ctx context.Context, t *testing.T, want state) string {
	t.Helper()
	diff := ""
	testenv.Poll(30*time.Second, func() bool {
		diff = want.diff(nodeState(t))
		return diff == "" || ctx.Err() != nil
	})
	return diff
}

func (s state) diff(other state) string {
	var out []string
	for _, line := range other {
		if !slices.Contains(s, line) {
			out = append(out, "+ "+line)
		}
	}
	for _, line := range s {
		if !slices.Contains(other, line) {
			out = append(out, "- "+line)
		}
	}
	return strings.Join(out, "\n")
}

// process is a process of a sandbox, known by its PID and start time.
type process struct {
	pid     int
	started string
}

// process is the first process of a sandbox's own (the child of its PID 1), by the sandbox's cgroup.
func (c *cluster) process(sb *v1alpha1.Sandbox) process {
	c.t.Helper()
	var p process
	c.wait("the process of "+sb.Name+" began", func() (bool, string) {
		pids := processesOf(c.t, string(sb.UID))
		if len(pids) > 1 {
			p = process{pid: pids[1], started: startOf(c.t, pids[1])}
		}
		return len(pids) > 1 && p.started != "", fmt.Sprint("its cgroup has ", pids)
	})
	return p
}

func processesOf(t *testing.T, uid string) []int {
	t.Helper()
	// Of whichever node: each has a cgroup of its own beside the deployed one's.
	nodes := filepath.Join(filepath.Dir(cgroupDir), "*")
	var files []string
	for _, hierarchy := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
		found, err := filepath.Glob(hierarchy + nodes + "/" + uid + "/cgroup.procs")
		must(t, err)
		files = append(files, found...)
	}
	if len(files) == 0 {
		return nil
	}
	return processesIn(t, files[0])
}

// processesIn are the processes of a cgroup, by its cgroup.procs, the oldest first.
func processesIn(t *testing.T, file string) []int {
	t.Helper()
	data, _ := os.ReadFile(file) // it may be gone by now
	var pids []int
	for _, f := range strings.Fields(string(data)) {
		pid, err := strconv.Atoi(f)
		must(t, err)
		pids = append(pids, pid)
	}
	slices.SortFunc(pids, func(a, b int) int { return strings.Compare(pad(startOf(t, a)), pad(startOf(t, b))) })
	return pids
}

func pad(s string) string { return fmt.Sprintf("%020s", s) }

// startOf is the start time of a process in clock ticks (proc_pid_stat(5), field 22).
func startOf(t *testing.T, pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	return strings.Fields(rest)[19]
}

func (p process) same(t *testing.T) bool { return startOf(t, p.pid) == p.started }

// mountAt is the line of a mount in a process's namespace, as its kernel shows it; empty when there is none.
func (p process) mountAt(t *testing.T, target string) string {
	t.Helper()
	found := ""
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/mountinfo", p.pid))) {
		if fields := strings.Fields(line); fields[4] == target {
			found = strings.TrimSpace(line)
		}
	}
	return found
}

// path is a path of the sandbox's, seen from the node.
func (p process) path(elem ...string) string {
	return filepath.Join(append([]string{fmt.Sprintf("/proc/%d/root", p.pid)}, elem...)...)
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return string(data)
}
