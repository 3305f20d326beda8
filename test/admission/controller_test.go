package admission

import (
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

var pods = schema.GroupVersionResource{Version: "v1", Resource: "pods"}

// A token of the controller is worth no more than what the controller does, whatever its role has to allow for that.
func TestTheControllerKeepsToItsOwn(t *testing.T) {
	c := open(t)
	namespace := c.namespace("")
	controller := client(t, apiserver.Shared(t).As("system:serviceaccount:flux-sandbox:flux-sandbox-controller", "system:masters"))

	const podsOnly = `the controller of FluxSandbox makes and deletes no Pods but those that a Sandbox owns, and anchors`
	create := func(meta string) error {
		_, err := controller.Resource(pods).Namespace(namespace).Create(t.Context(), c.object(`{apiVersion: v1, kind: Pod, metadata: {`+meta+`}, spec: {containers: [{name: a, image: i}]}}`),
			metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	serviceAccount := c.object(`{apiVersion: v1, kind: ServiceAccount, metadata: {name: default}}`)
	if _, err := c.admin.Resource(schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}).Namespace(namespace).Create(t.Context(), serviceAccount, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const sandbox = `{apiVersion: sandbox.flux.io/v1alpha1, kind: Sandbox, name: a, uid: u, controller: true}`
	const claim = `{apiVersion: v1, kind: PersistentVolumeClaim, name: a, uid: u}`
	eventually(t, "the policy is in force", func() bool { return apierrors.IsForbidden(create(`name: a`)) })
	c.verdict(create(`name: a, ownerReferences: [`+sandbox+`]`), "a sandbox's", ``)
	c.verdict(create(`generateName: flux-anchor-, ownerReferences: [`+claim+`]`), "an anchor", ``)
	c.verdict(create(`name: a`), "nobody's", podsOnly)
	c.verdict(create(`name: a, ownerReferences: [`+claim+`]`), "no anchor", podsOnly)
	c.verdict(create(`name: a, ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: a, uid: u, controller: true}]`), "a ReplicaSet's", podsOnly)
	for name, tt := range map[string]struct{ owner, sentence string }{"ours": {sandbox, ``}, "others": {``, podsOnly}} {
		o := c.object(`{apiVersion: v1, kind: Pod, metadata: {name: ` + name + `, ownerReferences: [` + tt.owner + `]}, spec: {containers: [{name: a, image: i}]}}`)
		if _, err := c.admin.Resource(pods).Namespace(namespace).Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		c.verdict(controller.Resource(pods).Namespace(namespace).Delete(t.Context(), name, metav1.DeleteOptions{DryRun: dryRun}), "delete "+name, tt.sentence)
	}

	const finalizerOnly = `the controller of FluxSandbox changes nothing of a claim or a PersistentVolume but its finalizer sandbox.flux.io/in-use, which ` +
		`sandbox owns it, and a selected node that is gone`
	o := c.object(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: a, finalizers: [example.com/x], annotations: {x: one, volume.kubernetes.io/selected-node: node}},
		spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}`)
	if _, err := c.admin.Resource(claims).Namespace(namespace).Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	patch := func(text string) error {
		_, err := controller.Resource(claims).Namespace(namespace).Patch(t.Context(), "a", types.StrategicMergePatchType, []byte(text), metav1.PatchOptions{DryRun: dryRun})
		return err
	}
	eventually(t, "the policy is in force", func() bool { return apierrors.IsForbidden(patch(`{"metadata":{"labels":{"a":"b"}}}`)) })
	c.verdict(patch(`{"metadata":{"finalizers":["sandbox.flux.io/in-use"]}}`), "its finalizer", ``)
	c.verdict(patch(`{"metadata":{"$deleteFromPrimitiveList/finalizers":["sandbox.flux.io/in-use"]}}`), "its finalizer away", ``)
	c.verdict(patch(`{"metadata":{"labels":{"sandbox.flux.io/sandbox":"a","sandbox.flux.io/sandbox-uid":"u"},"ownerReferences":[{"apiVersion":"sandbox.flux.io/v1alpha1","kind":"Sandbox","name":"a","uid":"u"}]}}`),
		"a sandbox's own", ``)
	c.verdict(patch(`{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":null}}}`), "no selected node", ``)
	for _, text := range []string{
		`{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":"m"}}}`,
		`{"metadata":{"annotations":{"x":null}}}`,
		`{"metadata":{"$deleteFromPrimitiveList/finalizers":["example.com/x"]}}`,
		`{"metadata":{"annotations":{"x":"two"}}}`,
		`{"metadata":{"labels":{"sandbox.flux.io/tenant-id":"t"}}}`,
		`{"metadata":{"ownerReferences":[` + `{"apiVersion":"v1","kind":"ConfigMap","name":"a","uid":"u"}` + `]}}`,
		`{"spec":{"volumeName":"v"}}`,
	} {
		c.verdict(patch(text), text, finalizerOnly)
	}

	const unboundOnly = `the controller of FluxSandbox deletes no claims but those that it made for a PersistentVolume and that are not bound`
	remove := func(name string) error {
		return controller.Resource(claims).Namespace(namespace).Delete(t.Context(), name, metav1.DeleteOptions{DryRun: dryRun})
	}
	eventually(t, "the policy is in force", func() bool { return apierrors.IsForbidden(remove("a")) })
	const made = `app.kubernetes.io/managed-by: flux-sandbox-controller, sandbox.flux.io/claim-for-volume: "true"`
	for name, tt := range map[string]struct{ labels, annotations, phase, sentence string }{
		"lost":      {made, ``, `Pending`, ``},
		"bound":     {made, ``, `Bound`, unboundOnly},
		"completed": {made, `pv.kubernetes.io/bind-completed: "yes"`, `Pending`, unboundOnly},
		"somebodys": {`app.kubernetes.io/managed-by: flux-sandbox-controller`, ``, `Pending`, unboundOnly},
	} {
		o := c.object(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: ` + name + `, labels: {` + tt.labels + `}, annotations: {` + tt.annotations + `}},
			spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}`)
		if _, err := c.admin.Resource(claims).Namespace(namespace).Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.admin.Resource(claims).Namespace(namespace).Patch(t.Context(), name, types.MergePatchType, []byte(`{"status":{"phase":"`+tt.phase+`"}}`), metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
		c.verdict(remove(name), "delete the claim "+name, tt.sentence)
	}

	const callersOnly = `the controller of FluxSandbox makes SandboxClaims for callers of its API, without owners and finalizers`
	makeClaim := func(meta string) error {
		_, err := controller.Resource(sbClaims).Namespace(namespace).Create(t.Context(), c.object(`{apiVersion: agents.kruise.io/v1alpha1, kind: SandboxClaim, metadata: {name: a`+meta+`}, spec: {templateName: pool}}`),
			metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	eventually(t, "the policy is in force", func() bool { return apierrors.IsForbidden(makeClaim(`, finalizers: [example.com/x]`)) })
	c.verdict(makeClaim(`, labels: {a: b}, annotations: {c: d}`), "a caller's", ``)
	c.verdict(makeClaim(`, finalizers: [example.com/x]`), "one that stays", callersOnly)
	c.verdict(makeClaim(`, ownerReferences: [`+sandbox+`]`), "one that something owns", callersOnly)
}
