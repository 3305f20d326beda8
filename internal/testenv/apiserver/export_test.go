package apiserver

// Pids are the processes of a server.
func (s *Server) Pids() []int { return []int{s.etcd.cmd.Process.Pid, s.api.cmd.Process.Pid} }
