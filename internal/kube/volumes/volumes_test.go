package volumes_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	agentv1 "github.com/flux-sandbox/flux-sandbox/api/proto/agent/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/kube/volumes"
	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

const (
	namespace   = "team-a"
	topologyKey = "unifiedbus.com/superpod"
	// directDriver is one whose volumes agents publish.
	directDriver = "direct.example.com"
)

// start runs Volumes on a fake API server that has the objects.
func start(t *testing.T, objects ...runtime.Object) (*volumes.Volumes, *fake.Clientset) {
	t.Helper()
	client := fake.NewClientset(objects...)
	v, err := volumes.New(client, volumes.Options{DirectDrivers: []string{directDriver}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		v.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	<-v.Synced()
	// The fake server tells a watch only of what comes after it.
	eventually(t, "all are watched", func() bool {
		watched := map[string]bool{}
		for _, a := range client.Actions() {
			if a.GetVerb() == "watch" {
				watched[a.GetResource().Resource] = true
			}
		}
		return len(watched) == 3
	})
	return v, client
}

// pair is a claim and the local volume to which it is bound.
func pair(change func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume)) []runtime.Object {
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "data", UID: "claim-uid"},
		Spec:       corev1.PersistentVolumeClaimSpec{VolumeName: "pv-1", AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}},
		Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "pv-1"},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/mnt/disks/1/"}},
			AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany},
			ClaimRef:               &corev1.ObjectReference{Namespace: namespace, Name: "data", UID: "claim-uid"},
			NodeAffinity: affinity(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"}}}}),
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound},
	}
	if change != nil {
		change(claim, pv)
	}
	return []runtime.Object{claim, pv}
}

func affinity(terms ...corev1.NodeSelectorTerm) *corev1.VolumeNodeAffinity {
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: terms}}
}

func wish(t v1alpha1.VolumeType, source string, change func(*scheduler.Wish)) scheduler.Wish {
	w := scheduler.Wish{
		Sandbox:     &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "sb"}, Spec: v1alpha1.SandboxSpec{TenantID: "t-1"}},
		Volume:      &v1alpha1.DynamicVolume{VolumeType: t, Source: source, Mode: v1alpha1.VolumeModeReadWrite},
		TopologyKey: topologyKey,
	}
	if change != nil {
		change(&w)
	}
	return w
}

func readOnly(w *scheduler.Wish) { w.Volume.Mode = v1alpha1.VolumeModeReadOnly }

func TestAClaimIsAPathOnItsNode(t *testing.T) {
	v, client := start(t, pair(func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
		pv.Labels = map[string]string{topologyKey: "d1"}
	})...)
	client.ClearActions()
	for _, w := range []scheduler.Wish{wish(v1alpha1.VolumeTypePVC, "data", nil), wish(v1alpha1.VolumeTypePV, "pv-1", nil)} {
		r, err := v.Resolve(t.Context(), w, "n1")
		if err != nil {
			t.Fatal(err)
		}
		request := &agentv1.AttachRequest{}
		r.SetSource(request)
		if l := request.GetLocal(); l.GetPath() != "/mnt/disks/1" || l.GetPersistentVolume() != "pv-1" {
			t.Errorf("source %v", l)
		}
		if r.PVCName != "data" || r.PVName != "pv-1" || r.Path != v1alpha1.VolumePathLocal || r.VolumeKey != volume.PersistentPathKey("/mnt/disks/1") {
			t.Errorf("%+v", r)
		}
		at, err := v.Locate(w)
		if err != nil || !reflect.DeepEqual(at.Domains, []string{"d1"}) || at.VolumeKey != r.VolumeKey || !reflect.DeepEqual(at.Reach.Likely, []string{"n1"}) {
			t.Errorf("%+v, %v", at, err)
		}
		if !at.Reach.Has("node-1", map[string]string{corev1.LabelHostname: "n1"}) || at.Reach.Has("n2", map[string]string{corev1.LabelHostname: "n2"}) || at.Reach.Has("n1", nil) {
			t.Error("the node affinity is not what is kept to")
		}
	}
	if calls := client.Actions(); len(calls) != 0 {
		t.Errorf("calls of the API server: %v", calls)
	}
}

