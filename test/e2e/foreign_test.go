package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// The driver of test/foreigndriver, and where it and kubelet have things.
const (
	foreignName = "foreign.example.com"
	foreignDir  = "/var/lib/flux-localcluster/foreign"
	kubeletDir  = "/var/lib/flux-localcluster/kubelet"
	registry    = "127.0.0.1:5055"
	// kubeletPatience is for what kubelet does with a driver that does not answer: it waits for two minutes, and tries again.
	kubeletPatience = 5 * time.Minute
)

// buildForeign builds the driver into a folder.
func (c *cluster) buildForeign(bin string) string {
	c.t.Helper()
	program := filepath.Join(bin, "foreigndriver")
	build := exec.CommandContext(c.t.Context(), "go", "build", "-C", "../foreigndriver", "-trimpath", "-ldflags", "-s -w", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		c.t.Fatalf("build the driver: %v\n%s", err, out)
	}
	return program
}

// deployForeign builds and deploys the driver, and takes it away at the test's end.
func (c *cluster) deployForeign() {
	t := c.t
	t.Helper()
	bin := t.TempDir()
	c.buildForeign(bin)
	push := exec.CommandContext(t.Context(), "go", "run", "./hack/image", "-bin", bin, "-programs", "foreigndriver", "-insecure", "-push", registry+"/library/foreigndriver:dev")
	push.Dir = "../.."
	image, err := push.Output()
	must(t, err)
	_, digest, _ := strings.Cut(strings.TrimSpace(string(image)), "@")
	manifest := filepath.Join(bin, "deploy.yaml")
	text := strings.NewReplacer("IMAGE", "docker.io/library/foreigndriver@"+digest, "KUBELET", kubeletDir, "DATA", foreignDir).Replace(read(t, "../foreigndriver/deploy.yaml"))
	must(t, os.WriteFile(manifest, []byte(text), 0o600))
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := c.kubectlEvenAtTheEnd("-n", "foreigndriver", "logs", "daemonset/foreigndriver", "--tail=100")
			t.Logf("the driver's log:\n%s", out)
		}
		if out, err := c.kubectlEvenAtTheEnd("delete", "-f", manifest, "--timeout=2m"); err != nil {
			t.Errorf("take the driver away: %v\n%s", err, out)
		}
		if err := os.RemoveAll(foreignDir); err != nil {
			t.Error(err)
		}
		// kubelet makes it, and leaves it.
		if err := os.Remove(filepath.Join(kubeletDir, "plugins/kubernetes.io/csi", foreignName)); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	if out, err := c.kubectlEvenAtTheEnd("apply", "-f", manifest); err != nil {
		t.Fatalf("deploy the driver: %v\n%s", err, out)
	}
	c.wait("kubelet knows the driver", func() (bool, string) {
		nodes, err := c.client.StorageV1().CSINodes().List(t.Context(), metav1.ListOptions{})
		must(t, err)
		var names []string
		for _, n := range nodes.Items {
			for _, d := range n.Spec.Drivers {
				names = append(names, d.Name)
			}
		}
		return slices.Contains(names, foreignName), fmt.Sprint(names)
	})
}

// kubectlEvenAtTheEnd is kubectl in no namespace, and also after the test's context has ended.
func (c *cluster) kubectlEvenAtTheEnd(args ...string) (string, error) {
	out, err := exec.Command(os.Getenv(kubectlEnv), append([]string{"--kubeconfig", os.Getenv(kubeconfigEnv)}, args...)...).CombinedOutput()
	return string(out), err
}

// foreign is a volume of the driver, with a claim.
type foreign struct {
	c         *cluster
	claim, pv string
}

