package capacity

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// The bytes of an image that are locked (see the package comment).
const (
	byteAttach  = 0
	byteCreator = 1
)

// reopen opens the same inode again: a new open file description, with locks of its own.
func reopen(file *os.File, flags int) (*os.File, error) {
	path := fmt.Sprintf("/proc/self/fd/%d", file.Fd())
	again, err := os.OpenFile(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, failed("open %s again: %w", file.Name(), errors.Unwrap(err))
	}
	return again, nil
}

// ofdLock is a write lock on one byte, owned by the open file description (fcntl(2), F_OFD_SETLK). It
// ends when the last descriptor of it is closed, so a killed process holds none.
func ofdLock(file *os.File, cmd int, offset int64) error {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: offset, Len: 1}
	return noEINTR(func() error { return unix.FcntlFlock(file.Fd(), cmd, &lock) })
}

// lockByte waits for the lock on one byte of the image, and returns the open file that holds it.
func lockByte(ctx context.Context, image *os.File, offset int64) (*os.File, error) {
	return acquire(ctx, image, func(f *os.File, wait bool) error {
		if wait {
			return ofdLock(f, unix.F_OFD_SETLKW, offset)
		}
		return ofdLock(f, unix.F_OFD_SETLK, offset)
	})
}

// lockDevice waits for the lock that a loop device on the image holds, and returns the open file that
// now holds it.
func lockDevice(ctx context.Context, image *os.File) (*os.File, error) {
	return acquire(ctx, image, flock)
}

func flock(f *os.File, wait bool) error {
	how := unix.LOCK_EX
	if !wait {
		how |= unix.LOCK_NB
	}
	return noEINTR(func() error { return unix.Flock(int(f.Fd()), how) })
}

// acquire opens the image again and locks it. It gives up with the context; the goroutine that waits in
// the kernel then lets go as soon as it gets the lock.
func acquire(ctx context.Context, image *os.File, lock func(f *os.File, wait bool) error) (*os.File, error) {
	return acquireFlags(ctx, image, os.O_RDWR, lock)
}

func acquireFlags(ctx context.Context, image *os.File, flags int, lock func(f *os.File, wait bool) error) (*os.File, error) {
	f, err := reopen(image, flags)
	if err != nil {
		return nil, err
	}
	err = lock(f, false)
	if err == nil {
		return f, nil
	}
	if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
		f.Close()
		return nil, failed("lock %s: %w", image.Name(), err)
	}
	got, abandoned := make(chan error), make(chan struct{})
	go func() {
		err := lock(f, true)
		select {
		case got <- err:
		case <-abandoned:
			f.Close()
		}
	}()
	select {
	case err := <-got:
		if err != nil {
			f.Close()
			return nil, failed("lock %s: %w", image.Name(), err)
		}
		return f, nil
	case <-ctx.Done():
		close(abandoned)
		return nil, fmt.Errorf("wait for the lock on %s: %w", image.Name(), context.Cause(ctx))
	}
}

func noEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
