package containers

// Processes are the host PIDs in the sandbox's cgroup; none if it has no cgroup.
func (r *Runtime) Processes(uid string) []int {
	if validateUID(uid) != nil {
		return nil
	}
	return cgroupProcesses(r.cgroups, r.cgroupPath(uid))
}
