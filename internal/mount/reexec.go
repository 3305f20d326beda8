package mount

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reexecEnv marks a process that has been re-executed, so that it happens once.
// Its value lists the kept files as name=descriptor, separated by commas.
const reexecEnv = "FLUX_MOUNT_REEXEC"

// ReexecInHostNamespace makes a privileged hostPID container and a host process
// one case: it executes the running binary again in the mount namespace of
// process 1. It does not return then; the new image calls it again, and gets
// the kept files. In a process that has that namespace already it does nothing
// and returns keep. (A container without hostPID is its own process 1, so it
// stays where it is.)
//
// A process 1 that protects itself does not let its namespace be opened. Then
// witness is asked for the PID of another process that has it, say containerd's;
// nil for none.
//
// The host's namespace does not have the Pod's own files (token, certificates):
// keep holds, by name (no '=' or ','), what must be open before. The working
// directory becomes "/". It must be called early in main, while nothing runs
// that cannot be cut off. After an error the process must exit.
func ReexecInHostNamespace(keep map[string]*os.File, witness func() (int, error)) (map[string]*os.File, error) {
	if value, ok := os.LookupEnv(reexecEnv); ok {
		os.Unsetenv(reexecEnv)
		return keptFiles(value)
	}
	return reexecInNamespaceOf(1, keep, witness)
}

// SocketPeer is the PID of the process that listens on a Unix socket: a witness for ReexecInHostNamespace.
func SocketPeer(socket string) (pid int, err error) {
	const op = "find the process behind a socket"
	if socket == "" {
		return 0, failed(op, "", "no socket of the host's is given, say containerd's", unix.EINVAL)
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return 0, failed(op, socket, "cannot connect", err)
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, failed(op, socket, "cannot be asked", err)
	}
	var credentials *unix.Ucred
	controlErr := raw.Control(func(fd uintptr) {
		credentials, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(controlErr, err); err != nil {
		return 0, failed(op, socket, "cannot be asked", err)
	}
	if credentials.Pid <= 0 {
		return 0, failed(op, socket, "its process is not in this PID namespace: hostPID is needed", unix.ESRCH)
	}
	return int(credentials.Pid), nil
}

// Reexecuted says whether this process is one that ReexecInHostNamespace executed, and has
// not called it yet.
func Reexecuted() bool {
	_, ok := os.LookupEnv(reexecEnv)
	return ok
}

func reexecInNamespaceOf(pid int, keep map[string]*os.File, witness func() (int, error)) (map[string]*os.File, error) {
	const op = "re-execute in the host's mount namespace"
	proc := "/proc/" + strconv.Itoa(pid)
	same, err := sameNamespace(proc)
	if err != nil {
		return nil, failed(op, "", "cannot compare the namespaces", err)
	}
	if same {
		return keep, nil
	}
	host, err := unix.Open(proc+"/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == unix.EACCES && witness != nil {
		other, err := witness()
		if err != nil {
			return nil, failed(op, "", fmt.Sprintf("process %d does not let its namespace be opened, and no other that has it is known", pid), err)
		}
		return reexecInNamespaceOf(other, keep, nil)
	}
	if err != nil {
		return nil, failed(op, "", "cannot open the host's namespace (is the container privileged, with hostPID, and run as root?)", err)
	}
	defer unix.Close(host)
	return nil, failed(op, "", "cannot execute", onThrowawayThread(func() error { return execIn(host, keep) }))
}

// sameNamespace tells whether a process has our mount namespace. Two namespaces
// have no mount in common, and mountinfo may be read where the namespace itself
// may not be opened (a process 1 that protects itself).
func sameNamespace(proc string) (bool, error) {
	f, err := os.Open(proc + "/mountinfo")
	if err != nil {
		return false, err
	}
	defer f.Close()
	theirs, err := parseMountinfo(f)
	if err != nil {
		return false, err
	}
	ours, err := Mounts()
	if err != nil {
		return false, err
	}
	for _, m := range theirs {
		if slices.ContainsFunc(ours, func(o Info) bool { return o.MountID == m.MountID }) {
			return true, nil
		}
	}
	return false, nil
}

// execIn ends in the new image or in an error.
func execIn(host int, keep map[string]*os.File) error {
	// The binary is not in the host's namespace: it is executed by descriptor.
	self, err := unix.Open("/proc/self/exe", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open our binary: %w", err)
	}
	value, err := inheritFiles(keep)
	if err != nil {
		return err
	}
	argv, err := syscall.SlicePtrFromStrings(os.Args)
	if err != nil {
		return err
	}
	envv, err := syscall.SlicePtrFromStrings(append(os.Environ(), reexecEnv+"="+value))
	if err != nil {
		return err
	}
	empty, err := unix.BytePtrFromString("")
	if err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Setns(host, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("setns: %w", err)
	}
	_, _, errno := unix.Syscall6(unix.SYS_EXECVEAT, uintptr(self), uintptr(unsafe.Pointer(empty)),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&envv[0])), unix.AT_EMPTY_PATH, 0)
	runtime.KeepAlive(keep)
	return fmt.Errorf("execveat: %w", errno)
}

// inheritFiles makes the files survive the exec and describes them.
func inheritFiles(keep map[string]*os.File) (string, error) {
	var list []string
	for name, f := range keep {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD, 3)
		runtime.KeepAlive(f)
		if err != nil {
			return "", fmt.Errorf("keep %s: %w", name, err)
		}
		list = append(list, name+"="+strconv.Itoa(fd))
	}
	slices.Sort(list)
	return strings.Join(list, ","), nil
}

func keptFiles(value string) (map[string]*os.File, error) {
	kept := map[string]*os.File{}
	for part := range strings.SplitSeq(value, ",") {
		if part == "" {
			continue
		}
		name, number, _ := strings.Cut(part, "=")
		fd, err := strconv.Atoi(number)
		if err != nil {
			return nil, fmt.Errorf("%s holds %q: %w", reexecEnv, part, err)
		}
		unix.CloseOnExec(fd)
		kept[name] = os.NewFile(uintptr(fd), name)
	}
	return kept, nil
}
