package e2e

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
)

// The driver that a test runs beside the cluster, which the agents may call (hack/localcluster/deploy).
const (
	publishName   = "publish.example.com"
	publishSocket = "/var/lib/flux-localcluster/publish-only/csi.sock"
)

// publisher runs the driver that needs neither attach nor stage, until the test's end.
func (c *cluster) publisher() {
	t := c.t
	t.Helper()
	program := c.buildForeign(t.TempDir())
	must(t, os.MkdirAll(filepath.Dir(publishSocket), 0o700))
	driver := exec.Command(program, "-publish-only", "-name", publishName, "-dir", foreignDir, "-socket", publishSocket)
	var log bytes.Buffer
	driver.Stdout, driver.Stderr = &log, &log
	must(t, driver.Start())
	t.Cleanup(func() {
		if err := driver.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := driver.Wait(); err != nil {
			t.Errorf("the driver: %v\n%s", err, log.String())
		}
		for _, dir := range []string{filepath.Dir(publishSocket), foreignDir} {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		}
	})
	c.wait("the driver answers", func() (bool, string) {
		conn, err := net.Dial("unix", publishSocket)
		if err == nil {
			err = conn.Close()
		}
		return err == nil, fmt.Sprint(err)
	})
}

// secretFor makes a Secret and lets the controller read it.
func (c *cluster) secretFor(name, value string) {
	t := c.t
	t.Helper()
	_, err := c.client.CoreV1().Secrets(c.namespace).Create(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name},
		StringData: map[string]string{"token": value}}, metav1.CreateOptions{})
	must(t, err)
	_, err = c.client.RbacV1().Roles(c.namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "volume-secret"},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{name}, Verbs: []string{"get"}}}}, metav1.CreateOptions{})
	must(t, err)
	_, err = c.client.RbacV1().RoleBindings(c.namespace).Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "volume-secret"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "volume-secret"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: system, Name: "flux-sandbox-controller"}}}, metav1.CreateOptions{})
	must(t, err)
}

// canary is a secret, and what tells that it got somewhere.
type canary struct {
	t     *testing.T
	value string
	// patterns are the forms in which it is looked for, file has them one a line.
	patterns []string
	file     string
}

func newCanary(t *testing.T) canary {
	t.Helper()
	var random [16]byte
	_, err := rand.Read(random[:])
	must(t, err)
	c := canary{t: t, value: fmt.Sprintf("canary-%x", random), file: filepath.Join(t.TempDir(), "patterns")}
	// Within a longer text it is base64 of three alignments.
	c.patterns = []string{c.value, fmt.Sprintf("%x", c.value)}
	for skip := range 3 {
		encoded := base64.RawStdEncoding.EncodeToString(append(make([]byte, skip), c.value...))
		c.patterns = append(c.patterns, encoded[4:len(encoded)-4])
	}
	must(t, os.WriteFile(c.file, []byte(strings.Join(c.patterns, "\n")+"\n"), 0o600))
	return c
}

// in fails if the canary is in a text.
func (c canary) in(where string, text []byte) {
	c.t.Helper()
	for _, p := range c.patterns {
		if bytes.Contains(text, []byte(p)) {
			c.t.Errorf("the secret is in %s", where)
		}
	}
}

// below fails if the canary is in a file below a folder.
func (c canary) below(dir string, except ...string) {
	c.t.Helper()
	args := []string{"-rlaF", "--devices=skip", "-f", c.file}
	for _, e := range except {
		args = append(args, "--exclude-dir="+e)
	}
	out, err := exec.CommandContext(c.t.Context(), "grep", append(args, dir)...).Output()
	var exit *exec.ExitError
	switch found := strings.TrimSpace(string(out)); {
	case found != "":
		c.t.Errorf("the secret is in %s", found)
	case err == nil, errors.As(err, &exit) && exit.ExitCode() == 1: // nothing found
	case errors.As(err, &exit):
		// What was removed meanwhile, and sockets, cannot be read.
		for line := range strings.Lines(string(exit.Stderr)) {
			if !strings.Contains(line, "No such file") && !strings.Contains(line, "No such device or address") && !strings.Contains(line, "Invalid argument") {
				c.t.Errorf("%s is not searched: %s", dir, line)
			}
		}
	default:
		c.t.Error(err)
	}
}

// processes fails if the canary is in the arguments or the environment of any process of the machine.
func (c canary) processes() {
	c.t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	must(c.t, err)
	looked := 0
	for _, dir := range dirs {
		for _, name := range []string{"cmdline", "environ"} {
			if text, err := os.ReadFile(filepath.Join(dir, name)); err == nil { // it may have ended
				looked++
				c.in(filepath.Join(dir, name), text)
			}
		}
	}
	if looked < 20 {
		c.t.Errorf("only %d files of processes were read", looked)
	}
}

// logs fails if the canary is in the log of a Pod of ours.
func (c canary) logs(cluster *cluster) {
	c.t.Helper()
	pods, err := cluster.client.CoreV1().Pods(system).List(c.t.Context(), metav1.ListOptions{})
	must(c.t, err)
	if len(pods.Items) < 3 {
		c.t.Errorf("there are %d Pods of ours", len(pods.Items))
	}
	for _, p := range pods.Items {
		log, err := cluster.client.CoreV1().Pods(system).GetLogs(p.Name, &corev1.PodLogOptions{}).DoRaw(c.t.Context())
		if err != nil || len(log) == 0 {
			c.t.Errorf("the log of %s: %v", p.Name, err)
		}
		c.in("the log of "+p.Name, log)
	}
}

