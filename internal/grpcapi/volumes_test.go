package grpcapi_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
)

func TestAddVolume(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))

	resp, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/data", func(r *sandboxv1.AddSandVolumeRequest) { r.RequestId = "mine" }))
	noError(t, err)
	if v := resp.Volume; v.Phase != "Mounted" || v.Mode != "rw" || v.TenantId != "acme" || v.RequestId != "mine" || v.OnFailure != "Remove" || resp.AlreadyMounted || len(resp.Warnings) != 0 {
		t.Errorf("got %v", resp)
	}

	resp, err = e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/data"))
	noError(t, err)
	if !resp.AlreadyMounted || resp.Volume.RequestId != "mine" {
		t.Errorf("the same again: %v", resp)
	}
	if n := len(stored(t, e, "a").Spec.DynamicVolumes); n != 1 {
		t.Errorf("%d entries after adding the same twice", n)
	}
}

func TestAddVolumeByEachRef(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	uid := e.Run(sandbox("a")).Uid
	for i, ref := range []*sandboxv1.SandboxRef{
		{Name: "a"}, {Namespace: "default", Name: "a"}, {Name: "a", Uid: uid}, {Uid: uid}, {Id: "default/a"}, {Id: uid},
	} {
		_, err := e.Volumes.AddSandVolume(t.Context(), add("", "/srv/data", fmt.Sprintf("/data%d", i), func(r *sandboxv1.AddSandVolumeRequest) { r.Sandbox = ref }))
		if err != nil {
			t.Errorf("%v: %v", ref, err)
		}
	}
}

func TestAddVolumeWarnings(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	e.Scheduler.Set("/srv/far", grpcapitest.Fate{Row: func(r *v1alpha1.VolumeStatus) {
		r.Topology, r.VolumeDomain, r.SandboxDomain = v1alpha1.TopologyForced, "pod-1", "pod-2"
		r.LimitEnforcement = v1alpha1.LimitBestEffort
	}})
	resp, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/far", "/data"))
	noError(t, err)
	if len(resp.Warnings) != 2 {
		t.Errorf("warnings %q", resp.Warnings)
	}
}

func TestAddFailedVolume(t *testing.T) {
	missing := grpcapitest.Fate{Reason: fault.SourceNotFound, Message: "/srv/x does not exist on node-1: create it there"}

	t.Run("Remove leaves no entry, and can be asked for again under the same request id", func(t *testing.T) {
		e := grpcapitest.Start(t, nil)
		e.Run(sandbox("a"))
		e.Scheduler.Set("/srv/x", missing)
		req := add("a", "/srv/x", "/data", func(r *sandboxv1.AddSandVolumeRequest) { r.RequestId = "mine" })
		_, err := e.Volumes.AddSandVolume(t.Context(), req)
		wantError(t, err, codes.NotFound, fault.SourceNotFound, "create it there")
		if fault.MetadataOf(fault.FromGRPC(err))["operationId"] == "" {
			t.Error("the error does not name its operation")
		}
		e.Await(keyOf("a"), func(sb *v1alpha1.Sandbox) bool { return len(sb.Spec.DynamicVolumes) == 0 })

		e.Scheduler.Set("/srv/x", grpcapitest.Fate{})
		resp, err := e.Volumes.AddSandVolume(t.Context(), req)
		noError(t, err)
		if resp.Volume.Phase != "Mounted" || resp.AlreadyMounted {
			t.Errorf("the second time: %v", resp)
		}
	})

	t.Run("Keep leaves the entry, and the same again is a retry", func(t *testing.T) {
		e := grpcapitest.Start(t, nil)
		e.Run(sandbox("a"))
		e.Scheduler.Set("/srv/x", missing)
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/x", "/data", keep))
		wantError(t, err, codes.NotFound, fault.SourceNotFound)
		first := stored(t, e, "a").Spec.DynamicVolumes[0].RequestID

		_, err = e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/x", "/data", keep))
		wantError(t, err, codes.NotFound, fault.SourceNotFound)

		e.Scheduler.Set("/srv/x", grpcapitest.Fate{})
		resp, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/x", "/data", keep))
		noError(t, err)
		if resp.Volume.RequestId == first {
			t.Error("the retry has the request id of the failure: the scheduler cannot tell them apart")
		}
	})

	t.Run("a reason of a newer component is passed on", func(t *testing.T) {
		e := grpcapitest.Start(t, nil)
		e.Run(sandbox("a"))
		e.Scheduler.Set("/srv/x", grpcapitest.Fate{Reason: "FROM_THE_FUTURE", Message: "flux capacitor empty"})
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/x", "/data"))
		wantError(t, err, codes.Internal, "FROM_THE_FUTURE", "flux capacitor empty")
	})
}

