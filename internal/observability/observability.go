// Package observability is what every server of ours shows of itself: a log on standard error, and metrics and health over
// HTTP.
package observability

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// LogConfig says how to log.
type LogConfig struct {
	// Level is debug, info, warn or error; info when empty.
	Level string `json:"level,omitempty"`
	// Format is text or json; text when empty.
	Format string `json:"format,omitempty"`
}

// NewLogger makes a logger that writes to standard error. Errors: ErrInvalidArgument.
func NewLogger(c LogConfig) (*slog.Logger, error) {
	level := slog.LevelInfo
	if c.Level != "" {
		if err := level.UnmarshalText([]byte(c.Level)); err != nil {
			return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "log.level %q: must be debug, info, warn or error", c.Level)
		}
	}
	options := &slog.HandlerOptions{Level: level}
	switch c.Format {
	case "", "text":
		return slog.New(slog.NewTextHandler(os.Stderr, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, options)), nil
	}
	return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, "log.format %q: must be text or json", c.Format)
}

// NewRegistry is a registry with the metrics of the process and of Go.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

// httpTimeout bounds a request's headers, and the end of the server.
const httpTimeout = 5 * time.Second

// Serve serves /metrics, /healthz (200 while the process runs) and /readyz (200 while ready says nil) at a TCP address
// until ctx ends. Listening is done when it returns; wait ends with the server.
func Serve(ctx context.Context, address string, registry prometheus.Gatherer, ready func() error) (wait func() error, err error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve metrics and health: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: httpTimeout}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	return func() error {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
		}
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), httpTimeout)
		defer cancel()
		if err := server.Shutdown(stop); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return nil
	}, nil
}
