//go:build failpoint

package clustercontroller_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/clustercontroller"
	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
)

// lateIdentity is that of a leader which is suspended, and goes on when another leads.
const lateIdentity = "old"

// process is a controller that runs.
type process struct {
	cmd *exec.Cmd
	// log has all that it wrote, once ended is closed.
	log   string
	ended chan struct{}
}

// controller starts a controller with the rights of its ServiceAccount, with failpoints armed.
func (c *cluster) controller(identity string, armed map[string]string) *process {
	settings := clustercontroller.Config{Kubeconfig: c.kubeconfig, Namespace: ownNamespace, Identity: identity, AnchorImage: "any",
		Listen: "127.0.0.1:0", CertificateListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0", DirectDrivers: []string{directDriver}}
	if identity == lateIdentity { // it is to find soon that another leads
		settings.LeaseDuration, settings.RenewDeadline, settings.RetryPeriod = 3*time.Second, 2*time.Second, 500*time.Millisecond
	}
	config := must(json.Marshal(settings))
	var terms []string
	for _, point := range slices.Sorted(maps.Keys(armed)) {
		terms = append(terms, point+"="+armed[point])
	}
	log := must(os.CreateTemp(c.logs, fmt.Sprintf("controller-%04d-", c.started.Add(1))))
	p := &process{cmd: exec.Command(must(os.Executable())), log: log.Name(), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(config), failpoint.Env+"="+strings.Join(terms, ";"))
	p.cmd.Stderr, p.cmd.Stdout = log, log
	if err := p.cmd.Start(); err != nil {
		panic(err)
	}
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait() // how it ended is in the log
		_ = log.Close()
	}()
	return p
}

// kill ends it as SIGKILL does.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// killedAt are the points that it was killed at: several, if several goroutines came to one at once.
func (p *process) killedAt() (points []string) {
	const said = "failpoint: killed at "
	for line := range bytes.Lines(must(os.ReadFile(p.log))) {
		if _, point, ok := strings.Cut(string(line), said); ok {
			points = append(points, strings.TrimSpace(point))
		}
	}
	return points
}

// supervisor keeps a controller running, as a Deployment does, and has each die at the first point that none before it
// died at.
type supervisor struct {
	c       *cluster
	killed  []string // complete once running is done
	stop    context.CancelFunc
	running sync.WaitGroup
}

func (c *cluster) supervise(armed map[string]string) *supervisor {
	ctx, stop := context.WithCancel(c.Context())
	s := &supervisor{c: c, stop: stop}
	armed = maps.Clone(armed)
	s.running.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			c.expireLease()
			p := c.controller(fmt.Sprint("controller-", n), armed)
			select {
			case <-ctx.Done():
				p.kill()
				return
			case <-p.ended:
			}
			points := p.killedAt()
			if len(points) == 0 {
				c.Errorf("a controller ended that nobody killed: %s", tail(p.log))
				return
			}
			s.killed = append(s.killed, points...)
			for _, point := range points {
				delete(armed, point)
			}
		}
	})
	c.Cleanup(func() { s.end() })
	return s
}

// end kills the last controller, and returns the points that others were killed at.
func (s *supervisor) end() []string {
	s.stop()
	s.running.Wait()
	return s.killed
}

// tail is the end of what a controller has logged.
func tail(log string) string {
	text, _ := os.ReadFile(log)
	return string(text[max(0, len(text)-8<<10):])
}

// logsOnFailure shows what the last controllers have said, when a test has failed.
func (c *cluster) logsOnFailure(t *testing.T) {
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		logs, _ := filepath.Glob(filepath.Join(c.logs, "controller-*")) // in the order of their names, which is that of their starts
		for _, log := range logs[max(0, len(logs)-2):] {
			t.Logf("%s:\n%s", filepath.Base(log), tail(log))
		}
	})
}
