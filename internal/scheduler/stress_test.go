package scheduler

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// TestManySandboxes adds and removes volumes of many sandboxes at once, while an agent fails, hangs up and the
// scheduler is replaced. In the end what is mounted is what the specs say.
func TestManySandboxes(t *testing.T) {
	const sandboxes, volumes = 30, 3
	w := newWorld(t)
	uids := make([]string, sandboxes)
	name := func(i int) string { return fmt.Sprint("sb-", i) }
	for i := range uids {
		uids[i] = w.create(name(i), func(sb *v1alpha1.Sandbox) {
			sb.Spec.VolumeMounts = []v1alpha1.VolumeMount{{Source: "/data/pub", Target: "/pub"}}
		})
	}
	var clients sync.WaitGroup
	for i := range uids {
		clients.Go(func() {
			for v := range volumes {
				w.add(name(i), local(fmt.Sprint("/v", v), fmt.Sprint("add-", v)))
			}
			w.remove(name(i), "/v0", "remove", i%2 == 0)
			w.add(name(i), local("/last", "add-last"))
		})
	}
	f := w.agent()
	for range 5 {
		f.with(func() {
			f.faults["attach"] = append(f.faults["attach"], errTransient, errTransient)
			f.faults["detach"] = append(f.faults["detach"], errTransient)
			f.faults["create"] = append(f.faults["create"], errTransient)
			f.cut()
		})
		w.clock.Step(firstReconnect)
	}
	clients.Wait()
	w.halt()
	w.start()
	want := []string{"/last", "/pub", "/v1", "/v2"}
	for i, uid := range uids {
		w.within(time.Second, name(i)+" is as wished", func() bool {
			sb := w.get(name(i))
			return sb.Status.Phase == v1alpha1.SandboxRunning && sb.Status.VolumesReady == "4/4" && len(sb.Spec.DynamicVolumes) == 3 &&
				len(sb.Status.Volumes) == 4 && slices.Equal(f.targets(uid), want)
		})
	}
	for i := range uids {
		w.delete(name(i))
	}
	w.within(time.Second, "all gone", func() bool {
		for i := range uids {
			if w.get(name(i)) != nil {
				return false
			}
		}
		return len(f.has()) == 0
	})
	w.eventually("gauge is 0", func() bool { return w.sample("sandbox_dynamic_volume_count", nil) == 0 })
}
