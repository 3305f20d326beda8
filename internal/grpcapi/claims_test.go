package grpcapi_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// claimOf is a claim of one sandbox of a set.
func claimOf(name, set string, change ...func(*sandboxv1.SandboxClaimSpec)) *sandboxv1.SandboxClaim {
	m := &sandboxv1.SandboxClaim{Name: name, Spec: &sandboxv1.SandboxClaimSpec{TemplateName: set}}
	for _, c := range change {
		c(m.Spec)
	}
	return m
}

func makeClaim(ctx context.Context, e *grpcapitest.Env, claim *sandboxv1.SandboxClaim, wait bool) (*sandboxv1.SandboxClaim, error) {
	return e.Claims.CreateSandboxClaim(ctx, &sandboxv1.CreateSandboxClaimRequest{Claim: claim, Wait: wait})
}

// badClaims are malformed requests about claims and sets.
func badClaims() []badInput {
	bad := codes.InvalidArgument
	mounts := func(m ...*sandboxv1.DynamicVolumeMount) func(*sandboxv1.SandboxClaimSpec) {
		return func(s *sandboxv1.SandboxClaimSpec) { s.DynamicVolumesMount = m }
	}
	var many []*sandboxv1.DynamicVolumeMount
	for i := range 33 {
		many = append(many, &sandboxv1.DynamicVolumeMount{PvName: "v", MountPath: fmt.Sprint("/d", i)})
	}
	var table []badInput
	for name, c := range map[string]struct {
		claim  *sandboxv1.SandboxClaim
		code   codes.Code
		reason fault.Reason
	}{
		"missing":            {nil, bad, fault.InvalidRequest},
		"no spec":            {&sandboxv1.SandboxClaim{Name: "c"}, bad, fault.InvalidRequest},
		"no set":             {claimOf("c", ""), bad, fault.InvalidRequest},
		"set no name":        {claimOf("c", "../pool"), bad, fault.InvalidName},
		"name upper case":    {claimOf("C", "pool"), bad, fault.InvalidName},
		"namespace no label": {&sandboxv1.SandboxClaim{Namespace: "a.b", Spec: &sandboxv1.SandboxClaimSpec{TemplateName: "pool"}}, bad, fault.InvalidName},
		"no replicas":        {claimOf("c", "pool", func(s *sandboxv1.SandboxClaimSpec) { s.Replicas = ptr.To[int32](0) }), bad, fault.InvalidRequest},
		"fewer than none":    {claimOf("c", "pool", func(s *sandboxv1.SandboxClaimSpec) { s.Replicas = ptr.To[int32](-1) }), bad, fault.InvalidRequest},
		"negative timeout":   {claimOf("c", "pool", func(s *sandboxv1.SandboxClaimSpec) { s.ClaimTimeout = durationpb.New(-time.Second) }), bad, fault.InvalidRequest},
		"timeout no time":    {claimOf("c", "pool", func(s *sandboxv1.SandboxClaimSpec) { s.ClaimTimeout = &durationpb.Duration{Nanos: 2e9} }), bad, fault.InvalidRequest},
		"ttl no time":        {claimOf("c", "pool", func(s *sandboxv1.SandboxClaimSpec) { s.TtlAfterCompleted = &durationpb.Duration{Seconds: 1 << 60} }), bad, fault.InvalidRequest},
		"shutdown no time":   {claimOf("c", "pool", func(s *sandboxv1.SandboxClaimSpec) { s.ShutdownTime = &timestamppb.Timestamp{Seconds: 1 << 60} }), bad, fault.InvalidRequest},
		"no quantity": {claimOf("c", "pool", func(s *sandboxv1.SandboxClaimSpec) {
			s.InplaceUpdate = &sandboxv1.InplaceUpdate{Resources: &sandboxv1.Resources{Limits: map[string]string{"cpu": "lots"}}}
		}), bad, fault.InvalidRequest},
		"volume without a path":    {claimOf("c", "pool", mounts(&sandboxv1.DynamicVolumeMount{PvName: "v"})), bad, fault.InvalidTarget},
		"volume without a name":    {claimOf("c", "pool", mounts(&sandboxv1.DynamicVolumeMount{MountPath: "/data"})), bad, fault.InvalidSource},
		"volume at a relative one": {claimOf("c", "pool", mounts(&sandboxv1.DynamicVolumeMount{PvName: "v", MountPath: "data"})), bad, fault.InvalidTarget},
		"volume at a denied one":   {claimOf("c", "pool", mounts(&sandboxv1.DynamicVolumeMount{PvName: "v", MountPath: "/proc"})), codes.PermissionDenied, fault.TargetDenied},
		"subPath that leaves it":   {claimOf("c", "pool", mounts(&sandboxv1.DynamicVolumeMount{PvName: "v", MountPath: "/data", SubPath: "../x"})), bad, fault.InvalidSubPath},
		"two volumes at one path":  {claimOf("c", "pool", mounts(&sandboxv1.DynamicVolumeMount{PvName: "v", MountPath: "/data"}, &sandboxv1.DynamicVolumeMount{PvName: "w", MountPath: "/data"})), codes.AlreadyExists, fault.TargetInUse},
		"a volume in another":      {claimOf("c", "pool", mounts(&sandboxv1.DynamicVolumeMount{PvName: "v", MountPath: "/data"}, &sandboxv1.DynamicVolumeMount{PvName: "w", MountPath: "/data/w"})), codes.FailedPrecondition, fault.TargetNested},
		"too many volumes":         {claimOf("c", "pool", mounts(many...)), bad, fault.TooManyVolumes},
	} {
		table = append(table, badInput{"claim/" + name, func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := makeClaim(ctx, e, c.claim, false)
			return err
		}, c.code, c.reason})
	}
	methods := map[string]func(ctx context.Context, e *grpcapitest.Env, namespace, name string) error{
		"get claim": func(ctx context.Context, e *grpcapitest.Env, namespace, name string) error {
			_, err := e.Claims.GetSandboxClaim(ctx, &sandboxv1.GetSandboxClaimRequest{Namespace: namespace, Name: name})
			return err
		},
		"delete claim": func(ctx context.Context, e *grpcapitest.Env, namespace, name string) error {
			_, err := e.Claims.DeleteSandboxClaim(ctx, &sandboxv1.DeleteSandboxClaimRequest{Namespace: namespace, Name: name})
			return err
		},
		"get set": func(ctx context.Context, e *grpcapitest.Env, namespace, name string) error {
			_, err := e.Sets.GetSandboxSet(ctx, &sandboxv1.GetSandboxSetRequest{Namespace: namespace, Name: name})
			return err
		},
		"delete set": func(ctx context.Context, e *grpcapitest.Env, namespace, name string) error {
			_, err := e.Sets.DeleteSandboxSet(ctx, &sandboxv1.DeleteSandboxSetRequest{Namespace: namespace, Name: name})
			return err
		},
	}
	for method, call := range methods {
		for name, key := range map[string]struct {
			namespace, name string
			code            codes.Code
			reason          fault.Reason
		}{
			"no name":         {"", "", bad, fault.InvalidRequest},
			"name upper case": {"", "A", bad, fault.InvalidName},
			"namespace bad":   {"a.b", "a", bad, fault.InvalidName},
			"not there": {"", "not-there", codes.NotFound,
				map[bool]fault.Reason{true: store.ClaimNotFound, false: store.SetNotFound}[strings.HasSuffix(method, "claim")]},
		} {
			table = append(table, badInput{method + "/" + name, func(ctx context.Context, e *grpcapitest.Env) error { return call(ctx, e, key.namespace, key.name) }, key.code, key.reason})
		}
	}
	for name, req := range map[string]*sandboxv1.ListSandboxClaimsRequest{
		"page size": {PageSize: -1}, "page token": {PageToken: "!"}, "selector": {LabelSelector: "a in"},
	} {
		table = append(table, badInput{"list claims/" + name, func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Claims.ListSandboxClaims(ctx, req)
			return err
		}, bad, fault.InvalidRequest}, badInput{"list sets/" + name, func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Sets.ListSandboxSets(ctx, &sandboxv1.ListSandboxSetsRequest{PageSize: req.PageSize, PageToken: req.PageToken, LabelSelector: req.LabelSelector})
			return err
		}, bad, fault.InvalidRequest})
	}
	return table
}

