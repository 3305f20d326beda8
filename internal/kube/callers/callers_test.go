package callers

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/metadata"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	corev1listers "k8s.io/client-go/listers/core/v1"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/tokens"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

var (
	start  = time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)
	silent = slog.New(slog.NewTextHandler(io.Discard, nil))
)

// apiServer is a fake one that knows tokens by their audience and what alice may do.
type apiServer struct {
	*fake.Clientset
	reviews, questions atomic.Int32

	mu    sync.Mutex // guards what follows
	down  bool
	valid map[string][]string // token → audiences; the API server's own is ""
	may   map[string]bool
	specs []authorizationv1.SubjectAccessReviewSpec
}

func newAPIServer() *apiServer {
	s := &apiServer{Clientset: fake.NewClientset(), valid: map[string][]string{}, may: map[string]bool{}}
	s.PrependReactor("get", "namespaces", func(action k8stesting.Action) (bool, runtime.Object, error) {
		name := action.(k8stesting.GetAction).GetName()
		return true, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1alpha1.LabelTenantID: "tenant-of-" + name}}}, nil
	})
	s.PrependReactor("create", "tokenreviews", func(action k8stesting.Action) (bool, runtime.Object, error) {
		s.reviews.Add(1)
		s.mu.Lock()
		defer s.mu.Unlock()
		review := action.(k8stesting.CreateAction).GetObject().(*authenticationv1.TokenReview)
		if s.down {
			return true, nil, errors.New("no route to 10.0.0.1")
		}
		wanted := append([]string(nil), review.Spec.Audiences...)
		if len(wanted) == 0 {
			wanted = []string{""}
		}
		for _, a := range s.valid[review.Spec.Token] {
			if slices.Contains(wanted, a) {
				review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, Audiences: []string{a},
					User: authenticationv1.UserInfo{Username: "alice", UID: "u-1", Groups: []string{"dev"}, Extra: map[string]authenticationv1.ExtraValue{"x": {"y"}}}}
				return true, review, nil
			}
		}
		review.Status.Error = "token audiences are invalid for 10.0.0.1"
		return true, review, nil
	})
	s.PrependReactor("create", "subjectaccessreviews", func(action k8stesting.Action) (bool, runtime.Object, error) {
		s.questions.Add(1)
		s.mu.Lock()
		defer s.mu.Unlock()
		review := action.(k8stesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview)
		if s.down {
			return true, nil, errors.New("no route to 10.0.0.1")
		}
		s.specs = append(s.specs, review.Spec)
		a := review.Spec.ResourceAttributes
		review.Status.Allowed = s.may[fmt.Sprint(review.Spec.User, " ", a.Verb, " ", a.Resource, "/", a.Subresource, " ", a.Namespace)]
		return true, review, nil
	})
	return s
}

func (s *apiServer) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *apiServer) callers(t *testing.T, change ...func(*Options)) (*Callers, *testclock.FakePassiveClock) {
	t.Helper()
	clock := testclock.NewFakePassiveClock(start)
	o := Options{
		Tokens: s.AuthenticationV1().TokenReviews(), Access: s.AuthorizationV1().SubjectAccessReviews(),
		Namespaces: corev1listers.NewNamespaceLister(cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)), NamespaceClient: s.CoreV1().Namespaces(),
		Clock: clock, Logger: silent,
	}
	for _, c := range change {
		c(&o)
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c, clock
}

// jwt is a token with claims that nobody signed.
func jwt(t *testing.T, claims map[string]any) string {
	t.Helper()
	text, err := json.Marshal(claims)
	if err != nil {
		t.Fatal(err)
	}
	encode := base64.RawURLEncoding.EncodeToString
	return encode([]byte(`{"alg":"RS256"}`)) + "." + encode(text) + "." + encode([]byte("signature"))
}

func bearing(ctx context.Context, token string) context.Context {
	return metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", "Bearer "+token))
}