// binder plays Kubernetes' controller of claims: it binds a volume to the first claim that names it.
func binder(client *fake.Clientset) {
	var mu sync.Mutex
	client.PrependReactor("create", "persistentvolumeclaims", func(a clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		claim := a.(clienttesting.CreateAction).GetObject().(*corev1.PersistentVolumeClaim)
		claim.UID = types.UID("uid-" + claim.Namespace)
		pvs := corev1.SchemeGroupVersion.WithResource("persistentvolumes")
		o, err := client.Tracker().Get(pvs, "", claim.Spec.VolumeName)
		if err != nil {
			return true, nil, err
		}
		if pv := o.(*corev1.PersistentVolume).DeepCopy(); pv.Spec.ClaimRef == nil {
			pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID}
			pv.Status.Phase, claim.Status.Phase = corev1.VolumeBound, corev1.ClaimBound
			return false, nil, client.Tracker().Update(pvs, pv, "")
		}
		return false, nil, nil
	})
}

// A volume that nobody has claimed, and that is not meant for the sandbox by a label, is its namespace's before it is used.
func TestAFreeVolumeIsClaimedFirst(t *testing.T) {
	both := func(c *corev1.PersistentVolumeClaim, p *corev1.PersistentVolume) {
		label("volume", "t-1", true)(c, p)
	}
	none := func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {}
	tenantless := func(w *scheduler.Wish) { w.Sandbox.Spec.TenantID = "" }
	for name, x := range map[string]struct {
		labels  func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume)
		wish    func(*scheduler.Wish)
		claimed bool
		reason  fault.Reason
	}{
		"not labelled":                  {none, nil, true, ""},
		"not labelled, read":            {none, readOnly, true, ""},
		"not labelled, without tenants": {none, tenantless, true, ""},
		"the tenant's":                  {label("volume", "t-1", false), nil, false, ""},
		"another's":                     {label("volume", "t-2", false), readOnly, false, fault.TenantMismatch},
		"another's, without tenants":    {label("volume", "t-2", false), tenantless, false, fault.TenantMismatch},
		"shared":                        {label("volume", "", true), readOnly, false, ""},
		"shared, to write":              {label("volume", "", true), nil, false, fault.ModeDenied},
		"shared, without tenants":       {label("volume", "", true), tenantless, false, fault.ModeDenied},
		"the tenant's and shared":       {both, nil, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			v, client := start(t, free(x.labels))
			binder(client)
			r, err := v.Resolve(t.Context(), wish(v1alpha1.VolumeTypePV, "pv-1", x.wish), "n1")
			if fault.ReasonOf(err) != x.reason {
				t.Fatalf("%v, want %q", err, x.reason)
			}
			claims, listErr := client.CoreV1().PersistentVolumeClaims(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
			if listErr != nil || len(claims.Items) == 1 != x.claimed {
				t.Errorf("claims %v, %v", claims.Items, listErr)
			}
			if err == nil && (r.PVCName == "flux-pv-1" != x.claimed || r.Reach != nil || r.Domains != nil) {
				t.Errorf("%+v", r)
			}
		})
	}
}

// Of two namespaces that name a free volume at the same time, one gets it.
func TestAFreeVolumeIsOneNamespaces(t *testing.T) {
	v, client := start(t, free(nil))
	binder(client)
	namespaces := []string{"team-a", "team-b"}
	errs := make([]error, len(namespaces))
	var all sync.WaitGroup
	for i, ns := range namespaces {
		all.Go(func() {
			_, errs[i] = v.Resolve(t.Context(), wish(v1alpha1.VolumeTypePV, "pv-1", func(w *scheduler.Wish) { w.Sandbox.Namespace = ns }), "n1")
		})
	}
	all.Wait()
	pv, err := client.CoreV1().PersistentVolumes().Get(t.Context(), "pv-1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, ns := range namespaces {
		if has := pv.Spec.ClaimRef.Namespace == ns; has && errs[i] != nil || !has && fault.ReasonOf(errs[i]) != fault.SourceDenied {
			t.Errorf("%s of %s: %v", ns, pv.Spec.ClaimRef.Namespace, errs[i])
		}
	}
}

// free is a volume without claim, which each node has.
func free(change func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume)) runtime.Object {
	return pair(func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
		pv.Spec.ClaimRef, pv.Status.Phase, pv.Spec.NodeAffinity = nil, corev1.VolumeAvailable, nil
		pv.Spec.Local, pv.Spec.HostPath = nil, &corev1.HostPathVolumeSource{Path: "/srv/models", Type: ptr.To(corev1.HostPathDirectoryOrCreate)}
		if change != nil {
			change(c, pv)
		}
	})[1]
}

