package testimage_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testimage"
)

func TestImageIsCompleteAndReproducible(t *testing.T) {
	if _, err := os.Stat(testimage.DefaultBusybox); err != nil {
		testenv.Missing(t, "busybox-static: %v", err)
	}
	opts := testimage.Options{Name: "example.test/box:1", User: "user", Files: map[string]string{"/etc/motd": "hello"}}
	var first, second bytes.Buffer
	for _, b := range []*bytes.Buffer{&first, &second} {
		if err := testimage.Write(b, opts); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same options gave different images")
	}

	tag, err := name.NewTag(opts.Name)
	if err != nil {
		t.Fatal(err)
	}
	image, err := tarball.Image(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(first.Bytes())), nil }, &tag)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Config; got.User != "user" || len(got.Cmd) != 1 || got.Cmd[0] != "sh" {
		t.Errorf("configuration %+v", got)
	}
	rootfs := mutate.Extract(image)
	defer rootfs.Close()
	found := map[string]tar.Header{}
	for r := tar.NewReader(rootfs); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		found["/"+h.Name] = *h
	}
	if h := found["/bin/sh"]; h.Linkname != "busybox" {
		t.Errorf("/bin/sh: %+v", h)
	}
	if h := found["/etc/motd"]; h.Size != 5 {
		t.Errorf("/etc/motd: %+v", h)
	}
	if h := found["/bin/busybox"]; h.Mode&0o111 == 0 || h.Size == 0 {
		t.Errorf("/bin/busybox: %+v", h)
	}
}