// What is asked for is what is stored, and nothing of the rest that a message could say.
func TestAClaimIsStoredAsAskedFor(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	m := claimOf("c", "pool", func(s *sandboxv1.SandboxClaimSpec) {
		s.Replicas, s.ClaimTimeout, s.EnvVars, s.Labels = ptr.To[int32](2), durationpb.New(90*time.Second), map[string]string{"A": "b"}, map[string]string{"team": "x"}
		s.InplaceUpdate, s.TtlAfterCompleted = &sandboxv1.InplaceUpdate{Image: "busybox:2"}, durationpb.New(-time.Second) // it is kept
		s.DynamicVolumesMount = []*sandboxv1.DynamicVolumeMount{{PvName: "v", MountPath: "/data", SubPath: "a/b", ReadOnly: true}}
	})
	m.Uid, m.ResourceVersion, m.Labels = "00000000-0000-0000-0000-000000000000", "7", map[string]string{"app": "demo"}
	m.Status = &sandboxv1.SandboxClaimStatus{Phase: "Failed"}
	got, err := makeClaim(t.Context(), e, m, true)
	noError(t, err)
	if got.Status.Phase != "Completed" || !slices.Equal(got.Status.SandboxNames, []string{"pool-0", "pool-1"}) || got.Uid == m.Uid {
		t.Errorf("%v", got)
	}
	stored, err := e.Pools.Claims.Get(t.Context(), keyOf("c"))
	noError(t, err)
	if len(stored.Finalizers) != 0 || len(stored.OwnerReferences) != 0 || stored.Labels["app"] != "demo" || *stored.Spec.Replicas != 2 ||
		stored.Spec.ClaimTimeout.Duration != 90*time.Second || stored.Spec.TTLAfterCompleted.Duration != -time.Second || stored.Spec.EnvVars["A"] != "b" || stored.Spec.Labels["team"] != "x" || stored.Spec.InplaceUpdate.Image != "busybox:2" ||
		stored.Spec.DynamicVolumesMount[0] != (agentsv1alpha1.DynamicVolumeMount{PVName: "v", MountPath: "/data", SubPath: "a/b", ReadOnly: true}) {
		t.Errorf("%+v", stored)
	}
	_, err = makeClaim(t.Context(), e, m, false)
	wantError(t, err, codes.AlreadyExists, store.ClaimExists)
	made, err := makeClaim(t.Context(), e, claimOf("", "pool"), false)
	noError(t, err)
	if !strings.HasPrefix(made.Name, "pool-") || len(made.Name) != len("pool-")+agentsv1alpha1.RandomSuffix {
		t.Errorf("a claim without a name is called %q", made.Name)
	}
}

