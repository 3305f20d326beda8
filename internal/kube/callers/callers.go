package callers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/containerd/errdefs"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/clock"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/tokens"
)

// DefaultAudience is the audience of tokens for the gRPC API.
const DefaultAudience = "sandbox.flux.io/api"

// How long answers are remembered, and how many.
const (
	keepUser    = 30 * time.Second
	keepAllowed = 10 * time.Second
	keepDenied  = 2 * time.Second
	// keepWhileAway is how long the last answer holds, for reads alone, while the API server does not answer.
	keepWhileAway = 10 * time.Minute
	maxUsers      = 1 << 12
	maxRights     = 1 << 14
	maxTenants    = 1 << 12
)

// reads are the verbs that go on while the API server is away.
var reads = map[string]bool{"get": true, "list": true, "watch": true}

// Options are what Callers are made of.
type Options struct {
	// Tokens and Access ask the API server; required.
	Tokens authenticationclient.TokenReviewInterface
	Access authorizationclient.SubjectAccessReviewInterface
	// Namespaces has the Namespaces, whose label names their tenant, and NamespaceClient reads one that is not there yet;
	// required.
	Namespaces      corev1listers.NamespaceLister
	NamespaceClient corev1client.NamespaceInterface
	// Audience is what tokens must be for; DefaultAudience when empty.
	Audience string
	// APIServerTokens accepts tokens that are meant for the API server itself, too. Whoever runs this server could
	// use such a token there as its owner: the operator decides.
	APIServerTokens bool
	// Clock is the system's when nil.
	Clock clock.PassiveClock
	// Logger is slog's default when nil.
	Logger *slog.Logger
}

// Callers authenticates and authorises. Methods may be called from any goroutine.
type Callers struct {
	options Options
	log     *slog.Logger
	users   *answers[grpcapi.Identity]
	rights  *answers[bool]
	tenants *answers[string]
}

var (
	_ grpcapi.Authenticator = (*Callers)(nil)
	_ grpcapi.Authorizer    = (*Callers)(nil)
)

