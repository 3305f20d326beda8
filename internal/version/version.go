// Package version says which build of FluxSandbox is running.
//
// The build stamps it from git (see the Makefile); a binary built without the Makefile, by go install or
// in a test, is "dev".
package version

// stamped is set by the linker: -X github.com/flux-sandbox/flux-sandbox/internal/version.stamped=v1.2.3
var stamped string

// String is the version: what git describe said at build time, or "dev".
func String() string {
	if stamped == "" {
		return "dev"
	}
	return stamped
}
