package house

import (
	"cmp"
	"path"
	"slices"
	"strings"
	"testing"
)

// A layer is a part of the house: a directory with everything below it. The longest that fits a package is
// its layer. Within a layer, packages may import each other.
type layer struct {
	dir string
	// may are the other layers it may import.
	may []string
	// only, if set, are the modules (by prefix) besides the standard library that it may import at all.
	only []string
	// never are modules (by prefix) that it may not import.
	never []string
}

// leaves import nothing of ours, and everybody but mount and capacity may import them.
var leaves = []string{"internal/fault", "internal/failpoint", "internal/version", "internal/unixsocket", "internal/grpcstop", "api"}

// Clients of the world outside. What decides (scheduler, volume, and who asks them) knows neither.
var (
	kubernetesClients = []string{"k8s.io/client-go", "sigs.k8s.io/controller-runtime", "k8s.io/kubernetes"}
	containerdClient  = []string{"github.com/containerd/containerd"}
	clients           = slices.Concat(kubernetesClients, containerdClient)
)

// layers is the table of who may import whom: downwards only.
var layers = []layer{
	// The ground floor. What is not allowed here cannot creep in from above.
	{dir: "internal/mount", only: []string{"golang.org/x/sys", "github.com/moby/sys/mountinfo", "github.com/containerd/errdefs"}},
	{dir: "internal/capacity", never: clients},
	{dir: "internal/cgroup", only: []string{"golang.org/x/sys", "github.com/moby/sys/mountinfo"}},
	{dir: "internal/fault", never: clients},
	{dir: "internal/failpoint", only: []string{}},
	{dir: "internal/version", only: []string{}},
	{dir: "internal/unixsocket", only: []string{}},
	{dir: "internal/grpcstop", only: []string{"google.golang.org/grpc"}},
	{dir: "api", never: clients},

	// One floor up: each knows the kernel or the API, none knows another but where it must.
	{dir: "internal/identity", may: leaves, never: clients},
	{dir: "internal/containers", may: slices.Concat(leaves, []string{"internal/cgroup", "internal/mount", "internal/capacity"}), never: kubernetesClients},
	{dir: "internal/pods", may: slices.Concat(leaves, []string{"internal/cgroup", "internal/pods/createhook"}), never: kubernetesClients},
	// Part of a program that has to be small.
	{dir: "internal/pods/createhook", only: []string{}},
	{dir: "internal/volume", may: slices.Concat(leaves, []string{"internal/mount", "internal/capacity"}), never: clients},
	{dir: "internal/store", may: leaves, never: clients},
	{dir: "internal/store/kube", may: slices.Concat(leaves, []string{"internal/store"}), never: containerdClient},
	{dir: "internal/scheduler", may: slices.Concat(leaves, []string{"internal/store", "internal/volume"}), never: clients},

	// What serves and what reconciles.
	{dir: "internal/agent", may: slices.Concat(leaves, []string{"internal/mount", "internal/capacity", "internal/containers", "internal/pods", "internal/volume"}), never: kubernetesClients},
	// Between the protobuf messages and the API types: for both ends of the wire.
	{dir: "internal/grpcapi/convert", may: leaves, never: clients},
	{dir: "internal/grpcapi", may: slices.Concat(leaves, []string{"internal/store", "internal/volume", "internal/grpcapi/convert"}), never: clients},
	{dir: "internal/httpapi", may: slices.Concat(leaves, []string{"internal/store", "internal/volume"}), never: clients},
	{dir: "internal/kube", may: slices.Concat(leaves, []string{"internal/identity", "internal/store", "internal/store/kube", "internal/volume", "internal/scheduler"}), never: containerdClient},
	// Answers a question of grpcapi's.
	{dir: "internal/kube/callers", may: slices.Concat(leaves, []string{"internal/grpcapi", "internal/kube"}), never: containerdClient},
	// In the process of the node's driver, which it calls.
	{dir: "internal/kube/provisioner", may: slices.Concat(leaves, []string{"internal/csidriver"}), never: containerdClient},
	// What every server shows of itself.
	{dir: "internal/observability", may: leaves, never: clients},
	// A node, of a cluster or of its own.
	{dir: "internal/node", may: slices.Concat(leaves, []string{"internal/agent", "internal/mount", "internal/containers", "internal/pods", "internal/volume"}), never: kubernetesClients},
	{dir: "internal/csidriver", may: slices.Concat(leaves, []string{"internal/mount", "internal/capacity"}), never: clients},

	// What people use. doctor asks the kernel itself.
	{dir: "client", may: []string{"api"}, never: clients},
	{dir: "internal/cli", may: slices.Concat(leaves, []string{"client", "internal/grpcapi/convert", "internal/identity", "internal/mount", "internal/capacity", "internal/volume"}), never: clients},

	// Development programs, which must build when nothing else does.
	{dir: "hack", only: []string{}},
	{dir: "hack/crds", only: []string{"sigs.k8s.io/yaml"}},
	{dir: "hack/image", only: []string{"github.com/google/go-containerregistry"}},
	{dir: "hack/demoimage", may: []string{"internal/testimage"}, never: clients},

	// Help for tests. testimage makes the image that sandboxes run in tests and in the demo.
	{dir: "internal/testenv", only: []string{}},
	{dir: "internal/testenv/manifests", never: containerdClient},
	{dir: "internal/testenv/apiserver", may: []string{"internal/testenv"}, never: containerdClient},
	{dir: "internal/testimage", may: []string{"internal/testenv"}, never: clients},
}