func TestWhoCalls(t *testing.T) {
	forUs := jwt(t, map[string]any{"aud": []string{"x", DefaultAudience}})
	forAPIServer := jwt(t, map[string]any{"aud": "https://kubernetes.default.svc"})
	pretender := jwt(t, map[string]any{"aud": DefaultAudience, "sub": "admin"})
	for name, tc := range map[string]struct {
		token           string
		valid           []string
		apiServerTokens bool
		reason          fault.Reason
	}{
		"for us":                                {forUs, []string{DefaultAudience}, false, ""},
		"for us, API server's accepted":         {forUs, []string{DefaultAudience}, true, ""},
		"for the API server":                    {forAPIServer, []string{""}, true, ""},
		"for the API server, not accepted":      {forAPIServer, []string{""}, false, fault.Unauthenticated},
		"no JWT, for us":                        {"opaque", []string{DefaultAudience}, false, ""},
		"no JWT, for the API server":            {"opaque", []string{""}, true, ""},
		"says it is for us, API server says no": {pretender, nil, true, fault.Unauthenticated},
		"says it is for us, is for it":          {pretender, []string{""}, true, fault.Unauthenticated},
		"for somebody else":                     {jwt(t, map[string]any{"aud": "vault"}), []string{"vault"}, true, fault.Unauthenticated},
		"rubbish":                               {"a.b.c", nil, true, fault.Unauthenticated},
	} {
		s := newAPIServer()
		s.valid[tc.token] = tc.valid
		c, _ := s.callers(t, func(o *Options) { o.APIServerTokens = tc.apiServerTokens })
		caller, err := c.Authenticate(bearing(t.Context(), tc.token))
		if err == nil != (tc.reason == "") || err != nil && (fault.ReasonOf(err) != tc.reason || !errors.Is(err, errdefs.ErrUnauthenticated) || strings.Contains(err.Error(), "10.0.0.1")) {
			t.Errorf("%s: %v; want %q", name, err, tc.reason)
		}
		if err == nil && (caller.Name != "alice" || caller.UID != "u-1" || !slices.Equal(caller.Groups, []string{"dev"}) || caller.Extra["x"][0] != "y" || caller.Tenant != "") {
			t.Errorf("%s: %+v", name, caller)
		}
	}
	c, _ := newAPIServer().callers(t)
	if _, err := c.Authenticate(t.Context()); !errors.Is(err, errdefs.ErrUnauthenticated) {
		t.Errorf("no token: %v", err)
	}
}

func TestUsersAreRememberedForAShortTime(t *testing.T) {
	s := newAPIServer()
	long := jwt(t, map[string]any{"aud": DefaultAudience, "exp": start.Add(time.Hour).Unix()})
	short := jwt(t, map[string]any{"aud": DefaultAudience, "exp": start.Add(12 * time.Second).Unix()})
	s.valid[long], s.valid[short] = []string{DefaultAudience}, []string{DefaultAudience}
	c, clock := s.callers(t)
	ask := func(token string, after time.Duration, valid bool, reviews int32) {
		t.Helper()
		clock.SetTime(start.Add(after))
		before := s.reviews.Load()
		if _, err := c.Authenticate(bearing(t.Context(), token)); (err == nil) != valid || s.reviews.Load()-before != reviews {
			t.Errorf("%s later: %v, %d reviews; want %d", after, err, s.reviews.Load()-before, reviews)
		}
	}
	ask(long, 0, true, 1)
	ask(short, 0, true, 1)
	ask(long, keepUser-time.Second, true, 0)
	ask(short, 11*time.Second, true, 0)
	s.set(func() { clear(s.valid) })
	ask(short, 12*time.Second+1, false, 1) // as long as it lives
	ask(long, 29*time.Second, true, 0)
	ask(long, keepUser+1, false, 1) // not longer than this
	ask(long, keepUser+1, false, 1) // and a refusal is not remembered
	s.set(func() { s.valid[long] = []string{DefaultAudience} })
	ask(long, keepUser+1, true, 1)
	s.set(func() { s.down = true })
	ask(long, keepUser+time.Second, true, 0) // the API server is away
	ask(long, 3*keepUser, true, 1)           // for a while, what it said last will do
	clock.SetTime(start.Add(2*keepUser + keepWhileAway))
	if _, err := c.Authenticate(bearing(t.Context(), long)); fault.ReasonOf(err) != fault.AuthUnavailable || !errdefs.IsUnavailable(err) {
		t.Errorf("the API server is away for long: %v", err)
	}
}

// While the API server is away, reads go on for who could read before, and nothing else does.
func TestReadsGoOnWhileTheAPIServerIsAway(t *testing.T) {
	s := newAPIServer()
	s.may["alice get sandboxes/ a"], s.may["alice create sandboxes/volumes a"] = true, true
	c, clock := s.callers(t)
	alice := grpcapi.Identity{Name: "alice"}
	ask := func(verb, sub, namespace string) error {
		_, err := c.Authorize(t.Context(), alice, grpcapi.Access{Verb: verb, Subresource: sub, Namespace: namespace})
		return err
	}
	if err := errors.Join(ask("get", "", "a"), ask("create", "volumes", "a")); err != nil {
		t.Fatal(err)
	}
	if err := ask("get", "", "b"); !errdefs.IsPermissionDenied(err) {
		t.Fatal(err)
	}
	s.set(func() { s.down = true })
	clock.SetTime(start.Add(keepWhileAway - time.Second))
	if err := ask("get", "", "a"); err != nil {
		t.Errorf("a read: %v", err)
	}
	for _, refused := range [][3]string{{"create", "volumes", "a"}, {"get", "", "b"}, {"list", "", "a"}} {
		if err := ask(refused[0], refused[1], refused[2]); fault.ReasonOf(err) != fault.AuthUnavailable {
			t.Errorf("%v: %v", refused, err)
		}
	}
	clock.SetTime(start.Add(keepWhileAway + time.Second))
	if err := ask("get", "", "a"); fault.ReasonOf(err) != fault.AuthUnavailable {
		t.Errorf("a read much later: %v", err)
	}
	// Back, it says no: that counts at once.
	s.set(func() { s.down = false; clear(s.may) })
	if err := ask("get", "", "a"); !errdefs.IsPermissionDenied(err) {
		t.Errorf("after it is back: %v", err)
	}
}

