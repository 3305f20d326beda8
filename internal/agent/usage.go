package agent

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// usagePatience bounds how long a scrape waits for filesystems that do not answer.
const usagePatience = 2 * time.Second

// usage are the metrics of the volumes that are filesystems of their own: how full they are, and the traffic of their
// block device where they have one. A directory of a filesystem that others use as well has no figures of its own, and
// is left out. Nothing is sampled: a scrape reads what holds.
//
// Each volume is asked once for all its users, by a tree of its own that no sandbox sees, so that a detach is never
// kept up by a busy mount. Whoever does not answer in time is counted as unknown, and is not asked again before the
// question that hangs has ended, or the volume is detached: a dead file server costs one helper, and every scrape
// usagePatience.
type usage struct {
	agent *Agent

	mu sync.Mutex // guards asked
	// asked are the questions under way, by volume key.
	asked map[string]*question

	unknown                                    *prometheus.Desc
	used, size, inodesUsed, inodes             *prometheus.Desc
	readBytes, writtenBytes, readOps, writeOps *prometheus.Desc
}

// question is one to a filesystem.
type question struct {
	done   chan struct{} // closed at the end
	cancel context.CancelFunc
	// Written before done is closed and read after.
	space mount.Usage
	err   error
}

func newUsage(a *Agent) *usage {
	// One series for each mounted volume: the cardinality is that of the volumes that the node has now.
	labels := []string{"namespace", "sandbox", "sandbox_uid", "tenant", "volume_type", "source", "target"}
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("flux_agent_volume_"+name, help, labels, nil)
	}
	return &usage{agent: a, asked: map[string]*question{},
		unknown: prometheus.NewDesc("flux_agent_volumes_usage_unknown", "Volumes with a filesystem of their own that did not say in time how full they are.", nil, nil),
		used:    desc("used_bytes", "Bytes in use in the volume's filesystem."), size: desc("size_bytes", "Size of the volume's filesystem."),
		inodesUsed: desc("inodes_used", "Inodes in use in the volume's filesystem."), inodes: desc("inodes", "Inodes of the volume's filesystem."),
		readBytes: desc("read_bytes_total", "Bytes read from the volume's block device."), writtenBytes: desc("written_bytes_total", "Bytes written to the volume's block device."),
		readOps: desc("reads_total", "Reads of the volume's block device."), writeOps: desc("writes_total", "Writes of the volume's block device."),
	}
}

// Describe implements prometheus.Collector.
func (u *usage) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{u.unknown, u.used, u.size, u.inodesUsed, u.inodes, u.readBytes, u.writtenBytes, u.readOps, u.writeOps} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (u *usage) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(u.agent.stopping, usagePatience)
	defer cancel()
	var volumes []journal.Volume
	questions := map[string]*question{}
	types := hostTypes()
	for _, v := range u.agent.journal.AllVolumes() {
		if v.Phase != journal.Mounted || !isOwnFilesystem(v) {
			continue
		}
		volumes = append(volumes, v)
		if questions[v.Request.Key] == nil {
			questions[v.Request.Key] = u.ask(v, types)
		}
	}
	u.forget(questions)
	unknown := 0
	for _, v := range volumes {
		labels := u.labels(v)
		send := func(d *prometheus.Desc, t prometheus.ValueType, value uint64) {
			out <- prometheus.MustNewConstMetric(d, t, float64(value), labels...)
		}
		q := questions[v.Request.Key]
		select {
		case <-q.done:
		case <-ctx.Done():
		}
		if space, ok := q.answer(); ok {
			send(u.used, prometheus.GaugeValue, space.TotalBytes-min(space.FreeBytes, space.TotalBytes))
			send(u.size, prometheus.GaugeValue, space.TotalBytes)
			send(u.inodesUsed, prometheus.GaugeValue, space.TotalInodes-min(space.FreeInodes, space.TotalInodes))
			send(u.inodes, prometheus.GaugeValue, space.TotalInodes)
		} else {
			unknown++
		}
		if d, err := readTraffic(v.Mount.Device); err == nil {
			send(u.readBytes, prometheus.CounterValue, d.readBytes)
			send(u.writtenBytes, prometheus.CounterValue, d.writtenBytes)
			send(u.readOps, prometheus.CounterValue, d.reads)
			send(u.writeOps, prometheus.CounterValue, d.writes)
		}
	}
	out <- prometheus.MustNewConstMetric(u.unknown, prometheus.GaugeValue, float64(unknown))
}

