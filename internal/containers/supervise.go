package containers

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// superviseSlice is how often a supervisor looks at its context, in milliseconds.
	superviseSlice = 1000
	// superviseBackoff is between two starts of a containerd that does not stay.
	superviseBackoff = 2 * time.Second
)

// Supervise starts containerd again whenever it ends, until ctx ends. Sandboxes go on meanwhile: their shims keep them.
func (c *Child) Supervise(ctx context.Context, log *slog.Logger) {
	for ctx.Err() == nil {
		p, err := c.config.find()
		if err == nil && p != nil {
			awaitEnd(ctx, p)
			p.close()
			if ctx.Err() != nil {
				return
			}
			log.Warn("containerd has ended and is started again; sandboxes go on", "address", c.Address())
		}
		started, err := StartContainerd(ctx, c.config)
		if err == nil {
			log.Info("containerd runs", "pid", started.PID())
			continue
		}
		if ctx.Err() != nil {
			return
		}
		log.Error("containerd cannot be started; it is tried again", "error", err)
		select {
		case <-time.After(superviseBackoff):
		case <-ctx.Done():
		}
	}
}

func awaitEnd(ctx context.Context, p *hostProcess) {
	for ctx.Err() == nil {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}, superviseSlice)
		if n > 0 || (err != nil && err != unix.EINTR) {
			return
		}
	}
}
