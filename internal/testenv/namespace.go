package testenv

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

const ownNamespaceEnv = "FLUX_TEST_OWN_NAMESPACE"

// InOwnMountNamespace runs the tests of a package, from its TestMain, in a mount namespace of their own: a namespace that
// somebody else on the machine makes meanwhile is then no copy of what they have mounted. It returns in the process that
// runs them. Without the rights for it, it does nothing.
func InOwnMountNamespace() {
	if os.Getuid() != 0 || os.Getenv(ownNamespaceEnv) != "" {
		return
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), ownNamespaceEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(max(exit.ExitCode(), 1))
	case err == nil:
		os.Exit(0)
	}
	panic(err)
}