// foreign makes a volume and a claim that is bound to it.
func (c *cluster) foreign(claim string, changes ...func(*corev1.PersistentVolume)) *foreign {
	t := c.t
	t.Helper()
	f := &foreign{c: c, claim: claim, pv: c.namespace + "-" + claim}
	must(t, os.MkdirAll(f.file(), 0o755))
	image, err := os.Create(f.file("disk.img"))
	must(t, err)
	must(t, image.Truncate(32<<20))
	must(t, image.Close())
	if out, err := exec.CommandContext(t.Context(), testenv.NeedBinary(t, "mkfs.ext4"), "-q", "-E", "root_owner=0:0", f.file("disk.img")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	none, size := "", corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("32Mi")}
	pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: f.pv}, Spec: corev1.PersistentVolumeSpec{
		Capacity: size, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
		PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: foreignName, VolumeHandle: f.pv, FSType: "ext4"}}}}
	for _, change := range changes {
		change(pv)
	}
	_, err = c.client.CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		if err := c.client.CoreV1().PersistentVolumes().Delete(context.Background(), f.pv, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	_, err = c.client.CoreV1().PersistentVolumeClaims(c.namespace).Create(t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: claim},
		Spec: corev1.PersistentVolumeClaimSpec{AccessModes: pv.Spec.AccessModes, StorageClassName: &none, VolumeName: f.pv,
			Resources: corev1.VolumeResourceRequirements{Requests: size}}}, metav1.CreateOptions{})
	must(t, err)
	c.wait(claim+" is bound", func() (bool, string) { v := c.volumeOf(claim); return v == f.pv, v })
	return f
}

func (f *foreign) file(elem ...string) string {
	return filepath.Join(append([]string{foreignDir, f.pv}, elem...)...)
}

// misbehave tells the driver what to do wrong with the volume, nothing without lines.
func (f *foreign) misbehave(lines ...string) {
	f.c.t.Helper()
	must(f.c.t, os.WriteFile(f.file("misbehave.new"), []byte(strings.Join(lines, "\n")+"\n"), 0o644))
	must(f.c.t, os.Rename(f.file("misbehave.new"), f.file("misbehave")))
}

