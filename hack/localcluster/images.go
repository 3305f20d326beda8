package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// busybox is Debian's busybox-static.
const busybox = "/bin/busybox"

// standsFor says which of the test images stands for one that people use. There is none for a program that the image
// would have to be: a database that is a shell is worse than an image that is not found.
var standsFor = map[string]string{
	"alpine": "box", "bash": "box", "busybox": "box", "debian": "box", "fedora": "box", "golang": "box", "node": "box",
	"python": "box", "ubuntu": "box",
	"nginx": "web", "httpd": "web",
	"pause": "pause",
}

// pause waits until it is told to end, and takes over processes whose parents have ended.
const pause = `trap "exit 0" TERM INT; while :; do sleep 2147483647 & wait $!; done`

// testImages makes the images, by name.
func testImages(busybox string) (map[string]v1.Image, error) {
	rootfs, err := rootfs(busybox)
	if err != nil {
		return nil, fmt.Errorf("make the test images: %w", err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(rootfs)), nil })
	if err != nil {
		return nil, err
	}
	base, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return nil, err
	}
	images := map[string]v1.Image{}
	for name, config := range map[string]v1.Config{
		"box":   {Cmd: []string{"sh"}},
		"web":   {Cmd: []string{"httpd", "-f", "-p", "80", "-h", "/www"}, ExposedPorts: map[string]struct{}{"80/tcp": {}}},
		"pause": {Entrypoint: []string{"sh", "-c", pause}},
	} {
		file, err := base.ConfigFile()
		if err != nil {
			return nil, err
		}
		file = file.DeepCopy()
		file.Architecture, file.OS, file.Config = runtime.GOARCH, "linux", config
		file.Config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
		if images[name], err = mutate.ConfigFile(base, file); err != nil {
			return nil, err
		}
	}
	return images, nil
}

// rootfs is the tar of the one layer that all of them have.
func rootfs(busybox string) ([]byte, error) {
	program, err := os.ReadFile(busybox)
	if err != nil {
		return nil, fmt.Errorf("%w: install Debian's busybox-static (hack/setup.sh)", err)
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list what %s can do: %w", busybox, err)
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	add := func(h tar.Header, content string) { // an error stays in w, and Close returns it
		h.ModTime, h.Size = time.Unix(0, 0), int64(len(content))
		if w.WriteHeader(&h) == nil {
			_, _ = io.WriteString(w, content)
		}
	}
	for _, dir := range []string{"bin", "dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "sys", "usr", "var", "www"} {
		add(tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: 0o755}, "")
	}
	add(tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, "")
	add(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, string(program))
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" {
			add(tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, "")
		}
	}
	add(tar.Header{Name: "bin/bash", Typeflag: tar.TypeReg, Mode: 0o755}, "#!/bin/sh\nexec sh \"$@\"\n") // people write it out of habit
	for _, file := range [][2]string{
		{"etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"},
		{"etc/group", "root:x:0:\nnogroup:x:65534:\n"},
		{"www/index.html", "<h1>It works.</h1>\n"},
	} {
		add(tar.Header{Name: file[0], Typeflag: tar.TypeReg, Mode: 0o644}, file[1])
	}
	return out.Bytes(), w.Close()
}
