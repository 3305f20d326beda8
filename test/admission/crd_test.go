package admission

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

// specified is the example of the specification (0006, "CR YAML"), with a name.
const specified = `
apiVersion: sandbox.flux.io/v1alpha1
kind: Sandbox
metadata:
  name: example
spec:
  volumeMounts:
  - source: /agent/public/models
    target: /sandbox/public
    mode: ro
  dynamicVolumes:
  - volumeType: pvc
    source: user-001-data
    target: /sandbox/workspace
    mode: rw
    sizeLimit: 50Gi
    tenantId: t-10086
`

func TestSpecifiedSandboxIsAccepted(t *testing.T) {
	c := open(t)
	made := c.made("", specified)
	want := c.object(specified).Object["spec"].(map[string]any)
	want["group"] = "default"
	want["dynamicVolumes"].([]any)[0].(map[string]any)["onFailure"] = "Keep"
	if got := made.Object["spec"]; !reflect.DeepEqual(got, any(want)) {
		t.Errorf("spec %v; want what was given and the defaults, %v", got, want)
	}
}

func TestSpecifiedGroupIsAccepted(t *testing.T) {
	c := open(t)
	c.made("", `{kind: SandboxGroup, metadata: {name: specified}, spec: {featureGates: {dynamicVolumeMount: true}, schedulingPolicy: {topologyAffinity: {enabled: true}}}}`)
}

// volume is an entry with all that it needs, and further members.
func volume(target, more string) string {
	return `{volumeType: pvc, source: claim, target: ` + target + more + `}`
}

func TestDefaults(t *testing.T) {
	c := open(t)
	o := c.made("", `spec: {volumeMounts: [{source: /models, target: /models}], dynamicVolumes: [`+volume("/data", "")+`]}`)
	for path, want := range map[string]string{"group": "default", "volumeMounts": "rw", "dynamicVolumes": "rw"} {
		got, found, _ := unstructured.NestedFieldNoCopy(o.Object, "spec", path)
		if list, ok := got.([]any); ok {
			got = list[0].(map[string]any)["mode"]
		}
		if !found || got != want {
			t.Errorf("spec.%s: %v; want %s", path, got, want)
		}
	}
	// A Sandbox may say nothing at all.
	if bare := c.made("", `metadata: {name: bare}`); bare.Object["spec"] == nil {
		t.Error("a sandbox without spec has none")
	}
}

