package admission

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

// The manifests of the two documents about SandboxSets, verbatim.
func TestManifestsOfTheDocumentsAreAccepted(t *testing.T) {
	c := open(t)
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) != 4 {
		t.Fatalf("%v, %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		want := c.object(string(text)).Object["spec"].(map[string]any)
		got := c.made("", string(text)).Object["spec"].(map[string]any)
		for field, value := range want {
			if field == "template" || field == "volumeClaimTemplates" || field == "dynamicVolumesMount" {
				continue // they get defaults inside
			}
			if fmt.Sprint(got[field]) != fmt.Sprint(value) {
				t.Errorf("%s: %s is %v; want %v", file, field, got[field], value)
			}
		}
		for field := range got {
			if _, given := want[field]; !given && !slices.Contains([]string{"replicas", "claimTimeout", "createOnNoStock"}, field) {
				t.Errorf("%s: it has a %s of its own: %v", file, field, got[field])
			}
		}
	}
}

func TestDefaultsOfClaims(t *testing.T) {
	c := open(t)
	o := c.made("", `{kind: SandboxClaim, spec: {templateName: any}}`)
	want := map[string]any{"templateName": "any", "replicas": int64(1), "claimTimeout": "1m", "createOnNoStock": true}
	if !reflect.DeepEqual(o.Object["spec"], any(want)) {
		t.Errorf("spec %v; want %v", o.Object["spec"], want)
	}
}

// set is a SandboxSet with what is beside its one container a.
func set(more string) string {
	return `{kind: SandboxSet, spec: {template: {spec: {containers: [{name: a, image: busybox, volumeMounts: [{name: data, mountPath: /data}]}]}}` + more + `}}`
}

const storage = `spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}`