// objects fails if the canary is in what anybody but a reader of Secrets can read.
func (c canary) objects(cluster *cluster) {
	c.t.Helper()
	for _, kind := range []schema.GroupVersionResource{sandboxes, groups, corev1.SchemeGroupVersion.WithResource("events"), corev1.SchemeGroupVersion.WithResource("pods"),
		corev1.SchemeGroupVersion.WithResource("configmaps"), corev1.SchemeGroupVersion.WithResource("persistentvolumeclaims"), corev1.SchemeGroupVersion.WithResource("persistentvolumes")} {
		list, err := cluster.dynamic.Resource(kind).List(c.t.Context(), metav1.ListOptions{})
		must(c.t, err)
		if len(list.Items) == 0 {
			c.t.Errorf("there are no %s", kind.Resource)
		}
		text, err := json.Marshal(list)
		must(c.t, err)
		c.in(kind.Resource, text)
	}
}

// The Secret with which a volume is published gets to its driver, and nowhere else: not into arguments, environments, logs,
// objects, records or sandboxes, whether it was published or refused.
func TestASecretGetsToTheDriverAlone(t *testing.T) {
	c := open(t)
	c.publisher()
	canary := newCanary(t)
	c.secretFor("key", canary.value)
	direct := func(pv *corev1.PersistentVolume) {
		pv.Spec.CSI.Driver = publishName
		pv.Spec.CSI.NodePublishSecretRef = &corev1.SecretReference{Namespace: c.namespace, Name: "key"}
	}
	f, refused := c.foreign("data", direct), c.foreign("refused", direct)
	refused.misbehave("NodePublishVolume fail InvalidArgument 1000")
	c.running("one", ticking, nil)
	other := refused.entry()
	other.Target = "/refused"
	c.volumes("one", f.entry(), other)
	if row := c.row("one", "/data", v1alpha1.VolumeMounted); row.Path != v1alpha1.VolumePathDirect {
		t.Errorf("row %+v", row)
	}
	c.row("one", "/refused", v1alpha1.VolumeFailed)
	if got, want := read(t, f.file("secrets")), fmt.Sprintf("token %x\n", sha256.Sum256([]byte(canary.value))); got != want {
		t.Fatalf("the driver was given %q, want %q", got, want)
	}
	// The agent reads its records again.
	c.kill("flux-sandbox-agent")
	c.systemReady()
	one := c.process(c.get("one"))
	write(t, one.path("data", "file"), "x")

	canary.processes()
	canary.logs(c)
	canary.objects(c)
	canary.below("/run/flux-localcluster")
	canary.below("/var/lib/flux-localcluster", "etcd") // where the Secret is kept
	for _, dir := range []string{"data", "etc", "tmp", "run", "dev/shm"} {
		if _, err := os.Stat(one.path(dir)); err == nil {
			canary.below(one.path(dir) + "/")
		}
	}
	// That it would have been found.
	planted := filepath.Join(c.data(), "planted")
	must(t, os.WriteFile(planted, []byte("token: "+canary.value), 0o600))
	if out, err := exec.CommandContext(t.Context(), "grep", "-rlaF", "-f", canary.file, volumesDir).Output(); err != nil || strings.TrimSpace(string(out)) != planted {
		t.Errorf("what was planted is not found: %v %s", err, out)
	}

	c.noSocketOf(one)
	uninterrupted(t, one)
	c.deleteAll(t.Context())
	f.gone()
	refused.gone()
	canary.below("/run/flux-localcluster")
	canary.logs(c)
}

// noSocketOf fails if a sandbox has a way to a socket that is not its own: by a path, by an open descriptor, or by a name that
// is no path.
func (c *cluster) noSocketOf(p process) {
	t := c.t
	t.Helper()
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/mountinfo", p.pid))) {
		at := strings.Fields(line)[4]
		if at == "/proc" || at == "/sys" || strings.HasPrefix(at, "/proc/") || strings.HasPrefix(at, "/sys/") {
			continue // the kernel's
		}
		err := filepath.WalkDir(p.path(at)+"/", func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type()&fs.ModeSocket != 0 {
				t.Errorf("the sandbox has the socket %s", path)
			}
			if d != nil && d.IsDir() && at == "/" && (d.Name() == "proc" || d.Name() == "sys") {
				return fs.SkipDir
			}
			return nil
		})
		must(t, err)
	}
	// In its network namespace nobody listens, and abstract names are those of one network namespace.
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/net/unix", p.pid))) {
		if fields := strings.Fields(line); len(fields) > 7 && fields[7] != "Path" { // the heading
			t.Errorf("in the sandbox's network namespace there is the socket %s", fields[7])
		}
	}
	descriptors, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.pid))
	must(t, err)
	for _, d := range descriptors {
		if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", p.pid, d.Name())); strings.HasPrefix(to, "socket:") {
			t.Errorf("the sandbox's process has %s open", to)
		}
	}
	mine, _ := os.Readlink("/proc/self/ns/net")
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p.pid))
	if err != nil || mine == theirs {
		t.Errorf("the sandbox is in the node's network namespace (%v)", err)
	}
}