func TestOneQuestionAtATime(t *testing.T) {
	s := newAPIServer()
	s.valid["opaque"] = []string{DefaultAudience}
	c, _ := s.callers(t)
	// While the API server thinks, twenty callers come, and one gives up.
	s.mu.Lock()
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if _, err := c.Authenticate(bearing(context.Background(), "opaque")); err != nil {
				t.Error(err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Authenticate(bearing(ctx, "opaque")); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that gave up: %v", err)
	}
	s.mu.Unlock()
	all.Wait()
	if n := s.reviews.Load(); n != 1 {
		t.Errorf("%d reviews", n)
	}
}

func TestWhatIsAllowed(t *testing.T) {
	s := newAPIServer()
	s.may["alice create sandboxes/volumes team"] = true
	s.may["alice list sandboxes/ "] = true
	c, clock := s.callers(t)
	alice := grpcapi.Identity{Name: "alice", UID: "u-1", Groups: []string{"dev"}, Extra: map[string][]string{"x": {"y"}}}
	add := grpcapi.Access{Verb: "create", Subresource: "volumes", Namespace: "team", Name: "sb"}
	tenant, err := c.Authorize(t.Context(), alice, add)
	if err != nil || tenant != "tenant-of-team" {
		t.Errorf("allowed: %q, %v", tenant, err)
	}
	spec := s.specs[0]
	if spec.User != "alice" || spec.UID != "u-1" || !slices.Equal(spec.Groups, []string{"dev"}) || spec.Extra["x"][0] != "y" ||
		*spec.ResourceAttributes != (authorizationv1.ResourceAttributes{Namespace: "team", Name: "sb", Verb: "create", Group: "sandbox.flux.io", Version: "v1alpha1", Resource: "sandboxes", Subresource: "volumes"}) {
		t.Errorf("asked: %+v, %+v", spec, spec.ResourceAttributes)
	}
	if tenant, err := c.Authorize(t.Context(), alice, grpcapi.Access{Verb: "list"}); err != nil || tenant != "" {
		t.Errorf("everywhere: %q, %v", tenant, err)
	}
	for name, tc := range map[string]struct {
		caller grpcapi.Identity
		access grpcapi.Access
		says   string
	}{
		"another verb":      {alice, grpcapi.Access{Verb: "delete", Subresource: "volumes", Namespace: "team", Name: "sb"}, `user "alice" may not delete sandboxes/volumes of "sb" in namespace "team"`},
		"another namespace": {alice, grpcapi.Access{Verb: "create", Subresource: "volumes", Namespace: "other", Name: "sb"}, `in namespace "other"`},
		"a claim":           {alice, grpcapi.Access{Verb: "create", Resource: grpcapi.ResourceClaims, Namespace: "team"}, `user "alice" may not create sandboxclaims in namespace "team": a Role with that verb on sandboxclaims.agents.kruise.io`},
		"the sandbox":       {alice, grpcapi.Access{Verb: "create", Namespace: "team"}, `user "alice" may not create sandboxes in namespace "team": a Role with that verb on sandboxes.sandbox.flux.io`},
		"everywhere":        {alice, grpcapi.Access{Verb: "watch"}, "in all namespaces: name one"},
		"somebody else":     {grpcapi.Identity{Name: "mallory"}, add, `user "mallory"`},
	} {
		if tenant, err := c.Authorize(t.Context(), tc.caller, tc.access); fault.ReasonOf(err) != fault.Forbidden || !errdefs.IsPermissionDenied(err) || !strings.Contains(err.Error(), tc.says) || tenant != "" {
			t.Errorf("%s: %q, %v; want %q", name, tenant, err, tc.says)
		}
	}

	// What is remembered, and for how long.
	ask := func(after time.Duration, allowed bool, questions int32) {
		t.Helper()
		clock.SetTime(start.Add(after))
		before := s.questions.Load()
		if _, err := c.Authorize(t.Context(), alice, add); (err == nil) != allowed || s.questions.Load()-before != questions {
			t.Errorf("%s later: %v, %d questions; want %d", after, err, s.questions.Load()-before, questions)
		}
	}
	s.set(func() { clear(s.may) })
	ask(keepAllowed-time.Second, true, 0)
	ask(keepAllowed+1, false, 1)
	s.set(func() { s.may["alice create sandboxes/volumes team"] = true })
	ask(keepAllowed+keepDenied-time.Second, false, 0)
	ask(keepAllowed+keepDenied+2, true, 1)
	s.set(func() { s.down = true })
	clock.SetTime(start.Add(time.Hour))
	if _, err := c.Authorize(t.Context(), alice, add); fault.ReasonOf(err) != fault.AuthUnavailable || strings.Contains(err.Error(), "10.0.0.1") {
		t.Errorf("the API server is away: %v", err)
	}
}

func TestTenantOfANamespace(t *testing.T) {
	ns := func(name, tenant string) *corev1.Namespace {
		n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if tenant != "" {
			n.Labels = map[string]string{v1alpha1.LabelTenantID: tenant}
		}
		return n
	}
	indexer := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	for _, n := range []*corev1.Namespace{ns("a", "acme"), ns("plain", "")} {
		if err := indexer.Add(n); err != nil {
			t.Fatal(err)
		}
	}
	client := fake.NewClientset(ns("new", "fresh"))
	c, _ := newAPIServer().callers(t, func(o *Options) {
		o.Namespaces, o.NamespaceClient = corev1listers.NewNamespaceLister(indexer), client.CoreV1().Namespaces()
	})
	for name, want := range map[string]string{"a": "acme", "plain": "", "new": "fresh"} {
		if got, err := c.tenant(t.Context(), name); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, want)
		}
	}
	if _, err := c.tenant(t.Context(), "nowhere"); !errdefs.IsNotFound(err) || fault.ReasonOf(err) != fault.NamespaceNotFound {
		t.Errorf("nowhere: %v", err)
	}
	client.PrependReactor("get", "namespaces", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("away") })
	if _, err := c.tenant(t.Context(), "unknown"); fault.ReasonOf(err) != fault.AuthUnavailable {
		t.Errorf("the API server is away: %v", err)
	}
	if got, err := c.tenant(t.Context(), "new"); err != nil || got != "fresh" { // the cache is behind, and it was asked before
		t.Errorf("the API server is away, and was asked before: %q, %v", got, err)
	}
}

