package local

import (
	"iter"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// maxTypes bounds the cache of mountTypes.
const maxTypes = 4096

// mountTypes remembers the filesystem types of paths for as long as the mount table stays as it is: reading it takes
// longer than all the rest of an attach. The kernel says when it changed (proc(5), /proc/pid/mountinfo: poll).
type mountTypes struct {
	mu    sync.Mutex // guards the fields below
	table *os.File
	known map[string]string
}

func (m *mountTypes) lookup(path string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.changed() || len(m.known) >= maxTypes {
		m.known = map[string]string{}
	}
	if t, ok := m.known[path]; ok {
		return t, nil
	}
	t, err := mount.FilesystemType(path)
	if err == nil {
		m.known[path] = t
	}
	return t, err
}

// changed says whether the mount table may have changed since the last call. A change after this answer is reported
// by the next call, so the table is always read after the question.
func (m *mountTypes) changed() bool {
	if m.table == nil {
		table, err := os.Open("/proc/self/mountinfo")
		if err != nil {
			return true
		}
		m.table = table
		return true
	}
	poll := []unix.PollFd{{Fd: int32(m.table.Fd()), Events: unix.POLLPRI}}
	n, err := unix.Poll(poll, 0)
	return n != 0 || err != nil || m.known == nil
}

// pathParts are the components of a clean relative path; none for ".".
func pathParts(rel string) iter.Seq[string] {
	if rel == "." {
		return func(func(string) bool) {}
	}
	return strings.SplitSeq(rel, "/")
}
