// Package sandboxv1 is the gRPC API that clients use: SandboxVolumeService, SandboxService and ImageService.
// It is generated from volume.proto and sandbox.proto, whose comments say what each call promises and which
// errors it gives.
package sandboxv1