func TestAddJoinsWhatIsUnderWay(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	e.Scheduler.Set("/srv/slow", grpcapitest.Fate{Hold: true})
	const clients = 8
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			if _, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/slow", "/data")); err != nil {
				t.Error(err)
			}
		})
	}
	e.Await(keyOf("a"), rowPhase("/data", v1alpha1.VolumeAttaching))
	e.Scheduler.Set("/srv/slow", grpcapitest.Fate{})
	wg.Wait()
	if row := stored(t, e, "a").Status.Volumes[0]; row.OperationID != "op-1" {
		t.Errorf("%d clients made more than one operation: %s", clients, row.OperationID)
	}
}

func TestAddIsNotUndoneByItsClient(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	e.Scheduler.Set("/srv/slow", grpcapitest.Fate{Hold: true})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := e.Volumes.AddSandVolume(ctx, add("a", "/srv/slow", "/data"))
		done <- err
	}()
	e.Await(keyOf("a"), rowPhase("/data", v1alpha1.VolumeAttaching))
	cancel()
	<-done
	e.Scheduler.Set("/srv/slow", grpcapitest.Fate{})
	e.Await(keyOf("a"), rowPhase("/data", v1alpha1.VolumeMounted))
}

func TestAddRunsOutOfTime(t *testing.T) {
	e := grpcapitest.Start(t, impatient)
	e.Run(sandbox("a"))
	e.Scheduler.Set("/srv/slow", grpcapitest.Fate{Hold: true})
	_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/slow", "/data"))
	wantError(t, err, codes.DeadlineExceeded, fault.OperationPending, "the operation goes on", "fluxctl volume ls")
	if len(stored(t, e, "a").Spec.DynamicVolumes) != 1 {
		t.Error("the entry is gone")
	}
}

func TestAddRefusals(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	static := func(sb *sandboxv1.Sandbox) {
		sb.Spec.VolumeMounts = []*sandboxv1.VolumeMount{{Source: "/srv/models", Target: "/models", Mode: "ro"}}
	}
	inGroup := func(g string) func(*sandboxv1.Sandbox) { return func(sb *sandboxv1.Sandbox) { sb.Spec.Group = g } }
	e.Run(sandbox("a", static))
	e.Run(sandbox("gate-off", inGroup("off")))
	e.Run(sandbox("strict", inGroup("strict")))
	e.Run(sandbox("paused", func(sb *sandboxv1.Sandbox) { sb.Spec.Paused = true }))
	e.Scheduler.Set("ends:1", grpcapitest.Fate{Phase: v1alpha1.SandboxSucceeded})
	e.Run(sandbox("ended", func(sb *sandboxv1.Sandbox) { sb.Spec.Image = "ends:1" }))
	e.Run(sandbox("going"))
	e.Scheduler.Set("going", grpcapitest.Fate{Hold: true})
	_, err := e.Sandboxes.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Sandbox: named("going")})
	noError(t, err)
	for i := range 2 {
		_, err := e.Volumes.AddSandVolume(t.Context(), add("strict", "/srv/data", fmt.Sprintf("/d%d", i), func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.SizeLimit = "1Gi" }))
		noError(t, err)
	}
	_, err = e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/data"))
	noError(t, err)

	volume := func(change func(*sandboxv1.DynamicVolume)) func(*sandboxv1.AddSandVolumeRequest) {
		return func(r *sandboxv1.AddSandVolumeRequest) { change(r.Volume) }
	}
	for name, c := range map[string]struct {
		req    *sandboxv1.AddSandVolumeRequest
		code   codes.Code
		reason fault.Reason
		word   string
	}{
		"no such sandbox": {add("nobody", "/srv/data", "/x"), codes.NotFound, fault.SandboxNotFound, "default/nobody"},
		"another of that name": {add("", "/srv/data", "/x", func(r *sandboxv1.AddSandVolumeRequest) {
			r.Sandbox = &sandboxv1.SandboxRef{Name: "a", Uid: "00000000-0000-0000-0000-000000000000"}
		}), codes.NotFound, fault.SandboxNotFound, "gone"},
		"gate off":               {add("gate-off", "/srv/data", "/x"), codes.FailedPrecondition, fault.FeatureDisabled, "spec.featureGates.dynamicVolumeMount: true"},
		"terminating":            {add("going", "/srv/data", "/x"), codes.FailedPrecondition, fault.SandboxTerminating, "deleted"},
		"paused":                 {add("paused", "/srv/data", "/x"), codes.FailedPrecondition, fault.SandboxNotRunning, "resume"},
		"ended":                  {add("ended", "/srv/data", "/x"), codes.FailedPrecondition, fault.SandboxNotRunning, "anew"},
		"other source there":     {add("a", "/srv/other", "/data"), codes.AlreadyExists, fault.TargetInUse, "/srv/data"},
		"other mode there":       {add("a", "/srv/data", "/data", volume(func(v *sandboxv1.DynamicVolume) { v.Mode = "ro" })), codes.AlreadyExists, fault.TargetInUse, "rw"},
		"static volume there":    {add("a", "/srv/data", "/models"), codes.AlreadyExists, fault.TargetInUse, "/models"},
		"nested in a dynamic":    {add("a", "/srv/other", "/data/inner"), codes.FailedPrecondition, fault.TargetNested, "/data"},
		"around a static":        {add("a", "/srv/other", "/models/v1"), codes.FailedPrecondition, fault.TargetNested, "/models"},
		"other tenant's":         {add("a", "/srv/other", "/x", volume(func(v *sandboxv1.DynamicVolume) { v.TenantId = "evil" })), codes.PermissionDenied, fault.TenantMismatch, "evil"},
		"type off in the group":  {add("strict", "claim", "/x", volume(func(v *sandboxv1.DynamicVolume) { v.VolumeType = "pvc" })), codes.FailedPrecondition, fault.VolumeTypeOff, "volumePolicy"},
		"target off in group":    {add("strict", "/srv/data", "/opt/x"), codes.PermissionDenied, fault.TargetDenied, "/opt"},
		"size required":          {add("strict", "/srv/data", "/x"), codes.FailedPrecondition, fault.SizeRequired, "sizeLimit"},
		"too many for the group": {add("strict", "/srv/data", "/x", volume(func(v *sandboxv1.DynamicVolume) { v.Mode = "ro" })), codes.FailedPrecondition, fault.TooManyVolumes, "2"},
	} {
		t.Run(name, func(t *testing.T) {
			before := e.Dump()
			_, err := e.Volumes.AddSandVolume(t.Context(), c.req)
			wantError(t, err, c.code, c.reason, c.word)
			if after := e.Dump(); after != before {
				t.Errorf("the refusal changed the store:\n%s\n%s", before, after)
			}
		})
	}
}

