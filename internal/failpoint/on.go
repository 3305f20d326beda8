//go:build failpoint

package failpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// Enabled says whether this binary was built with the tag "failpoint".
const Enabled = true

type arming struct {
	action string        // "", "kill", "hang", "pause" or "error"
	text   string        // the error's text, or the pause's file
	left   *atomic.Int64 // hits until it acts
}

func parse(name string) arming {
	for _, term := range strings.Split(os.Getenv(Env), ";") {
		n, action, ok := strings.Cut(strings.TrimSpace(term), "=")
		if !ok || n != name {
			continue
		}
		a := arming{left: &atomic.Int64{}}
		a.left.Store(1)
		if count, rest, ok := strings.Cut(action, "*"); ok {
			n, err := strconv.ParseInt(count, 10, 64)
			if err != nil || n < 1 {
				panic(fmt.Sprintf("failpoint: %s: %q is not a count", name, count))
			}
			a.left.Store(n)
			action = rest
		}
		switch {
		case action == "kill", action == "hang":
			a.action = action
		case strings.HasPrefix(action, "pause(") && strings.HasSuffix(action, ")"):
			a.action, a.text = "pause", action[len("pause("):len(action)-1]
		case strings.HasPrefix(action, "error(") && strings.HasSuffix(action, ")"):
			a.action, a.text = "error", action[len("error("):len(action)-1]
		default:
			panic(fmt.Sprintf("failpoint: %s: unknown action %q", name, action))
		}
		return a
	}
	return arming{}
}

// Hit acts as the point is armed: it kills the process as SIGKILL does, blocks for ever, or returns an
// error. A point that is not armed does nothing.
func (p *Point) Hit() error {
	if p.arm.action == "" || p.arm.left.Add(-1) != 0 {
		return nil
	}
	switch p.arm.action {
	case "kill":
		fmt.Fprintln(os.Stderr, "failpoint: killed at", p.name)
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "hang":
		fmt.Fprintln(os.Stderr, "failpoint: hanging at", p.name)
		select {}
	case "pause":
		pause(p.arm.text)
		return nil
	}
	return fmt.Errorf("failpoint %s: %s", p.name, p.arm.text)
}

// pauseLook is how often a pause looks whether its file is gone.
const pauseLook = 5 * time.Millisecond

// pause makes a file, which tells the test that the point was reached, and returns when the test has removed it.
func pause(file string) {
	done := make(chan struct{})
	// Not on the thread of the step, which may be in a sandbox's mount namespace: the file is not there.
	go func() {
		defer close(done)
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			panic(err)
		}
		ticker := time.NewTicker(pauseLook)
		defer ticker.Stop()
		for {
			if _, err := os.Stat(file); err != nil {
				return
			}
			<-ticker.C
		}
	}()
	<-done
}