func TestRefusals(t *testing.T) {
	type c = corev1.PersistentVolumeClaim
	type p = corev1.PersistentVolume
	pvc, named := v1alpha1.VolumeTypePVC, v1alpha1.VolumeTypePV
	now := ptr.To(metav1.Now())
	for name, x := range map[string]struct {
		change func(*c, *p)
		kind   v1alpha1.VolumeType
		source string
		wish   func(*scheduler.Wish)
		reason fault.Reason // empty: allowed
		says   string
	}{
		"no such claim":             {nil, pvc, "other", nil, fault.ClaimNotFound, "claim team-a/other does not exist"},
		"no such volume":            {nil, named, "other", nil, fault.VolumeNotFound, "PersistentVolume other does not exist"},
		"another namespace's claim": {nil, pvc, "data", func(w *scheduler.Wish) { w.Sandbox.Namespace = "team-b" }, fault.ClaimNotFound, "team-b/data"},
		"unbound":                   {func(c *c, _ *p) { c.Spec.VolumeName, c.Status.Phase = "", corev1.ClaimPending }, pvc, "data", nil, fault.VolumeNotBound, "is Pending"},
		"a volume wished for only":  {func(c *c, _ *p) { c.Status.Phase = corev1.ClaimPending }, pvc, "data", nil, fault.VolumeNotBound, "is Pending"},
		"lost":                      {func(c *c, _ *p) { c.Status.Phase = corev1.ClaimLost }, pvc, "data", nil, fault.VolumeNotBound, "is Lost"},
		"bound by the claim only":   {func(_ *c, p *p) { p.Spec.ClaimRef = nil }, pvc, "data", nil, fault.VolumeNotBound, "not bound to it"},
		"its volume is gone":        {func(c *c, _ *p) { c.Spec.VolumeName = "gone" }, pvc, "data", nil, fault.VolumeNotFound, "gone"},
		"another namespace's volume": {func(_ *c, p *p) { p.Spec.ClaimRef.Namespace = "team-b" }, pvc, "data", nil, fault.SourceDenied,
			"bound to another claim"},
		"another claim's volume":       {func(_ *c, p *p) { p.Spec.ClaimRef.Name = "other" }, pvc, "data", nil, fault.SourceDenied, "bound to another claim"},
		"an earlier claim of its name": {func(_ *c, p *p) { p.Spec.ClaimRef.UID = "old" }, pvc, "data", nil, fault.VolumeNotBound, "an earlier claim"},
		"named, another namespace's": {func(_ *c, p *p) { p.Spec.ClaimRef.Namespace = "team-b" }, named, "pv-1", nil, fault.SourceDenied,
			"claim of another namespace"},
		"named, reserved":          {func(_ *c, p *p) { p.Spec.ClaimRef.UID = "" }, named, "pv-1", nil, fault.VolumeNotBound, "reserved for claim team-a/data"},
		"named, its claim is gone": {func(_ *c, p *p) { p.Spec.ClaimRef.Name = "gone" }, named, "pv-1", nil, fault.ClaimNotFound, "team-a/gone"},
		"released":                 {func(_ *c, p *p) { p.Status.Phase = corev1.VolumeReleased }, named, "pv-1", nil, fault.VolumeNotBound, "is Released"},
		"failed":                   {func(_ *c, p *p) { p.Status.Phase = corev1.VolumeFailed }, named, "pv-1", nil, fault.VolumeNotBound, "is Failed"},
		"claim is being deleted":   {func(c *c, _ *p) { c.DeletionTimestamp, c.Finalizers = now, []string{"x/y"} }, pvc, "data", nil, fault.ClaimNotFound, "being deleted"},
		"volume is being deleted":  {func(_ *c, p *p) { p.DeletionTimestamp, p.Finalizers = now, []string{"x/y"} }, pvc, "data", nil, fault.VolumeNotFound, "being deleted"},
		"block":                    {func(_ *c, p *p) { p.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock) }, pvc, "data", nil, fault.InvalidSource, "volumeMode Filesystem"},
		"ReadWriteOncePod": {func(c *c, p *p) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
		}, pvc, "data", nil, fault.VolumeTypeOff,
			"claim team-a/data has access mode ReadWriteOncePod, which is for one Pod alone, and nothing keeps Pods and sandboxes apart in this version: use a claim with ReadWriteOnce"},
		"ReadOnlyMany, to rw": {func(c *c, _ *p) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
		}, pvc, "data", nil, fault.ModeDenied, "ask for mode ro"},
		"ReadOnlyMany, to rw by the volume's name": {func(c *c, _ *p) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
		}, named, "pv-1", nil, fault.ModeDenied, "claim team-a/data"},
		"the volume is ReadOnlyMany": {func(_ *c, p *p) {
			p.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
		}, pvc, "data", nil, fault.ModeDenied, "PersistentVolume pv-1 has access modes [ReadOnlyMany] only"},
		"ReadOnlyMany": {func(c *c, _ *p) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
		}, pvc, "data", readOnly, "", ""},
		"own tenant":                                   {label("claim", "t-1", false), pvc, "data", nil, "", ""},
		"another tenant's claim":                       {label("claim", "t-2", false), pvc, "data", readOnly, fault.TenantMismatch, `claim team-a/data is tenant "t-2"'s`},
		"another tenant's volume":                      {label("volume", "t-2", false), pvc, "data", readOnly, fault.TenantMismatch, `PersistentVolume pv-1 is tenant "t-2"'s`},
		"another tenant's claim, by the volume's name": {label("claim", "t-2", false), named, "pv-1", nil, fault.TenantMismatch, `claim team-a/data is`},
		"shared by another tenant":                     {label("volume", "t-2", true), pvc, "data", readOnly, "", ""},
		"shared by another, to rw":                     {label("volume", "t-2", true), pvc, "data", nil, fault.ModeDenied, "ask for mode ro"},
		"shared by nobody, to rw":                      {label("volume", "", true), named, "pv-1", nil, fault.ModeDenied, "ask for mode ro"},
		"own, shared, to rw":                           {label("volume", "t-1", true), pvc, "data", nil, "", ""},
		"a tenant's, to a sandbox without":             {label("claim", "t-1", false), pvc, "data", func(w *scheduler.Wish) { w.Sandbox.Spec.TenantID = "" }, fault.TenantMismatch, "t-1"},
		"CSI": {func(_ *c, p *p) {
			p.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "disk.example.com"}}
		}, pvc, "data", nil, fault.VolumeTypeOff, "CSI driver disk.example.com: this version attaches those of the drivers that the operator lists for it (direct.example.com; flag direct-drivers)"},
		"CSI, direct":                     {csiVolume(nil), pvc, "data", nil, "", ""},
		"CSI, read-only, to ro":           {csiVolume(func(p *p) { p.Spec.CSI.ReadOnly = true }), pvc, "data", readOnly, "", ""},
		"CSI, read-only":                  {csiVolume(func(p *p) { p.Spec.CSI.ReadOnly = true }), pvc, "data", nil, fault.ModeDenied, "ask for mode ro"},
		"CSI, mounted read-only":          {csiVolume(func(p *p) { p.Spec.MountOptions = []string{"ro"} }), named, "pv-1", nil, fault.ModeDenied, "ask for mode ro"},
		"CSI, ro among options":           {csiVolume(func(p *p) { p.Spec.MountOptions = []string{"noatime,ro"} }), named, "pv-1", nil, fault.ModeDenied, "ask for mode ro"},
		"local, mounted read-only":        {func(_ *c, p *p) { p.Spec.MountOptions = []string{"ro"} }, pvc, "data", nil, fault.ModeDenied, "ask for mode ro"},
		"local, mounted read-only, to ro": {func(_ *c, p *p) { p.Spec.MountOptions = []string{"ro"} }, pvc, "data", readOnly, "", ""},
		"CSI, no number of bytes": {csiVolume(func(p *p) { p.Spec.Capacity[corev1.ResourceStorage] = resource.MustParse("1e30") }), pvc, "data",
			func(w *scheduler.Wish) { w.Volume.SizeLimit = "1Gi" }, fault.LimitNotEnforced, "1073741824 bytes on PersistentVolume pv-1, which has 1e30"},
		"CSI, a limit that fits": {csiVolume(nil), pvc, "data", func(w *scheduler.Wish) { w.Volume.SizeLimit = "1Gi" }, "", ""},
		"CSI, a smaller limit": {csiVolume(nil), pvc, "data", func(w *scheduler.Wish) { w.Volume.SizeLimit = "512Mi" }, fault.LimitNotEnforced,
			"536870912 bytes on PersistentVolume pv-1, which has 1073741824"},
		"NFS": {func(_ *c, p *p) {
			p.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{NFS: &corev1.NFSVolumeSource{}}
		}, pvc, "data", nil, fault.VolumeTypeOff, "on NFS"},
		"another kind": {func(_ *c, p *p) {
			p.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{FC: &corev1.FCVolumeSource{}}
		}, pvc, "data", nil, fault.VolumeTypeOff, "of another kind"},
		"a hostPath that is a socket": {func(_ *c, p *p) {
			p.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/mnt/s", Type: ptr.To(corev1.HostPathSocket)}}
		}, pvc, "data", nil, fault.InvalidSource, "of type Socket"},
		"a path with ..": {func(_ *c, p *p) { p.Spec.Local.Path = "/mnt/../etc" }, pvc, "data", nil, fault.InvalidSource, "/mnt/../etc"},
		"no path":        {func(_ *c, p *p) { p.Spec.Local.Path = "" }, pvc, "data", nil, fault.InvalidSource, "must be absolute"},
		"another type":   {nil, v1alpha1.VolumeTypeOSS, "bucket", nil, fault.VolumeTypeOff, "type oss"},
	} {
		t.Run(name, func(t *testing.T) {
			v, _ := start(t, pair(x.change)...)
			w := wish(x.kind, x.source, x.wish)
			_, err := v.Resolve(t.Context(), w, "n1")
			_, located := v.Locate(w)
			if fault.ReasonOf(err) != x.reason || fault.ReasonOf(located) != x.reason {
				t.Fatalf("resolve: %v; locate: %v; want %s", err, located, x.reason)
			}
			if err == nil {
				return
			}
			if !strings.Contains(err.Error(), x.says) {
				t.Errorf("%q does not say %q", err, x.says)
			}
			if !errors.Is(err, fault.KindOf(x.reason)) {
				t.Errorf("%s is not of its kind: %v", x.reason, err)
			}
		})
	}
}

