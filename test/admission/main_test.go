package admission

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/manifests"
)

func TestMain(m *testing.M) { apiserver.Main(m) }

var (
	sandboxes  = v1alpha1.GroupVersion.WithResource("sandboxes")
	groups     = v1alpha1.GroupVersion.WithResource("sandboxgroups")
	namespaces = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"}
	sets       = agentsv1alpha1.GroupVersion.WithResource("sandboxsets")
	sbClaims   = agentsv1alpha1.GroupVersion.WithResource("sandboxclaims")
	configMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
)

// cluster is the API server with the CRDs and the policies. Users are trusted to name tenants in it.
type cluster struct {
	*testing.T
	admin dynamic.Interface
}

var install sync.Once

func open(t *testing.T) cluster {
	t.Helper()
	config := apiserver.Shared(t).Config()
	c := cluster{t, client(t, config)}
	install.Do(func() {
		objects := []*unstructured.Unstructured{c.object(`{apiVersion: v1, kind: Namespace, metadata: {name: flux-sandbox}}`)}
		for _, o := range manifests.Objects(t, "config/crd/*.yaml", "config/admission/*.yaml") {
			if o.GetKind() == "ConfigMap" {
				if err := unstructured.SetNestedField(o.Object, "true", "data", "trustTenantIDs"); err != nil {
					t.Fatal(err)
				}
			}
			objects = append(objects, o)
		}
		manifests.Apply(t, config, objects...)
		probe := c.namespace("probe")
		stranger := client(t, apiserver.Shared(t).As("stranger", "nobody")).Resource(namespaces)
		eventually(t, "the policies are in force", func() bool {
			given := c.dryRunIn(probe, `{}`)
			trusted := c.dryRunIn("default", `spec: {tenantId: any}`)
			tenant := c.dryRunIn(probe, `spec: {tenantId: other}`)
			pod := c.dryRunIn(probe, `spec: {template: {spec: {hostPID: true, containers: [{name: a}]}}, dynamicVolumes: [`+volume("/a", "")+`]}`)
			nested := c.dryRunIn(probe, `spec: {dynamicVolumes: [`+volume("/a", "")+`, `+volume("/a/b", "")+`]}`)
			claims := c.dryRunIn(probe, `spec: {template: {spec: {containers: [{name: a}]}}, volumeClaimTemplates: [`+claimTemplate("a", "")+`]}`)
			_, set := c.create(probe, `{kind: SandboxSet, spec: {replicas: 0, template: {spec: {containers: []}}}}`)
			_, label := stranger.Create(t.Context(), c.object(`{apiVersion: v1, kind: Namespace, metadata: {name: probe, labels: {sandbox.flux.io/tenant-id: x}}}`), metav1.CreateOptions{DryRun: dryRun})
			return given == nil && trusted == nil && apierrors.IsForbidden(tenant) && apierrors.IsForbidden(pod) && apierrors.IsInvalid(nested) && apierrors.IsInvalid(claims) && apierrors.IsInvalid(set) &&
				apierrors.IsForbidden(label)
		})
	})
	return c
}

func client(t *testing.T, config *rest.Config) dynamic.Interface {
	t.Helper()
	c, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// namespace makes a Namespace of the test's own, labelled with a tenant if it has one.
func (c cluster) namespace(tenant string) string {
	c.Helper()
	o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"generateName": "test-"}}}
	if tenant != "" {
		o.SetLabels(map[string]string{v1alpha1.LabelTenantID: tenant})
	}
	made, err := c.admin.Resource(namespaces).Create(c.Context(), o, metav1.CreateOptions{})
	if err != nil {
		c.Fatal(err)
	}
	return made.GetName()
}

// object is a Sandbox with the spec, or whatever else the text says.
func (c cluster) object(text string) *unstructured.Unstructured {
	c.Helper()
	o := &unstructured.Unstructured{Object: map[string]any{}}
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		c.Fatalf("%v: %s", err, text)
	}
	if o.GetKind() == "" {
		o.SetKind("Sandbox")
	}
	if o.GetAPIVersion() == "" {
		o.SetAPIVersion(resourceOf(o).GroupVersion().String())
	}
	if o.GetName() == "" {
		o.SetName("test")
	}
	return o
}

// resourceOf is the resource of an object of ours.
func resourceOf(o *unstructured.Unstructured) schema.GroupVersionResource {
	switch o.GetKind() {
	case "SandboxGroup":
		return groups
	case "SandboxSet":
		return sets
	case "SandboxClaim":
		return sbClaims
	}
	return sandboxes
}

func (c cluster) create(namespace, text string) (*unstructured.Unstructured, error) {
	c.Helper()
	o := c.object(text)
	if namespace == "" {
		namespace = "default"
	}
	return c.admin.Resource(resourceOf(o)).Namespace(namespace).Create(c.Context(), o, metav1.CreateOptions{})
}

// made creates a Sandbox that goes with the test.
func (c cluster) made(namespace, text string) *unstructured.Unstructured {
	c.Helper()
	o, err := c.create(namespace, text)
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() {
		r := c.admin.Resource(resourceOf(o)).Namespace(o.GetNamespace())
		if err := r.Delete(context.Background(), o.GetName(), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			c.Error(err)
		}
	})
	return o
}

var dryRun = []string{metav1.DryRunAll}

// dryRunIn asks whether a Sandbox would be accepted.
func (c cluster) dryRunIn(namespace, text string) error {
	c.Helper()
	o := c.object(text)
	if o.GetName() == "test" {
		o.SetName("dry-run") // one that does not exist
	}
	// Not the test's context: this is asked in its clean-up too.
	_, err := c.admin.Resource(sandboxes).Namespace(namespace).Create(context.Background(), o, metav1.CreateOptions{DryRun: dryRun})
	return err
}

// patch changes an object by a JSON merge patch written as YAML.
func (c cluster) patch(o *unstructured.Unstructured, text string) error {
	c.Helper()
	data, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		c.Fatal(err)
	}
	_, err = c.admin.Resource(resourceOf(o)).Namespace(o.GetNamespace()).
		Patch(c.Context(), o.GetName(), types.MergePatchType, data, metav1.PatchOptions{})
	return err
}

// sentences are what the API server says to a person about an error: a sentence for each cause, the whole for one
// without.
func sentences(err error) []string {
	var status apierrors.APIStatus
	if err == nil || !errors.As(err, &status) {
		return nil
	}
	var out []string
	if details := status.Status().Details; details != nil {
		for _, cause := range details.Causes {
			out = append(out, sentence(cause.Message))
		}
	}
	if len(out) == 0 {
		out = append(out, sentence(status.Status().Message))
	}
	return out
}

// sentence is a message without what field.Error and admission policies write before it.
func sentence(message string) string {
	if _, rest, ok := strings.Cut(message, " denied request: "); ok {
		return rest
	}
	if rest, ok := strings.CutPrefix(message, "Forbidden: "); ok {
		return rest
	}
	if rest, ok := strings.CutPrefix(message, "Invalid value: "); ok {
		return afterValue(rest)
	}
	return message
}

// afterValue cuts a JSON value and ": " off the front.
func afterValue(s string) string {
	d := json.NewDecoder(strings.NewReader(s))
	var v any
	if err := d.Decode(&v); err == nil {
		return strings.TrimPrefix(s[d.InputOffset():], ": ")
	}
	return s
}

// eventually waits until something is so: what an API server does after it has answered is told nowhere.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	testenv.Eventually(t, time.Minute, what, is)
}