// A claim that is Failed is an error in the words of its condition, with its reason where that is one of ours.
func TestAClaimThatFails(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	for set, c := range map[string]struct {
		fate   grpcapitest.ClaimFate
		code   codes.Code
		reason fault.Reason
	}{
		"volume":  {grpcapitest.ClaimFate{Reason: fault.VolumeNotFound, Message: "there is no PersistentVolume v"}, codes.NotFound, fault.VolumeNotFound},
		"set":     {grpcapitest.ClaimFate{Reason: store.SetNotFound, Message: "there is no SandboxSet set"}, codes.NotFound, store.SetNotFound},
		"pending": {grpcapitest.ClaimFate{Reason: "StartingSandbox", Message: "the time is over (claimTimeout): it is Pending"}, codes.DeadlineExceeded, grpcapi.ClaimTimeout},
		"refused": {grpcapitest.ClaimFate{Refuse: fault.New(errdefs.ErrPermissionDenied, store.Forbidden, "exceeded quota: q, used: 1")}, codes.PermissionDenied, store.Forbidden},
	} {
		e.Pools.Set(set, c.fate)
		_, err := makeClaim(t.Context(), e, claimOf("c-"+set, set), true)
		words := c.fate.Message
		if c.fate.Refuse != nil {
			words = c.fate.Refuse.Error()
		}
		wantError(t, err, c.code, c.reason, words)
		_, err = e.Claims.GetSandboxClaim(t.Context(), &sandboxv1.GetSandboxClaimRequest{Name: "c-" + set})
		if c.fate.Refuse != nil {
			wantError(t, err, codes.NotFound, store.ClaimNotFound)
		} else {
			noError(t, err) // it is kept, and shown as it is
		}
	}
	e.Pools.Set("short", grpcapitest.ClaimFate{Claimed: 1})
	got, err := makeClaim(t.Context(), e, claimOf("short", "short", func(s *sandboxv1.SandboxClaimSpec) { s.Replicas = ptr.To[int32](3) }), true)
	noError(t, err)
	if len(got.Status.SandboxNames) != 1 || !slices.ContainsFunc(got.Status.Conditions, func(c *sandboxv1.Condition) bool {
		return c.Type == agentsv1alpha1.ClaimPartially && c.Status == "True"
	}) {
		t.Errorf("%v", got.Status)
	}
}

