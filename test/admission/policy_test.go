package admission

import (
	"context"
	"slices"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

// parameter sets what the operator decides, until the test ends.
func (c cluster) parameter(name, value string, probe func() bool) {
	c.Helper()
	set := func(value string) error {
		_, err := c.admin.Resource(configMaps).Namespace("flux-sandbox").Patch(context.Background(), "flux-sandbox-admission", types.MergePatchType,
			[]byte(`{"data":{"`+name+`":"`+value+`"}}`), metav1.PatchOptions{})
		return err
	}
	before, err := c.admin.Resource(configMaps).Namespace("flux-sandbox").Get(c.Context(), "flux-sandbox-admission", metav1.GetOptions{})
	if err != nil {
		c.Fatal(err)
	}
	was, _, _ := unstructured.NestedString(before.Object, "data", name)
	c.Cleanup(func() {
		if err := set(was); err != nil {
			c.Error(err)
		}
		eventually(c.T, name+" is as it was", func() bool { return !probe() })
	})
	if err := set(value); err != nil {
		c.Fatal(err)
	}
	eventually(c.T, name+" is "+value, probe)
}

func (c cluster) label(namespace, value string) {
	c.Helper()
	if value != "null" {
		value = `"` + value + `"`
	}
	if _, err := c.admin.Resource(namespaces).Patch(c.Context(), namespace, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"`+v1alpha1.LabelTenantID+`":`+value+`}}}`), metav1.PatchOptions{}); err != nil {
		c.Fatal(err)
	}
}

func TestTenantOfTheNamespace(t *testing.T) {
	c := open(t)
	mine, nobodys := c.namespace("t-1"), c.namespace("")
	// Where the operator trusts them, users name tenants in Namespaces that have none.
	c.verdict(c.dryRunIn(nobodys, specified), specified, ``)
	c.verdict(c.dryRunIn(mine, `spec: {tenantId: t-2}`), "trusted", `Namespace `+mine+` belongs to tenant "t-1" and the sandbox names tenant "t-2": leave tenantId out, or use the Namespace of that tenant`)

	c.parameter("trustTenantIDs", "false", func() bool { return c.dryRunIn(nobodys, `spec: {tenantId: t-1}`) != nil })
	for _, tc := range []struct{ namespace, text, sentence string }{
		{mine, `spec: {tenantId: t-1, dynamicVolumes: [` + volume("/a", ", tenantId: t-1") + `]}`, ``},
		{mine, `spec: {dynamicVolumes: [` + volume("/a", ", tenantId: t-1") + `]}`, ``},
		{mine, `spec: {tenantId: t-2}`, `Namespace ` + mine + ` belongs to tenant "t-1" and the sandbox names tenant "t-2": leave tenantId out, or use the Namespace of that tenant`},
		{nobodys, `spec: {dynamicVolumes: [` + volume("/a", "") + `]}`, ``},
		{nobodys, `spec: {tenantId: t-1}`, `Namespace ` + nobodys + ` belongs to no tenant and the sandbox names tenant "t-1": leave tenantId out, or let an operator label the Namespace with sandbox.flux.io/tenant-id`},
		{nobodys, `spec: {dynamicVolumes: [` + volume("/a", ", tenantId: t-3") + `]}`, `Namespace ` + nobodys + ` belongs to no tenant and the sandbox names tenant "t-3": leave tenantId out, or let an operator label the Namespace with sandbox.flux.io/tenant-id`},
	} {
		c.verdict(c.dryRunIn(tc.namespace, tc.text), tc.text, tc.sentence)
	}

	// A sandbox that names no tenant gets its Namespace's, and with it the rules of the CRD.
	made := c.made(mine, `{}`)
	if tenant, _, _ := unstructured.NestedString(made.Object, "spec", "tenantId"); tenant != "t-1" {
		t.Errorf("the sandbox is of tenant %q", tenant)
	}
	err := c.patch(made, `spec: {dynamicVolumes: [`+volume("/a", ", tenantId: t-2")+`]}`)
	if want := `a volume is of another tenant than the sandbox, which is of tenant "t-1": a sandbox uses its own tenant's volumes only`; !slices.Contains(sentences(err), want) &&
		!apierrors.IsForbidden(err) { // whoever is asked first
		t.Errorf("another tenant's volume: %v", err)
	}
	if err := c.dryRunIn(mine, `spec: {dynamicVolumes: [`+volume("/a", ", tenantId: t-2")+`]}`); err == nil {
		t.Error("a new sandbox takes another tenant's volume")
	}
}