// csiVolume makes the volume one of the direct driver.
func csiVolume(change func(*corev1.PersistentVolume)) func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
	return func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
		pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
			Driver: directDriver, VolumeHandle: "h-1", FSType: "xfs", VolumeAttributes: map[string]string{"pool": "fast"}}}
		pv.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		pv.Spec.MountOptions = []string{"noexec"}
		if change != nil {
			change(pv)
		}
	}
}

func TestAVolumeOfADirectDriver(t *testing.T) {
	v, client := start(t, pair(csiVolume(nil))...)
	client.ClearActions()
	for _, w := range []scheduler.Wish{wish(v1alpha1.VolumeTypePVC, "data", nil), wish(v1alpha1.VolumeTypePV, "pv-1", readOnly)} {
		r, err := v.Resolve(t.Context(), w, "n1")
		if err != nil {
			t.Fatal(err)
		}
		request := &agentv1.AttachRequest{}
		r.SetSource(request)
		want := &agentv1.CSISource{Driver: directDriver, VolumeHandle: "h-1", FsType: "xfs", Attributes: map[string]string{"pool": "fast"},
			MountOptions: []string{"noexec"}, AccessMode: "ReadWriteOnce", PersistentVolume: "pv-1"}
		if !proto.Equal(request.GetCsi(), want) {
			t.Errorf("source %v, want %v", request.GetCsi(), want)
		}
		if r.PVCName != "data" || r.PVName != "pv-1" || r.Path != v1alpha1.VolumePathDirect || r.VolumeKey != volume.CSIKey(directDriver, "h-1") {
			t.Errorf("%+v", r)
		}
	}
	other, key := v.About(scheduler.VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: namespace, Source: "data"})
	if other.Source != "pv-1" || key != volume.CSIKey(directDriver, "h-1") {
		t.Errorf("%v, %s", other, key)
	}
	if calls := client.Actions(); len(calls) != 0 {
		t.Errorf("calls of the API server: %v", calls)
	}
}