// anything are the parts that put the others together. They may import every layer, and nothing but
// themselves imports them.
var anything = []string{"cmd", "test", "internal/standalone", "internal/clusteragent", "internal/clustercontroller", "internal/clusterdriver"}

// testSupport may be imported by every test, mount's and capacity's too; otherwise by test and hack alone.
var testSupport = []string{"internal/testenv", "internal/testimage"}

func within(dir, top string) bool { return dir == top || strings.HasPrefix(dir, top+"/") }

func withinAny(dir string, tops []string) bool {
	return slices.ContainsFunc(tops, func(top string) bool { return within(dir, top) })
}

// layerOf is the layer of a directory: the longest that fits.
func layerOf(dir string) (layer, bool) {
	var found layer
	for _, l := range layers {
		if within(dir, l.dir) && len(l.dir) > len(found.dir) {
			found = l
		}
	}
	return found, found.dir != ""
}

// isTestSupport tells packages that exist for tests: by their name, as storetest, or by the list.
func isTestSupport(dir string) bool {
	return strings.HasSuffix(path.Base(dir), "test") || withinAny(dir, testSupport)
}

func TestEveryPackageHasALayer(t *testing.T) {
	for _, p := range sources(t).pkgs {
		if _, ok := layerOf(p.dir); !ok && !withinAny(p.dir, anything) {
			t.Errorf("%s is in no layer: say in layers_test.go what it may import", p.dir)
		}
	}
}

func TestImportsPointDownwards(t *testing.T) {
	for _, p := range sources(t).pkgs {
		for _, f := range p.files {
			for _, imported := range f.imports() {
				if why := forbidden(p.dir, f.test, imported); why != "" {
					t.Errorf("%s imports %s: %s", f.name, imported, why)
				}
			}
		}
	}
}

// forbidden says why a file of the package at dir may not import a path, or "".
func forbidden(dir string, test bool, imported string) string {
	l, known := layerOf(dir)
	target, ours := strings.CutPrefix(imported, module+"/")
	if ours {
		return forbiddenOurs(dir, l, known, test, target)
	}
	standard := !strings.Contains(strings.Split(imported, "/")[0], ".")
	if !known || standard {
		if imported == "testing" && !test && !isTestSupport(dir) && !within(dir, "test") {
			return "only tests and test support (packages named …test) import testing"
		}
		return ""
	}
	if l.only != nil && !withinAny(imported, l.only) {
		if len(l.only) == 0 {
			return l.dir + " gets by with the standard library"
		}
		return l.dir + " gets by with " + strings.Join(l.only, ", ")
	}
	if withinAny(imported, l.never) {
		return l.dir + " knows no client of Kubernetes or containerd it is not given"
	}
	return ""
}

