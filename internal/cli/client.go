package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
)

// server is a connection to the server.
type server struct {
	sandboxes sandboxv1.SandboxServiceClient
	volumes   sandboxv1.SandboxVolumeServiceClient
	named     sandboxv1.VolumeServiceClient
	claims    sandboxv1.SandboxClaimServiceClient
	sets      sandboxv1.SandboxSetServiceClient
	images    sandboxv1.ImageServiceClient
	node      sandboxv1.NodeServiceClient
}

// connect calls do with a connection. what completes "cannot …" in the error's message.
func (a *app) connect(what string, do func(server) error) error {
	conn, end, err := a.reach()
	if err != nil {
		var usage usageError
		if errors.As(err, &usage) {
			return err
		}
		return &failure{what: what, err: err}
	}
	defer end()
	err = do(server{
		sandboxes: sandboxv1.NewSandboxServiceClient(conn),
		volumes:   sandboxv1.NewSandboxVolumeServiceClient(conn),
		named:     sandboxv1.NewVolumeServiceClient(conn),
		claims:    sandboxv1.NewSandboxClaimServiceClient(conn),
		sets:      sandboxv1.NewSandboxSetServiceClient(conn),
		images:    sandboxv1.NewImageServiceClient(conn),
		node:      sandboxv1.NewNodeServiceClient(conn),
	})
	var usage usageError
	var exit exitError
	if err == nil || errors.As(err, &usage) || errors.As(err, &exit) {
		return err
	}
	return &failure{what: what, err: err}
}

// reach makes a connection, and returns how to end it.
func (a *app) reach() (*grpc.ClientConn, func(), error) {
	if a.nowhere != nil {
		return nil, nil, a.nowhere
	}
	if a.cluster == nil {
		conn, err := a.dial()
		return conn, func() { _ = conn.Close() }, err
	}
	ctx, cancel := a.bounded(context.Background())
	defer cancel()
	way, err := a.cluster.Connect(ctx, a.system, a.namespace, a.account)
	if err != nil {
		return nil, nil, err
	}
	a.address = "tls://" + way.Address // for messages
	trust := identity.Credentials{Bundle: identity.NewBundleFile(func() ([]byte, error) { return way.CA, nil }).Bundle}
	conn, err := grpc.NewClient("passthrough:///"+way.Address,
		grpc.WithTransportCredentials(credentials.NewTLS(trust.ServiceClient(way.ServerName))), grpc.WithPerRPCCredentials(identity.Bearer(way.Token)))
	if err != nil {
		way.Close()
		return nil, nil, err
	}
	return conn, func() {
		_ = conn.Close()
		way.Close()
	}, nil
}

// dial makes the connection. A unix socket is guarded by its file's permissions; over a network there is TLS, and a token
// says who calls.
func (a *app) dial() (*grpc.ClientConn, error) {
	target, options := a.address, []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if hostPort, network := strings.CutPrefix(a.address, "tls://"); network {
		host, _, err := net.SplitHostPort(hostPort)
		if err != nil {
			return nil, usagef("--address %q: write tls://host:port: %v", a.address, err)
		}
		if a.serverName != "" {
			host = a.serverName
		}
		var trust identity.Credentials // the CAs of this machine
		if a.caFile != "" {
			trust.Bundle = identity.NewBundleFile(func() ([]byte, error) { return os.ReadFile(a.caFile) }).Bundle
		}
		target = "dns:///" + hostPort
		options = []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(trust.ServiceClient(host)))}
		if a.tokenFile != "" {
			options = append(options, grpc.WithPerRPCCredentials(identity.Bearer(a.token)))
		}
	} else if !strings.HasPrefix(a.address, "unix:") {
		return nil, usagef("--address %q: write unix:///path/of/the.sock or tls://host:port", a.address)
	}
	conn, err := grpc.NewClient(target, options...)
	if err != nil {
		return nil, usagef("--address %q: %v", a.address, err)
	}
	return conn, nil
}

// token reads the file of --token-file, anew for each call: whoever wrote it may renew it.
func (a *app) token() (string, error) {
	data, err := os.ReadFile(a.tokenFile)
	return strings.TrimSpace(string(data)), err
}

// bounded is a context with the --timeout, for calls that have an end.
func (a *app) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, a.timeout)
}

var uidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ref reads what a person types for a sandbox.
func (a *app) ref(name string) *sandboxv1.SandboxRef {
	if strings.Contains(name, "/") || uidPattern.MatchString(name) {
		return &sandboxv1.SandboxRef{Id: name}
	}
	return &sandboxv1.SandboxRef{Namespace: a.namespace, Name: name}
}

// failure is what fluxctl was to do and could not.
type failure struct {
	what string
	err  error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// printError prints an error as one line, and who holds a busy volume as a table.
func (a *app) printError(err error) {
	what := ""
	var f *failure
	if errors.As(err, &f) {
		what, err = "cannot "+f.what+": ", f.err
	}
	st, isStatus := status.FromError(err)
	if !isStatus {
		fmt.Fprintf(a.Err, "fluxctl: %s%s\n", what, oneLine(err.Error()))
		return
	}
	known := fault.FromGRPC(err)
	reason := fault.ReasonOf(known)
	switch {
	case st.Code() == codes.Unavailable && len(st.Details()) == 0 && strings.Contains(st.Message(), "permission denied"):
		fmt.Fprintf(a.Err, "fluxctl: %sthe socket %s may not be opened by this user: run fluxctl as root, or set listenGroup in the server's configuration\n", what, a.address)
	case st.Code() == codes.Unavailable && len(st.Details()) == 0 && !strings.HasPrefix(a.address, "unix:"):
		fmt.Fprintf(a.Err, "fluxctl: %sno connection to %s: %s\n", what, a.address, oneLine(st.Message()))
	case st.Code() == codes.Unavailable && len(st.Details()) == 0:
		fmt.Fprintf(a.Err, "fluxctl: %sno server answers at %s: start it with: flux-sandbox serve (as root); or name another by --address or %s\n", what, a.address, AddressEnv)
	case st.Code() == codes.DeadlineExceeded && len(st.Details()) == 0:
		fmt.Fprintf(a.Err, "fluxctl: %sthe server did not answer within %s: try again, or wait longer with --timeout\n", what, a.timeout)
	case len(st.Details()) == 0:
		fmt.Fprintf(a.Err, "fluxctl: %s%s [%s]\n", what, oneLine(st.Message()), st.Code())
	default:
		fmt.Fprintf(a.Err, "fluxctl: %s%s [%s]\n", what, oneLine(st.Message()), reason)
	}
	for _, busy := range fault.Details[*sandboxv1.BusyInfo](err) {
		t := newTable(a.Err, "PID", "COMMAND", "HOLDS BY")
		for _, h := range busy.GetHolders() {
			holder := convert.Holder(h)
			t.row(fmt.Sprint(holder.PID), holder.Command, holder.Kind)
		}
		_ = t.flush()
	}
}

// oneLine makes one line of a text for a terminal. What it says may come from inside a sandbox (the name of a process, of
// a file): a control character in it would be a command to the terminal.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return utf8.RuneError
	}, s)
}
