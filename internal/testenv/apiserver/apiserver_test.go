package apiserver_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

// call makes a request and returns the answer's status and body. Status 0: there was no answer.
func call(t *testing.T, config *rest.Config, method, path, body string) (int, string) {
	t.Helper()
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequest(method, config.Host+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	got, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(got)
}

func want(t *testing.T, status int, config *rest.Config, method, path, body string) {
	t.Helper()
	if got, answer := call(t, config, method, path, body); got != status {
		t.Fatalf("%s %s: status %d, want %d: %s", method, path, got, status, answer)
	}
}

func TestUsersHaveTheRightsThatRBACGivesThem(t *testing.T) {
	s := apiserver.Shared(t)
	alice := s.As("alice", "readers")
	const secrets = "/api/v1/namespaces/kube-system/secrets"
	want(t, http.StatusOK, s.Config(), http.MethodGet, secrets, "")
	want(t, http.StatusForbidden, alice, http.MethodGet, secrets, "")
	want(t, http.StatusCreated, s.Config(), http.MethodPost, "/apis/rbac.authorization.k8s.io/v1/clusterroles", `{"metadata":{"name":"reader"},
		"rules":[{"apiGroups":[""],"resources":["secrets"],"verbs":["list"]}]}`)
	want(t, http.StatusCreated, s.Config(), http.MethodPost, "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/rolebindings", `{"metadata":{"name":"readers"},
		"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":"reader"},
		"subjects":[{"apiGroup":"rbac.authorization.k8s.io","kind":"Group","name":"readers"}]}`)
	eventually(t, "alice may read", func() bool { // the authorizer reads from a cache
		status, _ := call(t, alice, http.MethodGet, secrets, "")
		return status == http.StatusOK
	})
}

func TestPodsAndServiceAccountTokensAreServed(t *testing.T) {
	admin := apiserver.Shared(t).Config()
	const accounts = "/api/v1/namespaces/default/serviceaccounts"
	want(t, http.StatusCreated, admin, http.MethodPost, accounts, `{"metadata":{"name":"agent"}}`)
	want(t, http.StatusCreated, admin, http.MethodPost, "/api/v1/namespaces/default/pods",
		`{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","image":"i","securityContext":{"privileged":true}}]}}`)
	status, answer := call(t, admin, http.MethodPost, accounts+"/agent/token", `{"spec":{"audiences":["flux"]}}`)
	if status != http.StatusCreated {
		t.Fatalf("token: %d: %s", status, answer)
	}
	var made struct {
		Status struct{ Token string }
	}
	if err := json.Unmarshal([]byte(answer), &made); err != nil {
		t.Fatal(err)
	}
	_, review := call(t, admin, http.MethodPost, "/apis/authentication.k8s.io/v1/tokenreviews",
		fmt.Sprintf(`{"spec":{"audiences":["flux"],"token":%q}}`, made.Status.Token))
	if !strings.Contains(review, `"system:serviceaccount:default:agent"`) {
		t.Errorf("the token is not known: %s", review)
	}
}

func TestTheAuditLogSaysWhoAskedForWhat(t *testing.T) {
	s := apiserver.Shared(t)
	config := s.As("carol")
	config.UserAgent = "audit-test/1"
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Get(config.Host + "/api/v1/namespaces/default/configmaps")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	eventually(t, "the request is in the log", func() bool { return slices.Contains(audited(t, s.AuditLog(), "carol"), "list 403 audit-test/1") })
	if got := audited(t, s.AuditLog(), "carol"); len(got) != 1 {
		t.Errorf("carol's one request is in the log as %v", got)
	}
}

// audited are a user's requests in an audit log: verb, status, user agent.
func audited(t *testing.T, path, user string) []string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for line := range strings.Lines(string(content)) {
		var event struct {
			Stage, Verb, UserAgent string
			ImpersonatedUser       struct{ Username string }
			ResponseStatus         struct{ Code int }
		}
		if strings.HasSuffix(line, "\n") { // the last may not be complete
			if err := json.Unmarshal([]byte(line), &event); err != nil {
				t.Fatal(err)
			}
		}
		if event.ImpersonatedUser.Username == user {
			all = append(all, fmt.Sprint(event.Verb, " ", event.ResponseStatus.Code, " ", event.UserAgent))
		}
	}
	return all
}

func TestStoppedAndStartedAgainItHasWhatWasStored(t *testing.T) {
	s := apiserver.Start(t, apiserver.Flags("--anonymous-auth=false"))
	want(t, http.StatusUnauthorized, &rest.Config{Host: s.Config().Host, TLSClientConfig: rest.TLSClientConfig{CAData: s.Config().CAData}},
		http.MethodGet, "/version", "") // the flag counts
	want(t, http.StatusCreated, s.Config(), http.MethodPost, "/api/v1/namespaces", `{"metadata":{"name":"kept"}}`)
	s.Stop()
	if status, answer := call(t, s.Config(), http.MethodGet, "/version", ""); status != 0 {
		t.Errorf("stopped, it answers: %d %s", status, answer)
	}
	s.Restart(t)
	want(t, http.StatusOK, s.Config(), http.MethodGet, "/api/v1/namespaces/kept", "")
}

func TestKubeconfigIsForKubectl(t *testing.T) {
	s := apiserver.Shared(t)
	content, err := os.ReadFile(s.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	var kubeconfig struct {
		Clusters []struct {
			Cluster struct {
				Server string
				CA     []byte `json:"certificate-authority-data"`
			}
		}
		Users []struct {
			User struct{ Token string }
		}
	}
	if err := json.Unmarshal(content, &kubeconfig); err != nil {
		t.Fatal(err)
	}
	cluster := kubeconfig.Clusters[0].Cluster
	want(t, http.StatusOK, &rest.Config{
		Host: cluster.Server, BearerToken: kubeconfig.Users[0].User.Token, TLSClientConfig: rest.TLSClientConfig{CAData: cluster.CA},
	}, http.MethodGet, "/api/v1/secrets", "")
}

// A killed test binary runs no cleanup.
func TestItDiesWithTheTestBinary(t *testing.T) {
	const child = "FLUX_TEST_APISERVER_CHILD"
	if os.Getenv(child) != "" {
		s := apiserver.Start(t)
		fmt.Println("pids", s.Pids())
		select {} // until killed
	}
	apiserver.Shared(t) // are there binaries?
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"=1", "TMPDIR="+t.TempDir())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pids []string
	for lines := bufio.NewScanner(out); pids == nil && lines.Scan(); {
		if list, ok := strings.CutPrefix(lines.Text(), "pids "); ok {
			pids = strings.Fields(strings.Trim(list, "[]"))
		}
	}
	if len(pids) != 2 || slices.ContainsFunc(pids, gone) {
		t.Errorf("the child's servers: %v", pids)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // "signal: killed"
	eventually(t, "both servers are gone", func() bool { return !slices.ContainsFunc(pids, func(pid string) bool { return !gone(pid) }) })
}

// gone says whether a process has ended; one that nobody waited for has.
func gone(pid string) bool {
	if _, err := strconv.Atoi(pid); err != nil {
		return false
	}
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	testenv.Eventually(t, time.Minute, what, is)
}
