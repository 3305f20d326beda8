package clusterdriver

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"github.com/containerd/errdefs"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
	"github.com/flux-sandbox/flux-sandbox/internal/version"
)

// Paths are where a Pod's files and the host's containerd are.
type Paths struct {
	// Account is the folder with the ServiceAccount's token and ca.crt. A process that is no Pod has none.
	Account string
	// Containerd is the socket of the host's containerd, whose process is in the host's mount namespace. It is asked for
	// that where process 1 does not let its own be seen.
	Containerd string
}

// Account is the open folder of a ServiceAccount; nil where there is none.
type Account struct{ dir *os.File }

// EnterHost goes to the host's mount namespace, where it is not there already, with the ServiceAccount's folder open. It
// executes the program again and then returns in the new one: call it early in main.
func EnterHost(paths Paths) (*Account, error) {
	keep := map[string]*os.File{}
	if !mount.Reexecuted() {
		dir, err := os.Open(paths.Account)
		if err == nil {
			keep["account"] = dir
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("the driver's own files: %w", err)
		}
	}
	kept, err := mount.ReexecInHostNamespace(keep, func() (int, error) { return mount.SocketPeer(paths.Containerd) })
	if err != nil {
		return nil, err
	}
	if dir := kept["account"]; dir != nil {
		return &Account{dir: dir}, nil
	}
	return nil, nil
}

// Component is the name of the driver's process in user agents.
const Component = "flux-sandbox-csi"

// client says how the API server is reached: by the kubeconfig, or else as the Pod's ServiceAccount.
func (a *Account) client(kubeconfig string) (*rest.Config, error) {
	config := &rest.Config{}
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	switch {
	case kubeconfig != "":
		var err error
		if config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
			return nil, fmt.Errorf("find the API server: %w", err)
		}
	case a == nil || host == "" || port == "":
		return nil, fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest,
			"find the API server: this is no Pod with a ServiceAccount: give --kubeconfig, or --provision=false to go without an API server")
	default:
		// The files are read again and again through the folder's descriptor, by the client.
		dir := fmt.Sprintf("/proc/self/fd/%d", a.dir.Fd())
		config.Host = "https://" + net.JoinHostPort(host, port)
		config.CAFile = dir + "/ca.crt"
		config.BearerTokenFile = dir + "/token"
	}
	config.UserAgent = Component + "/" + version.String()
	// No limit in practice: the API server's own priority and fairness knows what it can take.
	config.QPS, config.Burst = 200, 400
	return config, nil
}

func (a *Account) close() {
	if a != nil {
		a.dir.Close()
	}
}