// A call waits until the claim is over, is deleted, the time is up, or the server stops; another can wait for it as well.
func TestWaitingForAClaim(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Pools.Set("slow", grpcapitest.ClaimFate{Hold: true})
	waiting := func(ctx context.Context, name string, made chan<- error) {
		_, err := e.Claims.GetSandboxClaim(ctx, &sandboxv1.GetSandboxClaimRequest{Name: name, Wait: true})
		made <- err
	}
	for _, name := range []string{"a", "b"} {
		_, err := makeClaim(t.Context(), e, claimOf(name, "slow"), false)
		noError(t, err)
	}
	a, b := make(chan error, 1), make(chan error, 1)
	var running sync.WaitGroup
	running.Go(func() { waiting(t.Context(), "a", a) })
	running.Go(func() { waiting(t.Context(), "b", b) })
	noError(t, e.Pools.Claims.Delete(t.Context(), keyOf("b"), store.Preconditions{}))
	// Whether the call began before that or after it, there is none of that name.
	wantError(t, <-b, codes.NotFound, store.ClaimNotFound)
	e.Pools.Set("slow", grpcapitest.ClaimFate{})
	noError(t, <-a)
	running.Wait()
}

func TestAClaimIsWaitedForSoLong(t *testing.T) {
	e := grpcapitest.Start(t, impatient)
	e.Pools.Set("slow", grpcapitest.ClaimFate{Hold: true})
	_, err := makeClaim(t.Context(), e, claimOf("late", "slow"), true)
	wantError(t, err, codes.DeadlineExceeded, fault.OperationPending, "is not over yet (Claiming: 0 of 1 sandboxes are claimed; it is Pending)", "fluxctl claim get late --wait")
}

func TestAClaimIsNotWaitedForByAServerThatStops(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Pools.Set("slow", grpcapitest.ClaimFate{Hold: true})
	result := make(chan error, 1)
	go func() {
		_, err := makeClaim(t.Context(), e, claimOf("a", "slow"), true)
		result <- err
	}()
	for event := range e.Pools.Claims.Follow(t.Context(), keyOf("a")) {
		if event.Type == store.Changed {
			break
		}
	}
	e.Stop()
	wantError(t, <-result, codes.Unavailable, fault.OperationPending, "the server is stopping")
}

// A deletion that waits answers when the sandboxes are gone that were the claim's, and no others'.
func TestADeletedClaimTakesItsSandboxes(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	_, err := makeClaim(t.Context(), e, claimOf("c", "pool"), true)
	noError(t, err)
	claim, err := e.Pools.Claims.Get(t.Context(), keyOf("c"))
	noError(t, err)
	own := func(name string, owner metav1.Object) {
		e.Run(sandbox(name))
		_, err := e.Store.Sandboxes().UpdateSpec(t.Context(), keyOf(name), store.Preconditions{}, func(sb *v1alpha1.Sandbox) error {
			sb.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, agentsv1alpha1.GroupVersion.WithKind("SandboxClaim"))}
			return nil
		})
		noError(t, err)
	}
	own("mine", claim)
	own("others", &agentsv1alpha1.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", UID: "another"}})
	result := make(chan error, 1)
	go func() {
		_, err := e.Claims.DeleteSandboxClaim(t.Context(), &sandboxv1.DeleteSandboxClaimRequest{Name: "c", Wait: true})
		result <- err
	}()
	for event := range e.Pools.Claims.Follow(t.Context(), keyOf("c")) {
		if event.Type != store.Changed { // it is gone
			break
		}
	}
	select {
	case err := <-result:
		t.Errorf("it is answered while the sandbox is there: %v", err)
	default:
	}
	noError(t, e.Store.Sandboxes().Delete(t.Context(), keyOf("mine"), store.Preconditions{})) // as the garbage collector does
	noError(t, <-result)
	stored(t, e, "others")
}

