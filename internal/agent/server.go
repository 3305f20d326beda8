package agent

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/agent/journal"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/mount"
)

// server is the gRPC face of the agent.
type server struct {
	agentv1.UnimplementedAgentServiceServer
	*Agent
}

// streamWorkers is how many goroutines wait for calls. A call on one of them finds a stack that is large enough already; to
// grow that of a fresh one costs 50 µs. Streams that stay open hold one each; calls beyond that get a goroutine of their
// own.
const streamWorkers = 16

// NewServer makes a gRPC server of an agent. Who may call it is decided by its listener: a socket's permissions, or TLS.
func NewServer(a *Agent, options ...grpc.ServerOption) *grpc.Server {
	options = append(options,
		grpc.ChainUnaryInterceptor(a.aroundUnary),
		grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if !a.ready.Load() {
				return fault.ToGRPC(recovering())
			}
			return fault.ToGRPC(a.guard(func() error { return next(srv, stream) }))
		}))
	options = append(options, grpc.StaticStreamWindowSize(agentv1.Window), grpc.StaticConnWindowSize(agentv1.Window), allowKeepAlive(),
		grpc.NumStreamWorkers(streamWorkers))
	s := grpc.NewServer(options...)
	agentv1.RegisterAgentServiceServer(s, &server{Agent: a})
	h := health.NewServer()
	h.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
	healthv1.RegisterHealthServer(s, h)
	return s
}

// Service is an agent's service for a caller in its own process, and what goes around each of its unary calls there.
func Service(a *Agent) (agentv1.AgentServiceServer, grpc.UnaryServerInterceptor) {
	return &server{Agent: a}, a.aroundUnary
}

func (a *Agent) aroundUnary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if !a.ready.Load() {
		return nil, fault.ToGRPC(recovering())
	}
	var resp any
	err := a.guard(func() (err error) {
		resp, err = next(ctx, req)
		return err
	})
	return resp, fault.ToGRPC(err)
}

// guard turns a panic of a handler into an error: one bad request must not take the node's agent down.
func (a *Agent) guard(handle func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			a.log.Error("panic in a call", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = fault.New(errdefs.ErrInternal, fault.Internal, "the agent failed; its log says where: please report it")
		}
	}()
	return handle()
}

func recovering() error {
	return fault.New(errdefs.ErrUnavailable, fault.AgentRecovering, "the agent is still repairing the node after its start; try again in a moment")
}

func (s *server) CreateSandbox(ctx context.Context, r *agentv1.CreateSandboxRequest) (*agentv1.SandboxState, error) {
	if err := s.create(ctx, containerSpec(r), s.fenceOf(r.GetCommand(), "")); err != nil {
		return nil, err
	}
	return s.state(r.GetCommand().GetSandboxUid()), nil
}

func (s *server) StartSandbox(ctx context.Context, r *agentv1.StartSandboxRequest) (*agentv1.SandboxState, error) {
	sb, err := s.known(r.GetCommand().GetSandboxUid())
	if err != nil {
		return nil, err
	}
	if err := s.start(ctx, sb, s.fenceOf(r.GetCommand(), "")); err != nil {
		return nil, err
	}
	return s.state(sb.uid), nil
}

func (s *server) StopSandbox(ctx context.Context, r *agentv1.StopSandboxRequest) (*agentv1.SandboxState, error) {
	sb, err := s.known(r.GetCommand().GetSandboxUid())
	if err != nil {
		return nil, err
	}
	if err := s.stopTask(ctx, sb, grace(r.GetGrace()), s.fenceOf(r.GetCommand(), "")); err != nil {
		return nil, err
	}
	return s.state(sb.uid), nil
}

func (s *server) DeleteSandbox(ctx context.Context, r *agentv1.DeleteSandboxRequest) (*agentv1.DeleteSandboxResponse, error) {
	if err := s.fence(r.GetCommand(), ""); err != nil {
		return nil, err
	}
	return &agentv1.DeleteSandboxResponse{}, s.remove(ctx, r.GetCommand().GetSandboxUid(), grace(r.GetGrace()))
}

