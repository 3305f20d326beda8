package connect

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A person with the Role and a ServiceAccount to call as gets all that it takes, but for the way itself, for which a kubelet is
// needed (test/e2e); each right that is missing is said by its name.
func TestWhatAPersonGets(t *testing.T) {
	server := apiserver.Start(t)
	admin := kubernetes.NewForConfigOrDie(server.Config())
	for _, namespace := range []string{DefaultNamespace, "alice"} {
		_, err := admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
		must(t, err)
	}
	manifests.Apply(t, server.Config(), manifests.Objects(t, "config/kubernetes/rbac.yaml")...)
	alice, err := New(server.As("alice"), "alice")
	must(t, err)
	refused := func(what string) { // from when the API server's authorizer knows the last binding
		t.Helper()
		var err error
		if !testenv.Poll(30*time.Second, func() bool {
			_, err = alice.Connect(t.Context(), DefaultNamespace, "alice", "robot")
			return err != nil && strings.Contains(err.Error(), what)
		}) {
			t.Errorf("%v, want it to say %q", err, what)
		}
	}
	refused("the Role flux-sandbox-connect of Namespace flux-sandbox allows it")
	bind := func(namespace, role string) {
		t.Helper()
		_, err := admin.RbacV1().RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "alice"},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "alice"}}}, metav1.CreateOptions{})
		must(t, err)
	}
	bind(DefaultNamespace, Role)
	refused("is FluxSandbox installed in the cluster")
	_, err = admin.CoreV1().ConfigMaps(DefaultNamespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: Bundle}, Data: map[string]string{bundleKey: "pem"}}, metav1.CreateOptions{})
	must(t, err)
	refused("none of the 0 Pods of flux-sandbox-controller in Namespace flux-sandbox")

	_, err = admin.CoreV1().ServiceAccounts(DefaultNamespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	must(t, err)
	for name, ready := range map[string]corev1.ConditionStatus{"a-starting": corev1.ConditionFalse, "b-ready": corev1.ConditionTrue} {
		pod, err := admin.CoreV1().Pods(DefaultNamespace).Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/name": Service}},
			Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{Name: "controller", Image: "i",
				Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 1}, {Name: portName, ContainerPort: 9443}}}}},
		}, metav1.CreateOptions{})
		must(t, err)
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}
		_, err = admin.CoreV1().Pods(DefaultNamespace).UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
		must(t, err)
	}
	pod, port, err := alice.controller(t.Context(), DefaultNamespace)
	must(t, err)
	if pod.Name != "b-ready" || port != 9443 {
		t.Errorf("Pod %s, port %d", pod.Name, port)
	}
	refused("ask for a token of ServiceAccount alice/robot")
	_, err = admin.RbacV1().Roles("alice").Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "tokens"},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"serviceaccounts/token"}, Verbs: []string{"create"}}}}, metav1.CreateOptions{})
	must(t, err)
	bind("alice", "tokens")
	refused("there is no ServiceAccount robot in Namespace alice")
	_, err = admin.CoreV1().ServiceAccounts("alice").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "robot"}}, metav1.CreateOptions{})
	must(t, err)
	refused("forward port 9443 of Pod flux-sandbox/b-ready") // nobody may not, but nobody runs it

	token, err := alice.token("alice", "robot")
	must(t, err)
	first, err := token()
	must(t, err)
	if again, err := token(); err != nil || again != first {
		t.Errorf("another token, though the first is good: %v", err)
	}
	for audience, good := range map[string]bool{Audience: true, "": false} {
		review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: first}}
		if audience != "" {
			review.Spec.Audiences = []string{audience}
		}
		review, err := admin.AuthenticationV1().TokenReviews().Create(t.Context(), review, metav1.CreateOptions{})
		must(t, err)
		if review.Status.Authenticated != good || good && review.Status.User.Username != "system:serviceaccount:alice:robot" {
			t.Errorf("for the audience %q: %+v", audience, review.Status)
		}
	}
}

func TestTheKubeconfigsOwnToken(t *testing.T) {
	plugin := filepath.Join(t.TempDir(), "plugin")
	must(t, os.WriteFile(plugin, []byte("#!/bin/sh\necho '{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\"status\":{\"token\":\"of-the-plugin\"}}'\n"), 0o755))
	for name, tt := range map[string]struct {
		config rest.Config
		want   string
		says   string
	}{
		"token":  {config: rest.Config{BearerToken: "t0ken"}, want: "t0ken"},
		"plugin": {config: rest.Config{ExecProvider: &clientcmdapi.ExecConfig{Command: plugin, APIVersion: "client.authentication.k8s.io/v1", InteractiveMode: clientcmdapi.NeverExecInteractiveMode}}, want: "of-the-plugin"},
		"none":   {says: "has no token"},
	} {
		tt.config.Host = "https://127.0.0.1:1" // nobody is asked
		c, err := New(&tt.config, "")
		must(t, err)
		got, err := c.own()
		if got != tt.want || (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	t.Setenv("KUBECONFIG", filepath.Join(dir, "missing"))
	if _, found, err := Load("", ""); found || err != nil {
		t.Errorf("without a kubeconfig: %t, %v", found, err)
	}
	if _, _, err := Load(filepath.Join(dir, "missing"), ""); err == nil {
		t.Error("a file that is named and missing is no error")
	}
	file := filepath.Join(dir, "config")
	must(t, os.WriteFile(file, []byte(`
apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: "https://a:6443"}}, {name: b, cluster: {server: "https://b:6443"}}]
users: [{name: me, user: {token: x}}]
contexts: [{name: a, context: {cluster: a, user: me}}, {name: b, context: {cluster: b, user: me, namespace: alice}}]
current-context: a
`), 0o600))
	t.Setenv("KUBECONFIG", file)
	for contextName, want := range map[string][2]string{"": {"https://a:6443", "default"}, "b": {"https://b:6443", "alice"}} {
		c, found, err := Load("", contextName)
		if err != nil || !found || c.config.Host != want[0] || c.Namespace() != want[1] {
			t.Errorf("context %q: %t, %v", contextName, found, err)
		}
	}
	if _, _, err := Load("", "c"); err == nil || !strings.Contains(err.Error(), `"c"`) {
		t.Errorf("a context that is not there: %v", err)
	}
	// A way that nobody waits for is not opened.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c, _, err := Load(file, "")
	must(t, err)
	if _, err := c.Connect(ctx, DefaultNamespace, "x", "y"); err == nil {
		t.Error("connected after the end")
	}
}