func forbiddenOurs(dir string, l layer, known, test bool, target string) string {
	if withinAny(target, anything) && !withinAny(dir, anything) {
		return "only cmd and test import what puts the parts together"
	}
	if isTestSupport(target) && !test && !isTestSupport(dir) && !within(dir, "test") && !within(dir, "hack") {
		return "it is for tests"
	}
	if !known { // cmd and test
		return ""
	}
	if (test || isTestSupport(dir)) && withinAny(target, testSupport) {
		return ""
	}
	// A test may use the fake of a layer beside or above. The ground floor has no need to.
	if test && isTestSupport(target) && len(l.may) > 0 {
		return ""
	}
	to, ok := layerOf(target)
	if ok && (to.dir == l.dir || slices.Contains(l.may, to.dir)) {
		return ""
	}
	return l.dir + " may import of ours only " + cmp.Or(strings.Join(l.may, ", "), "itself")
}

// The table is data: this shows that the rules that matter most follow from it.
func TestForbiddenEdges(t *testing.T) {
	for _, tc := range []struct {
		from     string
		test     bool
		imported string
		allowed  bool
	}{
		{from: "internal/mount", imported: module + "/internal/fault"},
		{from: "internal/mount", imported: module + "/api/sandbox/v1alpha1"},
		{from: "internal/mount", imported: module + "/internal/testenv"},
		{from: "internal/mount", test: true, imported: module + "/internal/testenv", allowed: true},
		{from: "internal/mount", imported: "golang.org/x/sys/unix", allowed: true},
		{from: "internal/mount", imported: "google.golang.org/grpc"},
		{from: "internal/capacity", imported: module + "/internal/failpoint"},
		{from: "internal/capacity", imported: module + "/internal/mount"},
		{from: "internal/agent", imported: module + "/internal/mount", allowed: true},
		{from: "internal/agent", imported: module + "/internal/scheduler"},
		{from: "internal/scheduler", imported: "k8s.io/client-go/kubernetes"},
		{from: "internal/scheduler", imported: "sigs.k8s.io/controller-runtime/pkg/client"},
		{from: "internal/scheduler", imported: "github.com/containerd/containerd/v2/client"},
		{from: "internal/scheduler", imported: "github.com/containerd/errdefs", allowed: true},
		{from: "internal/scheduler", imported: "k8s.io/api/core/v1", allowed: true},
		{from: "internal/scheduler", imported: module + "/internal/agent"},
		{from: "internal/volume", imported: "github.com/containerd/containerd/v2/client"},
		{from: "internal/volume/local", imported: module + "/internal/volume", allowed: true},
		{from: "internal/volume/local", imported: module + "/internal/capacity", allowed: true},
		{from: "internal/grpcapi", imported: module + "/internal/scheduler"},
		{from: "internal/grpcapi", imported: module + "/internal/containers"},
		{from: "internal/cli", imported: module + "/internal/agent"},
		{from: "internal/store/embedded", imported: module + "/internal/store", allowed: true},
		{from: "internal/store/embedded", imported: module + "/internal/store/storetest"},
		{from: "internal/store/embedded", test: true, imported: module + "/internal/store/storetest", allowed: true},
		{from: "internal/fault", imported: module + "/internal/mount"},
		{from: "internal/fault", imported: "testing"},
		{from: "cmd/flux-sandbox", imported: module + "/internal/agent", allowed: true},
		{from: "internal/agent", imported: module + "/cmd/flux-sandbox"},
		{from: "cmd/flux-sandbox", imported: module + "/internal/store/storetest"},
		{from: "hack/leftovers", imported: "github.com/spf13/cobra"},
	} {
		if why := forbidden(tc.from, tc.test, tc.imported); (why == "") != tc.allowed {
			t.Errorf("%s → %s: allowed %v (%s), want %v", tc.from, tc.imported, why == "", why, tc.allowed)
		}
	}
}