func (c cluster) verdict(err error, text, sentence string) {
	c.Helper()
	if sentence == "" && err != nil || sentence != "" && !slices.Equal(sentences(err), []string{sentence}) {
		c.Errorf("%s\ngot  %v\nwant %q", text, err, sentence)
	}
}

// When the label of a Namespace has changed, what is there gets no more volumes, and can be cleaned up all the same.
func TestTheLabelChanges(t *testing.T) {
	c := open(t)
	namespace, nobodys := c.namespace("t-1"), c.namespace("")
	c.parameter("trustTenantIDs", "false", func() bool { return c.dryRunIn(nobodys, `spec: {tenantId: t-1}`) != nil })
	made := c.made(namespace, `{metadata: {finalizers: [`+v1alpha1.FinalizerVolumes+`]}, spec: {dynamicVolumes: [`+volume("/a", ", tenantId: t-1")+`, `+volume("/b", "")+`]}}`)
	for _, label := range []string{"t-2", "null"} {
		c.label(namespace, label)
		eventually(t, "the new label counts", func() bool { return apierrors.IsForbidden(c.dryRunIn(namespace, `spec: {tenantId: t-1}`)) })
		if err := c.patch(made, `spec: {dynamicVolumes: [`+volume("/a", ", tenantId: t-1")+`, `+volume("/new", "")+`]}`); !apierrors.IsForbidden(err) {
			t.Errorf("label %s: a volume is added: %v", label, err)
		}
		if err := c.patch(made, `spec: {paused: true}`); err != nil {
			t.Errorf("label %s: %v", label, err)
		}
	}
	if err := c.patch(made, `spec: {dynamicVolumes: [`+volume("/a", ", tenantId: t-1, detach: {force: true}")+`]}`); err != nil {
		t.Error(err)
	}
	if err := c.admin.Resource(sandboxes).Namespace(namespace).Delete(t.Context(), "test", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := c.patch(made, `metadata: {finalizers: null}`); err != nil {
		t.Error(err)
	}
	if _, err := c.admin.Resource(sandboxes).Namespace(namespace).Get(t.Context(), "test", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the sandbox is not gone: %v", err)
	}
}

// The label of a Namespace is set, changed and removed only by who may assign the tenant.
func TestWhoMayLabel(t *testing.T) {
	c := open(t)
	roles := schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"}
	bindings := roles.GroupVersion().WithResource("clusterrolebindings")
	for resource, text := range map[schema.GroupVersionResource]string{
		roles:    `{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: make-namespaces}, rules: [{apiGroups: [""], resources: [namespaces, namespaces/status, namespaces/finalize], verbs: ["*"]}]}`,
		bindings: `{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: make-namespaces}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: make-namespaces}, subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: makers}]}`,
	} {
		if _, err := c.admin.Resource(resource).Create(t.Context(), c.object(text), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	assign := `{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: assign-t-1}, rules: [{apiGroups: [sandbox.flux.io], resources: [tenants], resourceNames: [t-1], verbs: [assign]}]}`
	bound := `{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: assign-t-1}, roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: assign-t-1}, subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: assigner}]}`
	if _, err := c.admin.Resource(roles).Create(t.Context(), c.object(assign), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.admin.Resource(bindings).Create(t.Context(), c.object(bound), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	stranger := client(t, apiserver.Shared(t).As("stranger", "makers")).Resource(namespaces)
	assigner := client(t, apiserver.Shared(t).As("assigner", "makers")).Resource(namespaces)
	make := func(labels string) *unstructured.Unstructured {
		return c.object(`{apiVersion: v1, kind: Namespace, metadata: {name: labelled, labels: {` + labels + `}}}`)
	}
	tenant := func(value string) []byte {
		return []byte(`{"metadata":{"labels":{"` + v1alpha1.LabelTenantID + `":` + value + `}}}`)
	}
	owned, free := c.namespace("t-1"), c.namespace("")
	eventually(t, "the makers may make", func() bool {
		_, err := stranger.Create(t.Context(), make(`a: b`), metav1.CreateOptions{DryRun: dryRun})
		_, other := assigner.Create(t.Context(), make(v1alpha1.LabelTenantID+`: t-1`), metav1.CreateOptions{DryRun: dryRun})
		return err == nil && other == nil
	})
	refusal := func(name string) string {
		return `the label sandbox.flux.io/tenant-id of Namespace ` + name + ` says whose data it can reach: only who has the right to assign tenants.sandbox.flux.io may set, change or remove it`
	}
	_, err := stranger.Create(t.Context(), make(v1alpha1.LabelTenantID+`: t-1`), metav1.CreateOptions{DryRun: dryRun})
	c.verdict(err, "a Namespace with a label", refusal("labelled"))
	patch := func(who string, name, value string, subresource ...string) error {
		r := map[string]interface {
			Patch(context.Context, string, types.PatchType, []byte, metav1.PatchOptions, ...string) (*unstructured.Unstructured, error)
		}{"stranger": stranger, "assigner": assigner, "admin": c.admin.Resource(namespaces)}[who]
		_, err := r.Patch(t.Context(), name, types.MergePatchType, tenant(value), metav1.PatchOptions{DryRun: dryRun}, subresource...)
		return err
	}
	for _, tc := range []struct {
		who, namespace, value string
		allowed               bool
	}{
		{"stranger", free, `"t-1"`, false},
		{"stranger", owned, `"t-2"`, false},
		{"stranger", owned, `null`, false},
		{"stranger", owned, `"t-1"`, true}, // it is so already
		{"assigner", free, `"t-1"`, true},
		{"assigner", free, `"t-2"`, false},
		{"assigner", owned, `null`, true},
		{"assigner", owned, `"t-2"`, false},
		{"admin", owned, `"t-2"`, true},
	} {
		sentence := refusal(tc.namespace)
		if tc.allowed {
			sentence = ""
		}
		c.verdict(patch(tc.who, tc.namespace, tc.value), tc.who+" sets "+tc.value, sentence)
	}
	// A write to a subresource can change labels as well.
	c.verdict(patch("stranger", owned, `"t-2"`, "status"), "through the status", refusal(owned))
	if err := patch("admin", free, `"T.1"`); err == nil {
		t.Error("a label that is no tenant is accepted")
	} else if got := sentences(err); !slices.Contains(got, `the label sandbox.flux.io/tenant-id="T.1" is not valid: write 1 to 63 of the characters a-z, 0-9 and -`) {
		t.Errorf("got %q", got)
	}
}

// What the Pod of a sandbox with volumes may not be.
func TestPodTemplates(t *testing.T) {
	c := open(t)
	namespace := c.namespace("")
	pod := func(volumes, spec string) string {
		return `spec: {template: {spec: {` + spec + `}}` + volumes + `}`
	}
	one := `, dynamicVolumes: [` + volume("/data/a", "") + `]`
	const (
		privileged   = `container a is privileged and could remount its volumes: leave privileged out, or ask the operator (allowPrivilegedPods)`
		capability   = `container a has the capability SYS_ADMIN and could remount its volumes: leave it out, or ask the operator (allowPrivilegedPods)`
		hostPID      = `a Pod with hostPID sees the processes of the node and cannot have volumes: leave hostPID out, or ask the operator (allowPrivilegedPods)`
		runtimeClass = `Pods of RuntimeClass gvisor cannot have volumes, as it is not known to run containers as runc does: use another class, or ask the operator (runtimeClasses)`
		userNS       = `a Pod with a user namespace of its own (hostUsers false) cannot have volumes, as their files would not belong to its users: leave hostUsers out`
		propagation  = `a volume's target is on a mount with mountPropagation Bidirectional, so the volume would appear on the node and in other Pods: choose another target`
	)
	mount := func(path, propagation string) string {
		return `volumes: [{name: v, emptyDir: {}}], containers: [{name: a, volumeMounts: [{name: v, mountPath: ` + path + `, mountPropagation: ` + propagation + `}]}]`
	}
	for _, tc := range []struct{ volumes, spec, sentence string }{
		{one, `containers: [{name: a}]`, ``},
		{one, `containers: [{name: a, securityContext: {privileged: false, capabilities: {add: [NET_ADMIN], drop: [ALL]}}}], initContainers: [{name: i}], hostNetwork: true`, ``},
		{one, `containers: [{name: a, securityContext: {privileged: true}}]`, privileged},
		{``, `containers: [{name: a, securityContext: {privileged: true}}]`, ``},
		{`, volumeMounts: [{source: /m, target: /m}]`, `containers: [{name: a, securityContext: {privileged: true}}]`, privileged},
		{one, `containers: [{name: b}], initContainers: [{name: a, securityContext: {privileged: true}}]`, ``},
		{one, `containers: [{name: b}], initContainers: [{name: a, restartPolicy: Always, securityContext: {privileged: true}}]`, privileged},
		{one, `containers: [{name: b}, {name: a, securityContext: {capabilities: {add: [SYS_ADMIN]}}}]`, capability},
		{one, `containers: [{name: a, securityContext: {capabilities: {add: [CAP_SYS_ADMIN]}}}]`, capability},
		{one, `containers: [{name: a, securityContext: {capabilities: {add: [cap_sys_admin]}}}]`, capability}, // containerd makes it upper case
		{one, `containers: [{name: a, securityContext: {capabilities: {add: [all]}}}]`, capability},
		{one, `containers: [{name: a, securityContext: {capabilities: {add: [ALL]}}}]`, capability},
		{one, `hostPID: true, containers: [{name: a}]`, hostPID},
		{one, `runtimeClassName: gvisor, containers: [{name: a}]`, runtimeClass},
		{``, `runtimeClassName: gvisor, containers: [{name: a}]`, ``},
		{one, `hostUsers: false, containers: [{name: a}]`, userNS},
		{``, `hostUsers: false, containers: [{name: a}]`, ``},
		{one, `hostUsers: true, containers: [{name: a}]`, ``},
		{one, mount("/data", "Bidirectional"), propagation},
		{one, mount("/data/", "Bidirectional"), propagation},
		{one, mount("/data/a", "Bidirectional"), propagation},
		{one, mount("/", "Bidirectional"), propagation},
		{one, mount("/dat", "Bidirectional"), ``},
		{one, mount("/data", "HostToContainer"), ``},
	} {
		c.verdict(c.dryRunIn(namespace, pod(tc.volumes, tc.spec)), tc.spec, tc.sentence)
	}

	// The first volume of such a Pod is refused as well, and what has nothing to do with volumes is not.
	made := c.made(namespace, `{metadata: {name: later}, `+pod("", `hostPID: true, containers: [{name: a}]`)+`}`)
	if got := sentences(c.patch(made, `spec: {dynamicVolumes: [`+volume("/a", "")+`]}`)); !slices.Equal(got, []string{hostPID}) {
		t.Errorf("a volume added later: %q", got)
	}
	if err := c.patch(made, `{metadata: {labels: {a: b}}, spec: {shutdownTime: "2030-01-01T00:00:00Z"}}`); err != nil {
		t.Error(err)
	}

	c.parameter("runtimeClasses", "kata-runc gvisor", func() bool {
		return c.dryRunIn(namespace, pod(one, `runtimeClassName: gvisor, containers: [{name: a}]`)) == nil
	})
	c.parameter("allowPrivilegedPods", "true", func() bool {
		return c.dryRunIn(namespace, pod(one, `hostPID: true, containers: [{name: a, securityContext: {privileged: true}}]`)) == nil
	})
	c.verdict(c.dryRunIn(namespace, pod(one, mount("/data", "Bidirectional"))), "Bidirectional, where privileged Pods are allowed", propagation)
	c.verdict(c.dryRunIn(namespace, pod(one, `hostUsers: false, containers: [{name: a}]`)), "hostUsers, where privileged Pods are allowed", userNS)
}

// The targets of a sandbox's volumes lie apart.
func TestTargets(t *testing.T) {
	c := open(t)
	namespace := c.namespace("")
	nested := func(outer, inner string) string {
		return `the targets ` + outer + ` and ` + inner + ` lie in each other, and volumes cannot be nested: choose directories apart`
	}
	static := func(target string) string { return `{source: /a, target: ` + target + `}` }
	for _, tc := range []struct{ text, sentence string }{
		{`spec: {dynamicVolumes: [` + volume("/a/b", "") + `, ` + volume("/c", "") + `, ` + volume("/a", "") + `]}`, nested("/a", "/a/b")},
		{`spec: {volumeMounts: [` + static("/a/b/c") + `, ` + static("/a") + `]}`, nested("/a", "/a/b/c")},
		{`spec: {volumeMounts: [` + static("/a") + `], dynamicVolumes: [` + volume("/a/b", "") + `]}`, nested("/a", "/a/b")},
		{`spec: {volumeMounts: [` + static("/a/b") + `], dynamicVolumes: [` + volume("/a", "") + `]}`, nested("/a", "/a/b")},
		{`spec: {volumeMounts: [` + static("/a") + `], dynamicVolumes: [` + volume("/a", "") + `]}`, `the sandbox has a static and a dynamic volume at /a: choose another target`},
		{`spec: {volumeMounts: [` + static("/a") + `], dynamicVolumes: [` + volume("/ab", "") + `, ` + volume("/b/a", "") + `]}`, ``},
	} {
		c.verdict(c.dryRunIn(namespace, tc.text), tc.text, tc.sentence)
	}
	made := c.made(namespace, `spec: {volumeMounts: [`+static("/a")+`], dynamicVolumes: [`+volume("/b/c", "")+`]}`)
	for target, sentence := range map[string]string{"/b": nested("/b", "/b/c"), "/a/x": nested("/a", "/a/x"), "/c": ``} {
		c.verdict(c.patch(made, `spec: {dynamicVolumes: [`+volume("/b/c", "")+`, `+volume(target, "")+`]}`), target, sentence)
	}
}

// Without the operator's ConfigMap nothing is allowed that it would decide.
func TestWithoutParameters(t *testing.T) {
	c := open(t)
	maps := c.admin.Resource(configMaps).Namespace("flux-sandbox")
	was, err := maps.Get(t.Context(), "flux-sandbox-admission", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := maps.Delete(t.Context(), "flux-sandbox-admission", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		was.SetResourceVersion("")
		if _, err := maps.Create(context.Background(), was, metav1.CreateOptions{}); err != nil {
			t.Error(err)
		}
		eventually(t, "the parameters are back", func() bool { return c.dryRunIn("default", `{}`) == nil })
	})
	eventually(t, "the parameters are missed", func() bool { return c.dryRunIn("default", `{}`) != nil })
}
