package grpcapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// detailed is an error that brings a detail for its gRPC status.
type detailed struct {
	error
	detail protoadapt.MessageV1
}

func (d *detailed) Unwrap() error { return d.error }

// access gathers what the line about a call says.
type access struct {
	mu    sync.Mutex // guards attrs: streams have two goroutines
	attrs []slog.Attr
}

type accessKey struct{}

// annotate adds attributes to the line about the call.
func annotate(ctx context.Context, attrs ...slog.Attr) {
	a, ok := ctx.Value(accessKey{}).(*access)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, attr := range attrs {
		if attr.Value.Kind() != slog.KindString || attr.Value.String() != "" {
			a.attrs = append(a.attrs, attr)
		}
	}
}

func annotateSandbox(ctx context.Context, sb *v1alpha1.Sandbox) {
	annotate(ctx,
		slog.String("sandbox", sb.Namespace+"/"+sb.Name),
		slog.String("uid", string(sb.UID)),
		slog.String("tenant", sb.Spec.TenantID))
}

func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	err = s.call(ctx, info.FullMethod, func(ctx context.Context) error {
		resp, err = handler(ctx, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return s.call(ss.Context(), info.FullMethod, func(ctx context.Context) error {
		return handler(srv, &contextStream{ServerStream: ss, ctx: ctx})
	})
}

// contextStream is a stream with a context of ours.
type contextStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (c *contextStream) Context() context.Context { return c.ctx }

// call is what every call goes through: authentication, recovery from a panic, the mapping of errors, and
// the line in the log.
func (s *Server) call(ctx context.Context, method string, handle func(context.Context) error) error {
	start := time.Now()
	a := &access{}
	ctx = context.WithValue(ctx, accessKey{}, a)
	caller, err := s.authenticate(ctx, method)
	if err == nil {
		err = s.guard(context.WithValue(ctx, identityKey{}, caller), method, handle)
	}
	err = toStatus(err)

	code, level := status.Code(err), slog.LevelInfo
	switch {
	case open(method) || strings.HasPrefix(method, "/grpc.reflection."):
		level = slog.LevelDebug
	case code == codes.Internal:
		level = slog.LevelError
	}
	attrs := []slog.Attr{
		slog.String("method", method), slog.String("code", code.String()),
		slog.Duration("duration", time.Since(start)), slog.String("caller", caller.Name),
	}
	a.mu.Lock()
	attrs = append(attrs, a.attrs...)
	a.mu.Unlock()
	if err != nil {
		attrs = append(attrs, slog.String("reason", string(fault.ReasonOf(fault.FromGRPC(err)))), slog.String("error", status.Convert(err).Message()))
	}
	s.log.LogAttrs(ctx, level, "call", attrs...)
	return err
}

func (s *Server) authenticate(ctx context.Context, method string) (Identity, error) {
	if open(method) {
		return Identity{}, nil
	}
	return s.options.Authenticator.Authenticate(ctx)
}

// guard turns a panic of a handler into an error of the kind ErrInternal; the log gets the stack.
func (s *Server) guard(ctx context.Context, method string, handle func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.LogAttrs(ctx, slog.LevelError, "panic in a call", slog.String("method", method),
				slog.String("panic", fmt.Sprint(p)), slog.String("stack", string(debug.Stack())))
			err = fault.New(errdefs.ErrInternal, fault.Internal, "the server failed in %s; its log says where: please report it", method)
		}
	}()
	return handle(ctx)
}

// toStatus is the one place where errors of handlers become gRPC statuses.
func toStatus(err error) error {
	var d *detailed
	if errors.As(err, &d) {
		return fault.ToGRPC(err, d.detail)
	}
	return fault.ToGRPC(err)
}
