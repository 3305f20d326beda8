package grpcstop_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/flux-sandbox/flux-sandbox/internal/grpcstop"
)

// handler answers a call when its channel says so, whatever the call's context says.
type handler struct {
	healthv1.UnimplementedHealthServer
	entered, answer chan struct{}
}

func (h *handler) Check(context.Context, *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	close(h.entered)
	<-h.answer
	return &healthv1.HealthCheckResponse{}, nil
}

// called is a server with a call under way, how serving ended, and how the call did.
func called(t *testing.T) (server *grpc.Server, h *handler, served, call chan error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h = &handler{entered: make(chan struct{}), answer: make(chan struct{})}
	server = grpc.NewServer()
	healthv1.RegisterHealthServer(server, h)
	served, call = make(chan error, 1), make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	go func() {
		_, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
		call <- err
	}()
	<-h.entered
	return server, h, served, call
}

func TestAHandlerThatHangsIsLeftBehind(t *testing.T) {
	server, h, served, call := called(t)
	grpcstop.Within(server, time.Millisecond)
	if err := <-served; err != nil {
		t.Error("serving ended with", err)
	}
	if <-call == nil {
		t.Error("the call was answered")
	}
	close(h.answer)
}

func TestACallUnderWayIsAnswered(t *testing.T) {
	server, h, served, call := called(t)
	go close(h.answer)
	grpcstop.Within(server, time.Hour)
	if err := errors.Join(<-served, <-call); err != nil {
		t.Error(err)
	}
}