// New makes Callers.
func New(options Options) (*Callers, error) {
	if options.Tokens == nil || options.Access == nil || options.Namespaces == nil || options.NamespaceClient == nil {
		return nil, errors.New("callers: Tokens, Access, Namespaces and NamespaceClient are required")
	}
	if options.Audience == "" {
		options.Audience = DefaultAudience
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	away := &outage{}
	return &Callers{
		options: options,
		log:     options.Logger,
		users:   newAnswers[grpcapi.Identity](maxUsers, options.Clock, away),
		rights:  newAnswers[bool](maxRights, options.Clock, away),
		tenants: newAnswers[string](maxTenants, options.Clock, away),
	}, nil
}

// Authenticate is whose token the call has. Errors: ErrUnauthenticated; ErrUnavailable, reason AUTH_UNAVAILABLE.
func (c *Callers) Authenticate(ctx context.Context) (grpcapi.Identity, error) {
	token, err := tokens.Bearer(ctx)
	if err != nil {
		return grpcapi.Identity{}, err
	}
	caller, err := c.users.get(ctx, []byte(token), func(ctx context.Context) (answer[grpcapi.Identity], error) {
		says := claimsOf(token)
		user, err := tokens.Review(ctx, c.options.Tokens, token, c.audience(says))
		return answer[grpcapi.Identity]{identityOf(user), c.keep(says, keepUser), c.keep(says, keepWhileAway)}, err
	})
	if err != nil {
		c.log.Info("caller not authenticated", "reason", fault.ReasonOf(err), "cause", tokens.Cause(err))
	}
	return caller, err
}

// audience is for whom to have a token checked. What the token says of itself, which nobody has verified yet, only
// decides which of two questions is asked; the API server answers it.
func (c *Callers) audience(says claims) string {
	if c.options.APIServerTokens && !says.meantFor(c.options.Audience) {
		return "" // the API server
	}
	return c.options.Audience
}

// keep is how long the answer about a token is remembered, at most for a time. A token that does not say when it ends, since
// it is no JWT or says nothing, ends for us then.
func (c *Callers) keep(says claims, most time.Duration) time.Duration {
	if says.Expires == nil {
		return min(most, keepUser)
	}
	left := time.Duration((*says.Expires - float64(c.options.Clock.Now().Unix())) * float64(time.Second))
	return min(left, most)
}

func identityOf(user authenticationv1.UserInfo) grpcapi.Identity {
	caller := grpcapi.Identity{Name: user.Username, UID: user.UID, Groups: user.Groups}
	for k, v := range user.Extra {
		if caller.Extra == nil {
			caller.Extra = map[string][]string{}
		}
		caller.Extra[k] = v
	}
	return caller
}

// Authorize asks the API server, and returns the tenant of the namespace. Errors: ErrPermissionDenied, reason
// FORBIDDEN; ErrUnavailable, reason AUTH_UNAVAILABLE; NAMESPACE_NOT_FOUND.
func (c *Callers) Authorize(ctx context.Context, caller grpcapi.Identity, access grpcapi.Access) (string, error) {
	of := resourceOf(access)
	spec := authorizationv1.SubjectAccessReviewSpec{
		User: caller.Name, UID: caller.UID, Groups: caller.Groups,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Namespace: access.Namespace, Name: access.Name, Verb: access.Verb,
			Group: of.Group, Version: of.Version, Resource: of.Resource, Subresource: access.Subresource,
		},
	}
	for k, v := range caller.Extra {
		if spec.Extra == nil {
			spec.Extra = map[string]authorizationv1.ExtraValue{}
		}
		spec.Extra[k] = v
	}
	question, err := json.Marshal(spec)
	if err != nil {
		return "", err
	}
	allowed, err := c.rights.get(ctx, question, func(ctx context.Context) (answer[bool], error) {
		review, err := c.options.Access.Create(ctx, &authorizationv1.SubjectAccessReview{Spec: spec}, metav1.CreateOptions{})
		if err != nil {
			return answer[bool]{}, tokens.Unavailable(err, "the caller's rights could not be checked, as the API server did not answer: try again")
		}
		if review.Status.Allowed && !review.Status.Denied {
			yes := answer[bool]{value: true, keep: keepAllowed}
			if reads[access.Verb] {
				yes.away = keepWhileAway
			}
			return yes, nil
		}
		c.log.Info("access denied", "user", caller.Name, "verb", access.Verb, "resource", of.Resource, "subresource", access.Subresource, "namespace", access.Namespace,
			"name", access.Name, "why", review.Status.Reason, "evaluationError", review.Status.EvaluationError)
		return answer[bool]{keep: keepDenied}, nil
	})
	if err != nil {
		return "", err
	}
	if !allowed {
		return "", denied(caller, access)
	}
	if access.Namespace == "" {
		return "", nil
	}
	return c.tenant(ctx, access.Namespace)
}

// resourceOf is what a call is about, for the API server.
func resourceOf(access grpcapi.Access) schema.GroupVersionResource {
	if access.Resource != "" {
		return agentsv1alpha1.GroupVersion.WithResource(access.Resource)
	}
	return v1alpha1.GroupVersion.WithResource("sandboxes")
}

// denied says who may not do what, and where.
func denied(caller grpcapi.Identity, access grpcapi.Access) error {
	of := resourceOf(access)
	resource := of.Resource
	if access.Subresource != "" {
		resource += "/" + access.Subresource
	}
	what := fmt.Sprintf("%s %s", access.Verb, resource)
	if access.Name != "" {
		what += fmt.Sprintf(" of %q", access.Name)
	}
	where := "in all namespaces: name one, or get the right by a ClusterRoleBinding"
	if access.Namespace != "" {
		where = fmt.Sprintf("in namespace %q: a Role with that verb on %s.%s there gives the right", access.Namespace, resource, of.Group)
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.Forbidden, "user %q may not %s %s", caller.Name, what, where)
}
