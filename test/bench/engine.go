package main

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/agenttest"
	"github.com/flux-sandbox/flux-sandbox/internal/containers/containerstest"
)

// timedServer serves the node's agent once more, with a clock inside the server: what it measures is the agent without
// the socket.
type timedServer struct {
	client agentv1.AgentServiceClient
	// attach and detach are the times of the calls, by their order: one client, one call at a time.
	attach, detach samples
}

func serveTimed(p *program, n *agenttest.Node) *timedServer {
	t := &timedServer{}
	server := agent.NewServer(n.Agent, grpc.ChainUnaryInterceptor(
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (resp any, err error) {
			into := &t.attach
			if _, ok := req.(*agentv1.DetachRequest); ok {
				into = &t.detach
			}
			into.add(func() { resp, err = next(ctx, req) })
			return resp, err
		}))
	socket := filepath.Join(n.Env.Dir, "timed.sock")
	l, err := net.Listen("unix", socket)
	p.must(err)
	go func() { _ = server.Serve(l) }() // ends with Stop
	p.Cleanup(server.Stop)
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	p.must(err)
	p.Cleanup(func() { _ = conn.Close() })
	t.client = agentv1.NewAgentServiceClient(conn)
	return t
}

// attachBudget is the limit for an attach inside the agent.
const attachBudget = 300 * time.Microsecond

func benchEngine(p *program, r *report, s sizes) {
	n := agenttest.NewOn(p, containerstest.New(p), nil)
	sb := n.Run(p, agenttest.Sandbox{Tenant: "t1"})
	source := n.Dir(p, "t1", "data")
	sb.Shell(p, "mkdir /raw")
	sb.Attach(p, agenttest.Volume{Source: source, Target: "/other"}) // keeps the source prepared

	bare, err := enterRaw(sb.PID(p))
	p.must(err)
	timed := serveTimed(p, n)
	stages := map[string]samples{}
	var rawAttach, rawDetach, attach, detach samples
	op := 0
	command := func() *agentv1.Command {
		op++
		return &agentv1.Command{Epoch: 1, LeaseUid: "test", SandboxUid: sb.UID, Generation: 1, OperationId: fmt.Sprint("bench", op)}
	}
	request := sb.AttachRequest(agenttest.Volume{Source: source, Target: "/data"})
	pair := func() {
		request.Command = command()
		_, err := timed.client.Attach(p.Context(), request)
		p.must(err)
		_, err = timed.client.Detach(p.Context(), &agentv1.DetachRequest{Command: command(), Target: "/data"})
		p.must(err)
	}
	// A handful to warm up. In turns, so that what else the machine does hits all alike.
	for range 20 {
		pair()
	}
	timed.attach, timed.detach = nil, nil
	if s.profile != "" {
		f, err := os.Create(s.profile)
		p.must(err)
		p.must(pprof.StartCPUProfile(f))
		p.Cleanup(func() { pprof.StopCPUProfile(); p.must(f.Close()) })
	}
	for range s.pairs {
		if s.profile == "" {
			rawAttach.add(func() { p.must(bare.attach(source, "raw")) })
			rawDetach.add(func() { p.must(bare.detach("raw")) })
		}
		request.Command = command()
		var answer *agentv1.AttachResponse
		attach.add(func() {
			var err error
			answer, err = timed.client.Attach(p.Context(), request)
			p.must(err)
		})
		for _, stage := range answer.GetRecord().GetStages() {
			stages[stage.GetName()] = append(stages[stage.GetName()], stage.GetDuration().AsDuration())
		}
		detach.add(func() {
			_, err := timed.client.Detach(p.Context(), &agentv1.DetachRequest{Command: command(), Target: "/data"})
			p.must(err)
		})
	}
	bare.close()
	r.times("system calls alone: attach", rawAttach, "", nil)
	r.times("system calls alone: detach", rawDetach, "", nil)
	r.times("agent: attach of a prepared source, journal included", timed.attach, "system calls", rawAttach)
	for _, name := range slices.Sorted(maps.Keys(stages)) {
		r.times("… of which "+name, stages[name], "", nil)
	}
	r.times("agent: detach, journal included", timed.detach, "system calls", rawDetach)
	r.times("agent through its socket: attach", attach, "system calls", rawAttach)
	r.times("agent through its socket: detach", detach, "system calls", rawDetach)
	figure := timed.attach.median()
	r.budget("attach of a prepared source, inside the agent, journal included", "p50 ≤ 0.3 ms", span(figure), figure <= attachBudget)
}
