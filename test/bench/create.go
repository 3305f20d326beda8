package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"syscall"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"

	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/testimage"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// bareContainerd makes containers with nothing but containerd's client and its default specification.
type bareContainerd struct {
	p      *program
	ctx    context.Context
	client *containerd.Client
	image  containerd.Image
	cgroup string
	made   int
}

func newBareContainerd(p *program, env *containerstest.Env) *bareContainerd {
	client, err := containerd.New(env.Child.Address())
	p.must(err)
	p.Cleanup(func() { _ = client.Close() })
	// A namespace of its own: what is in the agent's is the agent's.
	b := &bareContainerd{p: p, ctx: namespaces.WithNamespace(p.Context(), "bench"), client: client, cgroup: env.Config().CgroupParent}
	var archive bytes.Buffer
	p.must(testimage.Write(&archive, testimage.Options{}))
	images, err := client.Import(b.ctx, &archive)
	p.must(err)
	b.image = containerd.NewImage(client, images[0])
	p.must(b.image.Unpack(b.ctx, ""))
	return b
}

// create makes a container and starts it; remove takes it away again. extra is added to the default specification, and
// logs, if not nil, are where output goes.
func (b *bareContainerd) create(logs cio.Creator, extra ...oci.SpecOpts) (remove func()) {
	if logs == nil {
		logs = cio.NullIO
	}
	b.made++
	id := fmt.Sprint("bare", b.made)
	container, err := b.client.NewContainer(b.ctx, id, containerd.WithNewSnapshot(id, b.image),
		containerd.WithNewSpec(append([]oci.SpecOpts{
			oci.WithImageConfig(b.image), oci.WithProcessArgs("sleep", "3600"), oci.WithCgroup(path.Join(b.cgroup, id))}, extra...)...))
	b.p.must(err)
	task, err := container.NewTask(b.ctx, logs)
	b.p.must(err)
	ended, err := task.Wait(b.ctx)
	b.p.must(err)
	b.p.must(task.Start(b.ctx))
	return func() {
		b.p.must(task.Kill(b.ctx, syscall.SIGKILL))
		<-ended
		_, err := task.Delete(b.ctx)
		b.p.must(err)
		b.p.must(container.Delete(b.ctx, containerd.WithSnapshotCleanup))
	}
}

// createBudget is how many times a bare containerd's create and start a sandbox's may take.
const createBudget = 1.10

func benchCreate(p *program, r *report, s sizes) {
	n := agenttest.NewOn(p, containerstest.New(p), nil)
	bare := newBareContainerd(p, n.Env)
	m := machine.New(p, false)
	api := &apiClient{program: p, m: m}

	// What a sandbox has and a bare container has not, where that costs anything: a system call filter, and its output in
	// rotated files.
	logDir := filepath.Join(n.Env.Dir, "bare-logs")
	p.must(os.Mkdir(logDir, 0o700))
	logs := cio.BinaryIO(n.Env.LoggerPath, map[string]string{"dir": logDir, "size": "1048576", "files": "2"})

	var bareTimes, filteredTimes, loggedTimes, agentTimes, apiTimes samples
	// The first round, which warms up, is not counted. Each is removed before the next is made: all have the machine alone.
	for i := range s.creates + 1 {
		if i == 1 {
			bareTimes, filteredTimes, loggedTimes, agentTimes, apiTimes = nil, nil, nil, nil, nil
		}
		var remove func()
		bareTimes.add(func() { remove = bare.create(nil) })
		remove()
		filteredTimes.add(func() { remove = bare.create(nil, seccomp.WithDefaultProfile()) })
		remove()
		loggedTimes.add(func() { remove = bare.create(logs, seccomp.WithDefaultProfile()) })
		remove()

		sb := n.Prepare(agenttest.Sandbox{Tenant: "t1"})
		agentTimes.add(func() { p.must(sb.TryRun(p.Context())) })
		sb.Delete(p)

		name := fmt.Sprint("c", i)
		apiTimes.add(func() { api.create(name) })
		api.remove(name)
	}
	r.times("create and start: bare containerd", bareTimes, "", nil)
	r.times("… with the default seccomp profile", filteredTimes, "bare containerd", bareTimes)
	r.times("… and the log program", loggedTimes, "bare containerd", bareTimes)
	r.times("create and start: agent, through its socket", agentTimes, "bare containerd", bareTimes)
	r.times("create, until it runs: API of the server", apiTimes, "bare containerd", bareTimes)
	judge := func(by string, t samples) {
		ratio := float64(t.median()) / float64(bareTimes.median())
		r.budget("create a sandbox, "+by, "≤ 1.10 × bare containerd in the same run", fmt.Sprintf("%.2f ×", ratio), ratio <= createBudget)
	}
	judge("by the agent", agentTimes)
	judge("by the server's API", apiTimes)
	synced, err := syncedWrite(filepath.Join(m.Dir, "state"), 200)
	p.must(err)
	r.times("write and fdatasync of 4 KiB in the state folder", synced, "", nil)
}
