package containers

import "github.com/flux-sandbox/flux-sandbox/internal/cgroup"

// Processes are the host PIDs in the sandbox's cgroup; none if it has no cgroup. It looks at one hierarchy, as every
// process of a sandbox is in all of them.
func (r *Runtime) Processes(uid string) []int {
	root, ok := cgroup.Controller(r.cgroups, "pids")
	if !ok || validateUID(uid) != nil {
		return nil
	}
	return cgroup.Processes([]cgroup.Root{root}, r.cgroupPath(uid))
}
