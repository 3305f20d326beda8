package mount

import (
	"fmt"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// nested is a mount namespace copied from another one, held by a thread only:
// what a process in the sandbox can make with unshare.
type nested struct {
	jobs chan func()
	once sync.Once // guards the closing of jobs
	tid  int
}

// newNested copies the namespace of the process, or our own for pid 0.
func newNested(t testing.TB, pid int) *nested {
	t.Helper()
	return newNestedAs(t, pid, unix.MS_PRIVATE)
}

// newNestedAs is newNested with another propagation of its mounts.
func newNestedAs(t testing.TB, pid int, propagation uintptr) *nested {
	t.Helper()
	n := &nested{jobs: make(chan func())}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		started <- func() error {
			n.tid = unix.Gettid()
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			if pid != 0 {
				fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
				if err != nil {
					return err
				}
				defer unix.Close(fd)
				if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
					return err
				}
			}
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			return unix.Mount("", "/", "", unix.MS_REC|propagation, "")
		}()
		for job := range n.jobs {
			job()
		}
	}()
	check(t, <-started)
	t.Cleanup(n.close)
	return n
}

func (n *nested) close() {
	n.once.Do(func() { close(n.jobs) })
}

// do runs f inside.
func (n *nested) do(f func() error) error {
	result := make(chan error, 1)
	n.jobs <- func() { result <- f() }
	return <-result
}

func (n *nested) namespace(t testing.TB) int {
	t.Helper()
	fd, err := unix.Open(fmt.Sprintf("/proc/self/task/%d/ns/mnt", n.tid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	check(t, err)
	return fd
}
