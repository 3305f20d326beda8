package agent

import "sync"

// lockedSend lets one goroutine at a time send.
type lockedSend struct{ mu sync.Mutex }

// chunks is a writer that sends what it gets in messages of bounded size.
type chunks struct {
	send *lockedSend
	each func([]byte) error
}

func (c *chunks) Write(p []byte) (int, error) {
	written := 0
	for len(p) > 0 {
		n := min(len(p), maxChunk)
		c.send.mu.Lock()
		err := c.each(p[:n])
		c.send.mu.Unlock()
		if err != nil {
			return written, err
		}
		written += n
		p = p[n:]
	}
	return written, nil
}
