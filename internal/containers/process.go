package containers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hostProcess is a process pinned by a pidfd, so that a signal never hits another one that has its PID later.
type hostProcess struct {
	pid  int
	fd   int
	argv []string
}

// findProcesses finds root's processes whose argument vector matches. The caller closes them.
func findProcesses(match func(argv []string) bool) ([]*hostProcess, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []*hostProcess
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if argv := argvOf(pid); len(argv) == 0 || !match(argv) {
			continue
		}
		p := pin(pid)
		if p == nil {
			continue
		}
		// Once more, as the PID may have been taken by another process before it was pinned.
		var st unix.Stat_t
		p.argv = argvOf(pid)
		if len(p.argv) == 0 || !match(p.argv) || unix.Stat(filepath.Join("/proc", e.Name()), &st) != nil || st.Uid != 0 {
			p.close()
			continue
		}
		found = append(found, p)
	}
	return found, nil
}

func pin(pid int) *hostProcess {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil
	}
	return &hostProcess{pid: pid, fd: fd}
}

func (p *hostProcess) close() { unix.Close(p.fd) }

// signal sends a signal; a process that is gone is no error.
func (p *hostProcess) signal(s unix.Signal) error {
	if err := unix.PidfdSendSignal(p.fd, s, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to process %d: %w", unix.SignalName(s), p.pid, err)
	}
	return nil
}

// waitSlice is how often a wait for a process looks at its context, in milliseconds.
const waitSlice = 50

// wait waits for the process's end.
func (p *hostProcess) wait(ctx context.Context) error {
	for {
		fds := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, waitSlice)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for process %d: %w", p.pid, err)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("wait for the end of process %d: %w", p.pid, context.Cause(ctx))
		}
	}
}

// argvOf is empty for a process that is gone, a zombie, or a kernel thread.
func argvOf(pid int) []string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || len(data) == 0 {
		return nil
	}
	return strings.Split(string(bytes.TrimSuffix(data, []byte{0})), "\x00")
}

// argument is the value that follows the option name in argv, or empty.
func argument(argv []string, name string) string {
	for i := 1; i+1 < len(argv); i++ {
		if argv[i] == name {
			return argv[i+1]
		}
	}
	return ""
}

// childrenOf pins the children of a process.
func childrenOf(pid int) []*hostProcess {
	var found []*hostProcess
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, file := range threads {
		data, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		for _, field := range strings.Fields(string(data)) {
			if child, err := strconv.Atoi(field); err == nil {
				if p := pin(child); p != nil {
					found = append(found, p)
				}
			}
		}
	}
	return found
}

// cgroupsOf are the paths of a process's cgroups, each within its hierarchy; the root is left out.
func cgroupsOf(pid int) []string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil
	}
	var paths []string
	for line := range strings.Lines(string(data)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3) // cgroups(7): ID:controllers:path
		if len(fields) == 3 && fields[2] != "/" {
			paths = append(paths, fields[2])
		}
	}
	return paths
}