func TestRefusalsOfSetsAndClaims(t *testing.T) {
	c := open(t)
	claim := func(more string) string { return `{kind: SandboxClaim, spec: {templateName: pool` + more + `}}` }
	mount := func(more string) string {
		return claim(`, dynamicVolumesMount: [{pvName: v, mountPath: ` + more + `}]`)
	}
	long := strings.Repeat("x", 58)
	const badName = `the name of an environment variable must not be empty or have spaces, control characters, = or characters that are not ASCII`
	for _, tc := range []struct{ text, sentence string }{
		{strings.Replace(set(""), "{kind", "{metadata: {name: "+long+"}, kind", 1), `the name "` + long + `" is not valid: sandboxes are named after it with six characters more, and have host names; write at most 57 lower-case letters, digits and -`},
		{set(`, runtimes: [{name: envd}]`), `runtime "envd" is not known: write csi (dynamic volumes) or agent-runtime`},
		{set(`, updateStrategy: {maxUnavailable: 120%}`), `maxUnavailable is not valid: write a number such as 2, or a percentage of replicas such as 20%`},
		{set(`, scaleStrategy: {maxUnavailable: -1}`), `maxUnavailable is not valid: write a number such as 2, or a percentage of replicas such as 20%`},
		{set(`, updateStrategy: {maxUnavailable: 2147483648}`), `maxUnavailable is not valid: write a number such as 2, or a percentage of replicas such as 20%`},
		{set(`, persistentVolumeClaimRetentionPolicy: {whenScaled: Keep}`), `whenScaled "Keep" is not valid: write Delete or Retain`},
		{set(`, volumeClaimTemplates: [{metadata: {name: cache}, ` + storage + `}]`), `no container mounts the claim template "cache": add it to volumeMounts of a container, or leave it out`},
		{set(`, volumeClaimTemplates: [{` + storage + `}]`), `a claim template has no name: write metadata.name, by which containers mount it`},
		{set(`, volumeClaimTemplates: [{metadata: {name: ""}, ` + storage + `}]`), `a claim template has no name: write metadata.name, by which containers mount it`},
		{set(`, volumeClaimTemplates: [{metadata: {name: data}, ` + storage + `}, {metadata: {name: data}, ` + storage + `}]`), `there are two claim templates "data": give each a name of its own`},
		{set(`, volumeClaimTemplates: [{metadata: {name: data}, spec: {accessModes: [ReadWriteOnce]}}]`), `the claim template "data" asks for no storage: write spec.accessModes and spec.resources.requests.storage`},
		{set(`, volumeClaimTemplates: [{metadata: {name: data}, spec: {volumeName: v, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}]`), `the claim template "data" names a PersistentVolume (volumeName), which the sandboxes cannot all have: leave it out`},
		{`{kind: SandboxSet, spec: {template: {spec: {containers: [{name: a, volumeMounts: [{name: D_1, mountPath: /d}]}]}}, volumeClaimTemplates: [{metadata: {name: D_1}, ` + storage + `}]}}`, `the name of the claim template "D_1" is not valid: it becomes part of the claim's name and a volume of the Pod; write at most 63 lower-case letters, digits and -`},
		{`{kind: SandboxSet, spec: {template: {spec: {containers: []}}}}`, `template has no containers: write spec.template.spec.containers, of which the first gets the volumes`},
		{`{kind: SandboxSet, spec: {runtimes: [{name: csi}], template: {spec: {containers: [{name: a, securityContext: {capabilities: {add: [sys_admin]}}}]}}}}`, `container a is privileged or has the capability SYS_ADMIN, so the sandboxes could not have volumes: leave it out, or leave out the runtime csi, or ask the operator (allowPrivilegedPods)`},
		{`{kind: SandboxSet, spec: {runtimes: [{name: csi}], template: {spec: {containers: [{name: a, securityContext: {privileged: true}}]}}}}`, `container a is privileged or has the capability SYS_ADMIN, so the sandboxes could not have volumes: leave it out, or leave out the runtime csi, or ask the operator (allowPrivilegedPods)`},
		{`{kind: SandboxSet, spec: {runtimes: [{name: csi}], template: {spec: {hostPID: true, containers: [{name: a}]}}}}`, `the Pod has hostPID, so the sandboxes could not have volumes: leave it out, or leave out the runtime csi, or ask the operator (allowPrivilegedPods)`},
		{mount(`data`), `the target is not valid: write a clean absolute path such as /data`},
		{mount(`/etc/ssl`), `no volume may be mounted at /etc/ssl: it is, is in, or contains a directory of the system; choose another directory such as /data`},
		{mount(`/data, subPath: ../x`), `the subPath is not valid: write a clean relative path such as models/v1`},
		{claim(`, claimTimeout: soon`), `claimTimeout is not valid: write a time from 1s to 168h such as 30s or 5m`},
		{claim(`, claimTimeout: 0s`), `claimTimeout is not valid: write a time from 1s to 168h such as 30s or 5m`},
		{claim(`, ttlAfterCompleted: 5x`), `ttlAfterCompleted is not valid: write a time such as 30s, 5m or 24h`},
		{claim(`, labels: {agents.kruise.io/claim-name: other}`), `labels of agents.kruise.io and sandbox.flux.io say whose a sandbox is, and cannot be given by a claim: use names of your own`},
		{claim(`, labels: {team: ` + strings.Repeat("x", 64) + `}`), `the value of a label is not valid: write at most 63 letters, digits, -, _ and .`},
		{claim(`, annotations: {sandbox.flux.io/path: anchor}`), `annotations of agents.kruise.io and sandbox.flux.io are instructions to the system, and cannot be given by a claim: use names of your own`},
		{claim(`, envVars: {A B: c}`), badName},
		{claim(`, envVars: {Ä: c}`), badName},
		{claim(`, envVars: {"": c}`), badName},
		{claim(`, inplaceUpdate: {resources: {limits: {ephemeral-storage: 1Gi}}}`), `a container that runs can be given only cpu and memory, in limits and requests: leave the rest out`},
		{claim(`, inplaceUpdate: {resources: {claims: [{name: gpu}]}}`), `a container that runs can be given only cpu and memory, in limits and requests: leave the rest out`},
		{claim(`, inplaceUpdate: {image: "a b"}`), `the image "a b" is not valid: write a reference such as docker.io/library/busybox:latest`},
	} {
		_, err := c.create("", tc.text)
		if got := sentences(err); !slices.Equal(got, []string{tc.sentence}) {
			t.Errorf("%s\ngot  %q\nwant %q", tc.text, got, tc.sentence)
		}
	}
	for text, word := range map[string]string{
		claim(`, replicas: 0`): "greater than or equal to 1",
		claim(`, dynamicVolumesMount: [{pvName: a, mountPath: /d}, {pvName: b, mountPath: /d}]`): "Duplicate value",
		claim(`, dynamicVolumesMount: [{mountPath: /d}]`):                                        "pvName: Required value",
		set(`, runtimes: [{name: csi}, {name: csi}]`):                                            "Duplicate value",
		`{kind: SandboxClaim, spec: {}}`:                                                         "templateName: Required value",
	} {
		if _, err := c.create("", text); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s\ngot %v; want %q", text, err, word)
		}
	}
}