// What is refused, with the sentence that says so.
func TestRefusals(t *testing.T) {
	c := open(t)
	for _, tc := range []struct{ text, sentence string }{
		{`metadata: {name: a.b}`, `the name "a.b" is not valid: it becomes a host name; write at most 63 lower-case letters, digits and -`},
		{`spec: {dynamicVolumes: [` + volume("data", "") + `]}`, `the target is not valid: write a clean absolute path such as /data`},
		{`spec: {dynamicVolumes: [` + volume("/etc/ssl", "") + `]}`, `no volume may be mounted at /etc/ssl: it is, is in, or contains a directory of the system; choose another directory such as /data`},
		{`spec: {volumeMounts: [{source: /a, target: /var}]}`, `no volume may be mounted at /var: it is, is in, or contains a directory of the system; choose another directory such as /data`},
		{`spec: {volumeMounts: [{source: models, target: /a}]}`, `the source is not valid: write a clean absolute path of the node such as /srv/data`},
		{`spec: {volumeMounts: [{source: /a, target: /a, mode: r}]}`, `mode "r" is not valid: write ro or rw`},
		{`spec: {dynamicVolumes: [` + volume("/a", ", mode: readonly") + `]}`, `mode "readonly" is not valid: write ro or rw`},
		{`spec: {dynamicVolumes: [{volumeType: nfs, source: a, target: /a}]}`, `volumeType "nfs" is not known: write local, pvc, pv, snapshot or oss`},
		{`spec: {dynamicVolumes: [{volumeType: local, source: a, target: /a}]}`, `the source of type local is not valid: write a clean absolute path of the node such as /srv/data`},
		{`spec: {dynamicVolumes: [{volumeType: pvc, source: A/B, target: /a}]}`, `the source of type pvc is not valid: write the name of a claim or volume (lower-case letters, digits, - and ., at most 253)`},
		{`spec: {dynamicVolumes: [{volumeType: oss, source: a b, target: /a}]}`, `the source of type oss is not valid: write it without spaces and control characters`},
		{`spec: {dynamicVolumes: [` + volume("/a", ", sizeLimit: 50GB") + `]}`, `size "50GB" is not valid: write a quantity of whole bytes from 1Mi to 1Ei such as 500Mi or 50Gi`},
		{`spec: {dynamicVolumes: [` + volume("/a", ", tenantId: T_1") + `]}`, `the tenant is not valid: write 1 to 63 of the characters a-z, 0-9 and -`},
		{`spec: {dynamicVolumes: [` + volume("/a", ", subPath: ../b") + `]}`, `the subPath is not valid: write a clean relative path such as models/v1`},
		{`spec: {dynamicVolumes: [` + volume("/a", ", onFailure: Retry") + `]}`, `onFailure "Retry" is not valid: write Keep or Remove`},
		{`spec: {dynamicVolumes: [` + volume("/a", ", requestId: a b") + `]}`, `the requestId is not valid: write at most 128 printable ASCII characters without spaces`},
		{`spec: {tenantId: t-1, dynamicVolumes: [` + volume("/a", ", tenantId: t-2") + `]}`, `a volume is of another tenant than the sandbox, which is of tenant "t-1": a sandbox uses its own tenant's volumes only`},
		{`spec: {dynamicVolumes: [` + volume("/a", ", tenantId: t-1") + `, ` + volume("/b", ", tenantId: t-2") + `]}`, `the volumes are of different tenants: a sandbox uses its own tenant's volumes only`},
		{`spec: {group: Default}`, `the name is not valid: write lower-case letters, digits and -`},
		{`spec: {image: "busybox latest"}`, `the image "busybox latest" is not valid: write a reference such as docker.io/library/busybox:latest`},
		{`spec: {workingDir: work}`, `the working directory is not valid: write a clean absolute path such as /work`},
		{`spec: {restartPolicy: Sometimes}`, `restartPolicy "Sometimes" is not valid: write Always, OnFailure or Never`},
		{`spec: {env: [{name: A B}]}`, `the name of an environment variable must not have spaces, control characters or =`},
		{`spec: {resources: {limits: {cpu: 1, gpu: 1}}}`, `only cpu and memory can be set in limits and requests`},
		{`spec: {podRef: {name: web}, template: {spec: {containers: [{name: a}]}}}`, `a sandbox is made from template or is the Pod of podRef, not both: leave one out`},
		{`spec: {podRef: {name: web}, image: busybox}`, `image, command, args, env, workingDir, resources and restartPolicy are of a sandbox with a container of its own: with template or podRef leave them out`},
		{`spec: {template: {spec: {containers: [{name: a}]}}, resources: {limits: {cpu: 1}}}`, `image, command, args, env, workingDir, resources and restartPolicy are of a sandbox with a container of its own: with template or podRef leave them out`},
		{`spec: {podRef: {name: web}, paused: true}`, `a sandbox with podRef cannot be paused, as its Pod belongs to somebody else: stop the Pod instead`},
		{`{kind: SandboxGroup, spec: {schedulingPolicy: {strategy: Sperad}}}`, `strategy "Sperad" is not known: write Spread or Pack`},
		{`{kind: SandboxGroup, spec: {volumePolicy: {allowedTypes: [pvc, nfs]}}}`, `a volume type is not known: write local, pvc, pv, snapshot or oss`},
		{`{kind: SandboxGroup, metadata: {name: a.b}}`, `the name "a.b" is not valid: write at most 63 lower-case letters, digits and -`},
	} {
		_, err := c.create("", tc.text)
		if got := sentences(err); !slices.Equal(got, []string{tc.sentence}) {
			t.Errorf("%s\ngot  %q\nwant %q", tc.text, got, tc.sentence)
		}
		if len(tc.sentence) > 256 { // what a CRD may have for a message
			t.Errorf("the sentence is too long: %s", tc.sentence)
		}
	}
}

