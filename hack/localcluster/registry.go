package main

import (
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path"
	"regexp"
	"strings"
	"syscall"

	containername "github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// serveRegistry is the process that stands in for all registries. It ends by a signal.
func serveRegistry() error {
	images, err := testImages(busybox)
	if err != nil {
		return err
	}
	handler := standIn{real: ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))}
	for name, image := range images {
		if err := handler.load(name, image); err != nil {
			return err
		}
	}
	l, err := net.Listen("tcp", registry)
	if err != nil {
		return err
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-ended
		_ = l.Close()
	}()
	if err := http.Serve(l, handler); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// standIn is a registry that has test images under the names that people use.
type standIn struct {
	real http.Handler // what was pushed
}

// load pushes an image.
func (s standIn) load(name string, image v1.Image) error {
	tag, err := containername.NewTag(registry+"/"+name+":latest", containername.Insecure)
	if err != nil {
		return err
	}
	return remote.Write(tag, image, remote.WithTransport(direct{s.real}))
}

// direct makes requests of a handler without a network.
type direct struct{ handler http.Handler }

func (d direct) RoundTrip(r *http.Request) (*http.Response, error) {
	received := r.Clone(r.Context())
	if received.Body == nil {
		received.Body = http.NoBody // as a server has it
	}
	answer := httptest.NewRecorder()
	d.handler.ServeHTTP(answer, received)
	response := answer.Result()
	response.Request = r
	return response, nil
}

// manifests matches the path of a request for an image by tag or digest.
var manifests = regexp.MustCompile(`^/v2/(.+)/manifests/([^/]+)$`)

// ServeHTTP answers with what was pushed under the name. For what was not, and has the name of an image that people
// use, it is the one of ours that stands for it, whatever the registry, folder and tag.
func (s standIn) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m := manifests.FindStringSubmatch(r.URL.Path)
	if (r.Method == http.MethodGet || r.Method == http.MethodHead) && m != nil {
		image, known := standsFor[path.Base(m[1])]
		if known && s.missing(r) {
			reference := m[2]
			if !strings.Contains(reference, ":") { // a tag; a digest was learned from an earlier answer
				reference = "latest"
			}
			r = r.Clone(r.Context())
			r.URL.Path = "/v2/" + image + "/manifests/" + reference
		}
	}
	s.real.ServeHTTP(w, r)
}

func (s standIn) missing(r *http.Request) bool {
	probe := httptest.NewRecorder()
	s.real.ServeHTTP(probe, r)
	return probe.Code == http.StatusNotFound
}