func TestAtMost32Volumes(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	// They race: the last place is given once.
	var wg sync.WaitGroup
	refused := make(chan error, 40)
	for i := range 40 {
		wg.Go(func() {
			if _, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", fmt.Sprintf("/d%d", i))); err != nil {
				refused <- err
			}
		})
	}
	wg.Wait()
	close(refused)
	n := 0
	for err := range refused {
		n++
		wantError(t, err, codes.FailedPrecondition, fault.TooManyVolumes, "32")
	}
	if n != 8 || len(stored(t, e, "a").Spec.DynamicVolumes) != 32 {
		t.Errorf("%d refused, %d entries", n, len(stored(t, e, "a").Spec.DynamicVolumes))
	}
}

func TestAddToPendingSandboxWaits(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Scheduler.Set("late:1", grpcapitest.Fate{Hold: true})
	_, err := e.Sandboxes.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Sandbox: sandbox("a", func(sb *sandboxv1.Sandbox) { sb.Spec.Image = "late:1" })})
	noError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/data"))
		done <- err
	}()
	e.Await(keyOf("a"), rowPhase("/data", v1alpha1.VolumePending))
	e.Scheduler.Set("late:1", grpcapitest.Fate{})
	noError(t, <-done)
}

func TestAddWaitsForTheFormerVolume(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/old", "/data"))
	noError(t, err)
	e.Scheduler.Set("/srv/old", grpcapitest.Fate{Hold: true})
	removed, added := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/data"))
		removed <- err
	}()
	e.Await(keyOf("a"), rowPhase("/data", v1alpha1.VolumeDetaching))
	go func() {
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/new", "/data"))
		added <- err
	}()
	e.Scheduler.Set("/srv/old", grpcapitest.Fate{})
	noError(t, <-removed)
	noError(t, <-added)
	if got := stored(t, e, "a").Spec.DynamicVolumes; len(got) != 1 || got[0].Source != "/srv/new" {
		t.Errorf("entries %v", got)
	}
}