// What is wrong in its form is refused by the schema.
func TestSchema(t *testing.T) {
	c := open(t)
	many := func(n int) string {
		var entries []string
		for i := range n {
			entries = append(entries, volume(fmt.Sprint("/v", i), ""))
		}
		return `spec: {dynamicVolumes: [` + strings.Join(entries, ", ") + `]}`
	}
	for text, word := range map[string]string{
		many(33): "must have at most 32 items",
		`spec: {dynamicVolumes: [` + volume("/a", "") + `, ` + volume("/a", "") + `]}`: "Duplicate value",
		`spec: {env: [{name: A}, {name: A}]}`:                                          "Duplicate value",
		`spec: {dynamicVolumes: [{source: a, target: /a}]}`:                            "volumeType: Required value",
		`spec: {dynamicVolumes: [{volumeType: pvc, target: /a}]}`:                      "source: Required value",
		`spec: {dynamicVolumes: [{volumeType: pvc, source: a}]}`:                       "target: Required value",
		`spec: {podRef: {}}`: "name: Required value",
		`{kind: SandboxGroup, spec: {volumePolicy: {maxVolumes: 33}}}`: "less than or equal to 32",
		`{kind: SandboxGroup, spec: {subGroups: [{name: ""}]}}`:        "at least 1 chars",
	} {
		if _, err := c.create("", text); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s\ngot %v; want %q", text, err, word)
		}
	}
	if o, err := c.create("", many(32)); err != nil {
		t.Error(err)
	} else if err := c.admin.Resource(sandboxes).Namespace("default").Delete(t.Context(), o.GetName(), metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}

