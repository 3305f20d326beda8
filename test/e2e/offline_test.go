package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// shutDown ends a filesystem at once, as when its device is gone (EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN). What was written
// before is on the disk.
func shutDown(t *testing.T, dir string) {
	t.Helper()
	d, err := os.Open(dir)
	must(t, err)
	defer d.Close()
	must(t, unix.Syncfs(int(d.Fd())))
	const shutdown, noLogFlush = 0x8004587d, 2
	must(t, unix.IoctlSetPointerInt(int(d.Fd()), shutdown, noLogFlush))
}

// isOffline waits until a sandbox's row says that its volume is offline, and an Event as well.
func (c *cluster) isOffline(name, target string) {
	c.t.Helper()
	row := c.row(name, target, v1alpha1.VolumeFailed)
	if row.Reason != string(fault.VolumeOffline) || !strings.Contains(row.Message, "shut down") || !strings.Contains(row.Message, "detach it") {
		c.t.Errorf("row %+v", row)
	}
	c.event(name, string(fault.VolumeOffline))
}

// forced is an entry whose forced detach is asked for.
func forced(v v1alpha1.DynamicVolume) v1alpha1.DynamicVolume {
	v.Detach = &v1alpha1.DetachRequest{Force: true, RequestID: "forced"}
	return v
}

// The filesystem under running sandboxes is shut down: their other volumes go on, status and Events say so, a forced detach
// works though a process has a file open there, and so does an attach when the volume is back.
func TestAVolumeGoesOffline(t *testing.T) {
	c := open(t)
	c.bound("data", "other")
	holding := "while ! [ -e /data/hold ]; do sleep 0.1; done; exec 3>>/data/held; echo held > /holding; while :; do sleep 0.1; done"
	c.running("one", holding, nil)
	c.running("two", ticking, nil)
	c.volumes("one", claim("data", "/data"), claim("other", "/other"))
	c.volumes("two", claim("data", "/data"))
	for _, name := range []string{"one", "two"} {
		c.row(name, "/data", v1alpha1.VolumeMounted)
	}
	c.row("one", "/other", v1alpha1.VolumeMounted)
	one, two := c.process(c.get("one")), c.process(c.get("two"))
	write(t, one.path("data", "file"), "kept")
	write(t, one.path("data", "hold"), "")
	c.wait("a process has a file open", func() (bool, string) {
		_, err := os.Stat(one.path("holding"))
		return err == nil, fmt.Sprint(err)
	})
	shutDown(t, one.path("data"))

	for _, name := range []string{"one", "two"} {
		c.isOffline(name, "/data")
	}
	if err := os.WriteFile(two.path("data", "file"), nil, 0o644); err == nil {
		t.Error("it can still be written")
	}
	write(t, one.path("other", "file"), "goes on")
	if row := c.row("one", "/other", v1alpha1.VolumeMounted); row.Reason != "" {
		t.Errorf("row %+v", row)
	}
	c.undelayed("beside")
	// Whoever has it open keeps it from being unmounted, but not from being taken away.
	c.volumes("one", forced(claim("data", "/data")), claim("other", "/other"))
	c.volumes("two", forced(claim("data", "/data")))
	c.noRow("two", "/data")
	c.wait("it is not in the sandboxes any more", func() (bool, string) {
		at := one.mountAt(t, "/data") + two.mountAt(t, "/data")
		return at == "", at
	})
	if !one.same(t) {
		t.Error("the process was ended")
	}
	uninterrupted(t, two)
	// It has its file open until it ends; then the volume can be back.
	c.deleteSandbox("one")
	c.wait("it is unpublished", func() (bool, string) {
		p := published(t)
		return len(p) == 0, strings.Join(p, ", ")
	})
	c.volumes("two", claim("data", "/data"))
	c.row("two", "/data", v1alpha1.VolumeMounted)
	if got := read(t, two.path("data", "file")); got != "kept" {
		t.Errorf("it has %q", got)
	}
	uninterrupted(t, two)
	c.deleteAll(t.Context())
	c.deleteClaim("data")
	c.deleteClaim("other")
}

// deleteSandbox deletes a sandbox and waits until it is gone.
func (c *cluster) deleteSandbox(name string) {
	c.t.Helper()
	must(c.t, c.dynamic.Resource(sandboxes).Namespace(c.namespace).Delete(c.t.Context(), name, metav1.DeleteOptions{}))
	c.wait(name+" is gone", func() (bool, string) { return c.get(name) == nil, "it is there" })
}
