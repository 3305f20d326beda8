package main

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	containername "github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

func TestARouteIntoTheClustersAddressesIsACollision(t *testing.T) {
	for routes, want := range map[string]bool{
		"default via 192.0.2.1 dev eth0 \n192.0.2.0/24 dev eth0 proto kernel scope link src 192.0.2.2 \n": false,
		"10.0.0.0/8 via 192.0.2.1 dev tun0 \n":                 false, // the cluster's are more specific
		"10.213.4.0/24 dev eth1 \n":                            true,
		"10.213.0.0/16 dev eth1 \n":                            true,
		"default via 192.0.2.1 dev eth0 \n10.213.9.9 dev x \n": true,
		"local 127.0.0.1 dev lo table local \n":                false,
	} {
		if err := collision(routes); (err != nil) != want {
			t.Errorf("%q: %v", routes, err)
		}
	}
}

func TestProcessesAreFoundByTheirMark(t *testing.T) {
	proc := t.TempDir()
	for pid, files := range map[int][2]string{
		10: {"PATH=/bin\x00" + mark + "=containerd\x00", "containerd\x00--config=x\x00"},
		11: {mark + "=containerd\x00", "/c/containerd-shim-runc-v2\x00-id\x00"},
		12: {"PATH=/bin\x00", "containerd\x00"},               // somebody else's
		13: {mark + "=etcd\x00", ""},                          // ended, and nobody waited for it
		14: {"NOT_" + mark + "=etcd\x00", "etcd\x00"},         // another variable
		15: {"A=" + mark + "=etcd\x00", "etcd\x00--flag\x00"}, // only a value
	} {
		dir := filepath.Join(proc, strconv.Itoa(pid))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for i, name := range []string{"environ", "cmdline"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(files[i]), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	var got []string
	for _, p := range marked(proc) {
		got = append(got, strconv.Itoa(p.pid)+" "+p.component+" "+p.program())
	}
	if want := []string{"10 containerd containerd", "11 containerd containerd-shim-runc-v2"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestMountPoints(t *testing.T) {
	const mountinfo = `26 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 26 0:30 / /var/lib/x/kubelet rw shared:1 - ext4 /dev/vda rw
41 40 0:31 / /var/lib/x/kubelet/a\040b rw shared:2 master:1 - tmpfs tmpfs rw
42 26 0:32 / /var/lib/xy rw - tmpfs tmpfs rw
43 26 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
`
	below := mountPoints(mountinfo, func(point, _ string) bool { return within(point, "/var/lib/x") })
	if want := []string{"/var/lib/x/kubelet", "/var/lib/x/kubelet/a b"}; !slices.Equal(below, want) {
		t.Errorf("got %q, want %q", below, want)
	}
	if got := mountPoints(mountinfo, func(_, fstype string) bool { return fstype == "cgroup" }); !slices.Equal(got, []string{"/sys/fs/cgroup/cpu"}) {
		t.Errorf("control groups: %q", got)
	}
}

func TestConfigurationsAreCompleteAndKeptInTheFolders(t *testing.T) {
	l := layout{dir: "/d", run: "/r"}
	for _, name := range files {
		content, err := l.render(name, true)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if strings.Contains(string(content), "flux-localcluster/") || strings.Contains(string(content), "<no value>") {
			t.Errorf("%s does not follow the layout:\n%s", name, content)
		}
	}
	for _, c := range l.components(state{Kube: "/k", Containerd: "/c"}) {
		for _, arg := range c.args {
			if strings.Contains(arg, place.dir) || strings.Contains(arg, place.run) {
				t.Errorf("%s %s does not follow the layout", c.name, arg)
			}
		}
	}
	without, err := l.render("containerd.toml", false)
	if err != nil || !strings.Contains(string(without), "restrict_oom_score_adj = true") {
		t.Errorf("without CAP_SYS_RESOURCE (%v):\n%s", err, without)
	}
}

func TestCertificatesAreOfOneCAAndMadeOnce(t *testing.T) {
	l := layout{dir: t.TempDir(), run: t.TempDir()}
	if err := l.writePKI(); err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(l.pki("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	verify := func(name string, options x509.VerifyOptions) *x509.Certificate {
		pair, err := tls.LoadX509KeyPair(l.pki(name+".crt"), l.pki(name+".key"))
		if err != nil {
			t.Fatal(err)
		}
		options.Roots = roots
		if _, err := pair.Leaf.Verify(options); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return pair.Leaf
	}
	for name, names := range servers {
		for _, n := range names {
			verify(name, x509.VerifyOptions{DNSName: n})
		}
	}
	for name, user := range users {
		c := verify(name+"-user", x509.VerifyOptions{KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		if c.Subject.CommonName != user.name || strings.Join(c.Subject.Organization, "") != user.group {
			t.Errorf("%s is %v", name, c.Subject)
		}
		if _, err := os.Stat(l.kubeconfig(name)); err != nil {
			t.Error(err)
		}
	}
	if err := l.writePKI(); err != nil {
		t.Fatal(err)
	}
	if again, err := os.ReadFile(l.pki("ca.crt")); err != nil || string(again) != string(ca) {
		t.Errorf("a second up made another CA (%v)", err)
	}
}

func TestTheRegistryHasImagesUnderAnyRegistrysNames(t *testing.T) {
	images, err := testImages(busybox)
	if err != nil {
		t.Fatal(err)
	}
	served := standIn{real: ggcr.New()}
	for _, name := range slices.Sorted(maps.Keys(images)) {
		if err := served.load(name, images[name]); err != nil {
			t.Fatal(err)
		}
	}
	pull := func(name string) (string, error) {
		ref, err := containername.ParseReference(registry + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		image, err := remote.Image(ref, remote.WithTransport(direct{served}))
		if err != nil {
			return "", err
		}
		digest, err := image.Digest()
		if err != nil {
			t.Fatal(err)
		}
		rootfs := mutate.Extract(image)
		defer rootfs.Close()
		if n, err := io.Copy(io.Discard, rootfs); err != nil || n == 0 {
			t.Errorf("%s: %d bytes, %v", name, n, err)
		}
		byDigest := ref.Context().Digest(digest.String())
		if _, err := remote.Image(byDigest, remote.WithTransport(direct{served})); err != nil {
			t.Errorf("%s has a tag, but not by its digest: %v", name, err)
		}
		return digest.String(), nil
	}
	ubuntu, err := pull("library/ubuntu:latest")
	if err != nil {
		t.Fatal(err)
	}
	if other, err := pull("some/where/python:3.13-slim"); err != nil || other != ubuntu {
		t.Errorf("another name of it, another tag: %s, %v", other, err)
	}
	if pause, err := pull("pause:3.10"); err != nil || pause == ubuntu {
		t.Errorf("pause: %s, %v", pause, err)
	}
	if _, err := pull("library/postgres:latest"); statusOf(err) != http.StatusNotFound {
		t.Errorf("an image that is not there: %v", err)
	}
	// What is pushed under such a name counts.
	if err := served.load("library/ubuntu", images["web"]); err != nil {
		t.Fatal(err)
	}
	if pushed, err := pull("library/ubuntu:latest"); err != nil || pushed == ubuntu {
		t.Errorf("after a push: %s, %v", pushed, err)
	}
}

func statusOf(err error) int {
	if failed, ok := err.(*transport.Error); ok {
		return failed.StatusCode
	}
	return 0
}

func TestAddressesFitTogether(t *testing.T) {
	_, all, err := net.ParseCIDR(block)
	if err != nil {
		t.Fatal(err)
	}
	_, pods, err := net.ParseCIDR(podCIDR)
	if err != nil {
		t.Fatal(err)
	}
	_, virtual, err := net.ParseCIDR(services)
	if err != nil {
		t.Fatal(err)
	}
	node, first, gateway := net.ParseIP(nodeIP), net.ParseIP(firstIP), net.ParseIP(podGateway)
	switch {
	case !all.Contains(pods.IP), !all.Contains(virtual.IP), !all.Contains(node):
		t.Error("not all of them are in the block that is looked for on the machine")
	case pods.Contains(virtual.IP), virtual.Contains(pods.IP), pods.Contains(node), virtual.Contains(node):
		t.Error("two of them overlap")
	case !virtual.Contains(first), !pods.Contains(gateway):
		t.Error("the first Service or the gateway is elsewhere")
	}
}