func TestWhatCanBeChangedOfSetsAndClaims(t *testing.T) {
	c := open(t)
	pool := c.made("", strings.Replace(set(`, replicas: 2, volumeClaimTemplates: [{metadata: {name: data, labels: {l: v}}, `+storage+`}]`), "{kind", "{metadata: {name: changed}, kind", 1))
	if list, _, _ := unstructured.NestedSlice(pool.Object, "spec", "volumeClaimTemplates"); list[0].(map[string]any)["metadata"].(map[string]any)["labels"].(map[string]any)["l"] != "v" {
		t.Error("the labels of the claim template are lost")
	}
	one := c.made("", `{kind: SandboxClaim, metadata: {name: changed}, spec: {templateName: pool, envVars: {A: b}, labels: {a: b}, inplaceUpdate: {image: busybox}, dynamicVolumesMount: [{pvName: v, mountPath: /d}]}}`)
	ends := c.made("", `{kind: SandboxClaim, metadata: {name: ends}, spec: {templateName: pool, shutdownTime: "2036-01-02T03:04:05Z"}}`)
	for _, tc := range []struct {
		object          *unstructured.Unstructured
		patch, sentence string // no sentence: it is allowed
	}{
		{pool, `spec: {replicas: 0, updateStrategy: {maxUnavailable: 1}, scaleStrategy: {maxUnavailable: 25%}, runtimes: [{name: csi}]}`, ``},
		{pool, `spec: {template: {spec: {containers: [{name: a, image: alpine}]}}}`, `no container mounts the claim template "data": add it to volumeMounts of a container, or leave it out`},
		{pool, `spec: {volumeClaimTemplates: null, template: {spec: {containers: [{name: a, image: alpine}]}}}`, ``},
		{one, `spec: {replicas: 2}`, `replicas cannot be changed: create another claim for more sandboxes, or delete sandboxes of this one`},
		{one, `spec: {templateName: other}`, `templateName cannot be changed, as sandboxes of it may have been taken: delete the claim and create another`},
		{one, `spec: {dynamicVolumesMount: null}`, `dynamicVolumesMount cannot be changed: add and remove volumes of the claimed sandboxes, in their spec.dynamicVolumes`},
		{one, `spec: {envVars: {A: c}}`, `envVars cannot be changed, as the containers were made with them: delete the claim and create another`},
		{one, `spec: {labels: {a: c}}`, `labels and annotations cannot be changed, as they were given to the claimed sandboxes: change them there`},
		{one, `spec: {shutdownTime: "2036-01-02T03:04:05Z"}`, `shutdownTime cannot be changed, as it was given to the claimed sandboxes: change it there`},
		{ends, `spec: {shutdownTime: null}`, `shutdownTime cannot be changed, as it was given to the claimed sandboxes: change it there`},
		{ends, `spec: {shutdownTime: "2036-01-02T03:04:06Z"}`, `shutdownTime cannot be changed, as it was given to the claimed sandboxes: change it there`},
		{ends, `spec: {claimTimeout: 2m}`, ``},
		{one, `spec: {inplaceUpdate: null}`, `inplaceUpdate cannot be changed: delete the claim and create another`},
		{one, `spec: {claimTimeout: 2m30s, ttlAfterCompleted: 1h, createOnNoStock: false}`, ``},
		{one, `spec: {ttlAfterCompleted: "-1s"}`, ``}, // never, as OpenKruise Agents has it
	} {
		c.verdict(c.patch(tc.object, tc.patch), tc.patch, tc.sentence)
	}
}

// The names and columns of the documents.
func TestColumnsAndNamesOfSetsAndClaims(t *testing.T) {
	c := open(t)
	var list metav1.APIResourceList
	if err := get(t, "/apis/agents.kruise.io/v1alpha1", "application/json", &list); err != nil {
		t.Fatal(err)
	}
	for resource, want := range map[string]struct{ short, columns string }{
		"sandboxsets":   {"sbs", "Name Replicas Available UpdateRevision Age"},
		"sandboxclaims": {"sbc", "Name Phase Template Desired Claimed Age"},
	} {
		if !slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool {
			return r.Name == resource && slices.Equal(r.ShortNames, []string{want.short}) && slices.Equal(r.Categories, []string{"flux"})
		}) {
			t.Errorf("%s does not have the short name %s and the category flux", resource, want.short)
		}
		var table metav1.Table
		if err := get(t, "/apis/agents.kruise.io/v1alpha1/namespaces/default/"+resource, "application/json;as=Table;v=v1;g=meta.k8s.io", &table); err != nil {
			t.Fatal(err)
		}
		var always []string
		for _, column := range table.ColumnDefinitions {
			if column.Priority == 0 {
				always = append(always, column.Name)
			}
		}
		if got := strings.Join(always, " "); got != want.columns {
			t.Errorf("%s: %s; want %s", resource, got, want.columns)
		}
	}
	made := c.made("", strings.Replace(set(`, replicas: 2`), "{kind", "{metadata: {name: scaled}, kind", 1))
	scale, err := c.admin.Resource(sets).Namespace("default").Get(t.Context(), made.GetName(), metav1.GetOptions{}, "scale")
	if err != nil {
		t.Fatal(err)
	}
	if n, _, _ := unstructured.NestedInt64(scale.Object, "spec", "replicas"); n != 2 {
		t.Errorf("scale is %v", scale.Object)
	}
}

