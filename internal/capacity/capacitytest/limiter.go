// Package capacitytest has a Limiter for tests of machines whose filesystems have no project quota.
package capacitytest

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/capacity"
)

// Limiter keeps project ids and limits in memory, by inode. It enforces nothing.
type Limiter struct {
	mu       sync.Mutex // guards the maps
	projects map[inode]uint32
	limits   map[uint32]capacity.Limit
	used     map[uint32]capacity.Usage
}

type inode struct{ dev, ino uint64 }

var _ capacity.Limiter = (*Limiter)(nil)

func of(dir *os.File) (inode, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(dir.Fd()), &st)
	return inode{st.Dev, st.Ino}, err
}

// Occupy makes a project hold something, as if another directory carried its id.
func (l *Limiter) Occupy(id uint32, usage capacity.Usage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used == nil {
		l.used = map[uint32]capacity.Usage{}
	}
	l.used[id] = usage
}

// Limits is a copy of all limits by project id.
func (l *Limiter) Limits() map[uint32]capacity.Limit {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[uint32]capacity.Limit, len(l.limits))
	for id, limit := range l.limits {
		out[id] = limit
	}
	return out
}

// Supported implements capacity.Limiter: it always is.
func (l *Limiter) Supported(*os.File) error { return nil }

// Project implements capacity.Limiter.
func (l *Limiter) Project(dir *os.File) (uint32, error) {
	i, err := of(dir)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.projects[i], err
}

// Set implements capacity.Limiter.
func (l *Limiter) Set(dir *os.File, id uint32, limit capacity.Limit) error {
	i, err := of(dir)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.projects == nil {
		l.projects, l.limits = map[inode]uint32{}, map[uint32]capacity.Limit{}
	}
	l.projects[i], l.limits[id] = id, capacity.Limit{Bytes: limit.Bytes &^ 1023, Inodes: limit.Inodes}
	return nil
}

// Clear implements capacity.Limiter.
func (l *Limiter) Clear(dir *os.File, id uint32) error {
	i, err := of(dir)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.projects[i] == id {
		delete(l.projects, i)
		delete(l.limits, id)
	}
	return nil
}

// Usage implements capacity.Limiter.
func (l *Limiter) Usage(_ *os.File, id uint32) (capacity.Usage, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.used[id]
	u.Limit = l.limits[id]
	return u, nil
}