func TestFormerVolumeStaysTooLong(t *testing.T) {
	e := grpcapitest.Start(t, impatient)
	e.Run(sandbox("a"))
	// It may take longer than the server waits; then the same again joins it.
	_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/old", "/data"))
	for fault.ReasonOf(fault.FromGRPC(err)) == fault.OperationPending {
		_, err = e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/old", "/data"))
	}
	noError(t, err)
	e.Scheduler.Set("/srv/old", grpcapitest.Fate{Hold: true})
	_, err = e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/data"))
	wantError(t, err, codes.DeadlineExceeded, fault.OperationPending, "goes on")
	_, err = e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/new", "/data"))
	wantError(t, err, codes.DeadlineExceeded, fault.OperationPending, "nothing was added")
}

func TestRemoveVolume(t *testing.T) {
	holders := []v1alpha1.VolumeHolder{{PID: 4711, Command: "python3", Kind: "cwd"}, {PID: 4712, Command: "tail", Kind: "fd"}, {PID: 4713, Command: "a", Kind: "fd"}, {PID: 4714, Command: "b", Kind: "map"}}
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a", func(sb *sandboxv1.Sandbox) {
		sb.Spec.VolumeMounts = []*sandboxv1.VolumeMount{{Source: "/srv/models", Target: "/models", Mode: "ro"}}
	}))
	_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/data"))
	noError(t, err)

	t.Run("static", func(t *testing.T) {
		_, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/models"))
		wantError(t, err, codes.FailedPrecondition, fault.Immutable, "static")
	})
	t.Run("absent", func(t *testing.T) {
		resp, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/nothing"))
		noError(t, err)
		if resp.Result != sandboxv1.RemoveSandVolumeResponse_ABSENT {
			t.Errorf("got %v", resp)
		}
	})
	t.Run("busy", func(t *testing.T) {
		e.Scheduler.Set("/srv/data", grpcapitest.Fate{Holders: holders})
		// Twice: the second must not take the first one's answer for its own.
		for range 2 {
			_, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/data"))
			wantError(t, err, codes.FailedPrecondition, fault.Busy, "python3 (pid 4711, cwd)", "and 1 more")
			infos := fault.Details[*sandboxv1.BusyInfo](err)
			if len(infos) != 1 || len(infos[0].Holders) != 4 || infos[0].Holders[3].Kind != "map" {
				t.Errorf("details %v", infos)
			}
		}
		if stored(t, e, "a").Spec.DynamicVolumes[0].Detach != nil {
			t.Error("the request to detach is still there")
		}
	})
	t.Run("lazy by force, then absent", func(t *testing.T) {
		resp, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/data", force))
		noError(t, err)
		if resp.Result != sandboxv1.RemoveSandVolumeResponse_LAZY || resp.Volume.DetachState != "Lazy" {
			t.Errorf("got %v", resp)
		}
		resp, err = e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/data"))
		noError(t, err)
		if resp.Result != sandboxv1.RemoveSandVolumeResponse_ABSENT || resp.Volume.GetDetachState() != "Lazy" {
			t.Errorf("got %v", resp)
		}
	})
	t.Run("detached", func(t *testing.T) {
		e.Scheduler.Set("/srv/data", grpcapitest.Fate{})
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/again"))
		noError(t, err)
		resp, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/again"))
		noError(t, err)
		if resp.Result != sandboxv1.RemoveSandVolumeResponse_DETACHED || resp.Volume.Phase != "Detaching" || resp.Volume.Source != "/srv/data" {
			t.Errorf("got %v", resp)
		}
	})
	t.Run("never mounted", func(t *testing.T) {
		e.Scheduler.Set("/srv/x", grpcapitest.Fate{Reason: fault.SourceNotFound, Message: "not there"})
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/x", "/x", keep))
		wantError(t, err, codes.NotFound, fault.SourceNotFound)
		resp, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/x"))
		noError(t, err)
		if resp.Result != sandboxv1.RemoveSandVolumeResponse_DETACHED || len(stored(t, e, "a").Spec.DynamicVolumes) != 0 {
			t.Errorf("got %v", resp)
		}
	})
}

func TestForceOvertakesARemovalUnderWay(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/data"))
	noError(t, err)
	e.Scheduler.Set("/srv/data", grpcapitest.Fate{Hold: true})
	results := make(chan error, 2)
	go func() {
		_, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/data"))
		results <- err
	}()
	e.Await(keyOf("a"), rowPhase("/data", v1alpha1.VolumeDetaching))
	go func() {
		_, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/data", force))
		results <- err
	}()
	e.Await(keyOf("a"), func(sb *v1alpha1.Sandbox) bool { return sb.Spec.DynamicVolumes[0].Detach.Force })
	e.Scheduler.Set("/srv/data", grpcapitest.Fate{Holders: []v1alpha1.VolumeHolder{{PID: 1, Command: "sh", Kind: "cwd"}}})
	noError(t, <-results)
	noError(t, <-results)
}