// isOwnFilesystem says whether a mounted volume is a whole filesystem.
func isOwnFilesystem(v journal.Volume) bool {
	return v.Limit == v1alpha1.LimitImage || v.CapacityBytes > 0 || v.Mount.Root == "/" && v.Request.SubPath == ""
}

func (u *usage) labels(v journal.Volume) []string {
	namespace, name, source := "", "", v.Request.Source
	u.agent.mu.Lock()
	sb := u.agent.sandboxes[v.SandboxUID]
	u.agent.mu.Unlock()
	if sb != nil {
		if c, ok := sb.seen(); ok {
			namespace, name = c.Namespace, c.Name
		}
	}
	if record, ok := u.agent.journal.Sandbox(v.SandboxUID); ok && record.Pod.UID != "" {
		namespace, name = record.Pod.Namespace, record.Pod.Name
	}
	kind := string(v.Request.Type)
	if v.Request.PersistentVolume != "" {
		kind, source = string(v1alpha1.VolumeTypePV), v.Request.PersistentVolume
	}
	return []string{namespace, name, v.SandboxUID, v.Request.TenantID, kind, source, v.Target}
}

// ask has a volume say how full it is, unless it is being asked already.
func (u *usage) ask(v journal.Volume, types map[string]string) *question {
	key := v.Request.Key
	u.mu.Lock()
	defer u.mu.Unlock()
	if q := u.asked[key]; q != nil {
		return q
	}
	ctx, cancel := context.WithCancel(u.agent.stopping)
	q := &question{done: make(chan struct{}), cancel: cancel}
	u.asked[key] = q
	go func() {
		defer cancel()
		q.space, q.err = u.agent.prepared.space(ctx, v.Request, hangs(v, types))
		u.mu.Lock()
		delete(u.asked, key)
		u.mu.Unlock()
		close(q.done)
	}()
	return q
}

// forget ends the questions to volumes that are not among those that are mounted.
func (u *usage) forget(mounted map[string]*question) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for key, q := range u.asked {
		if mounted[key] == nil {
			q.cancel()
		}
	}
}

func (q *question) answer() (mount.Usage, bool) {
	select {
	case <-q.done:
		return q.space, q.err == nil
	default:
		return mount.Usage{}, false
	}
}

// hostTypes are the filesystem types by device, as far as the host has them mounted.
func hostTypes() map[string]string {
	types := map[string]string{}
	list, _ := mount.Mounts() // without them everything is asked by a helper
	for _, m := range list {
		types[m.Device] = m.FSType
	}
	return types
}

// traffic is what went through a block device since it was set up.
type traffic struct{ reads, readBytes, writes, writtenBytes uint64 }

// readTraffic reads the traffic of the block device "major:minor"; an error says that there is no such device.
func readTraffic(device string) (traffic, error) {
	const sector = 512 // in this file, whatever the device's is
	path := "/sys/dev/block/" + device + "/stat"
	data, err := os.ReadFile(path)
	if err != nil {
		return traffic{}, err
	}
	var n [7]uint64
	fields := strings.Fields(string(data))
	if len(fields) < len(n) {
		return traffic{}, fmt.Errorf("%s has %d fields: %q", path, len(fields), data)
	}
	for i := range n {
		if n[i], err = strconv.ParseUint(fields[i], 10, 64); err != nil {
			return traffic{}, fmt.Errorf("%s: %w", path, err)
		}
	}
	return traffic{reads: n[0], readBytes: n[2] * sector, writes: n[4], writtenBytes: n[6] * sector}, nil
}
