package certificates

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"
	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/cache"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	"k8s.io/utils/clock"

	nodev1 "github.com/flux-sandbox/flux-sandbox/api/proto/node/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/tokens"
)

// DefaultAudience is the audience of agents' tokens.
const DefaultAudience = "sandbox.flux.io/agent"

// The claims of a ServiceAccount's token that is bound to a Pod, as TokenReview returns them
// (k8s.io/apiserver/pkg/authentication/serviceaccount: NodeNameKey, PodNameKey, PodUIDKey).
const (
	nodeNameClaim = "authentication.kubernetes.io/node-name"
	podNameClaim  = "authentication.kubernetes.io/pod-name"
	podUIDClaim   = "authentication.kubernetes.io/pod-uid"
)

const (
	// A node gets this many certificates at once, for an agent that restarts, and then one in this time, for each
	// replica. Renewal needs one in four hours.
	nodeBurst = 10
	nodeEvery = 30 * time.Second
	// maxNodes bounds what is remembered for the limit; who is forgotten, longest unseen first, begins anew.
	maxNodes = 1 << 14
	// maxReviews is how many tokens are checked at a time, so that strangers cannot keep the API server busy by us.
	maxReviews = 16
)

// ServiceOptions are what a Service is made of.
type ServiceOptions struct {
	// Reviews checks tokens; required.
	Reviews authenticationclient.TokenReviewInterface
	// Authority signs; required.
	Authority *Authority
	// ServiceAccount is the agents'; required.
	ServiceAccount types.NamespacedName
	// Audience is what tokens must be for; DefaultAudience when empty.
	Audience string
	// Issued is told of every answer, for metrics: its reason, empty for a certificate. May be nil.
	Issued func(reason fault.Reason)
	// Clock is the system's when nil.
	Clock clock.PassiveClock
	// Logger is slog's default when nil.
	Logger *slog.Logger
}

// Service signs the certificates of agents.
type Service struct {
	nodev1.UnimplementedNodeCertificateServiceServer
	options ServiceOptions
	log     *slog.Logger
	reviews *semaphore.Weighted

	mu     sync.Mutex // held from looking up a node's limit to storing it
	limits *cache.LRUExpireCache
}

// NewService makes a Service.
func NewService(options ServiceOptions) (*Service, error) {
	if options.Reviews == nil || options.Authority == nil || options.ServiceAccount.Name == "" || options.ServiceAccount.Namespace == "" {
		return nil, errors.New("certificates: Reviews, Authority and ServiceAccount are required")
	}
	if options.Audience == "" {
		options.Audience = DefaultAudience
	}
	if options.Issued == nil {
		options.Issued = func(fault.Reason) {}
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	return &Service{
		options: options,
		log:     options.Logger,
		reviews: semaphore.NewWeighted(maxReviews),
		limits:  cache.NewLRUExpireCacheWithClock(maxNodes, options.Clock),
	}, nil
}

// NewServer makes the gRPC server of a Service, for a listener of its own. The configuration is that of
// identity.Credentials.ControllerServer; refused is told of connections that fail.
func NewServer(s *Service, config *tls.Config, refused func(error)) *grpc.Server {
	options := append(identity.ServerOptions(config, identity.ConnectionAge, refused),
		grpc.MaxRecvMsgSize(64<<10), // a request is less than 1 KiB
		grpc.MaxHeaderListSize(64<<10),
		grpc.MaxConcurrentStreams(8),
		grpc.UnaryInterceptor(s.intercept))
	server := grpc.NewServer(options...)
	nodev1.RegisterNodeCertificateServiceServer(server, s)
	return server
}

// intercept makes a status of an error, and an error of a panic.
func (s *Service) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (resp any, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("panic in a call", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			resp, err = nil, fault.ToGRPC(fault.New(errdefs.ErrInternal, fault.Internal, "the controller failed; its log says where: please report it"))
		}
	}()
	resp, err = next(ctx, req)
	return resp, fault.ToGRPC(err)
}

// agentPod is who a token says its holder is.
type agentPod struct{ node, name, uid string }

