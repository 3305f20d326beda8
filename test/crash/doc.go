// Package crash is the crash matrix: it kills the shipped server before and after every step of what it does, and
// proves that nothing is lost and nothing leaks.
//
// # Method
//
// The steps are not listed here. The server, built with the tag "failpoint", names all its failpoints ("flux-sandbox
// failpoints"), and each must be reached: a point at which nothing was killed fails the test, and so does one that no
// scenario claims.
//
// A scenario (scenario_test.go) is a list of requests that a client would send, from the creation of a sandbox to its
// deletion. Every request may be sent again. For each point:
//
//  1. The server is started with the point armed, and the scenario runs until SIGKILL hits the server.
//  2. The server is started again. As soon as it serves, what the kernel shows in the mount namespace of every sandbox
//     must be what the agent says is there: no mount too many, none missing, each of the right device and directory
//     (consistent in kernel_test.go); and soon after also what the API says. So the interrupted request has happened, or
//     has not.
//  3. The scenario goes on from the interrupted request, which is sent again, to its end.
//  4. Nothing is left: the whole state of the machine (facts_test.go) is what it was before. That is the mounts of all
//     mount namespaces, loop devices, processes, cgroups, containerd's objects, the agent's records, files, and the open
//     files of the server.
//
// To kill recovery itself, the machine is first left in disorder, by a kill at another point, and the server is killed
// a second time while it repairs that (matrix_test.go).
//
// Two more tests stop the server at a point without killing it ("pause"): there containerd is killed, and comes back, or
// the sandbox's first process is (pause_test.go). The request may fail then, but cleanly, and succeeds when it is sent
// again; the server does not die; and in the end nothing is left.
//
// FLUX_SOAK=1 adds many rounds at random points, at the first or a later hit of each; the seed is printed, and
// FLUX_CRASH_SEED repeats it.
//
// Everything is looked at from outside, with the kernel as the judge, and waited for with a deadline: releases go on
// after the answer, as processes and filesystems take a moment to end. The matrix runs without the race detector, whose
// slowness would only spread the kills out.
package crash