func TestAccessModeOfAPublication(t *testing.T) {
	for want, modes := range map[string][]corev1.PersistentVolumeAccessMode{
		"ReadWriteMany": {corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOnce},
		"ReadOnlyMany":  {corev1.ReadOnlyMany},
	} {
		v, _ := start(t, pair(func(c *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			csiVolume(nil)(c, pv)
			c.Spec.AccessModes, pv.Spec.AccessModes = modes, modes
		})...)
		r, err := v.Resolve(t.Context(), wish(v1alpha1.VolumeTypePVC, "data", readOnly), "n1")
		if err != nil {
			t.Fatal(err)
		}
		request := &agentv1.AttachRequest{}
		if r.SetSource(request); request.GetCsi().GetAccessMode() != want {
			t.Errorf("%v: published with %s", modes, request.GetCsi().GetAccessMode())
		}
	}
}

// A Secret is read for the command that needs it, as it is then; and no other is.
func TestSecretsOfAVolume(t *testing.T) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: "token"}, Data: map[string][]byte{"key": []byte("one")}}
	v, client := start(t, append(pair(csiVolume(func(pv *corev1.PersistentVolume) {
		pv.Spec.CSI.NodePublishSecretRef = &corev1.SecretReference{Namespace: "storage", Name: "token"}
	})), secret)...)
	w := wish(v1alpha1.VolumeTypePVC, "data", nil)
	secretOf := func() (string, error) {
		r, err := v.Resolve(t.Context(), w, "n1")
		if err != nil {
			return "", err
		}
		request := &agentv1.AttachRequest{}
		r.SetSource(request)
		return request.GetCsi().GetSecrets()["key"], nil
	}
	client.ClearActions()
	if _, err := v.Locate(w); err != nil || len(client.Actions()) > 0 {
		t.Errorf("to place a sandbox: %v, %v", err, client.Actions())
	}
	if got, err := secretOf(); got != "one" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	for _, a := range client.Actions() {
		if !a.Matches("get", "secrets") {
			t.Errorf("a call beside that: %v", a)
		}
	}
	secret.Data["key"] = []byte("two")
	if _, err := client.CoreV1().Secrets("storage").Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got, err := secretOf(); got != "two" || err != nil {
		t.Errorf("after a change: %q, %v", got, err)
	}
	secret.Data["key"] = []byte("\xffhidden")
	if _, err := client.CoreV1().Secrets("storage").Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := secretOf(); fault.ReasonOf(err) != fault.SecretUnavailable || !strings.Contains(err.Error(), "key key is no text") || strings.Contains(err.Error(), "hidden") {
		t.Errorf("with bytes that are no text: %v", err)
	}
	if err := client.CoreV1().Secrets("storage").Delete(t.Context(), "token", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := secretOf(); fault.ReasonOf(err) != fault.SecretUnavailable || fault.IsPermanent(err) {
		t.Errorf("without the Secret: %v", err)
	}
	client.PrependReactor("get", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("secrets"), "token", errors.New("no"))
	})
	if _, err := secretOf(); fault.ReasonOf(err) != fault.SecretUnavailable || !strings.Contains(err.Error(), "make a Role in namespace storage with verb get on secrets, resourceNames [token]") {
		t.Errorf("without the right: %v", err)
	}
}

