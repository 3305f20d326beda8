package mount

import (
	"bytes"
	"fmt"
	"os"
	"strconv"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Process is a container's init, pinned so that its number, once reused, is
// never mistaken for it. Its methods are safe for concurrent use, except Close.
type Process struct {
	pid    int
	pidfd  int
	dir    int // /proc/PID; answers ESRCH once the process is gone
	start  uint64
	closed bool
}

// OpenProcess pins the process with this number. A caller that knows an older
// record of it compares StartTime. Reason: NAMESPACE_GONE.
func OpenProcess(pid int) (*Process, error) {
	gone := func(err error) error {
		return &Error{Op: "open process", Path: strconv.Itoa(pid), Code: ReasonNamespaceGone, Kind: errdefs.ErrNotFound,
			Message: "the container's init is not running", Err: err}
	}
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		if err == unix.ESRCH || err == unix.EINVAL {
			return nil, gone(err)
		}
		return nil, failed("open process", strconv.Itoa(pid), "pidfd_open failed", err)
	}
	p := &Process{pid: pid, pidfd: pidfd, dir: -1}
	p.dir, err = unix.Open(fmt.Sprintf("/proc/%d", pid), directoryPath, 0)
	if err != nil {
		p.Close()
		return nil, gone(err)
	}
	p.start, err = startTime(p.dir)
	// Alive after both were opened: so both are the same process.
	if err != nil || !p.Alive() {
		p.Close()
		return nil, gone(err)
	}
	return p, nil
}

// PID returns the process number, for messages.
func (p *Process) PID() int { return p.pid }

// StartTime returns when the process started, in clock ticks since the boot
// (proc(5), field 22 of stat). PID and StartTime together are unique on a boot.
func (p *Process) StartTime() uint64 { return p.start }

// Alive tells whether the process has not exited yet. A zombie is not alive.
func (p *Process) Alive() bool {
	fds := []unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if err == unix.EINTR {
			continue
		}
		return err == nil && n == 0
	}
}

// UserNamespace opens the process's user namespace, for Attributes.IDMap.
func (p *Process) UserNamespace() (*os.File, error) { return p.namespace("user") }

func (p *Process) namespace(kind string) (*os.File, error) {
	fd, err := unix.Openat(p.dir, "ns/"+kind, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &Error{Op: "open namespace", Path: strconv.Itoa(p.pid), Code: ReasonNamespaceGone, Kind: errdefs.ErrNotFound,
			Message: "the container's init is not running", Err: err}
	}
	return os.NewFile(uintptr(fd), kind), nil
}

// Close releases the descriptors. It may be called twice.
func (p *Process) Close() error {
	if p.closed {
		return nil
	}
	p.closed = true
	unix.Close(p.pidfd)
	if p.dir >= 0 {
		unix.Close(p.dir)
	}
	return nil
}

// startTime reads field 22 of /proc/PID/stat. The command in field 2 may hold
// anything, so fields are counted from its closing parenthesis.
func startTime(procDir int) (uint64, error) {
	fd, err := unix.Openat(procDir, "stat", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	data, err := readAll(fd)
	if err != nil {
		return 0, err
	}
	end := bytes.LastIndexByte(data, ')')
	fields := bytes.Fields(data[end+1:])
	const index = 22 - 3
	if end < 0 || len(fields) <= index {
		return 0, unix.EINVAL
	}
	return strconv.ParseUint(string(fields[index]), 10, 64)
}
