package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// memoryBudget is the limit for the server's resident memory with 100 sandboxes and 300 volumes.
const memoryBudget = 64 << 20

func benchFleet(p *program, r *report, s sizes) {
	m := machine.New(p, false)
	c := &apiClient{program: p, m: m}
	metrics := freeAddress(p)
	config, err := os.ReadFile(m.Config)
	p.must(err)
	m.Stop(p)
	p.must(os.WriteFile(m.Config, fmt.Appendf(config, "metricsListen: %s\n", metrics), 0o644))
	m.Start(p)

	empty := usageOf(p, m.PID(), metrics)
	uids := make([]string, s.sandboxes)
	running := 0
	grow := func(to int) {
		from := running
		c.inParallel(to-from, func(c *apiClient, i int) { uids[from+i] = c.create(fmt.Sprint("s", from+i)) })
		running = to
	}
	var first samples
	for _, count := range []int{1, 10, s.sandboxes} {
		if count <= running || count > s.sandboxes {
			continue
		}
		grow(count)
		c.pairs("s0", uids[0], 20) // to warm up
		attach, detach := c.pairs("s0", uids[0], s.apiPairs/2)
		if first == nil {
			first = attach
		}
		r.times(fmt.Sprintf("API: attach, %s running", sandboxes(count)), attach, "with 1", first)
		r.times(fmt.Sprintf("API: detach, %s running", sandboxes(count)), detach, "", nil)
	}
	c.inParallel(running, func(c *apiClient, i int) {
		for j := range volumesPerSandbox {
			v := &sandboxv1.DynamicVolume{VolumeType: "local", Source: c.m.TenantDir(c, "t1", fmt.Sprintf("d%d-%d", i, j)), Target: fmt.Sprint("/volumes/", j)}
			c.attach(fmt.Sprint("s", i), v)
		}
	})
	full := usageOf(p, m.PID(), metrics)
	volumes := running * volumesPerSandbox
	what := func(of string) string {
		return fmt.Sprintf("server: %s, %d sandboxes and %d volumes", of, running, volumes)
	}
	r.value(what("resident memory"), mebibytes(full.resident), "with none: "+mebibytes(empty.resident))
	r.value(what("threads"), fmt.Sprint(full.threads), fmt.Sprint("with none: ", empty.threads))
	r.value(what("goroutines"), fmt.Sprint(full.goroutines), fmt.Sprint("with none: ", empty.goroutines))
	r.value(fmt.Sprintf("mounts on the host, %d sandboxes and %d volumes", running, volumes), fmt.Sprint(full.mounts), fmt.Sprint("with none: ", empty.mounts))
	r.budget(fmt.Sprintf("agent memory (the whole server), %d sandboxes and %d volumes", running, volumes), "≤ 64 MiB", mebibytes(full.resident), full.resident <= memoryBudget)

	var recovery samples
	for range 3 {
		m.Kill(p)
		recovery.add(func() { m.Start(p) })
	}
	for i := range running {
		list, err := m.Volumes.ListSandVolumes(p.Context(), &sandboxv1.ListSandVolumesRequest{Sandbox: ref(fmt.Sprint("s", i))})
		p.must(err)
		for _, v := range list.GetVolumes() {
			if v.GetPhase() != "Mounted" {
				p.Errorf("after the recovery, %v", v)
			}
		}
	}
	r.times(fmt.Sprintf("server killed → ready again, %d sandboxes and %d volumes", running, volumes), recovery, "", nil)
	c.inParallel(running, func(c *apiClient, i int) { c.remove(fmt.Sprint("s", i)) })
	after := usageOf(p, m.PID(), metrics)
	if after.mounts != empty.mounts {
		p.Errorf("%d mounts on the host in the end, %d at the start", after.mounts, empty.mounts)
	}
}

func sandboxes(n int) string {
	if n == 1 {
		return "1 sandbox"
	}
	return fmt.Sprint(n, " sandboxes")
}

// usage is what a server takes of the machine.
type usage struct {
	resident            int64 // bytes
	threads, goroutines int
	mounts              int // of the host
}

// settle is how long a server is left alone before it is looked at: what it does after its last answer is not what is
// asked for.
const settle = 2 * time.Second

func usageOf(p *program, pid int, metrics string) usage {
	<-time.After(settle)
	var u usage
	status, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	p.must(err)
	for line := range strings.Lines(string(status)) {
		words := strings.Fields(line)
		switch words[0] {
		case "VmRSS:":
			kib, err := strconv.ParseInt(words[1], 10, 64)
			p.must(err)
			u.resident = kib << 10
		case "Threads:":
			u.threads, err = strconv.Atoi(words[1])
			p.must(err)
		}
	}
	resp, err := http.Get("http://" + metrics + "/metrics")
	p.must(err)
	defer resp.Body.Close()
	lines := bufio.NewScanner(io.LimitReader(resp.Body, 64<<20))
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), "go_goroutines "); ok {
			u.goroutines, err = strconv.Atoi(value)
			p.must(err)
		}
	}
	p.must(lines.Err())
	own, err := os.ReadFile("/proc/self/mountinfo")
	p.must(err)
	u.mounts = strings.Count(string(own), "\n")
	return u
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