func TestClaimsAreListedInPages(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	for i := range 5 {
		m := claimOf(fmt.Sprint("c", i), "pool")
		m.Labels = map[string]string{"odd": fmt.Sprint(i % 2)}
		_, err := makeClaim(t.Context(), e, m, false)
		noError(t, err)
		e.MustSet(fmt.Sprint("s", i), int32(i))
	}
	var names []string
	req := &sandboxv1.ListSandboxClaimsRequest{Namespace: "default", PageSize: 2, LabelSelector: "odd=0"}
	for pages := 1; ; pages++ {
		page, err := e.Claims.ListSandboxClaims(t.Context(), req)
		noError(t, err)
		for _, c := range page.Claims {
			names = append(names, c.Name)
		}
		if req.PageToken = page.NextPageToken; req.PageToken == "" || pages > 3 {
			break
		}
	}
	if strings.Join(names, " ") != "c0 c2 c4" {
		t.Errorf("listed %v", names)
	}
	sets, err := e.Sets.ListSandboxSets(t.Context(), &sandboxv1.ListSandboxSetsRequest{})
	noError(t, err)
	if len(sets.Sets) != 5 || sets.Sets[4].Spec.Replicas != 4 || sets.Sets[4].Status.AvailableReplicas != 4 {
		t.Errorf("%v", sets)
	}
	noError(t, func() error {
		_, err := e.Sets.DeleteSandboxSet(t.Context(), &sandboxv1.DeleteSandboxSetRequest{Name: "s4", Wait: true})
		return err
	}())
	_, err = e.Sets.GetSandboxSet(t.Context(), &sandboxv1.GetSandboxSetRequest{Name: "s4"})
	wantError(t, err, codes.NotFound, store.SetNotFound)
}

// A page of sets with large templates ends before it is too large for a message, and nothing is left out.
func TestLargeSetsFitIntoMessages(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	for i := range 3 {
		set := e.MustSet(fmt.Sprint("s", i), 1)
		_, err := e.Pools.Sets.UpdateSpec(t.Context(), store.KeyOf(set), store.Preconditions{}, func(s *agentsv1alpha1.SandboxSet) error {
			s.Annotations = map[string]string{"a": strings.Repeat("x", 3<<19)}
			return nil
		})
		noError(t, err)
	}
	n, req := 0, &sandboxv1.ListSandboxSetsRequest{}
	for {
		page, err := e.Sets.ListSandboxSets(t.Context(), req)
		noError(t, err)
		n += len(page.Sets)
		if req.PageToken = page.NextPageToken; req.PageToken == "" {
			break
		}
	}
	if n != 3 {
		t.Errorf("%d sets are listed", n)
	}
}

func TestWhereThereAreNoPools(t *testing.T) {
	calls := func(e *grpcapitest.Env, ctx context.Context) map[string]error {
		_, created := makeClaim(ctx, e, claimOf("c", "pool"), false)
		_, listed := e.Sets.ListSandboxSets(ctx, &sandboxv1.ListSandboxSetsRequest{})
		return map[string]error{"create": created, "list": listed}
	}
	standalone := grpcapitest.Start(t, func(o *grpcapi.Options) { o.Pools = nil })
	for name, err := range calls(standalone, t.Context()) {
		t.Log(name)
		wantError(t, err, codes.Unimplemented, fault.NotAvailable, "fluxctl run")
	}
	away := grpcapitest.Start(t, func(o *grpcapi.Options) {
		o.Pools = func() (*grpcapi.Pools, error) {
			return nil, fault.New(errdefs.ErrUnavailable, store.Unavailable, "not yet")
		}
	})
	for name, err := range calls(away, t.Context()) {
		t.Log(name)
		wantError(t, err, codes.Unavailable, store.Unavailable, "not yet")
	}
	// Whose a claim is its Namespace says alone: a tenant without an Authorizer gets none.
	tenants := grpcapitest.Start(t, func(o *grpcapi.Options) { o.Authenticator = callers{"acme": {Name: "alice", Tenant: "acme"}} })
	for name, err := range calls(tenants, as(t, "acme")) {
		t.Log(name)
		wantError(t, err, codes.PermissionDenied, fault.TenantMismatch)
	}
}
