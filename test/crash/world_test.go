//go:build failpoint

package crash

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// world is a machine, whose containerd goes on while servers come and go, with eyes on all parts of it.
type world struct {
	*machine.Machine
	agent   agentv1.AgentServiceClient
	runtime *containers.Runtime
	// containerd is the machine's own.
	containerd *containers.Child
	// plain are the places where a sandbox without volumes has mounts.
	plain map[string]bool
	// before are the facts of the machine with nothing on it.
	before []string
	// processDies: somebody kills the sandbox's process, so that a volume may not be in use any more.
	processDies bool
	// images counts the image-backed volumes that were made: each is a new one.
	images int
}

// newWorld makes a machine on which every scenario has run once undisturbed, so that folders that stay are there, and
// notes what is on it then.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Machine: machine.New(t, true)}
	t.Cleanup(func() {
		if log, err := os.ReadFile(filepath.Join(w.Dir, "state/containerd/containerd.log")); err == nil && t.Failed() {
			t.Logf("containerd's log:\n%s", log[max(0, len(log)-16<<10):])
		}
	})
	name := filepath.Base(w.Dir)
	var err error
	w.runtime, err = containers.Open(t.Context(), containers.Config{
		Address: filepath.Join(w.Dir, "run/containerd/containerd.sock"), CgroupParent: "/" + name,
		StateDir: filepath.Join(w.Dir, "state/sandboxes"), RunDir: filepath.Join(w.Dir, "run/containers"),
		InitPath: filepath.Join(w.Bin, "flux-sandbox-init"), LoggerPath: filepath.Join(w.Bin, "flux-sandbox-logger"),
		ConnectWait: patience,
	})
	must(t, err)
	t.Cleanup(func() { must(t, w.runtime.Close()) })
	// It is found, as it runs already.
	w.containerd, err = containers.StartContainerd(t.Context(), containers.ChildConfig{Binary: testenv.NeedContainerd(t),
		Root: filepath.Join(w.Dir, "state/containerd"), State: filepath.Join(w.Dir, "run/containerd"), Cgroup: "/" + name + "-containerd"})
	must(t, err)
	conn, err := grpc.NewClient("unix://"+filepath.Join(w.Dir, "run/agent.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: patience,
			Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.6, MaxDelay: 20 * time.Millisecond}}))
	must(t, err)
	t.Cleanup(func() { must(t, conn.Close()) })
	w.agent = agentv1.NewAgentServiceClient(conn)
	for _, dir := range []string{"static", "busy", "more"} {
		w.TenantDir(t, tenant, dir)
	}
	w.learnPlain(t)
	for i := range scenarios {
		w.next()
		began := time.Now()
		w.finish(t, scenarios[i].steps)
		t.Logf("undisturbed: %s: %s", scenarios[i].name, time.Since(began).Round(time.Millisecond))
	}
	// As every server that is looked at later, it has just been started and has run one scenario.
	w.restart(t)
	w.finish(t, scenarios[0].steps)
	w.before = w.settledFacts(t)
	for _, f := range w.before {
		for _, leak := range []string{"loop device", "mount", "container", "leftover", "agent's sandbox", "prepared", "sandbox"} {
			if strings.HasPrefix(f, leak+" ") {
				t.Fatalf("undisturbed scenarios left: %s", f)
			}
		}
	}
	return w
}

// next begins another round. The last one's image, which nothing uses any more, would count against the disk.
func (w *world) next() {
	_ = os.Remove(w.image() + ".img") // if that round made one
	w.images++
}

// image is the source of this round's image-backed volume.
func (w *world) image() string { return w.ImageDir(tenant, "new-"+strconv.Itoa(w.images)) }

// restart kills the server and starts it again, with failpoints armed as env says.
func (w *world) restart(t *testing.T, env ...string) {
	t.Helper()
	w.Kill(t)
	w.Start(t, env...)
}

// run runs the steps one after another until the server dies, and returns those that are still to do, the interrupted
// one included.
func (w *world) run(t *testing.T, steps []step) (rest []step, died bool) {
	t.Helper()
	for i, s := range steps {
		ctx, cancel := context.WithCancel(t.Context())
		answered := make(chan error, 1)
		go func() { answered <- w.try(ctx, s) }()
		var err error
		for waiting := true; waiting; {
			select {
			case err = <-answered:
				waiting = false
			default:
				if died = w.Ended(5 * time.Millisecond); died {
					cancel() // nobody answers any more
					err, waiting = <-answered, false
				}
			}
		}
		cancel()
		if !died {
			// The death may be the reason of the error, or follow the answer.
			wait := time.Millisecond
			if err != nil {
				wait = backgroundWait
			}
			died = w.Ended(wait)
		}
		switch {
		case died && err == nil:
			return steps[i+1:], true
		case died:
			return steps[i:], true
		case err != nil:
			t.Fatalf("%s: %v", s.name, err)
		}
	}
	return nil, false
}

// finish runs the steps to their end.
func (w *world) finish(t *testing.T, steps []step) {
	t.Helper()
	for _, s := range steps {
		if err := w.try(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
	}
}

func (w *world) try(ctx context.Context, s step) error {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	return s.do(ctx, w)
}

// checkNothingLeft holds the whole state against what it was before.
func (w *world) checkNothingLeft(t *testing.T) {
	t.Helper()
	err := await(t.Context(), func(ctx context.Context) error {
		now, err := w.facts(ctx)
		if err != nil {
			return err
		}
		if d := diff(w.before, now); d != "" {
			return fmt.Errorf("the machine is not as before:\n%s", d)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// settledFacts are the facts once two looks in a row find the same.
func (w *world) settledFacts(t *testing.T) []string {
	t.Helper()
	var last []string
	must(t, await(t.Context(), func(ctx context.Context) error {
		now, err := w.facts(ctx)
		if err != nil {
			return err
		}
		d := diff(last, now)
		last = now
		if d != "" {
			return fmt.Errorf("the machine does not come to rest:\n%s", d)
		}
		return nil
	}))
	return last
}