// What cannot be changed, and what can.
func TestImmutable(t *testing.T) {
	c := open(t)
	container := c.made("", `{metadata: {name: container}, spec: {image: busybox, command: [sleep], env: [{name: A, value: "1"}], tenantId: t-1,
		resources: {limits: {cpu: 1}}, volumeMounts: [{source: /m, target: /m}], dynamicVolumes: [`+volume("/a", `, sizeLimit: 1Gi, subPath: x`)+`]}}`)
	pod := c.made("", `{metadata: {name: pod}, spec: {podRef: {name: web}}}`)
	template := c.made("", `{metadata: {name: template}, spec: {template: {metadata: {labels: {a: b}}, spec: {containers: [{name: a, image: busybox}]}}}}`)
	if got, _, _ := unstructured.NestedString(template.Object, "spec", "template", "metadata", "labels", "a"); got != "b" {
		t.Error("the labels of the template are lost")
	}
	const (
		fixedTemplate  = `of template only the images of its containers and their CPU and memory can be changed, as the Pod is made from it: delete the sandbox and create another`
		fixedResources = `of the resources of a container in template only CPU and memory can be changed, and none can be taken away: delete the sandbox and create another`
	)
	entry := func(more string) string { return `spec: {dynamicVolumes: [` + volume("/a", more) + `]}` }
	for _, tc := range []struct {
		object          *unstructured.Unstructured
		patch, sentence string // no sentence: it is allowed
	}{
		{container, `spec: {group: other}`, `group and subGroup cannot be changed: delete the sandbox and create another`},
		{container, `spec: {subGroup: other}`, `group and subGroup cannot be changed: delete the sandbox and create another`},
		{container, `spec: {tenantId: t-2}`, `tenantId cannot be changed: delete the sandbox and create another`},
		{container, `spec: {tenantId: null}`, `tenantId cannot be changed: delete the sandbox and create another`},
		{container, `spec: {image: alpine}`, `image cannot be changed, as the container is made of it: delete the sandbox and create another`},
		{container, `spec: {command: [echo]}`, `command, args, env, workingDir and restartPolicy cannot be changed, as the container is made of them: delete the sandbox and create another`},
		{container, `spec: {env: null}`, `command, args, env, workingDir and restartPolicy cannot be changed, as the container is made of them: delete the sandbox and create another`},
		{container, `spec: {resources: {limits: {cpu: 2}}}`, `resources cannot be changed, as the container is made with them: delete the sandbox and create another`},
		{container, `spec: {volumeMounts: []}`, `volumeMounts cannot be changed, as static volumes live as long as the sandbox: use dynamicVolumes`},
		{container, `spec: {podRef: {name: web}, image: null, command: null, env: null, resources: null}`, `podRef cannot be added or removed: delete the sandbox and create another`},
		{container, entry(`, sizeLimit: 2Gi, subPath: x`), `sizeLimit of the volume at /a cannot be changed: remove the volume and add it again`},
		{container, entry(`, subPath: x`), `sizeLimit of the volume at /a cannot be changed: remove the volume and add it again`},
		{container, entry(`, sizeLimit: 1Gi`), `subPath of the volume at /a cannot be changed: remove the volume and add it again`},
		{container, entry(`, sizeLimit: 1Gi, subPath: x, mode: ro`), `mode of the volume at /a cannot be changed: remove the volume and add it again`},
		{container, `spec: {dynamicVolumes: [{volumeType: pvc, source: other, target: /a, sizeLimit: 1Gi, subPath: x}]}`, `source of the volume at /a cannot be changed: remove the volume and add it again`},
		{container, `spec: {dynamicVolumes: [{volumeType: pv, source: claim, target: /a, sizeLimit: 1Gi, subPath: x}]}`, `volumeType of the volume at /a cannot be changed: remove the volume and add it again`},
		{container, entry(`, sizeLimit: 1024Mi, subPath: x, mode: "", forceMount: true, onFailure: Remove, tenantId: t-1, detach: {force: true, requestId: r}`), ``},
		{container, entry(`, sizeLimit: 1Gi, subPath: x, requestId: again`), ``}, // another entry, for the same volume
		{container, `spec: {dynamicVolumes: [` + volume("/b", "") + `]}`, ``},
		{container, `spec: {dynamicVolumes: [], paused: true, shutdownTime: "2030-01-01T00:00:00Z", resources: {requests: {}}, workingDir: ""}`, ``},
		{container, `spec: null`, `tenantId cannot be changed: delete the sandbox and create another`},
		{pod, `spec: {podRef: {uid: u-1}}`, ``}, // the controller fills it in
		{pod, `spec: {podRef: {uid: u-2}}`, `podRef cannot be changed, as the sandbox is that Pod: create another Sandbox for another Pod`},
		{pod, `spec: {podRef: {name: other}}`, `podRef cannot be changed, as the sandbox is that Pod: create another Sandbox for another Pod`},
		{pod, `spec: {podRef: {container: b}}`, `podRef cannot be changed, as the sandbox is that Pod: create another Sandbox for another Pod`},
		{pod, `spec: {podRef: null}`, `podRef cannot be added or removed: delete the sandbox and create another`},
		{pod, entry(""), ``},
		{template, `spec: {template: {metadata: {labels: {a: c}}}}`, fixedTemplate},
		{template, `spec: {template: {spec: {containers: [{name: a, image: alpine}]}}}`, ``},
		{template, `spec: {template: {spec: {containers: [{name: a, image: busybox, resources: {limits: {cpu: 1, memory: 1Gi}, requests: {cpu: 1}}}]}}}`, ``},
		{template, `spec: {template: {spec: {containers: [{name: a, image: busybox, resources: {limits: {cpu: 2, memory: 2Gi}, requests: {cpu: 500m}}}]}}}`, ``},
		{template, `spec: {template: {spec: {containers: [{name: a, image: busybox, resources: {limits: {cpu: 2}, requests: {cpu: 500m}}}]}}}`, fixedResources},
		{template, `spec: {template: {spec: {containers: [{name: a, image: busybox}]}}}`, fixedResources},
		{template, `spec: {template: {spec: {containers: [{name: a, image: busybox, resources: {limits: {cpu: 2, memory: 2Gi, gpu: 1}, requests: {cpu: 500m}}}]}}}`, fixedResources},
		{template, `spec: {template: {spec: {containers: [{name: a, image: busybox, command: [sh], resources: {limits: {cpu: 2, memory: 2Gi}, requests: {cpu: 500m}}}]}}}`, fixedTemplate},
		{template, `spec: {template: {spec: {containers: [{name: b, image: busybox}]}}}`, fixedTemplate},
		{template, `spec: {template: {spec: {hostNetwork: true}}}`, fixedTemplate},
		{template, `spec: {template: {spec: {initContainers: [{name: i, image: busybox}]}}}`, fixedTemplate},
		{template, `spec: {template: null}`, `template cannot be added or removed: delete the sandbox and create another`},
		{template, entry(""), ``},
	} {
		err := c.patch(tc.object, tc.patch)
		got := sentences(err)
		if tc.sentence == "" && err != nil || tc.sentence != "" && !slices.Contains(got, tc.sentence) {
			t.Errorf("%s: %s\ngot  %q\nwant %q", tc.object.GetName(), tc.patch, got, tc.sentence)
		}
	}
}