func TestSandboxDeletedWhileVolumesAreAwaited(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a"))
	_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", "/data"))
	noError(t, err)
	e.Scheduler.Set("/srv/data", grpcapitest.Fate{Hold: true})
	e.Scheduler.Set("/srv/slow", grpcapitest.Fate{Hold: true})
	added, removed := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/slow", "/slow"))
		added <- err
	}()
	go func() {
		_, err := e.Volumes.RemoveSandVolume(t.Context(), remove("a", "/data"))
		removed <- err
	}()
	e.Await(keyOf("a"), rowPhase("/slow", v1alpha1.VolumeAttaching))
	e.Await(keyOf("a"), rowPhase("/data", v1alpha1.VolumeDetaching))
	_, err = e.Sandboxes.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Sandbox: named("a"), Wait: true})
	noError(t, err)
	if err := <-added; fault.ReasonOf(fault.FromGRPC(err)) != fault.SandboxTerminating && fault.ReasonOf(fault.FromGRPC(err)) != fault.SandboxNotFound {
		t.Errorf("add: %v", err)
	}
	if err := <-removed; err != nil {
		t.Errorf("remove: %v", err)
	}
}

func TestListVolumes(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a", func(sb *sandboxv1.Sandbox) {
		sb.Spec.VolumeMounts = []*sandboxv1.VolumeMount{{Source: "/srv/models", Target: "/models", Mode: "ro"}}
	}))
	for _, target := range []string{"/c", "/a"} {
		_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/data", target))
		noError(t, err)
	}
	// A row for an entry that the scheduler has not looked at.
	e.Scheduler.Set("/srv/x", grpcapitest.Fate{Reason: fault.SourceNotFound})
	_, err := e.Volumes.AddSandVolume(t.Context(), add("a", "/srv/x", "/b"))
	wantError(t, err, codes.NotFound, fault.SourceNotFound)
	e.Await(keyOf("a"), func(sb *v1alpha1.Sandbox) bool { return len(sb.Spec.DynamicVolumes) == 2 })

	all, err := e.Volumes.ListSandVolumes(t.Context(), &sandboxv1.ListSandVolumesRequest{Sandbox: named("a")})
	noError(t, err)
	var paged []*sandboxv1.VolumeStatus
	token := ""
	for pages := 0; pages == 0 || token != ""; pages++ {
		page, err := e.Volumes.ListSandVolumes(t.Context(), &sandboxv1.ListSandVolumesRequest{Sandbox: named("a"), PageSize: 1, PageToken: token})
		noError(t, err)
		if len(page.Volumes) > 1 || pages > 4 {
			t.Fatalf("page %d: %v", pages, page)
		}
		paged, token = append(paged, page.Volumes...), page.NextPageToken
	}
	want := []string{"/models Static Mounted", "/a Dynamic Mounted", "/b Dynamic Failed", "/c Dynamic Mounted"}
	for i, rows := range [][]*sandboxv1.VolumeStatus{all.Volumes, paged} {
		var got []string
		for _, r := range rows {
			got = append(got, r.Target+" "+r.Kind+" "+r.Phase)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("list %d: got %q, want %q", i, got, want)
		}
	}
	if len(paged) == len(all.Volumes) && !proto.Equal(paged[0], all.Volumes[0]) {
		t.Error("pages and the whole list differ")
	}
}

func TestListShowsEntriesThatNobodyLookedAtAsPending(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	// No group: the scheduler of the test would look at it, so write it past the API and stop the status.
	e.Scheduler.Set("late:1", grpcapitest.Fate{Hold: true})
	_, err := e.Sandboxes.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Sandbox: sandbox("a", func(sb *sandboxv1.Sandbox) {
		sb.Spec.Image = "late:1"
		sb.Spec.DynamicVolumes = []*sandboxv1.DynamicVolume{{VolumeType: "local", Source: "/srv/data", Target: "/data"}}
	})})
	noError(t, err)
	list, err := e.Volumes.ListSandVolumes(t.Context(), &sandboxv1.ListSandVolumesRequest{Sandbox: named("a")})
	noError(t, err)
	if len(list.Volumes) != 1 || list.Volumes[0].Phase != "Pending" || list.Volumes[0].TenantId != "acme" || list.Volumes[0].EntryHash == "" {
		t.Errorf("got %v", list.Volumes)
	}
}