// label labels a claim or its volume.
func label(what, tenant string, shared bool) func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {
	labels := map[string]string{}
	if tenant != "" {
		labels[v1alpha1.LabelTenantID] = tenant
	}
	if shared {
		labels[volumes.LabelShared] = "true"
	}
	return func(c *corev1.PersistentVolumeClaim, p *corev1.PersistentVolume) {
		if what == "claim" {
			c.Labels = labels
		} else {
			p.Labels = labels
		}
	}
}

// Each access mode of a claim and of a volume, by the claim's name and by the volume's, to read and to write.
func TestAccessModes(t *testing.T) {
	const once, many, onlyRead, pod = corev1.ReadWriteOnce, corev1.ReadWriteMany, corev1.ReadOnlyMany, corev1.ReadWriteOncePod
	type modes = []corev1.PersistentVolumeAccessMode
	for _, x := range []struct {
		claim, volume modes
		rw, ro        fault.Reason // empty: allowed
	}{
		{modes{once}, modes{once}, "", ""},
		{modes{many}, modes{many, onlyRead}, "", ""},
		{modes{onlyRead, many}, modes{onlyRead, many}, "", ""},
		{modes{onlyRead}, modes{once, onlyRead}, fault.ModeDenied, ""},
		{modes{once}, modes{onlyRead}, fault.ModeDenied, ""},
		{modes{pod}, modes{pod}, fault.VolumeTypeOff, fault.VolumeTypeOff},
		{modes{once}, modes{pod}, fault.VolumeTypeOff, fault.VolumeTypeOff},
		{modes{pod}, modes{once}, fault.VolumeTypeOff, fault.VolumeTypeOff},
		{nil, modes{once}, "", ""}, // no claim
		{nil, modes{onlyRead}, fault.ModeDenied, ""},
		{nil, modes{pod}, fault.VolumeTypeOff, fault.VolumeTypeOff},
		{nil, nil, fault.ModeDenied, ""},
	} {
		v, _ := start(t, pair(func(c *corev1.PersistentVolumeClaim, p *corev1.PersistentVolume) {
			c.Spec.AccessModes, p.Spec.AccessModes = x.claim, x.volume
			if x.claim == nil {
				p.Spec.ClaimRef, p.Status.Phase = nil, corev1.VolumeAvailable
				label("volume", "t-1", false)(c, p)
			}
		})...)
		wishes := []scheduler.Wish{wish(v1alpha1.VolumeTypePV, "pv-1", nil)}
		if x.claim != nil {
			wishes = append(wishes, wish(v1alpha1.VolumeTypePVC, "data", nil))
		}
		for _, w := range wishes {
			for mode, want := range map[v1alpha1.VolumeMode]fault.Reason{v1alpha1.VolumeModeReadWrite: x.rw, "": x.rw, v1alpha1.VolumeModeReadOnly: x.ro} {
				w.Volume.Mode = mode
				if _, err := v.Resolve(t.Context(), w, "n1"); fault.ReasonOf(err) != want {
					t.Errorf("claim %v, volume %v, %s in mode %q: %v, want %q", x.claim, x.volume, w.Volume.VolumeType, mode, err, want)
				}
			}
		}
	}
}