// calls are the driver's calls for the volume: "begin NodePublishVolume", "end NodePublishVolume OK".
func (f *foreign) calls() []string {
	data, _ := os.ReadFile(f.file("calls")) // none so far
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

func (f *foreign) called(line string) {
	f.c.t.Helper()
	f.c.wait("the driver is at "+line, func() (bool, string) {
		calls := f.calls()
		return slices.Contains(calls, line), strings.Join(calls, ", ")
	})
}

func (f *foreign) count(line string) int {
	n := 0
	for _, call := range f.calls() {
		if call == line {
			n++
		}
	}
	return n
}

func (f *foreign) entry() v1alpha1.DynamicVolume { return claim(f.claim, "/data") }

// staged is where kubelet has the driver stage the volume.
func (f *foreign) staged() string {
	sum := sha256.Sum256([]byte(f.pv))
	return filepath.Join(kubeletDir, "plugins/kubernetes.io/csi", foreignName, hex.EncodeToString(sum[:]), "globalmount")
}

// mounts are the lines about the volume in the node's mountinfo: published for Pods, staged, or of a guard, which shows the
// same device.
func (f *foreign) mounts() []string {
	f.c.t.Helper()
	var out []string
	for line := range strings.Lines(read(f.c.t, "/proc/self/mountinfo")) {
		if strings.Contains(line, f.pv) || strings.Contains(line, f.staged()) {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

// published are those that are published for Pods.
func (f *foreign) published() []string {
	f.c.t.Helper()
	return slices.DeleteFunc(f.mounts(), func(line string) bool { return !strings.Contains(line, "/kubernetes.io~csi/"+f.pv+"/mount ") })
}

// left is what is left of the volume's use on the node and in the API server.
func (f *foreign) left() []string {
	t := f.c.t
	t.Helper()
	left := f.mounts()
	attachments, err := f.c.client.StorageV1().VolumeAttachments().List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for _, a := range attachments.Items {
		if a.Spec.Source.PersistentVolumeName != nil && *a.Spec.Source.PersistentVolumeName == f.pv {
			left = append(left, "VolumeAttachment "+a.Name)
		}
	}
	for _, p := range f.c.anchors(f.claim) {
		left = append(left, "anchor "+p.Name)
	}
	got, err := f.c.client.CoreV1().PersistentVolumeClaims(f.c.namespace).Get(t.Context(), f.claim, metav1.GetOptions{})
	must(t, err)
	if slices.Contains(got.Finalizers, v1alpha1.FinalizerInUse) {
		left = append(left, "finalizer of claim "+f.claim)
	}
	if _, err := os.Stat(f.file("attached")); err == nil {
		left = append(left, "attached to the node")
	}
	for device, file := range testenv.LoopDevices() {
		if strings.HasPrefix(file, f.file()) {
			left = append(left, device+" of "+file)
		}
	}
	return left
}

// gone waits until nothing is left.
func (f *foreign) gone() {
	f.c.t.Helper()
	f.c.waitFor(kubeletPatience, "nothing of "+f.claim+" is left", func() (bool, string) {
		left := f.left()
		return len(left) == 0, strings.Join(left, "\n")
	})
	if f.count("end NodeUnstageVolume OK") == 0 && f.count("end NodeStageVolume OK") > 0 {
		f.c.t.Errorf("it was not unstaged: %v", f.calls())
	}
}

// undelayed attaches a volume of the node to a sandbox of its own, while something hangs.
func (c *cluster) undelayed(name string) {
	c.t.Helper()
	c.running(name, ticking, nil)
	c.volumes(name, local(c.dir(name), "/local"))
	c.row(name, "/local", v1alpha1.VolumeMounted)
}

// besides makes a namespace for one of several tests at a time. What is left on the node is looked at when all have ended.
func besides(t *testing.T) *cluster {
	t.Parallel()
	return open(t, func(c *cluster) { c.before = nil })
}

// A driver of somebody else, which needs its volumes attached and staged, takes the anchor path without a line of code for
// it. Whatever it does wrong gives the right result or says what is wrong, delays no other volume, and leaves nothing.
func TestAForeignDriver(t *testing.T) {
	open(t).deployForeign()
	t.Run("does it right", func(t *testing.T) {
		c := besides(t)
		f := c.foreign("data")
		for _, name := range []string{"one", "two"} {
			c.running(name, ticking, nil)
			c.volumes(name, f.entry())
			row := c.row(name, "/data", v1alpha1.VolumeMounted)
			if row.Path != v1alpha1.VolumePathAnchor || !strings.Contains(row.PathReason, "none that the agents call") || row.PVCName != "data" || row.PVName != f.pv {
				t.Errorf("row %+v", row)
			}
		}
		if f.count("end NodeStageVolume OK") != 1 || f.count("end NodePublishVolume OK") != 1 || f.count("end ControllerPublishVolume OK") != 1 {
			t.Errorf("calls: %v", f.calls())
		}
		one, two := c.process(c.get("one")), c.process(c.get("two"))
		write(t, one.path("data", "file"), "written by one")
		if got := read(t, two.path("data", "file")); got != "written by one" {
			t.Errorf("the second reads %q", got)
		}
		c.volumes("one")
		c.noRow("one", "/data")
		if got := read(t, two.path("data", "file")); got != "written by one" {
			t.Errorf("the second reads %q", got)
		}
		uninterrupted(t, one)
		uninterrupted(t, two)
		c.deleteAll(t.Context())
		f.gone()
		c.running("next", ticking, nil)
		c.volumes("next", f.entry())
		c.row("next", "/data", v1alpha1.VolumeMounted)
		if got := read(t, c.process(c.get("next")).path("data", "file")); got != "written by one" {
			t.Errorf("the next reads %q", got)
		}
		c.deleteAll(t.Context())
		f.gone()
	})
	t.Run("is slow, and fails at first", func(t *testing.T) {
		c := besides(t)
		f := c.foreign("data")
		f.misbehave("NodePublishVolume slow 2s", "NodePublishVolume fail Aborted 2", "NodePublishVolume fail DeadlineExceeded 2", "NodeStageVolume fail Unavailable 1")
		c.running("one", ticking, nil)
		c.volumes("one", f.entry())
		c.row("one", "/data", v1alpha1.VolumeMounted)
		if f.count("end NodePublishVolume Aborted") < 2 || f.count("end NodePublishVolume DeadlineExceeded") != 2 {
			t.Errorf("calls: %v", f.calls())
		}
		write(t, c.process(c.get("one")).path("data", "file"), "x")
		c.deleteAll(t.Context())
		f.gone()
	})
	t.Run("ignores read-only", func(t *testing.T) {
		c := besides(t)
		f := c.foreign("data", func(pv *corev1.PersistentVolume) { pv.Spec.CSI.ReadOnly = true })
		f.misbehave("NodePublishVolume ignore-read-only")
		c.running("one", ticking, nil)
		writable, readOnly := f.entry(), f.entry()
		readOnly.Mode = v1alpha1.VolumeModeReadOnly
		c.volumes("one", writable)
		if row := c.row("one", "/data", v1alpha1.VolumeFailed); row.Reason != string(fault.ModeDenied) {
			t.Errorf("row %+v", row)
		}
		c.volumes("one")
		c.noRow("one", "/data")
		c.volumes("one", readOnly)
		c.row("one", "/data", v1alpha1.VolumeMounted)
		if p := f.published(); len(p) != 1 || strings.Fields(p[0])[5][:2] != "rw" {
			t.Errorf("the driver did not ignore it: %v", p)
		}
		one := c.process(c.get("one"))
		if err := os.WriteFile(one.path("data", "file"), nil, 0o644); err == nil || !strings.Contains(err.Error(), "read-only") {
			t.Errorf("it can be written: %v", err)
		}
		c.deleteAll(t.Context())
		f.gone()
	})
	t.Run("mounts nothing", func(t *testing.T) {
		c := besides(t)
		f := c.foreign("data")
		f.misbehave("NodePublishVolume no-mount")
		c.running("one", ticking, nil)
		c.volumes("one", f.entry())
		row := c.row("one", "/data", v1alpha1.VolumeFailed)
		if row.Reason != string(fault.DriverFailed) || !strings.Contains(row.Message, foreignName) || !strings.Contains(row.Message, "mounted nothing") {
			t.Errorf("row %+v", row)
		}
		one := c.process(c.get("one"))
		if line := one.mountAt(t, "/data"); line != "" {
			t.Errorf("the sandbox has got %s", line)
		}
		// Once it does it right, it is attached.
		f.misbehave()
		c.row("one", "/data", v1alpha1.VolumeMounted)
		write(t, one.path("data", "file"), "x")
		uninterrupted(t, one)
		c.deleteAll(t.Context())
		f.gone()
	})
	t.Run("hangs in NodePublishVolume", func(t *testing.T) {
		c := besides(t)
		f := c.foreign("data")
		other := c.foreign("other")
		f.misbehave("NodePublishVolume hang")
		c.running("one", ticking, nil)
		c.volumes("one", f.entry())
		f.called("begin NodePublishVolume")
		c.undelayed("beside")
		// Nor is one of the same driver.
		c.running("two", ticking, nil)
		c.volumes("two", other.entry())
		c.row("two", "/data", v1alpha1.VolumeMounted)
		var row v1alpha1.VolumeStatus
		c.waitFor(kubeletPatience, "the row says what is wrong", func() (bool, string) {
			row = v1alpha1.VolumeStatus{}
			for _, v := range c.get("one").Status.Volumes {
				row = v
			}
			return row.Phase == v1alpha1.VolumeFailed, fmt.Sprint(row.Phase, row.Reason)
		})
		if row.Reason != string(fault.AnchorPending) || !strings.Contains(row.Message, "flux-anchor-") || row.NextRetryTime == nil {
			t.Errorf("row %+v", row)
		}
		if f.count("end NodePublishVolume OK") > 0 {
			t.Errorf("it does not hang: %v", f.calls())
		}
		f.misbehave()
		c.waitFor(kubeletPatience, "it is attached", func() (bool, string) {
			for _, v := range c.get("one").Status.Volumes {
				row = v
			}
			return row.Phase == v1alpha1.VolumeMounted, fmt.Sprint(row.Phase, row.Reason, row.Message)
		})
		uninterrupted(t, c.process(c.get("one")))
		c.deleteAll(t.Context())
		f.gone()
		other.gone()
	})
	t.Run("hangs in NodeUnpublishVolume", func(t *testing.T) {
		c := besides(t)
		f := c.foreign("data")
		c.running("one", ticking, nil)
		c.volumes("one", f.entry())
		c.row("one", "/data", v1alpha1.VolumeMounted)
		write(t, c.process(c.get("one")).path("data", "file"), "x")
		f.misbehave("NodeUnpublishVolume hang")
		// Neither the detach nor the sandbox's end waits for the driver.
		c.volumes("one")
		c.noRow("one", "/data")
		f.called("begin NodeUnpublishVolume")
		c.deleteAll(t.Context())
		c.undelayed("beside")
		// The claim is held until the driver has let go of it. kubelet does one thing at a time with a volume, so who wants it
		// again waits; their other volumes do not.
		if left := strings.Join(f.left(), "\n"); !strings.Contains(left, "finalizer") {
			t.Errorf("the claim is not held any more: %s", left)
		}
		c.running("again", ticking, nil)
		c.volumes("again", f.entry(), local(c.dir("again"), "/local"))
		c.row("again", "/local", v1alpha1.VolumeMounted)
		f.misbehave()
		c.waitFor(kubeletPatience, "it is attached again", func() (bool, string) {
			row := c.get("again").Status.Volumes[0]
			return row.Target == "/data" && row.Phase == v1alpha1.VolumeMounted, fmt.Sprintf("%+v", row)
		})
		if got := read(t, c.process(c.get("again")).path("data", "file")); got != "x" {
			t.Errorf("it reads %q", got)
		}
		c.deleteAll(t.Context())
		f.gone()
	})
	t.Run("loses what it is on", func(t *testing.T) {
		c := besides(t)
		f := c.foreign("data")
		c.running("one", ticking, nil)
		c.volumes("one", f.entry(), local(c.dir("local"), "/local"))
		c.row("one", "/data", v1alpha1.VolumeMounted)
		one := c.process(c.get("one"))
		write(t, one.path("data", "file"), "kept")
		shutDown(t, f.staged())
		c.isOffline("one", "/data")
		write(t, one.path("local", "file"), "goes on")
		c.volumes("one", forced(f.entry()), local(c.data("local"), "/local"))
		c.noRow("one", "/data")
		// As long as there is an anchor, kubelet has the dead filesystem: it is not given to the next.
		c.volumes("one", f.entry(), local(c.data("local"), "/local"))
		c.row("one", "/data", v1alpha1.VolumeMounted)
		if got := read(t, one.path("data", "file")); got != "kept" {
			t.Errorf("it has %q", got)
		}
		uninterrupted(t, one)
		c.deleteAll(t.Context())
		f.gone()
	})
	t.Run("unmounts it while it is used", func(t *testing.T) {
		c := besides(t)
		f := c.foreign("data")
		for _, name := range []string{"one", "two"} {
			c.running(name, ticking, nil)
		}
		c.volumes("one", f.entry())
		c.row("one", "/data", v1alpha1.VolumeMounted)
		one := c.process(c.get("one"))
		for _, line := range f.published() {
			must(t, unix.Unmount(strings.Fields(line)[4], unix.MNT_DETACH))
		}
		must(t, unix.Unmount(f.staged(), unix.MNT_DETACH))
		// Who has it keeps it; nobody else gets something else instead.
		write(t, one.path("data", "file"), "kept")
		c.volumes("two", f.entry())
		if row := c.row("two", "/data", v1alpha1.VolumeFailed); row.Reason != string(fault.AnchorLost) && row.Reason != string(fault.AnchorPending) {
			t.Errorf("row %+v", row) // lost at first, and then the next anchor does not get it
		}
		two := c.process(c.get("two"))
		if line := two.mountAt(t, "/data"); line != "" {
			t.Errorf("it has got %s", line)
		}
		c.volumes("one")
		c.volumes("two")
		c.noRow("one", "/data")
		c.noRow("two", "/data")
		f.gone()
		c.volumes("two", f.entry())
		c.row("two", "/data", v1alpha1.VolumeMounted)
		if got := read(t, two.path("data", "file")); got != "kept" {
			t.Errorf("it has %q", got)
		}
		uninterrupted(t, one)
		c.deleteAll(t.Context())
		f.gone()
	})
}
