package containers

// Processes are the host PIDs in the sandbox's cgroup; none if it has no cgroup. It looks at one hierarchy, as every
// process of a sandbox is in all of them.
func (r *Runtime) Processes(uid string) []int {
	root, ok := controllerRoot(r.cgroups, "pids")
	if !ok || validateUID(uid) != nil {
		return nil
	}
	return cgroupProcesses([]cgroupRoot{root}, r.cgroupPath(uid))
}