func TestDomainsAndReachOfANodeAffinity(t *testing.T) {
	type req = corev1.NodeSelectorRequirement
	in := func(key string, values ...string) req {
		return req{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}
	}
	term := func(r ...req) corev1.NodeSelectorTerm { return corev1.NodeSelectorTerm{MatchExpressions: r} }
	name := corev1.NodeSelectorTerm{MatchFields: []req{in("metadata.name", "n1", "n2")}}
	n1 := map[string]string{topologyKey: "d1", corev1.LabelHostname: "n1", "cpus": "8"}
	for what, x := range map[string]struct {
		terms   []corev1.NodeSelectorTerm
		domains []string
		likely  []string
		has     bool // n1
	}{
		"one domain":          {[]corev1.NodeSelectorTerm{term(in(topologyKey, "d1"))}, []string{"d1"}, nil, true},
		"another":             {[]corev1.NodeSelectorTerm{term(in(topologyKey, "d2"))}, []string{"d2"}, nil, false},
		"several":             {[]corev1.NodeSelectorTerm{term(in(topologyKey, "d1", "d2")), term(in(topologyKey, "d2", "d3"))}, []string{"d1", "d2", "d3"}, nil, true},
		"required twice":      {[]corev1.NodeSelectorTerm{term(in(topologyKey, "d1", "d2"), in(topologyKey, "d2"))}, []string{"d2"}, nil, false},
		"by one term only":    {[]corev1.NodeSelectorTerm{term(in(topologyKey, "d2")), term(in(corev1.LabelHostname, "n1"))}, nil, nil, true},
		"a host":              {[]corev1.NodeSelectorTerm{term(in(corev1.LabelHostname, "n1"))}, nil, []string{"n1"}, true},
		"a host of two terms": {[]corev1.NodeSelectorTerm{term(in(corev1.LabelHostname, "n2")), name}, nil, []string{"n2", "n1", "n2"}, true},
		"a host in a domain":  {[]corev1.NodeSelectorTerm{term(in(corev1.LabelHostname, "n1"), in(topologyKey, "d1"))}, []string{"d1"}, []string{"n1"}, true},
		"a host elsewhere":    {[]corev1.NodeSelectorTerm{term(in(corev1.LabelHostname, "n1"), in(topologyKey, "d2"))}, []string{"d2"}, []string{"n1"}, false},
		"by name":             {[]corev1.NodeSelectorTerm{name}, nil, []string{"n1", "n2"}, true},
		"another field":       {[]corev1.NodeSelectorTerm{{MatchFields: []req{in("metadata.uid", "n1")}}}, nil, nil, false},
		"nothing":             {nil, nil, nil, false},
		"an empty term":       {[]corev1.NodeSelectorTerm{{}}, nil, nil, false},
		"not in":              {[]corev1.NodeSelectorTerm{term(req{Key: topologyKey, Operator: corev1.NodeSelectorOpNotIn, Values: []string{"d1"}})}, nil, nil, false},
		"not in, without":     {[]corev1.NodeSelectorTerm{term(req{Key: "other", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"d1"}})}, nil, nil, true},
		"exists":              {[]corev1.NodeSelectorTerm{term(req{Key: "cpus", Operator: corev1.NodeSelectorOpExists})}, nil, nil, true},
		"does not exist":      {[]corev1.NodeSelectorTerm{term(req{Key: "cpus", Operator: corev1.NodeSelectorOpDoesNotExist})}, nil, nil, false},
		"more than":           {[]corev1.NodeSelectorTerm{term(req{Key: "cpus", Operator: corev1.NodeSelectorOpGt, Values: []string{"7"}})}, nil, nil, true},
		"less than":           {[]corev1.NodeSelectorTerm{term(req{Key: "cpus", Operator: corev1.NodeSelectorOpLt, Values: []string{"8"}})}, nil, nil, false},
		"less than no number": {[]corev1.NodeSelectorTerm{term(req{Key: topologyKey, Operator: corev1.NodeSelectorOpLt, Values: []string{"8"}})}, nil, nil, false},
		"an unknown operator": {[]corev1.NodeSelectorTerm{term(req{Key: "cpus", Operator: "Near", Values: []string{"8"}})}, nil, nil, false},
	} {
		v, _ := start(t, pair(func(_ *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) {
			pv.Spec.NodeAffinity = affinity(x.terms...)
		})...)
		at, err := v.Locate(wish(v1alpha1.VolumeTypePVC, "data", nil))
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(at.Domains, x.domains) || !reflect.DeepEqual(at.Reach.Likely, x.likely) || at.Reach.Has("n1", n1) != x.has {
			t.Errorf("%s: domains %v, likely %v, has n1 %v", what, at.Domains, at.Reach.Likely, at.Reach.Has("n1", n1))
		}
	}
}

