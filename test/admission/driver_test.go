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
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv/apiserver"
)

var (
	classes           = schema.GroupVersionResource{Group: "storage.k8s.io", Version: "v1", Resource: "storageclasses"}
	persistentVolumes = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumes"}
	claims            = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}
)

func TestClassesOfTheDriver(t *testing.T) {
	c := open(t)
	class := func(text string) error {
		o := c.object(`{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: dry-run}, ` + text + `}`)
		_, err := c.admin.Resource(classes).Create(t.Context(), o, metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	const ours, waits = `provisioner: local.csi.sandbox.flux.io, `, `volumeBindingMode: WaitForFirstConsumer`
	eventually(t, "the policy is in force", func() bool { return apierrors.IsInvalid(class(ours + `volumeBindingMode: Immediate`)) })
	for text, sentence := range map[string]string{
		ours + waits: ``,
		ours + waits + `, parameters: {allocation: preallocated, csi.storage.k8s.io/fstype: xfs, csi.storage.k8s.io/other: x}, mountOptions: [noexec, ro]`:     ``,
		`provisioner: other.example.com, volumeBindingMode: Immediate, allowVolumeExpansion: true, parameters: {a: b, allocation: x}, mountOptions: [discard]`: ``,
		ours + `volumeBindingMode: Immediate`:                             `a volume of local.csi.sandbox.flux.io lies on the node of its first user: set volumeBindingMode to WaitForFirstConsumer`,
		ours + `reclaimPolicy: Retain`:                                    `a volume of local.csi.sandbox.flux.io lies on the node of its first user: set volumeBindingMode to WaitForFirstConsumer`,
		ours + waits + `, allowVolumeExpansion: true`:                     `a volume of local.csi.sandbox.flux.io keeps its size: set allowVolumeExpansion to false`,
		ours + waits + `, parameters: {fstype: xfs}`:                      `the parameter fstype is not known: local.csi.sandbox.flux.io has allocation and csi.storage.k8s.io/fstype`,
		ours + waits + `, parameters: {allocation: thick}`:                `the allocation thick is not known: thin or preallocated`,
		ours + waits + `, parameters: {csi.storage.k8s.io/fstype: btrfs}`: `the filesystem btrfs is not known: ext4 or xfs`,
		ours + waits + `, mountOptions: [noexec, discard]`:                `the mount option discard is not possible: ro, rw, noexec, nosuid, nodev are`,
	} {
		c.verdict(class(text), text, sentence)
	}
}

// driver is a client in the name of the driver whose Pod is on a node. RBAC lets it do everything: what is left are the policies.
func driver(t *testing.T, node string) dynamic.Interface {
	config := apiserver.Shared(t).Config()
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:flux-sandbox:flux-sandbox-csi", Groups: []string{"system:masters"}}
	if node != "" {
		config.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
	}
	return client(t, config)
}

const ownVolumesOnly = `the driver of node a may touch no PersistentVolume but those of its own on that node`

// persistentVolume is one of a driver, with a node affinity.
func (c cluster) persistentVolume(name, csi, values string) *unstructured.Unstructured {
	return c.object(`{apiVersion: v1, kind: PersistentVolume, metadata: {name: ` + name + `}, spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce],
		csi: {driver: ` + csi + `, volumeHandle: x},
		nodeAffinity: {required: {nodeSelectorTerms: [{matchExpressions: [{key: topology.local.csi.sandbox.flux.io/node, operator: In, values: ` + values + `}]}]}}}}`)
}

func TestTheDriverTouchesItsOwnNodesVolumes(t *testing.T) {
	c := open(t)
	a, nobody := driver(t, "a").Resource(persistentVolumes), driver(t, "").Resource(persistentVolumes)
	const ours = "local.csi.sandbox.flux.io"
	create := func(by dynamic.ResourceInterface, csi, values string) error {
		_, err := by.Create(t.Context(), c.persistentVolume("dry-run", csi, values), metav1.CreateOptions{DryRun: dryRun})
		return err
	}
	eventually(t, "the policy is in force", func() bool { return apierrors.IsForbidden(create(a, ours, "[b]")) })
	c.verdict(create(a, ours, "[a]"), "its own", ``)
	c.verdict(create(a, ours, "[b]"), "another node's", ownVolumesOnly)
	c.verdict(create(a, ours, "[a, b]"), "two nodes'", ownVolumesOnly)
	c.verdict(create(a, "other.example.com", "[a]"), "another driver's", ownVolumesOnly)
	if err := create(nobody, ours, "[a]"); !slices.Contains(sentences(err), `the driver's token does not name its node, so nothing is its own`) {
		t.Errorf("a token without a node: %v", err)
	}
	c.verdict(create(c.admin.Resource(persistentVolumes), ours, "[b]"), "somebody else", ``)

	for node, sentence := range map[string]string{"a": ``, "b": ownVolumesOnly} {
		pv := "test-of-" + node
		_, err := c.admin.Resource(persistentVolumes).Create(t.Context(), c.persistentVolume(pv, ours, "["+node+"]"), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			r := c.admin.Resource(persistentVolumes)
			if _, err := r.Patch(context.WithoutCancel(t.Context()), pv, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
				t.Error(err)
			}
			if err := r.Delete(context.WithoutCancel(t.Context()), pv, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
		patch := func(text string) error {
			_, err := a.Patch(t.Context(), pv, types.MergePatchType, []byte(text), metav1.PatchOptions{DryRun: dryRun})
			return err
		}
		c.verdict(a.Delete(t.Context(), pv, metav1.DeleteOptions{DryRun: dryRun}), "delete that of "+node, sentence)
		c.verdict(patch(`{"metadata":{"finalizers":["example.com/x"]}}`), "a finalizer of that of "+node, sentence)
		if node == "a" {
			for _, text := range []string{`{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`, `{"metadata":{"labels":{"sandbox.flux.io/tenant-id":"t"}}}`} {
				c.verdict(patch(text), text, `the driver may change no PersistentVolume but for its finalizer`)
			}
		}
	}
}

func TestTheDriverGivesItsNodesClaimsBack(t *testing.T) {
	c := open(t)
	namespace := c.namespace("")
	a := driver(t, "a").Resource(claims).Namespace(namespace)
	for _, node := range []string{"a", "b"} {
		o := c.object(`{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: ` + node + `, annotations: {volume.kubernetes.io/selected-node: ` + node + `, x: one}},
			spec: {accessModes: [ReadWriteOnce], storageClassName: c, resources: {requests: {storage: 1Gi}}}}`)
		if _, err := c.admin.Resource(claims).Namespace(namespace).Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	patch := func(claim, text string) error {
		_, err := a.Patch(t.Context(), claim, types.MergePatchType, []byte(text), metav1.PatchOptions{DryRun: dryRun})
		return err
	}
	const back = `{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":null}}}`
	eventually(t, "the policy is in force", func() bool { return apierrors.IsForbidden(patch("b", back)) })
	c.verdict(patch("a", back), "its own", ``)
	c.verdict(patch("b", back), "another node's", `the driver of node a may change no claim but those for which that node was selected`)
	for _, text := range []string{
		`{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":null,"x":null}}}`,
		`{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":null,"x":"z"}}}`,
		`{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":"b"}}}`,
		`{"metadata":{"annotations":{"volume.kubernetes.io/selected-node":null,"new":"x"}}}`,
		`{"metadata":{"finalizers":null,"annotations":{"volume.kubernetes.io/selected-node":null}}}`,
		`{"metadata":{"labels":{"a":"b"},"annotations":{"volume.kubernetes.io/selected-node":null}}}`,
		`{"spec":{"volumeName":"v"},"metadata":{"annotations":{"volume.kubernetes.io/selected-node":null}}}`,
	} {
		c.verdict(patch("a", text), text, `the driver may change nothing of a claim but take the selected node away`)
	}
}
