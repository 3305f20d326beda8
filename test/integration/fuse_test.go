package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// deadFilesystem mounts a FUSE filesystem whose server never answers: whoever looks into it waits.
func deadFilesystem(t *testing.T, dir string) {
	t.Helper()
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		testenv.Missing(t, "FUSE (%v)", err)
	}
	must(t, unix.Mount("dead", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)))
	t.Cleanup(func() {
		must(t, unix.Close(fd)) // whoever waits gets ENOTCONN
		must(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
}

func TestDeadFileServerDelaysNobodyElse(t *testing.T) {
	n := agenttest.New(t, nil)
	dead, good := n.Dir(t, "t1", "dead"), n.Dir(t, "t1", "good")
	deadFilesystem(t, dead)
	sb := n.Run(t, agenttest.Sandbox{Tenant: "t1"})

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := sb.TryAttach(ctx, agenttest.Volume{Source: dead + "/sub", Target: "/sub"}); err == nil {
		t.Fatal("a directory that only the server knows was attached without it")
	}
	sb.Attach(t, agenttest.Volume{Source: good, Target: "/good"})
	sb.Shell(t, "touch /good/file")

	// The root of it can be attached without the server, and must be detachable without it too.
	sb.Attach(t, agenttest.Volume{Source: dead, Target: "/root-of-it"})
	if r := sb.Detach(t, "/root-of-it", false); r.GetResult() != agentv1.DetachResponse_DETACHED {
		t.Errorf("detach: %v", r)
	}
	if _, ok := sb.Mounts(t)["/root-of-it"]; ok {
		t.Error("it is still mounted")
	}
	n.Restart(t) // the agent can stop
	sb.Detach(t, "/good", false)
}
