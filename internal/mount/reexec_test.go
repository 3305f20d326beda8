package mount

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// reexecMain runs in a mount namespace other than the host's, as an agent in a
// container does, and twice: before and after.
func reexecMain() {
	var keep map[string]*os.File
	if os.Getenv(reexecEnv) == "" {
		// A file that only this namespace has.
		if err := unix.Mount("none", os.Getenv(rootEnv), "tmpfs", 0, ""); err != nil {
			fmt.Println("tmpfs", err)
			os.Exit(1)
		}
		secret := os.Getenv(rootEnv) + "/token"
		err := os.WriteFile(secret, []byte("secret"), 0o600)
		f, openErr := os.Open(secret)
		if err != nil || openErr != nil {
			fmt.Println(err, openErr)
			os.Exit(1)
		}
		keep = map[string]*os.File{"token": f}
	}
	host, _ := strconv.Atoi(os.Getenv(reexecTest))
	var kept map[string]*os.File
	var err error
	if os.Getenv(reexecEnv) == "" {
		kept, err = reexecInNamespaceOf(host, keep, nil)
	} else {
		kept, err = ReexecInHostNamespace(nil, nil)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	_, guarded := os.LookupEnv(reexecEnv)
	_, hidden := os.Stat(os.Getenv(rootEnv) + "/token")
	data, err := io.ReadAll(kept["token"])
	same, _ := sameNamespace("/proc/" + os.Getenv(reexecTest))
	fmt.Printf("args=%q guarded=%v hidden=%v token=%s %v host=%v\n", os.Args[1:], guarded, os.IsNotExist(hidden), data, err, same)
	os.Exit(0)
}

func TestReexecInHostNamespace(t *testing.T) {
	testenv.NeedRoot(t)
	cmd := exec.Command("/proc/self/exe", "an", "argument")
	cmd.Env = []string{fmt.Sprintf("%s=%d", reexecTest, os.Getpid()), rootEnv + "=" + t.TempDir()}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	want := `args=["an" "argument"] guarded=false hidden=true token=secret <nil> host=true`
	if got := strings.TrimSpace(string(out)); err != nil || got != want {
		t.Errorf("%v: %s\nwant %s", err, got, want)
	}
}

func TestReexecInTheHostIsANoOp(t *testing.T) {
	testenv.NeedRoot(t)
	keep := map[string]*os.File{"a": os.Stdin}
	kept, err := reexecInNamespaceOf(os.Getppid(), keep, nil)
	if err != nil || kept["a"] != os.Stdin {
		t.Errorf("%v %v", kept, err)
	}
}

func TestSocketPeer(t *testing.T) {
	socket := t.TempDir() + "/s"
	if _, err := SocketPeer(socket); !errdefs.IsNotFound(err) {
		t.Errorf("nobody listens: %v", err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if pid, err := SocketPeer(socket); err != nil || pid != os.Getpid() {
		t.Errorf("%d listens (%v), want %d", pid, err, os.Getpid())
	}
	if _, err := SocketPeer(""); err == nil {
		t.Error("no socket has a peer")
	}
}
