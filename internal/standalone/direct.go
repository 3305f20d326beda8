package standalone

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// direct is a connection to a service in this process: a unary call runs the service's handler, a stream goes through
// the connection that it has besides. Caller and service share no memory, and a call ends with its context though the
// handler goes on, as with any connection.
type direct struct {
	grpc.ClientConnInterface
	service any
	around  grpc.UnaryServerInterceptor
	methods map[string]grpc.MethodHandler // by full name
	calls   chan func()                   // to the workers
}

// directWorkers are the goroutines that wait for calls. On one of them a call finds a stack that is large enough, which
// a fresh one grows step by step; calls beyond that get a goroutine of their own.
const directWorkers = 4

func newDirect(streams grpc.ClientConnInterface, desc *grpc.ServiceDesc, service any, around grpc.UnaryServerInterceptor) *direct {
	d := &direct{ClientConnInterface: streams, service: service, around: around, methods: map[string]grpc.MethodHandler{}, calls: make(chan func())}
	for _, m := range desc.Methods {
		d.methods["/"+desc.ServiceName+"/"+m.MethodName] = m.Handler
	}
	for range directWorkers {
		go func() {
			for call := range d.calls {
				call()
			}
		}()
	}
	return d
}

// close ends the workers once they have nothing to do. There is no call after it.
func (d *direct) close() { close(d.calls) }

// Invoke implements grpc.ClientConnInterface. Options of a call mean nothing without a wire.
func (d *direct) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	handler := d.methods[method]
	if handler == nil {
		return status.Errorf(codes.Unimplemented, "this agent has no method %s", method)
	}
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	request := proto.Clone(args.(proto.Message)) // the caller may use its own again when the call is given up
	type outcome struct {
		response any
		err      error
	}
	done := make(chan outcome, 1)
	call := func() {
		response, err := handler(d.service, ctx, func(into any) error {
			proto.Merge(into.(proto.Message), request)
			return nil
		}, d.around)
		done <- outcome{response, err}
	}
	select {
	case d.calls <- call:
	default:
		go call()
	}
	select {
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	case o := <-done:
		if o.err != nil {
			return o.err
		}
		proto.Merge(reply.(proto.Message), o.response.(proto.Message))
		return nil
	}
}