// grant gives a user rights in a Namespace.
func grant(t *testing.T, namespace, user string, rules ...rbacv1.PolicyRule) {
	t.Helper()
	admin := kubernetes.NewForConfigOrDie(apiserver.Shared(t).Config())
	if _, err := admin.RbacV1().Roles(namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: rules}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.RbacV1().RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: user},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// Who may claim and make no sandboxes cannot say what runs in them.
func TestWhoMaySayWhatRunsInAClaimedSandbox(t *testing.T) {
	c := open(t)
	namespace := c.namespace("")
	toClaim := rbacv1.PolicyRule{APIGroups: []string{"agents.kruise.io"}, Resources: []string{"sandboxclaims"}, Verbs: []string{"create"}}
	grant(t, namespace, "of-claims", toClaim)
	grant(t, namespace, "of-both", toClaim, rbacv1.PolicyRule{APIGroups: []string{"sandbox.flux.io"}, Resources: []string{"sandboxes"}, Verbs: []string{"create"}})
	claim := func(more string) string {
		return `{kind: SandboxClaim, metadata: {name: a}, spec: {templateName: pool` + more + `}}`
	}
	try := func(user, text string) error {
		_, err := client(t, apiserver.Shared(t).As(user)).Resource(sbClaims).Namespace(namespace).Create(t.Context(), c.object(text), metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	image, env := claim(`, inplaceUpdate: {image: busybox}`), claim(`, envVars: {LD_PRELOAD: /data/mine.so}`)
	eventually(t, "the users have their rights", func() bool {
		return try("of-claims", claim("")) == nil && try("of-both", image) == nil && try("of-both", env) == nil
	})
	for _, text := range []string{image, env} {
		c.verdict(try("of-claims", text), text, `inplaceUpdate.image and envVars decide what runs in a sandbox, with its ServiceAccount and Secrets: leave them out, or ask for the right to create Sandboxes`)
	}
	resized := claim(`, labels: {a: b}, inplaceUpdate: {resources: {limits: {cpu: "1"}}}`)
	c.verdict(try("of-claims", resized), resized, ``)
}

// A sandbox gets its runtimes from a set: who may make none, cannot turn its gate.
func TestWhoMayNameRuntimes(t *testing.T) {
	c := open(t)
	namespace := c.namespace("")
	create := rbacv1.PolicyRule{APIGroups: []string{"sandbox.flux.io"}, Resources: []string{"sandboxes"}, Verbs: []string{"create"}}
	grant(t, namespace, "of-sandboxes", create)
	grant(t, namespace, "of-sets", create, rbacv1.PolicyRule{APIGroups: []string{"agents.kruise.io"}, Resources: []string{"sandboxsets"}, Verbs: []string{"create"}})
	grant(t, namespace, "of-runtimes", create, rbacv1.PolicyRule{APIGroups: []string{"sandbox.flux.io"}, Resources: []string{"sandboxes/runtimes"}, Verbs: []string{"create"}})
	try := func(user, spec string) error {
		_, err := client(t, apiserver.Shared(t).As(user)).Resource(sandboxes).Namespace(namespace).Create(t.Context(), c.object(spec), metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	const plain, withCSI = `{metadata: {name: plain}, spec: {template: {spec: {containers: [{name: a}]}}}}`, `{metadata: {name: runs}, spec: {runtimes: [csi], template: {spec: {containers: [{name: a}]}}}}`
	eventually(t, "the users have their rights", func() bool {
		return try("of-sandboxes", plain) == nil && try("of-sets", withCSI) == nil && try("of-runtimes", withCSI) == nil
	})
	c.verdict(try("of-sandboxes", withCSI), withCSI, `runtimes are what a SandboxSet turns on for its sandboxes: leave them out, or ask for the right to create SandboxSets`)
	made := c.made("", withCSI)
	c.verdict(c.patch(made, `spec: {runtimes: null}`), "taken away", `runtimes cannot be changed: delete the sandbox and create another`)
	c.verdict(c.dryRunIn("default", `spec: {image: busybox, runtimes: [csi]}`), "no Pod", `runtimes are of a sandbox with template: leave them out`)
}
