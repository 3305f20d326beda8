package agent_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
	"github.com/flux-sandbox/flux-sandbox/internal/pods"
)

// childEnv is the environment variable by which the test binary is an agent, described by its value, instead of tests.
const childEnv = "FLUX_TEST_AGENT"

// child describes an agent that runs as a process of its own, so that it can be killed.
type child struct {
	Dir, Init, Logger string // of the containers' environment
	Hook, HookSocket  string
	Data, Run, Socket string
	Containerd, NRI   string // of the Pods; empty for none
	Kubelet           string // kubelet's folder, for volumes of anchors; empty for none
	Ready             string // a file that is made when it serves
}

// runChildIfAsked runs the agent that the environment describes, and does not return then.
func runChildIfAsked() {
	description := os.Getenv(childEnv)
	if description == "" {
		return
	}
	var c child
	err := json.Unmarshal([]byte(description), &c)
	if err == nil {
		err = c.serve()
	}
	fmt.Fprintln(os.Stderr, "agent:", err)
	os.Exit(1)
}

func (c child) serve() error {
	ctx := context.Background()
	env := containerstest.Env{Dir: c.Dir, InitPath: c.Init, LoggerPath: c.Logger}
	runtime, err := containers.Open(ctx, env.Config())
	if err != nil {
		return err
	}
	sources, err := agenttest.SourcesIn(c.Data)
	if err != nil {
		return err
	}
	config := agent.Config{Node: "node", RunDir: c.Run, Containers: runtime, Sources: sources}
	if c.Kubelet != "" {
		if sources[v1alpha1.VolumeTypePVC], err = anchorsIn(c.Run, c.Kubelet); err != nil {
			return err
		}
	}
	connected := func() bool { return true }
	if c.Containerd != "" {
		p, err := pods.Open(ctx, pods.Config{Address: c.Containerd, NRISocket: c.NRI, HookProgram: c.Hook, HookSocket: c.HookSocket})
		if err != nil {
			return err
		}
		config.Pods, connected = p, p.Connected
	}
	a, err := agent.Open(ctx, config)
	if err != nil {
		return err
	}
	if err := os.Remove(c.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", c.Socket)
	if err != nil {
		return err
	}
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for !connected() {
		<-ticker.C
	}
	if err := os.WriteFile(c.Ready, nil, 0o600); err != nil {
		return err
	}
	return agent.NewServer(a).Serve(l)
}

// startChild starts the node's agent as a process of its own, and returns what kills it.
func (p *podNode) startChild(t *testing.T) (kill func()) {
	t.Helper()
	cmd, ready := p.childCommand(t)
	kill = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	t.Cleanup(kill)
	awaitChild(t, cmd, ready)
	return kill
}

// childCommand is the node's agent as a process of its own that was not started yet, and the file that it makes when
// it serves.
func (p *podNode) childCommand(t *testing.T) (cmd *exec.Cmd, ready string) {
	t.Helper()
	return childOf(t, p.Node, child{Hook: p.Env.HookPath, HookSocket: p.hook, Containerd: p.env.Address, NRI: p.nri})
}

// childOf is childCommand of any node. c says what the node itself does not.
func childOf(t *testing.T, n *agenttest.Node, c child) (cmd *exec.Cmd, ready string) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	ready = filepath.Join(t.TempDir(), "ready")
	c.Dir, c.Init, c.Logger, c.Data, c.Run, c.Socket, c.Ready = n.Env.Dir, n.Env.InitPath, n.Env.LoggerPath, n.Data, n.RunDir(), n.Socket(), ready
	description, err := json.Marshal(c)
	must(t, err)
	cmd = exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+string(description))
	cmd.Stderr = os.Stderr
	return cmd, ready
}

// awaitChild starts an agent's process and waits until it serves.
func awaitChild(t *testing.T, cmd *exec.Cmd, ready string) {
	t.Helper()
	must(t, cmd.Start())
	agenttest.Eventually(t, "the agent's process serves", func() bool { _, err := os.Stat(ready); return err == nil })
}