func grace(d *durationpb.Duration) time.Duration {
	if d == nil {
		return DefaultGrace
	}
	return max(d.AsDuration(), 0)
}

func (s *server) Attach(ctx context.Context, r *agentv1.AttachRequest) (*agentv1.AttachResponse, error) {
	began := s.config.Clock.Now()
	record, already, err := s.attach(ctx, r)
	about := []any{"operationId", r.GetCommand().GetOperationId(), "sandbox", r.GetCommand().GetSandboxUid(),
		"tenant", r.GetTenantId(), "source", sourceName(r), "target", r.GetTarget(), "mode", r.GetMode()}
	s.observe("attach", began, result(err, false), record.Stages)
	if err != nil {
		s.log.Warn("volume not attached", append(about, "reason", fault.ReasonOf(err), "error", err)...)
		return nil, err
	}
	s.log.Info("volume attached", append(about, "already", already, "limit", record.Limit, "duration", s.config.Clock.Since(began))...)
	return &agentv1.AttachResponse{Record: mountRecord(record), AlreadyMounted: already}, nil
}

func (s *server) attach(ctx context.Context, r *agentv1.AttachRequest) (journal.Volume, bool, error) {
	sb, tenant, err := s.workload(ctx, r)
	if err != nil {
		return journal.Volume{}, false, err
	}
	attachment, err := s.attachment(r, tenant)
	if err != nil {
		return journal.Volume{}, false, err
	}
	attachment.Fence = s.passOf(r.GetCommand(), r.GetTarget())
	return s.updater.Attach(ctx, sb, attachment)
}

// workload is the sandbox that a volume is for, and its tenant. Before the container exists the request says whose it is.
func (s *server) workload(ctx context.Context, r *agentv1.AttachRequest) (*sandbox, string, error) {
	uid := r.GetCommand().GetSandboxUid()
	if pod := r.GetWorkload().GetPod(); pod != nil {
		return s.podWorkload(ctx, uid, pod, r)
	}
	sb, err := s.known(uid)
	if err == nil {
		c, _ := sb.seen()
		return sb, c.TenantID, nil
	}
	if r.GetWhen() == agentv1.When_AT_CREATE && uid != "" {
		return s.sandbox(uid), r.GetTenantId(), nil
	}
	return nil, "", err
}

func (s *server) Detach(ctx context.Context, r *agentv1.DetachRequest) (*agentv1.DetachResponse, error) {
	began := s.config.Clock.Now()
	out, err := s.detach(ctx, r)
	about := []any{"operationId", r.GetCommand().GetOperationId(), "sandbox", r.GetCommand().GetSandboxUid(),
		"tenant", out.Record.Request.TenantID, "source", string(out.Record.Request.Type) + ":" + out.Record.Request.Source,
		"target", r.GetTarget(), "force", r.GetForce()}
	s.observe("detach", began, result(err, out.Busy), nil)
	if err != nil {
		s.log.Warn("volume not detached", append(about, "reason", fault.ReasonOf(err), "error", err)...)
		return nil, err
	}
	resp := &agentv1.DetachResponse{ReleasePending: out.ReleasePending}
	for _, h := range out.Holders {
		resp.Holders = append(resp.Holders, &agentv1.Holder{Pid: int32(h.PID), Command: h.Command, Kind: string(h.Kind)})
	}
	switch {
	case out.Busy:
		resp.Result = agentv1.DetachResponse_BUSY
	case out.Outcome == mount.Lazy:
		resp.Result = agentv1.DetachResponse_LAZY
	case out.Outcome == mount.Absent:
		resp.Result = agentv1.DetachResponse_ABSENT
	default:
		resp.Result = agentv1.DetachResponse_DETACHED
	}
	s.log.Info("volume detach", append(about, "result", resp.Result.String(), "holders", len(resp.Holders), "duration", s.config.Clock.Since(began))...)
	return resp, nil
}

