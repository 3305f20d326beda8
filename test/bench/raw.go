package main

import (
	"fmt"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// raw attaches and detaches by bare system calls, without any of the checks that make it safe: the floor. Its thread
// stays in the sandbox's mount namespace.
type raw struct {
	jobs chan func() error
	errs chan error
	root int // the namespace's root directory
}

// enterRaw starts the thread in the namespace of a process.
func enterRaw(pid int) (*raw, error) {
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(ns)
	r := &raw{jobs: make(chan func() error), errs: make(chan error)}
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		for job := range r.jobs {
			r.errs <- job()
		}
	}()
	return r, r.inside(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
			return err
		}
		r.root, err = unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
}

// inside runs f on the thread.
func (r *raw) inside(f func() error) error {
	r.jobs <- f
	return <-r.errs
}

// attach mounts a directory of the host at a name in the sandbox's root directory.
func (r *raw) attach(source, name string) error {
	dir, err := unix.Open(source, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	tree, err := unix.OpenTree(dir, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return err
	}
	return r.inside(func() error {
		target, err := unix.Openat(r.root, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(target)
		return unix.MoveMount(tree, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	})
}

func (r *raw) detach(name string) error {
	return r.inside(func() error {
		if err := unix.Fchdir(r.root); err != nil {
			return err
		}
		return unix.Unmount(name, unix.UMOUNT_NOFOLLOW)
	})
}

func (r *raw) close() {
	close(r.jobs)
	unix.Close(r.root)
}

// syncedWrite is the cost of making 4 KiB safe in a folder: one write and one fdatasync.
func syncedWrite(folder string, n int) (samples, error) {
	fd, err := unix.Open(filepath.Join(folder, "bench.sync"), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	defer unix.Unlink(filepath.Join(folder, "bench.sync"))
	block := make([]byte, 4096)
	var s samples
	for i := range n {
		var err error
		s.add(func() {
			if _, err = unix.Pwrite(fd, block, int64(i%64)*int64(len(block))); err == nil {
				err = unix.Fdatasync(fd)
			}
		})
		if err != nil {
			return nil, err
		}
	}
	return s, nil
}