// Issue signs a certificate for the node of the caller's token.
func (s *Service) Issue(ctx context.Context, r *nodev1.IssueRequest) (*nodev1.IssueResponse, error) {
	pod, resp, err := s.issue(ctx, r)
	log := s.log.With("node", pod.node, "pod", pod.name, "podUID", pod.uid)
	if err != nil {
		s.options.Issued(fault.ReasonOf(err))
		log.Warn("certificate refused", "reason", fault.ReasonOf(err), "error", err, "cause", tokens.Cause(err))
		return nil, err
	}
	s.options.Issued("")
	log.Info("certificate issued", "validUntil", resp.GetNotAfter().AsTime())
	return resp, nil
}

func (s *Service) issue(ctx context.Context, r *nodev1.IssueRequest) (agentPod, *nodev1.IssueResponse, error) {
	pod, err := s.authenticate(ctx)
	if err != nil {
		return pod, nil, err
	}
	if !s.limit(pod.node).AllowN(s.options.Clock.Now(), 1) {
		return pod, nil, fault.New(errdefs.ErrResourceExhausted, fault.RateLimited, "the agent of node %s asked for certificates too often: ask again in %s", pod.node, nodeEvery)
	}
	id, err := identity.Agent(pod.node)
	if err != nil {
		return pod, nil, err
	}
	key, err := identity.CheckRequest(r.GetCsr(), id)
	if err != nil {
		return pod, nil, err
	}
	issued, err := s.options.Authority.Agent(pod.node, key)
	if err != nil {
		return pod, nil, signing(err)
	}
	leaf, err := x509.ParseCertificate(issued.Chain[0])
	if err != nil {
		return pod, nil, signing(err)
	}
	return pod, &nodev1.IssueResponse{Chain: issued.Chain, Bundle: issued.Bundle.DER(), NotAfter: timestamppb.New(leaf.NotAfter)}, nil
}

// authenticate is who calls: the agent's Pod, by its token.
func (s *Service) authenticate(ctx context.Context) (agentPod, error) {
	token, err := tokens.Bearer(ctx)
	if err != nil {
		return agentPod{}, err
	}
	if err := s.reviews.Acquire(ctx, 1); err != nil {
		return agentPod{}, tokens.Unavailable(err, "the token could not be checked in time: try again")
	}
	user, err := tokens.Review(ctx, s.options.Reviews, token, s.options.Audience)
	s.reviews.Release(1)
	if err != nil {
		return agentPod{}, err
	}
	want := s.options.ServiceAccount
	if user.Username != "system:serviceaccount:"+want.Namespace+":"+want.Name {
		return agentPod{}, forbidden("%s gets no certificate: it is not the agents' ServiceAccount", user.Username)
	}
	pod := agentPod{node: claim(user, nodeNameClaim), name: claim(user, podNameClaim), uid: claim(user, podUIDClaim)}
	if pod.node == "" || pod.name == "" || pod.uid == "" {
		return pod, forbidden("the token is not bound to a Pod on a node: use the one that kubelet projects into the agent's Pod")
	}
	return pod, nil
}

// claim is a claim that a token has once; empty otherwise.
func claim(user authenticationv1.UserInfo, name string) string {
	if values := user.Extra[name]; len(values) == 1 {
		return values[0]
	}
	return ""
}

// limit is a node's limit.
func (s *Service) limit(node string) *rate.Limiter {
	s.mu.Lock()
	defer s.mu.Unlock()
	limiter, ok := s.limits.Get(node)
	if !ok {
		limiter = rate.NewLimiter(rate.Every(nodeEvery), nodeBurst)
	}
	s.limits.Add(node, limiter, nodeBurst*nodeEvery) // after that it would be full again
	return limiter.(*rate.Limiter)
}

func forbidden(format string, args ...any) error {
	return fault.New(errdefs.ErrPermissionDenied, fault.Forbidden, format, args...)
}

// signing hides from the caller why the CA does not sign; the log has it.
func signing(err error) error {
	return &fault.Error{Kind: errdefs.ErrUnavailable, Reason: fault.AuthUnavailable, Message: "the controller cannot sign certificates at the moment; its log says why", Err: err}
}
