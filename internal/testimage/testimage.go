// Package testimage builds a small container image out of the machine's static busybox, without Docker and without a
// registry, for the demo and the tests. The image is a tar as `docker save` writes it: one layer with /bin/busybox, a
// link for each of its applets, and the few files and directories that programs expect. The same options give the same
// bytes.
package testimage

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Defaults of Options.
const (
	DefaultName    = "docker.io/library/busybox:latest"
	DefaultBusybox = "/bin/busybox" // of Debian's busybox-static
)

// Options describe the image. The zero value is a busybox with a shell as its command.
type Options struct {
	// Name is the image's reference with a tag; default DefaultName.
	Name string
	// Busybox is a statically linked busybox; default DefaultBusybox.
	Busybox string
	// Entrypoint, Cmd, Env, User and WorkingDir are the image's configuration. Cmd defaults to "sh" if there is no
	// Entrypoint either, and Env to a PATH.
	Entrypoint, Cmd, Env []string
	User, WorkingDir     string
	// Files are further regular files (absolute path to content), mode 0644.
	Files map[string]string
}

// Write writes the image's archive.
func Write(w io.Writer, opts Options) error {
	if opts.Name == "" {
		opts.Name = DefaultName
	}
	if opts.Busybox == "" {
		opts.Busybox = DefaultBusybox
	}
	if len(opts.Cmd) == 0 && len(opts.Entrypoint) == 0 {
		opts.Cmd = []string{"sh"}
	}
	if len(opts.Env) == 0 {
		opts.Env = []string{"PATH=/bin"}
	}
	tag, err := name.NewTag(opts.Name)
	if err != nil {
		return fmt.Errorf("build image: %w", err)
	}
	content, err := layer(opts)
	if err != nil {
		return fmt.Errorf("build image %s: %w", opts.Name, err)
	}
	rootfs, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content)), nil
	}, tarball.WithCompressionLevel(gzip.BestSpeed))
	if err != nil {
		return fmt.Errorf("build image %s: %w", opts.Name, err)
	}
	image, err := mutate.AppendLayers(empty.Image, rootfs)
	if err != nil {
		return fmt.Errorf("build image %s: %w", opts.Name, err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		return fmt.Errorf("build image %s: %w", opts.Name, err)
	}
	config = config.DeepCopy()
	config.Architecture, config.OS = runtime.GOARCH, "linux"
	config.Config = v1.Config{
		Entrypoint: opts.Entrypoint, Cmd: opts.Cmd, Env: opts.Env, User: opts.User, WorkingDir: opts.WorkingDir,
	}
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return fmt.Errorf("build image %s: %w", opts.Name, err)
	}
	if err := tarball.Write(tag, image, w); err != nil {
		return fmt.Errorf("write image %s: %w", opts.Name, err)
	}
	return nil
}

// layer makes the root filesystem's tar.
func layer(opts Options) ([]byte, error) {
	busybox, err := os.ReadFile(opts.Busybox)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: install it (apt-get install busybox-static)", err)
	}
	if err != nil {
		return nil, err
	}
	applets, err := exec.Command(opts.Busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("list the applets of %s: %w", opts.Busybox, err)
	}
	var b bytes.Buffer
	t := &layerTar{w: tar.NewWriter(&b)}
	for _, dir := range []string{"bin", "dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "usr", "var"} {
		t.add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}, nil)
	}
	t.add(tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777}, nil)
	t.add(tar.Header{Typeflag: tar.TypeReg, Name: "bin/busybox", Mode: 0o755}, busybox)
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" {
			t.add(tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox", Mode: 0o777}, nil)
		}
	}
	files := map[string]string{
		"/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home:/bin/sh\n",
		"/etc/group":  "root:x:0:\nuser:x:1000:\n",
	}
	for name, content := range opts.Files {
		files[path.Join("/", name)] = content
	}
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		t.add(tar.Header{Typeflag: tar.TypeReg, Name: strings.TrimPrefix(name, "/"), Mode: 0o644}, []byte(files[name]))
	}
	if t.err == nil {
		t.err = t.w.Close()
	}
	return b.Bytes(), t.err
}

// layerTar adds entries until one fails.
type layerTar struct {
	w   *tar.Writer
	err error
}

func (t *layerTar) add(h tar.Header, content []byte) {
	if t.err != nil {
		return
	}
	h.ModTime = time.Unix(0, 0)
	h.Size = int64(len(content))
	if t.err = t.w.WriteHeader(&h); t.err == nil {
		_, t.err = t.w.Write(content)
	}
}
