// Command image makes the image of the cluster's programs without Docker, and pushes it or writes it to a file:
//
//	go run ./hack/image -bin bin -push registry.example.com/flux-sandbox:v1
//	go run ./hack/image -bin bin -archive flux-sandbox.tar -name flux-sandbox:v1
//
// It is one image for all components, with nothing in it but static programs and the CAs of this machine; which
// program runs is said by the Pod. The Dockerfile makes the same for those who build with Docker. The same programs give
// the same image, bit for bit. Other programs than ours (-programs), as tests have them, become an image of their own.
package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// programs are what the image has, from the folder of binaries.
var programs = []string{"flux-sandbox-controller", "flux-sandbox-agent", "flux-sandbox-init", "flux-sandbox-logger", "flux-sandbox-hook", "flux-sandbox-csi", "fluxctl"}

// caCertificates are where Debian, and this image, have the CAs that programs trust.
const caCertificates = "/etc/ssl/certs/ca-certificates.crt"

func main() {
	bin := flag.String("bin", "bin", "`folder` of the programs")
	push := flag.String("push", "", "`reference` to push to")
	insecure := flag.Bool("insecure", false, "push over plain HTTP")
	only := flag.String("programs", strings.Join(programs, ","), "`names` of the programs")
	archive := flag.String("archive", "", "`file` to write a docker archive to")
	ref := flag.String("name", "flux-sandbox:latest", "the image's `reference` in the archive")
	flag.Parse()
	programs = strings.Split(*only, ",")
	if err := run(*bin, *push, *insecure, *archive, *ref); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(bin, push string, insecure bool, archive, ref string) error {
	if (push == "") == (archive == "") {
		return errors.New("give one of -push and -archive")
	}
	image, err := build(bin)
	if err != nil {
		return err
	}
	if archive != "" {
		tag, err := name.NewTag(ref)
		if err != nil {
			return err
		}
		return tarball.WriteToFile(archive, tag, image)
	}
	var options []name.Option
	if insecure {
		options = append(options, name.Insecure)
	}
	to, err := name.ParseReference(push, options...)
	if err != nil {
		return err
	}
	if err := remote.Write(to, image, remote.WithAuthFromKeychain(authn.DefaultKeychain)); err != nil {
		return err
	}
	digest, err := image.Digest()
	if err != nil {
		return err
	}
	fmt.Println(to.Context().Digest(digest.String()))
	return nil
}

// build makes the image: a layer per program, so that a change of one is a small pull.
func build(bin string) (v1.Image, error) {
	image := empty.Image
	files := map[string]string{}
	if _, err := os.Stat(caCertificates); err == nil {
		files[caCertificates] = caCertificates
	}
	for _, p := range programs {
		files["/"+p] = filepath.Join(bin, p)
	}
	for _, path := range append([]string{caCertificates}, prefixed(programs)...) {
		from, ok := files[path]
		if !ok {
			continue
		}
		layer, err := layerOf(path, from)
		if err != nil {
			return nil, err
		}
		if image, err = mutate.AppendLayers(image, layer); err != nil {
			return nil, err
		}
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config.User = "65532:65532"
	config.Config.WorkingDir = "/"
	config.Config.Env = []string{"PATH=/", "SSL_CERT_FILE=" + caCertificates}
	return mutate.ConfigFile(image, config)
}

func prefixed(names []string) []string {
	var out []string
	for _, n := range names {
		out = append(out, "/"+n)
	}
	return out
}

// layerOf is a layer with one file, in which nothing depends on when or by whom it is made.
func layerOf(path, from string) (v1.Layer, error) {
	data, err := os.ReadFile(from)
	if err != nil {
		return nil, err
	}
	mode := int64(0o755)
	if path == caCertificates {
		mode = 0o644
	} else if err := static(from); err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, dir := range parents(path) {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}); err != nil {
			return nil, err
		}
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: path[1:], Mode: mode, Size: int64(len(data))}); err != nil {
		return nil, err
	}
	if _, err := w.Write(data); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	content := buf.Bytes()
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil })
}

// static fails unless a program needs no other file to start: there is none in the image.
func static(program string) error {
	f, err := elf.Open(program)
	if err != nil {
		return fmt.Errorf("%s: %w", program, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("%s is linked dynamically: build it with CGO_ENABLED=0, as make build does", program)
		}
	}
	return nil
}

// parents are the folders above an absolute path, the topmost first.
func parents(path string) []string {
	var dirs []string
	for dir := filepath.Dir(path); dir != "/"; dir = filepath.Dir(dir) {
		dirs = append([]string{dir[1:] + "/"}, dirs...)
	}
	return dirs
}