// The largest sandbox that the schema allows stays within what CEL may cost, when it is made and when it changes.
func TestLargestSandbox(t *testing.T) {
	c := open(t)
	long := func(kind string, i int) string {
		head := fmt.Sprintf("/%s%02d", kind, i)
		return head + strings.Repeat("/"+strings.Repeat("x", 250), 4) + "/" + strings.Repeat("y", 1024-len(head)-4*251-1)
	}
	o := c.object(`metadata: {name: largest}`)
	var static, dynamic []any
	for i := range v1alpha1.MaxVolumes {
		source := "/srv" + strings.Repeat("/"+strings.Repeat("s", 200), 20)
		static = append(static, map[string]any{"source": source, "target": long("static", i)})
		dynamic = append(dynamic, map[string]any{"volumeType": "local", "source": source, "target": long("dynamic", i), "sizeLimit": "1.5Gi",
			"subPath": strings.TrimPrefix(source, "/"), "tenantId": strings.Repeat("t", 63), "requestId": strings.Repeat("r", 128)})
	}
	if n := len(static[0].(map[string]any)["target"].(string)); n != 1024 {
		t.Fatalf("a target has %d bytes", n)
	}
	var env []any
	for i := range 1024 {
		env = append(env, map[string]any{"name": fmt.Sprintf("%0250d", i), "value": "v"})
	}
	o.Object["spec"] = map[string]any{"volumeMounts": static, "dynamicVolumes": dynamic, "env": env, "tenantId": strings.Repeat("t", 63)}
	text, err := json.Marshal(o.Object)
	if err != nil {
		t.Fatal(err)
	}
	made := c.made("", string(text))
	dynamic[0].(map[string]any)["forceMount"] = true
	change, err := json.Marshal(map[string]any{"spec": map[string]any{"dynamicVolumes": dynamic}})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.patch(made, string(change)); err != nil {
		t.Error(err)
	}
}

// A writer whose structs lack the fields of today writes a status whole, and takes nothing from the spec.
func TestOldWriterKeepsWhatItDoesNotKnow(t *testing.T) {
	c := open(t)
	made := c.made("", `{metadata: {name: old}, spec: {dynamicVolumes: [`+volume("/a", "")+`], template: {spec: {containers: [{name: a, image: busybox}]}}}}`)
	type oldSandbox struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			Group string `json:"group"`
		} `json:"spec"`
		Status struct {
			Phase string `json:"phase"`
		} `json:"status"`
	}
	data, err := json.Marshal(made)
	if err != nil {
		t.Fatal(err)
	}
	var old oldSandbox
	if err := json.Unmarshal(data, &old); err != nil {
		t.Fatal(err)
	}
	old.Status.Phase = "Running"
	if data, err = json.Marshal(old); err != nil {
		t.Fatal(err)
	}
	written := &unstructured.Unstructured{}
	if err := json.Unmarshal(data, &written.Object); err != nil {
		t.Fatal(err)
	}
	got, err := c.admin.Resource(sandboxes).Namespace("default").UpdateStatus(t.Context(), written, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got.Object["spec"], made.Object["spec"]) || got.GetGeneration() != made.GetGeneration() {
		t.Errorf("the spec is %v; it was %v", got.Object["spec"], made.Object["spec"])
	}
	if phase, _, _ := unstructured.NestedString(got.Object, "status", "phase"); phase != "Running" {
		t.Errorf("the phase is %q", phase)
	}
}

