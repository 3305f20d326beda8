// Package grpcapitest runs the public gRPC API for tests: a real server on a real unix socket over the
// embedded store, with a Scheduler that plays the scheduler runtime by writing status, and an Agent that
// plays a node's agent. Tests tell these two what to do and look at what clients see.
package grpcapitest