func (s *server) detach(ctx context.Context, r *agentv1.DetachRequest) (Detached, error) {
	sb := s.sandbox(r.GetCommand().GetSandboxUid())
	if err := s.freshPod(ctx, sb); err != nil {
		return Detached{}, err
	}
	return s.updater.Detach(ctx, sb, r.GetTarget(), r.GetEntryHash(), r.GetForce(),
		s.passOf(r.GetCommand(), r.GetTarget()))
}

func result(err error, busy bool) string {
	switch {
	case err != nil:
		return string(fault.ReasonOf(err))
	case busy:
		return "busy"
	}
	return "ok"
}

func (s *server) observe(operation string, began time.Time, result string, stages []journal.Stage) {
	s.metrics.operations.WithLabelValues(operation, result).Inc()
	s.metrics.duration.WithLabelValues(operation).Observe(s.config.Clock.Since(began).Seconds())
	for _, stage := range stages {
		s.metrics.stages.WithLabelValues(stage.Name).Observe(stage.Duration.Seconds())
	}
}

// sourceName names a request's source in logs, without its secrets.
func sourceName(r *agentv1.AttachRequest) slog.Value {
	switch src := r.GetSource().(type) {
	case *agentv1.AttachRequest_Local:
		return slog.StringValue("local:" + src.Local.GetPath())
	case *agentv1.AttachRequest_Csi:
		return slog.StringValue("csi:" + src.Csi.GetDriver() + "/" + src.Csi.GetVolumeHandle())
	case *agentv1.AttachRequest_Anchor:
		return slog.StringValue("anchor:" + src.Anchor.GetPvName())
	case *agentv1.AttachRequest_Snapshot:
		return slog.StringValue("snapshot:" + src.Snapshot.GetImage())
	case *agentv1.AttachRequest_Oss:
		return slog.StringValue("oss:" + src.Oss.GetBucket() + "/" + src.Oss.GetPrefix())
	}
	return slog.StringValue("")
}

func (s *server) Inventory(r *agentv1.InventoryRequest, stream agentv1.AgentService_InventoryServer) error {
	if err := s.fenceFollower(r); err != nil {
		return err
	}
	f, leave := s.inventory.follow()
	defer leave()
	_, _, revision := s.inventory.take(f)
	u := s.update(nil, nil, revision, true)
	u.EpochSeen = s.journal.Epoch(r.GetLeaseUid())
	if err := stream.Send(u); err != nil {
		return err
	}
	for {
		select {
		case <-f.signal:
		case <-stream.Context().Done():
			return nil
		case <-s.stopping.Done():
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping")
		}
		uids, keys, revision := s.inventory.take(f)
		u := s.update(uids, keys, revision, false)
		u.EpochSeen = s.journal.Epoch(r.GetLeaseUid())
		if err := stream.Send(u); err != nil {
			return err
		}
	}
}

// fenceFollower notes a follower's epoch, so that a new leader shuts the old one out before its first command. One that
// is not the leader any more may still look.
func (s *server) fenceFollower(r *agentv1.InventoryRequest) error {
	s.fenceMu.Lock()
	defer s.fenceMu.Unlock()
	if r.GetEpoch() <= s.journal.Epoch(r.GetLeaseUid()) {
		return nil
	}
	return s.journal.Write(journal.Change{PutEpochs: map[string]int64{r.GetLeaseUid(): r.GetEpoch()}})
}

func (s *server) Probe(context.Context, *agentv1.ProbeRequest) (*agentv1.ProbeResponse, error) {
	resp := &agentv1.ProbeResponse{}
	for _, f := range mount.Probe() {
		c := &agentv1.ProbeCheck{Name: f.Name, Status: "OK", Detail: f.Purpose, Required: f.Needed}
		if !f.OK {
			c.Status, c.Detail = "DEGRADED", f.Purpose+": "+f.Detail
			if f.Needed {
				c.Status = "MISSING"
			}
		}
		resp.Checks = append(resp.Checks, c)
	}
	return resp, nil
}
