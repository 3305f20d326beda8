package integration

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

const (
	fleetSize    = 100
	fleetClients = 32
	sharing      = 10 // sandboxes that share one image
)

// fleet is many sandboxes on one node, each with three volumes that may or may not be attached.
type fleet struct {
	*agenttest.Node
	sandboxes []*agenttest.Sandbox
	volumes   [][]*fleetVolume
	runtime   *containers.Runtime // stays open while the agent restarts
}

// fleetVolume is a volume of one sandbox. Whoever works on it holds mu; attached is what its last successful operation says.
type fleetVolume struct {
	agenttest.Volume
	mu       sync.Mutex // guards attached
	attached bool
}

func (f *fleet) volume(sandbox, i int) *fleetVolume {
	v := &fleetVolume{}
	switch i {
	case 0:
		v.Source = filepath.Join(f.Data, "tenants/t1", fmt.Sprint("own", sandbox))
	case 1:
		v.Source, v.ReadOnly = filepath.Join(f.Data, "shared/model"), true
	case 2:
		v.Source, v.Size = f.Image("t1", fmt.Sprint("img", sandbox/sharing)), 16<<20
	}
	v.Target = fmt.Sprint("/volumes/", i)
	return v
}

// inParallel calls f for 0 ≤ i < n, eight at a time.
func inParallel(n int, f func(i int)) {
	var wg sync.WaitGroup
	next := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// preparations counts, of one image, how often Prepare made it, and whether two of its calls ever ran at once.
type preparations struct {
	source                          string
	running, overlaps, calls, fresh atomic.Int32
}

func (p *preparations) began(_ context.Context, r volume.Request) error {
	if r.Source != p.source {
		return nil
	}
	p.calls.Add(1)
	if p.running.Add(1) > 1 {
		p.overlaps.Add(1)
	}
	if _, err := os.Stat(p.source + ".img"); errors.Is(err, os.ErrNotExist) {
		p.fresh.Add(1)
	}
	return nil
}

func (p *preparations) ended(r volume.Request) {
	if r.Source == p.source {
		p.running.Add(-1)
	}
}

// A hundred sandboxes: what a node must stand.
func TestFleet(t *testing.T) {
	var p preparations
	h := &hooks{prepare: p.began, prepared: p.ended}
	f := &fleet{Node: agenttest.New(t, h.install), sandboxes: make([]*agenttest.Sandbox, fleetSize)}
	f.runtime = f.Env.Open(t, nil)
	p.source = f.Image("t1", "once")
	f.Shared(t, "model")
	must(t, os.WriteFile(filepath.Join(f.Data, "shared/model/name"), []byte("model"), 0o644))
	for i := range fleetSize {
		own := fmt.Sprint("own", i)
		must(t, os.WriteFile(filepath.Join(f.Dir(t, "t1", own), "name"), []byte(own), 0o644))
		f.volumes = append(f.volumes, []*fleetVolume{f.volume(i, 0), f.volume(i, 1), f.volume(i, 2)})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	inParallel(fleetSize, func(i int) {
		sb := f.Prepare(agenttest.Sandbox{Tenant: "t1", Restart: v1alpha1.RestartAlways})
		if err := sb.TryRun(ctx); err != nil {
			t.Error(err)
		}
		f.sandboxes[i] = sb
	})
	if t.Failed() {
		return
	}
	t.Run("the same source into 50 at once", func(t *testing.T) { f.sameSource(t, &p, 50) })
	t.Run("chaos", f.chaos)
	inParallel(fleetSize, func(i int) {
		if err := f.sandboxes[i].TryDelete(ctx); err != nil {
			t.Error(err)
		}
	})
	f.nothingLeft(t)
}

func (f *fleet) sameSource(t *testing.T, p *preparations, many int) {
	v := agenttest.Volume{Source: p.source, Target: "/once", Size: 16 << 20}
	atOnce(many, func(i int) {
		if _, err := f.sandboxes[i].TryAttach(t.Context(), v); err != nil {
			t.Error(err)
		}
	})
	t.Logf("%d calls of Prepare", p.calls.Load())
	if p.fresh.Load() != 1 || p.overlaps.Load() != 0 {
		t.Errorf("the image was made %d times, %d calls overlapped; want once and none", p.fresh.Load(), p.overlaps.Load())
	}
	if devices := loopDevices(t, v.Source); len(devices) != 1 {
		t.Errorf("loop devices %v, want one", devices)
	}
	f.sandboxes[0].Shell(t, "echo shared > /once/file")
	if got := f.sandboxes[many-1].Shell(t, "cat /once/file"); got != "shared\n" {
		t.Errorf("the last sandbox reads %q", got)
	}
	atOnce(many, func(i int) {
		if _, err := f.sandboxes[i].TryDetach(t.Context(), v.Target, false); err != nil {
			t.Error(err)
		}
	})
	nothingPrepared(t, f.Node)
	if devices := loopDevices(t, v.Source); len(devices) != 0 {
		t.Errorf("loop devices %v are left", devices)
	}
}

// chaos lets many clients attach and detach at random, while sandboxes' processes are killed and the agent restarts. In
// the end each sandbox has exactly the volumes that the last successful operation on each says.
func (f *fleet) chaos(t *testing.T) {
	const (
		killEvery    = 20  // operations
		restartEvery = 250 // operations
		kills        = 3   // of one sandbox: the back-off of restarts grows with each
	)
	operations := testenv.Long(1500, 20000)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	base := f.sandboxes[0].Mounts(t)

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	var clients sync.WaitGroup
	done := make(chan struct{}, operations)
	for c := range fleetClients {
		random := rand.New(rand.NewPCG(seed, uint64(c)))
		clients.Go(func() {
			for range operations / fleetClients {
				if err := f.operation(ctx, random); err != nil {
					t.Errorf("client %d: %v", c, err)
				}
				done <- struct{}{}
			}
		})
	}
	go func() {
		clients.Wait()
		close(done)
	}()
	random := rand.New(rand.NewPCG(seed, fleetClients))
	killed, restarts := map[int]int{}, 0
	dead := map[int]int{} // the PID that was killed last, by sandbox
	count := 0
	for range done {
		count++
		if count%killEvery == 0 {
			if i := random.IntN(fleetSize); killed[i] < kills {
				if pid := f.kill(t, i); pid != 0 {
					killed[i]++
					dead[i] = pid
				}
			}
		}
		if count%restartEvery == 0 {
			f.Restart(t)
			restarts++
		}
	}
	t.Logf("%d operations; processes of %d sandboxes killed; %d restarts of the agent", count, len(killed), restarts)
	if len(killed) == 0 || restarts == 0 {
		t.Error("there was no chaos")
	}
	// A process is started when its volumes are attached. That the agent says so is not enough: it may not know yet that
	// the last one was killed.
	for i, sb := range f.sandboxes {
		agenttest.Eventually(t, "every sandbox runs", func() bool {
			c, err := f.runtime.Get(t.Context(), sb.UID)
			must(t, err)
			return c.State == containers.Running && c.PID != dead[i]
		})
	}
	attached := 0
	for i := range f.sandboxes {
		attached += f.check(t, i, slices.Collect(maps.Keys(base)))
	}
	t.Logf("%d of %d volumes are attached in the end", attached, 3*fleetSize)
}

// operation attaches a volume that is not attached, or detaches one that is; now and then it asks for what is so already.
// It tries until it succeeds: the sandbox may be between two processes, and the agent away.
func (f *fleet) operation(ctx context.Context, random *rand.Rand) error {
	i, j := random.IntN(fleetSize), random.IntN(3)
	v, sb := f.volumes[i][j], f.sandboxes[i]
	again := random.IntN(8) == 0
	v.mu.Lock()
	defer v.mu.Unlock()
	attach := v.attached == again
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	var last error
	for {
		var err error
		if attach {
			_, err = sb.TryAttach(ctx, v.Volume)
		} else {
			var r *agentv1.DetachResponse
			if r, err = sb.TryDetach(ctx, v.Target, false); err == nil && r.GetResult() == agentv1.DetachResponse_BUSY {
				err = fmt.Errorf("busy: %v", r.GetHolders())
			}
		}
		if err == nil {
			v.attached = attach
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("sandbox %s, %s, attach %v: %w, after %w", sb.UID, v.Target, attach, err, last)
		}
		last = err
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}

// kill kills the process of a sandbox that runs, and returns its PID; 0 when there was none.
func (f *fleet) kill(t *testing.T, i int) int {
	t.Helper()
	pid := func() int {
		c, err := f.runtime.Get(t.Context(), f.sandboxes[i].UID)
		must(t, err)
		if c.State != containers.Running {
			return 0
		}
		return c.PID
	}
	before := pid()
	if before == 0 {
		return 0
	}
	fd, err := unix.PidfdOpen(before, 0)
	if errors.Is(err, unix.ESRCH) {
		return 0
	}
	must(t, err)
	defer unix.Close(fd)
	// Still the same: so the descriptor is of this process and no other.
	if pid() != before || unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) != nil {
		return 0
	}
	return before
}

// check holds what the kernel has of a sandbox against what it should have, and counts its volumes.
func (f *fleet) check(t *testing.T, i int, base []string) (attached int) {
	t.Helper()
	sb := f.sandboxes[i]
	mounts, pid := sb.Mounts(t), sb.PID(t)
	for _, v := range f.volumes[i] {
		m, there := mounts[v.Target]
		delete(mounts, v.Target)
		if there != v.attached {
			t.Errorf("sandbox %d: %s is mounted: %v, want %v", i, v.Target, there, v.attached)
			continue
		}
		if !there {
			continue
		}
		attached++
		if m.ReadOnly != v.ReadOnly {
			t.Errorf("sandbox %d: %s is read-only: %v", i, v.Target, m.ReadOnly)
		}
		if v.Size > 0 {
			devices := loopDevices(t, v.Source)
			if len(devices) != 1 {
				t.Errorf("%s has loop devices %v", v.Source, devices)
				continue
			}
			number, err := os.ReadFile(filepath.Join("/sys/block", devices[0], "dev"))
			if must(t, err); strings.TrimSpace(string(number)) != m.Device {
				t.Errorf("sandbox %d: %s is on device %s, its image on %s", i, v.Target, m.Device, number)
			}
		} else if name, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s/name", pid, v.Target)); err != nil || string(name) != filepath.Base(v.Source) {
			t.Errorf("sandbox %d: %s shows %q, %v; want %s", i, v.Target, name, err, v.Source)
		}
	}
	if got := slices.Sorted(maps.Keys(mounts)); !slices.Equal(got, slices.Sorted(slices.Values(base))) {
		t.Errorf("sandbox %d has mounts %v beside its volumes, want %v", i, got, base)
	}
	return attached
}

// nothingLeft checks that nothing of the fleet is left in the kernel, in containerd and in the agent.
func (f *fleet) nothingLeft(t *testing.T) {
	t.Helper()
	nothingPrepared(t, f.Node)
	if u := f.Inventory(t); len(u.GetSandboxes()) != 0 {
		t.Errorf("the inventory has %v", u.GetSandboxes())
	}
	left, err := f.runtime.Leftovers(t.Context())
	if err != nil || len(left) != 0 {
		t.Errorf("leftovers %v, %v", left, err)
	}
	for i := 0; i < fleetSize; i += sharing {
		if devices := loopDevices(t, f.volumes[i][2].Source); len(devices) != 0 {
			t.Errorf("loop devices %v", devices)
		}
	}
	own, err := mount.Mounts()
	must(t, err)
	for _, m := range own {
		if strings.HasPrefix(m.MountPoint, f.Data) {
			t.Errorf("the host has a mount at %s", m.MountPoint)
		}
	}
	for i, sandbox := range f.volumes {
		if got, err := os.ReadFile(filepath.Join(sandbox[0].Source, "name")); err != nil || string(got) != fmt.Sprint("own", i) {
			t.Errorf("the source %s has %q, %v", sandbox[0].Source, got, err)
		}
	}
}