// What is not in memory is asked for once, and not again until it appears.
func TestWhatIsNotThereIsAskedForOnce(t *testing.T) {
	v, client := start(t)
	client.ClearActions()
	gets := func() (n int) {
		for _, a := range client.Actions() {
			if a.GetVerb() == "get" {
				n++
			}
		}
		return n
	}
	w := wish(v1alpha1.VolumeTypePVC, "data", nil)
	if _, err := v.Locate(w); fault.ReasonOf(err) != fault.ClaimNotFound || gets() != 0 {
		t.Errorf("locate: %v, %d calls", err, gets())
	}
	for range 3 {
		if _, err := v.Resolve(t.Context(), w, "n1"); fault.ReasonOf(err) != fault.ClaimNotFound || gets() != 1 {
			t.Errorf("resolve: %v, %d calls", err, gets())
		}
	}
	for _, o := range pair(nil) {
		if err := create(client, o); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the claim is told", func() bool { _, err := v.Locate(w); return err == nil })
	if err := client.CoreV1().PersistentVolumeClaims(namespace).Delete(t.Context(), "data", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is gone", func() bool { _, err := v.Locate(w); return fault.ReasonOf(err) == fault.ClaimNotFound })
	if _, err := v.Resolve(t.Context(), w, "n1"); fault.ReasonOf(err) != fault.ClaimNotFound || gets() != 2 {
		t.Errorf("after its end: %v, %d calls", err, gets())
	}
	// Whose answer is final asks anew: the volume may be newer than what is in memory.
	before := gets()
	for i := range 2 {
		if _, err := v.Check(t.Context(), wish(v1alpha1.VolumeTypePV, "none", nil)); fault.ReasonOf(err) != fault.VolumeNotFound || gets() != before+i+1 {
			t.Errorf("check: %v, %d calls", err, gets()-before)
		}
	}
}

func TestChangesAreTold(t *testing.T) {
	v, client := start(t)
	ctx, cancel := context.WithCancel(t.Context())
	told := make(chan scheduler.VolumeRef)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ref := range v.Changes(ctx) {
			select {
			case told <- ref:
			case <-ctx.Done():
			}
		}
	}()
	defer func() {
		cancel()
		<-ended
	}()
	claim := scheduler.VolumeRef{Type: v1alpha1.VolumeTypePVC, Namespace: namespace, Source: "data"}
	pv := scheduler.VolumeRef{Type: v1alpha1.VolumeTypePV, Source: "pv-1"}
	for _, o := range pair(nil) {
		// It may come before the follower is there: it is written until it is told of, by both names.
		want := map[scheduler.VolumeRef]bool{claim: true, pv: true}
		if err := create(client, o); err != nil {
			t.Fatal(err)
		}
		tick := time.NewTicker(10 * time.Millisecond)
		for deadline := time.After(10 * time.Second); len(want) > 0; {
			select {
			case ref := <-told:
				delete(want, ref)
			case <-tick.C:
				touch(t, client, o)
			case <-deadline:
				t.Fatalf("not told of %v", want)
			}
		}
		tick.Stop()
	}
}

// touch writes an object as it is.
func touch(t *testing.T, client *fake.Clientset, o runtime.Object) {
	t.Helper()
	var err error
	switch o := o.(type) {
	case *corev1.PersistentVolumeClaim:
		_, err = client.CoreV1().PersistentVolumeClaims(o.Namespace).Update(t.Context(), o, metav1.UpdateOptions{})
	case *corev1.PersistentVolume:
		_, err = client.CoreV1().PersistentVolumes().Update(t.Context(), o, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestAnAPIServerThatIsAwayIsTriedAgain(t *testing.T) {
	v, client := start(t)
	client.PrependReactor("get", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection refused")
	})
	_, err := v.Resolve(t.Context(), wish(v1alpha1.VolumeTypePV, "pv-1", nil), "n1")
	if fault.ReasonOf(err) != store.Unavailable || fault.IsPermanent(err) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := v.Resolve(ctx, wish(v1alpha1.VolumeTypePV, "pv-1", nil), "n1"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func create(client *fake.Clientset, o runtime.Object) (err error) {
	switch o := o.(type) {
	case *corev1.PersistentVolumeClaim:
		o.UID = types.UID("claim-uid")
		_, err = client.CoreV1().PersistentVolumeClaims(o.Namespace).Create(context.Background(), o, metav1.CreateOptions{})
	case *corev1.PersistentVolume:
		_, err = client.CoreV1().PersistentVolumes().Create(context.Background(), o, metav1.CreateOptions{})
	}
	return err
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, what, holds)
}
