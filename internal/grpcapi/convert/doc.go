// Package convert turns the messages of the public gRPC API into the objects of sandbox.flux.io/v1alpha1
// and back. The server and its clients share it.
//
// It copies and does not judge: enumerations are open strings, and only what cannot be expressed in the
// other form (a quantity that is none) is an error. A test fills every field of both sides by reflection
// and sends it there and back, so that a field that is added on one side cannot be forgotten here; what
// one side does not have is listed there, with the reason.
package convert
