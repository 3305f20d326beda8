// Package grpcstop ends gRPC servers within a time: what is under way is answered if it can be, and a handler that hangs
// keeps no process from ending.
package grpcstop

import (
	"time"

	"google.golang.org/grpc"
)

// Within closes the server's listeners, lets the calls under way be answered for a grace, and then cuts them off. A
// handler that does not return even then, as one that hangs in the kernel, is left behind: GracefulStop would wait for
// it, also after Stop.
func Within(server *grpc.Server, grace time.Duration) {
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		server.GracefulStop()
	}()
	over := time.NewTimer(grace)
	defer over.Stop()
	select {
	case <-answered:
	case <-over.C:
		server.Stop()
	}
}
