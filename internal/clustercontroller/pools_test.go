package clustercontroller_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/clustercontroller"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/identity"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) {
	if isChild() {
		runChild()
		return
	}
	apiserver.Main(m)
}

// as is a kubeconfig for a user who has the rights that are given to him, in a file.
func as(t *testing.T, server *apiserver.Server, user string) string {
	t.Helper()
	content, err := os.ReadFile(server.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	var kubeconfig map[string]any
	if err := json.Unmarshal(content, &kubeconfig); err != nil {
		t.Fatal(err)
	}
	kubeconfig["users"].([]any)[0].(map[string]any)["user"].(map[string]any)["as"] = user
	if content, err = json.Marshal(kubeconfig); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// The controller works without SandboxSets. When their definitions are OpenKruise's, it leaves them alone; when they are
// ours, it begins, with the rights of config/kubernetes/rbac.yaml and without being started again.
func TestSandboxSetsAreAnOption(t *testing.T) {
	server := apiserver.Shared(t)
	client := kubernetes.NewForConfigOrDie(server.Config())
	objects := dynamic.NewForConfigOrDie(server.Config())
	if _, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "flux-sandbox"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	manifests.Apply(t, server.Config(), manifests.Objects(t, "config/crd/sandbox.flux.io_*.yaml")...)
	for _, o := range manifests.Objects(t, "config/kubernetes/rbac.yaml") {
		if strings.HasSuffix(o.GetKind(), "Binding") && o.GetName() == "flux-sandbox-controller" {
			if err := unstructured.SetNestedSlice(o.Object, []any{map[string]any{"apiGroup": rbacv1.GroupName, "kind": "User", "name": "controller"}}, "subjects"); err != nil {
				t.Fatal(err)
			}
		}
		manifests.Apply(t, server.Config(), o)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- clustercontroller.Run(ctx, clustercontroller.Config{Kubeconfig: as(t, server, "controller"), Namespace: "flux-sandbox", Identity: "test", AnchorImage: "any",
			Listen: "127.0.0.1:0", CertificateListen: "127.0.0.1:0", MetricsListen: "127.0.0.1:0"}, func(api, _ string) { ready <- api })
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	var address string
	select {
	case address = <-ready:
	case err := <-ended:
		ended <- err
		t.Fatal(err)
	}

	ours := manifests.Objects(t, "config/crd/agents.kruise.io_*.yaml")
	var foreign []*unstructured.Unstructured
	for _, o := range ours {
		o = o.DeepCopy()
		unstructured.RemoveNestedField(o.Object, "spec", "names", "categories")
		foreign = append(foreign, o)
	}
	manifests.Apply(t, server.Config(), foreign...)
	sets := objects.Resource(agentsv1alpha1.GroupVersion.WithResource("sandboxsets")).Namespace("default")
	set := &unstructured.Unstructured{Object: map[string]any{"apiVersion": agentsv1alpha1.GroupVersion.String(), "kind": "SandboxSet", "metadata": map[string]any{"name": "pool"},
		"spec": map[string]any{"replicas": int64(2), "template": map[string]any{"spec": map[string]any{"containers": []any{map[string]any{"name": "a", "image": "busybox"}}}}}}}
	testenv.Eventually(t, time.Minute, "the kind is served", func() bool {
		_, err := sets.Create(t.Context(), set, metav1.CreateOptions{})
		return err == nil
	})
	made := func() int {
		list, err := objects.Resource(v1alpha1.GroupVersion.WithResource("sandboxes")).Namespace("default").List(t.Context(), metav1.ListOptions{LabelSelector: "agents.kruise.io/sandbox-set=pool"})
		if err != nil {
			t.Fatal(err)
		}
		return len(list.Items)
	}
	// Somebody else's sets and claims are nobody's here: a sandbox that is made and run by then shows that the controller works.
	if _, err := objects.Resource(v1alpha1.GroupVersion.WithResource("sandboxes")).Namespace("default").Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.GroupVersion.String(), "kind": "Sandbox", "metadata": map[string]any{"name": "alone"},
		"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"containers": []any{map[string]any{"name": "a", "image": "busybox"}}}}}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "the sandbox has its Pod", func() bool {
		_, err := client.CoreV1().Pods("default").Get(t.Context(), "alone", metav1.GetOptions{})
		return err == nil
	})
	if n := made(); n != 0 {
		t.Errorf("%d sandboxes are made for somebody else's set", n)
	}
	claims := claimsAPI(t, client, address)
	create := func(name, set string, labels map[string]string) (*sandboxv1.SandboxClaim, error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		claim, err := claims.CreateSandboxClaim(ctx, &sandboxv1.CreateSandboxClaimRequest{Wait: true, Claim: &sandboxv1.SandboxClaim{
			Namespace: "default", Name: name, Spec: &sandboxv1.SandboxClaimSpec{TemplateName: set, Labels: labels}}})
		return claim, fault.FromGRPC(err)
	}
	reason := func(_ *sandboxv1.SandboxClaim, err error) fault.Reason { return fault.ReasonOf(err) }
	testenv.Eventually(t, time.Minute, "the API says that these are not ours", func() bool { return reason(create("a", "pool", nil)) == fault.NotAvailable })
	// Who may not read them is told so, and goes on when he may.
	allow := withoutPools(t, client)
	for _, o := range ours {
		definitions := objects.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
		now, err := definitions.Get(t.Context(), o.GetName(), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		o.SetResourceVersion(now.GetResourceVersion())
		if _, err := definitions.Update(t.Context(), o, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, time.Minute, "the API says why these cannot be read", func() bool {
		_, err := create("a", "pool", nil)
		return fault.ReasonOf(err) == store.Unavailable && strings.Contains(err.Error(), `User "controller" cannot list resource "sandboxsets"`)
	})
	allow()
	testenv.Eventually(t, time.Minute, "the set has its sandboxes", func() bool { return made() == 2 })
	testenv.Eventually(t, time.Minute, "the sandboxes have their Pods", func() bool {
		pods, err := client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
		return err == nil && len(pods.Items) == 3
	})
	// From then on there are claims by the API, refused by the API server's words and decided by the leader.
	testenv.Eventually(t, time.Minute, "the API has claims", func() bool { return reason(create("a", "not-there", nil)) == store.SetNotFound })
	_, err := create("b", "pool", map[string]string{"sandbox.flux.io/x": "y"})
	if fault.ReasonOf(err) != fault.InvalidRequest || !strings.Contains(err.Error(), "labels of agents.kruise.io and sandbox.flux.io say whose a sandbox is, and cannot be given by a claim: use names of your own") {
		t.Errorf("refused by the schema: %v", err)
	}
	if _, err := create("a", "pool", nil); fault.ReasonOf(err) != store.ClaimExists {
		t.Errorf("the claim that failed is kept: %v", err)
	}
	if _, err := claims.DeleteSandboxClaim(t.Context(), &sandboxv1.DeleteSandboxClaimRequest{Namespace: "default", Name: "a", Wait: true}); err != nil {
		t.Error(err)
	}
	if _, err := claims.GetSandboxClaim(t.Context(), &sandboxv1.GetSandboxClaimRequest{Namespace: "default", Name: "a"}); fault.ReasonOf(fault.FromGRPC(err)) != store.ClaimNotFound {
		t.Error(err)
	}
	// One that the pool can meet is answered when it is.
	run(t, client)
	claim, err := create("b", "pool", map[string]string{"app": "demo"})
	if err != nil {
		t.Fatal(err)
	}
	mine, err := objects.Resource(v1alpha1.GroupVersion.WithResource("sandboxes")).Namespace("default").List(t.Context(), metav1.ListOptions{LabelSelector: "agents.kruise.io/claim-name=b,app=demo"})
	if err != nil || len(mine.Items) != 1 || claim.GetStatus().GetPhase() != "Completed" || strings.Join(claim.GetStatus().GetSandboxNames(), " ") != mine.Items[0].GetName() {
		t.Errorf("%v; it has %v, %v", claim, mine, err)
	}
}

// withoutPools takes the right to read sets and claims from the controller, until allow.
func withoutPools(t *testing.T, client kubernetes.Interface) (allow func()) {
	t.Helper()
	const name = "flux-sandbox-controller"
	role, err := client.RbacV1().ClusterRoles().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	rules := role.Rules
	write := func(rules []rbacv1.PolicyRule) {
		t.Helper()
		role.Rules = rules
		if role, err = client.RbacV1().ClusterRoles().Update(t.Context(), role, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	write(slices.DeleteFunc(slices.Clone(rules), func(r rbacv1.PolicyRule) bool { return slices.Contains(r.APIGroups, agentsv1alpha1.GroupName) }))
	return func() { t.Helper(); write(rules) }
}

// run plays scheduler and kubelet for the Pods that there are.
func run(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	if _, err := client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pods, err := client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range pods.Items {
		if err := client.CoreV1().Pods("default").Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: pod.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: "n1"}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		live, err := client.CoreV1().Pods("default").Get(t.Context(), pod.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		live.Status.Phase = corev1.PodRunning
		live.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		live.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "a", Ready: true, ContainerID: "containerd://" + pod.Name, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
		if _, err := client.CoreV1().Pods("default").UpdateStatus(t.Context(), live, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// claimsAPI calls the controller's API as a ServiceAccount that has the role flux-sandbox-user.
func claimsAPI(t *testing.T, client kubernetes.Interface, address string) sandboxv1.SandboxClaimServiceClient {
	t.Helper()
	if _, err := client.CoreV1().ServiceAccounts("default").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "alice"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "alice"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "flux-sandbox-user"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: "alice"}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	token, err := client.CoreV1().ServiceAccounts("default").CreateToken(t.Context(), "alice",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{"sandbox.flux.io/api"}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	trust := identity.Credentials{Bundle: identity.NewBundleFile(func() ([]byte, error) {
		bundle, err := client.CoreV1().ConfigMaps("flux-sandbox").Get(context.Background(), "flux-sandbox-ca-bundle", metav1.GetOptions{})
		return []byte(bundle.Data["ca.crt"]), err
	}).Bundle}
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(trust.ServiceClient("flux-sandbox-controller.flux-sandbox.svc"))),
		grpc.WithPerRPCCredentials(identity.Bearer(func() (string, error) { return token.Status.Token, nil })))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return sandboxv1.NewSandboxClaimServiceClient(conn)
}