func TestClaims(t *testing.T) {
	for token, want := range map[string]string{
		jwt(t, map[string]any{"aud": "a", "exp": 12}):         "[a] 12",
		jwt(t, map[string]any{"aud": []string{"a", "b"}}):     "[a b] none",
		jwt(t, map[string]any{"exp": 1.5}):                    "[] 1.5",
		jwt(t, map[string]any{"aud": 7, "exp": 12}):           "[] none",
		jwt(t, map[string]any{"aud": []any{"a", 1}}):          "[] none",
		jwt(t, map[string]any{"aud": "a", "exp": "tomorrow"}): "[] none",
		"opaque": "[] none", "": "[] none", "a.!.c": "[] none", "a.YWI.c": "[] none", "..": "[] none",
	} {
		c := claimsOf(token)
		got := fmt.Sprint([]string(c.Audience), " none")
		if c.Expires != nil {
			got = fmt.Sprint([]string(c.Audience), " ", *c.Expires)
		}
		if got != want {
			t.Errorf("%s: %s, want %s", token, got, want)
		}
	}
}

// An API server that hangs is waited for once, not once for every question of every call.
func TestAHangingAPIServerIsWaitedForOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		hangs := false
		a := newAnswers[string](10, clock.RealClock{}, &outage{})
		ask := func(context.Context) (answer[string], error) {
			if hangs {
				<-ctx.Done()
				return answer[string]{}, tokens.Unavailable(ctx.Err(), "away")
			}
			return answer[string]{value: "yes", away: time.Hour}, nil
		}
		get := func(question string) time.Duration {
			before := time.Now()
			if got, err := a.get(t.Context(), []byte(question), ask); err != nil || got != "yes" {
				t.Errorf("%s: %q, %v", question, got, err)
			}
			return time.Since(before)
		}
		get("who")
		get("may")
		hangs = true
		if waited := get("who"); waited != awayPatience {
			t.Errorf("the first question waited %s", waited)
		}
		if waited := get("may"); waited != stillAwayPatience {
			t.Errorf("the second question waited %s", waited)
		}
		cancel()
		synctest.Wait()
	})
}