// A manifest that is applied on the server side adds its volumes to those of others.
func TestServerSideApplyMergesByTarget(t *testing.T) {
	c := open(t)
	c.made("", `{metadata: {name: merged}, spec: {dynamicVolumes: [`+volume("/a", "")+`]}}`)
	manifest := c.object(`{metadata: {name: merged}, spec: {dynamicVolumes: [` + volume("/b", "") + `]}}`)
	got, err := c.admin.Resource(sandboxes).Namespace("default").Apply(t.Context(), "merged", manifest, metav1.ApplyOptions{FieldManager: "user"})
	if err != nil {
		t.Fatal(err)
	}
	if list, _, _ := unstructured.NestedSlice(got.Object, "spec", "dynamicVolumes"); len(list) != 2 {
		t.Errorf("the volumes are %v", list)
	}
}

// Enumerations of the status are open: a value of a newer build is stored.
func TestStatusIsOpen(t *testing.T) {
	c := open(t)
	made := c.made("", `metadata: {name: open}`)
	made.Object["status"] = map[string]any{"phase": "Hibernating", "volumes": []any{map[string]any{"target": "/t", "volumeType": "tape", "phase": "Rewinding"}}}
	got, err := c.admin.Resource(sandboxes).Namespace("default").UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got.Object["status"], made.Object["status"]) {
		t.Errorf("status %v", got.Object["status"])
	}
}

// STATUS and AGE come first, and -o wide adds the rest.
func TestColumns(t *testing.T) {
	open(t)
	for resource, want := range map[string]string{
		"sandboxes":     "Name Status Age (Group Node Volumes Tenant Message)",
		"sandboxgroups": "Name Sandboxes Age (Dynamic Volumes Strategy)",
	} {
		var table metav1.Table
		if err := get(t, "/apis/sandbox.flux.io/v1alpha1/namespaces/default/"+resource, "application/json;as=Table;v=v1;g=meta.k8s.io", &table); err != nil {
			t.Fatal(err)
		}
		var always, wide []string
		for _, column := range table.ColumnDefinitions {
			if column.Priority == 0 {
				always = append(always, column.Name)
			} else {
				wide = append(wide, column.Name)
			}
		}
		if got := strings.Join(always, " ") + " (" + strings.Join(wide, " ") + ")"; got != want {
			t.Errorf("%s: %s; want %s", resource, got, want)
		}
	}
}

func TestNames(t *testing.T) {
	open(t)
	var list metav1.APIResourceList
	if err := get(t, "/apis/sandbox.flux.io/v1alpha1", "application/json", &list); err != nil {
		t.Fatal(err)
	}
	short := map[string]string{"sandboxes": "sbx", "sandboxgroups": "sbg"}
	for _, r := range list.APIResources {
		if want, ok := short[r.Name]; ok && (!slices.Equal(r.ShortNames, []string{want}) || !slices.Equal(r.Categories, []string{"flux"})) {
			t.Errorf("%s: short names %v, categories %v", r.Name, r.ShortNames, r.Categories)
		}
	}
}

func TestSelectableFields(t *testing.T) {
	c := open(t)
	o := c.made("", `{metadata: {name: selected}, spec: {group: chosen, subGroup: part, tenantId: t-9}}`)
	o.Object["status"] = map[string]any{"node": "n1", "phase": "Running"}
	if _, err := c.admin.Resource(sandboxes).Namespace("default").UpdateStatus(t.Context(), o, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.made("", `metadata: {name: other}`)
	for _, selector := range []string{"spec.group=chosen", "spec.subGroup=part", "spec.tenantId=t-9", "status.node=n1", "status.phase=Running"} {
		list, err := c.admin.Resource(sandboxes).List(t.Context(), metav1.ListOptions{FieldSelector: selector})
		if err != nil || len(list.Items) != 1 || list.Items[0].GetName() != "selected" {
			t.Errorf("%s: %v, %v", selector, list, err)
		}
	}
}

// get decodes what the API server answers to a GET.
func get(t *testing.T, path, accept string, into any) error {
	t.Helper()
	config := apiserver.Shared(t).Config()
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	raw, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		return err
	}
	data, err := raw.Get().AbsPath(path).SetHeader("Accept", accept).DoRaw(t.Context())
	if err != nil {
		return err
	}
	return json.Unmarshal(data, into)
}
