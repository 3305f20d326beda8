package callers

import (
	"context"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

// A ServiceAccount with a Role in one namespace, against a real API server: its token is accepted as the audience
// says, and RBAC decides by verb, subresource, name and namespace.
func TestRealTokensAndRBAC(t *testing.T) {
	client, err := kubernetes.NewForConfig(apiserver.Shared(t).Config())
	if err != nil {
		t.Fatal(err)
	}
	namespace := func(tenant string) string {
		ns, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			GenerateName: "callers-", Labels: map[string]string{v1alpha1.LabelTenantID: tenant},
		}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return ns.Name
	}
	team, other := namespace("acme"), namespace("evil")
	if _, err := client.CoreV1().ServiceAccounts(team).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "sdk"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	group := []string{v1alpha1.GroupVersion.Group}
	if _, err := client.RbacV1().Roles(team).Create(t.Context(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "sdk"},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: group, Resources: []string{"sandboxes"}, Verbs: []string{"get", "list"}},
			{APIGroups: group, Resources: []string{"sandboxes/volumes"}, Verbs: []string{"create"}},
			{APIGroups: []string{agentsv1alpha1.GroupVersion.Group}, Resources: []string{"sandboxclaims"}, Verbs: []string{"create", "get"}},
			{APIGroups: group, Resources: []string{"sandboxes/exec"}, Verbs: []string{"create"}, ResourceNames: []string{"mine"}},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.RbacV1().RoleBindings(team).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "sdk"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "sdk"},
		Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: team, Name: "sdk"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token := func(audiences ...string) string {
		r, err := client.CoreV1().ServiceAccounts(team).CreateToken(t.Context(), "sdk", &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{Audiences: audiences},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return r.Status.Token
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	lister := factory.Core().V1().Namespaces().Lister()
	callers := func(apiServerTokens bool) *Callers {
		c, err := New(Options{
			Tokens: client.AuthenticationV1().TokenReviews(), Access: client.AuthorizationV1().SubjectAccessReviews(),
			Namespaces: lister, NamespaceClient: client.CoreV1().Namespaces(), APIServerTokens: apiServerTokens, Logger: silent,
		})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer factory.Shutdown()
	defer cancel()
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())

	strict, open := callers(false), callers(true)
	for name, tc := range map[string]struct {
		callers *Callers
		token   string
		valid   bool
	}{
		"our audience":                     {strict, token(DefaultAudience), true},
		"our audience among others":        {open, token("x", DefaultAudience), true},
		"kubectl create token":             {open, token(), true},
		"kubectl create token, when not":   {strict, token(), false},
		"an agent's audience":              {open, token("sandbox.flux.io/agent"), false},
		"another audience, strict":         {strict, token("x"), false},
		"our audience, signature replaced": {strict, token(DefaultAudience) + "x", false},
	} {
		caller, err := tc.callers.Authenticate(bearing(t.Context(), tc.token))
		if (err == nil) != tc.valid || err != nil && fault.ReasonOf(err) != fault.Unauthenticated {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && caller.Name != "system:serviceaccount:"+team+":sdk" {
			t.Errorf("%s: it is %q", name, caller.Name)
		}
	}

	caller, err := strict.Authenticate(bearing(t.Context(), token(DefaultAudience)))
	if err != nil {
		t.Fatal(err)
	}
	for access, want := range map[grpcapi.Access]bool{
		{Verb: "get", Namespace: team, Name: "a"}:                                      true,
		{Verb: "list", Namespace: team}:                                                true,
		{Verb: "list"}:                                                                 false,
		{Verb: "list", Namespace: other}:                                               false,
		{Verb: "create", Namespace: team}:                                              false,
		{Verb: "create", Subresource: "volumes", Namespace: team, Name: "a"}:           true,
		{Verb: "delete", Subresource: "volumes", Namespace: team, Name: "a"}:           false,
		{Verb: "create", Subresource: "exec", Namespace: team, Name: "mine"}:           true,
		{Verb: "create", Subresource: "exec", Namespace: team, Name: "a"}:              false,
		{Verb: "update", Subresource: "node"}:                                          false,
		{Verb: "create", Resource: grpcapi.ResourceClaims, Namespace: team}:            true,
		{Verb: "get", Resource: grpcapi.ResourceClaims, Namespace: team, Name: "a"}:    true,
		{Verb: "delete", Resource: grpcapi.ResourceClaims, Namespace: team, Name: "a"}: false,
		{Verb: "create", Resource: grpcapi.ResourceClaims, Namespace: other}:           false,
		{Verb: "get", Resource: grpcapi.ResourceSets, Namespace: team, Name: "a"}:      false,
	} {
		tenant, err := strict.Authorize(t.Context(), caller, access)
		if (err == nil) != want || err != nil && fault.ReasonOf(err) != fault.Forbidden {
			t.Errorf("%+v: %v; want allowed: %v", access, err, want)
		}
		if err == nil && tenant != "acme" {
			t.Errorf("%+v: acts for %q", access, tenant)
		}
	}
}
