package csi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	csiv1 "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/flux-sandbox/flux-sandbox/internal/csidriver/csidrivertest"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/volume"
)

const (
	nodePublish   = "NodePublishVolume"
	nodeUnpublish = "NodeUnpublishVolume"
)

func ctxOf(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func prepare(t testing.TB, s *Source, r volume.Request) volume.Prepared {
	t.Helper()
	p, err := s.Prepare(ctxOf(t), r)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// released repeats a release that is BUSY, as the agent does: whatever makes a mount namespace on this machine has the
// volume for a moment.
func released(t testing.TB, s *Source, p volume.Prepared) {
	t.Helper()
	ctx := ctxOf(t)
	for {
		err := s.Release(ctx, p)
		if fault.ReasonOf(err) != fault.Busy || ctx.Err() != nil {
			must(t, err)
			return
		}
	}
}

// short is how long is waited for a call that never ends.
const short = 300 * time.Millisecond

func answer(code codes.Code) csidrivertest.Hook {
	return func(context.Context, any, func() (any, error)) (any, error) {
		return nil, status.Error(code, "so it is")
	}
}

// after does the work, and answers otherwise.
func after(code codes.Code) csidrivertest.Hook {
	return func(_ context.Context, _ any, next func() (any, error)) (any, error) {
		if _, err := next(); err != nil {
			return nil, err
		}
		return nil, status.Error(code, "the work was done")
	}
}

// hang answers when the caller has given up.
func hang(ctx context.Context, _ any, _ func() (any, error)) (any, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// onlySay answers OK and does nothing.
func onlySay(response any) csidrivertest.Hook {
	return func(context.Context, any, func() (any, error)) (any, error) { return response, nil }
}

// A publish that fails, however it does, is undone; and when the driver has come to its senses, it works.
func TestDriversThatMisbehaveInPublish(t *testing.T) {
	for name, tc := range map[string]struct {
		hook      func(w *world) csidrivertest.Hook
		reason    fault.Reason
		permanent bool
	}{
		"Aborted":                     {hook: func(*world) csidrivertest.Hook { return answer(codes.Aborted) }, reason: fault.DriverUnavailable},
		"DeadlineExceeded":            {hook: func(*world) csidrivertest.Hook { return answer(codes.DeadlineExceeded) }, reason: fault.DriverUnavailable},
		"DeadlineExceeded, work done": {hook: func(*world) csidrivertest.Hook { return after(codes.DeadlineExceeded) }, reason: fault.DriverUnavailable},
		"InvalidArgument":             {hook: func(*world) csidrivertest.Hook { return answer(codes.InvalidArgument) }, reason: fault.DriverRefused, permanent: true},
		"InvalidArgument, work done":  {hook: func(*world) csidrivertest.Hook { return after(codes.InvalidArgument) }, reason: fault.DriverRefused, permanent: true},
		"NotFound":                    {hook: func(*world) csidrivertest.Hook { return answer(codes.NotFound) }, reason: fault.DriverRefused, permanent: true},
		"publishes no mount":          {hook: func(*world) csidrivertest.Hook { return onlySay(&csiv1.NodePublishVolumeResponse{}) }, reason: fault.DriverFailed},
		"hangs":                       {hook: func(*world) csidrivertest.Hook { return hang }, reason: fault.DriverUnavailable},
		"dies after the work": {reason: fault.DriverUnavailable, hook: func(w *world) csidrivertest.Hook {
			return func(_ context.Context, _ any, next func() (any, error)) (any, error) {
				_, err := next()
				go w.Stop() // it waits for this handler
				return nil, errors.Join(err, errors.New("nobody hears this"))
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			s, before := w.source(t, nil), w.state(t)
			if name == "hangs" {
				s.config.Timeouts.Publish = short
			}
			w.On(nodePublish, tc.hook(w))
			_, err := s.Prepare(ctxOf(t), request("v"))
			if name == "dies after the work" {
				// Whether it was still there to undo its work is a matter of luck.
				if err == nil {
					t.Error("it was published")
				}
				w.Stop()
				w.Serve(t)
				released(t, s, s.Unfinished(keyed(t, s, request("v"))))
			} else if fault.ReasonOf(err) != tc.reason || fault.IsPermanent(err) != tc.permanent || errors.Is(err, volume.ErrUnfinished) {
				t.Errorf("error %v (%s, permanent %t), want %s, %t", err, fault.ReasonOf(err), fault.IsPermanent(err), tc.reason, tc.permanent)
			}
			if got := w.state(t); fmt.Sprint(got) != fmt.Sprint(before) {
				t.Errorf("left: %q, before: %q", got, before)
			}
			w.On(nodePublish, nil)
			released(t, s, prepare(t, s, request("v")))
		})
	}
}

// keyed is a request with its key.
func keyed(t testing.TB, s *Source, r volume.Request) volume.Request {
	t.Helper()
	_, err := s.Resolve(ctxOf(t), &r)
	must(t, err)
	return r
}

// Nothing is forgotten while the driver cannot undo it; another volume of it is not delayed.
func TestDriversThatMisbehaveInUnpublish(t *testing.T) {
	for name, hook := range map[string]csidrivertest.Hook{
		"hangs":                       hang,
		"Aborted":                     answer(codes.Aborted),
		"Internal":                    answer(codes.Internal),
		"answers OK, leaves it":       onlySay(&csiv1.NodeUnpublishVolumeResponse{}),
		"NotFound, leaves it":         answer(codes.NotFound),
		"DeadlineExceeded, work done": after(codes.DeadlineExceeded),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.Create(t, "other", volumeSize)
			s := w.source(t, nil)
			if name == "hangs" {
				s.config.Timeouts.Unpublish = short
			}
			p := prepare(t, s, request("v"))
			w.On(nodeUnpublish, func(ctx context.Context, r any, next func() (any, error)) (any, error) {
				if r.(*csiv1.NodeUnpublishVolumeRequest).GetVolumeId() == "other" {
					return next()
				}
				return hook(ctx, r, next)
			})
			answered := make(chan error, 1)
			go func() { answered <- s.Release(ctxOf(t), p) }()
			others := w.source(t, nil) // with patience
			released(t, others, prepare(t, others, request("other")))
			if err := <-answered; err == nil || fault.IsPermanent(err) && name != "NotFound, leaves it" {
				t.Errorf("released with %v", err)
			}
			if _, known, err := s.sys.Load(s.dir(p.Key)); err != nil || !known {
				t.Errorf("it was forgotten: %t, %v", known, err)
			}
			w.On(nodeUnpublish, nil)
			released(t, others, p)
			released(t, others, p)
		})
	}
}

// A publish of which nobody knows how far it came, by a driver that is away then, is undone when it is back.
func TestNothingIsForgottenWhileTheDriverIsAway(t *testing.T) {
	w := newWorld(t)
	s := w.source(t, nil)
	w.On(nodePublish, after(codes.DeadlineExceeded))
	w.On(nodeUnpublish, answer(codes.Unavailable))
	_, err := s.Prepare(ctxOf(t), request("v"))
	if !errors.Is(err, volume.ErrUnfinished) || fault.ReasonOf(err) != fault.DriverUnavailable || fault.IsPermanent(err) {
		t.Fatalf("error %v, want it unfinished", err)
	}
	w.Stop()
	_, err = s.Prepare(ctxOf(t), request("v")) // another attempt, which does not get that far
	if !errors.Is(err, volume.ErrUnfinished) {
		t.Fatalf("error %v, want it unfinished still", err)
	}
	left := s.Unfinished(keyed(t, s, request("v")))
	if err := s.Release(ctxOf(t), left); fault.ReasonOf(err) != fault.DriverUnavailable && fault.ReasonOf(err) != fault.Busy {
		t.Errorf("released with %v while the driver is away", err)
	}
	w.Serve(t)
	w.On(nodeUnpublish, nil)
	released(t, s, left)
	w.On(nodePublish, nil)
	released(t, s, prepare(t, s, request("v")))
}

func TestDriversThatAreRefused(t *testing.T) {
	w := newWorld(t)
	s := w.source(t, nil)
	w.On("NodeGetCapabilities", onlySay(&csiv1.NodeGetCapabilitiesResponse{Capabilities: []*csiv1.NodeServiceCapability{{
		Type: &csiv1.NodeServiceCapability_Rpc{Rpc: &csiv1.NodeServiceCapability_RPC{Type: csiv1.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME}}}}}))
	_, err := s.Prepare(ctxOf(t), request("v"))
	if fault.ReasonOf(err) != fault.VolumeTypeOff || !fault.IsPermanent(err) || !strings.Contains(err.Error(), csidrivertest.Name) {
		t.Errorf("a driver that stages: %v", err)
	}
	w.On("NodeGetCapabilities", nil)
	w.On("GetPluginInfo", onlySay(&csiv1.GetPluginInfoResponse{Name: "another"}))
	_, err = s.Prepare(ctxOf(t), request("v"))
	if fault.ReasonOf(err) != fault.DriverRefused || !strings.Contains(err.Error(), `"another"`) {
		t.Errorf("another driver at the socket: %v", err)
	}
	w.On("GetPluginInfo", nil)
	w.Stop()
	_, err = s.Prepare(ctxOf(t), request("v"))
	if fault.ReasonOf(err) != fault.DriverUnavailable || fault.IsPermanent(err) || errors.Is(err, volume.ErrUnfinished) {
		t.Errorf("no driver at the socket: %v", err)
	}
	if n := w.Calls(nodePublish); n != 0 {
		t.Errorf("%d publishes", n)
	}
}

// Every code has a meaning, and the ones that say "try again" are transient.
func TestMeanings(t *testing.T) {
	transient := map[codes.Code]bool{codes.Canceled: true, codes.Unknown: true, codes.DeadlineExceeded: true, codes.ResourceExhausted: true,
		codes.Aborted: true, codes.Internal: true, codes.Unavailable: true, codes.DataLoss: true}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		if _, ok := meanings[code]; !ok {
			t.Errorf("%s has no meaning", code)
		}
		err := Driver{Name: "d"}.answered("Call", status.Error(code, "text"), nil)
		if fault.IsPermanent(err) == transient[code] || fault.KindOf(fault.ReasonOf(err)) != meanings[code].kind {
			t.Errorf("%s: permanent %t, %s", code, fault.IsPermanent(err), fault.ReasonOf(err))
		}
		if isNotFound(err) != (code == codes.NotFound) {
			t.Errorf("%s: isNotFound is wrong", code)
		}
	}
	if err := (Driver{}).answered("Call", status.Error(codes.Code(99), ""), nil); fault.IsPermanent(err) || fault.ReasonOf(err) != fault.DriverFailed {
		t.Errorf("a code that nobody knows: %v", err)
	}
}

// The driver is told what the PersistentVolume says, and is asked for a writable mount unless nobody may write.
func TestWhatTheDriverIsTold(t *testing.T) {
	v := &volume.CSIVolume{Driver: "d", Handle: "h", Attributes: map[string]string{"a": "1"}, FSType: "xfs", MountOptions: []string{"noexec"},
		AccessMode: readWriteOnce, Secrets: volume.Secrets{"user": "u"}}
	r := publishRequest(v, "/t", abilities{})
	if r.GetVolumeId() != "h" || r.GetTargetPath() != "/t" || r.GetVolumeContext()["a"] != "1" || r.GetSecrets()["user"] != "u" ||
		r.GetVolumeCapability().GetMount().GetFsType() != "xfs" || r.GetVolumeCapability().GetMount().GetMountFlags()[0] != "noexec" || r.GetStagingTargetPath() != "" {
		t.Errorf("told: %v", r)
	}
	for _, tc := range []struct {
		mode        string
		readOnly    bool
		multiWriter bool
		want        csiv1.VolumeCapability_AccessMode_Mode
		wantRO      bool
	}{
		{mode: readWriteOnce, want: csiv1.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		{mode: readWriteOnce, multiWriter: true, want: csiv1.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
		{mode: readWriteOnce, readOnly: true, want: csiv1.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, wantRO: true},
		{mode: readWriteMany, multiWriter: true, want: csiv1.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
		{mode: readOnlyMany, want: csiv1.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, wantRO: true},
	} {
		v.AccessMode, v.ReadOnly = tc.mode, tc.readOnly
		r := publishRequest(v, "/t", abilities{multiWriter: tc.multiWriter})
		if got := r.GetVolumeCapability().GetAccessMode().GetMode(); got != tc.want || r.GetReadonly() != tc.wantRO {
			t.Errorf("%+v: %s, read-only %t", tc, got, r.GetReadonly())
		}
	}
}

// A secret gets to the driver, and nowhere else.
func TestSecretsAreShownNowhere(t *testing.T) {
	const canary = "canary-9f2c"
	w := newWorld(t)
	s := w.source(t, nil)
	r := request("v", func(r *volume.Request) {
		r.CSI.Secrets, r.CSI.NeedsSecrets = volume.Secrets{"password": canary}, true
	})
	told := ""
	w.On(nodePublish, func(_ context.Context, r any, _ func() (any, error)) (any, error) {
		told = r.(*csiv1.NodePublishVolumeRequest).GetSecrets()["password"]
		return nil, status.Errorf(codes.PermissionDenied, "the password %s is wrong", told)
	})
	_, err := s.Prepare(ctxOf(t), r)
	if err == nil || strings.Contains(err.Error(), canary) || told != canary {
		t.Errorf("the driver was told %q, the error is %v", told, err)
	}
	w.On(nodePublish, nil)
	p := prepare(t, s, r)
	asJSON, err := json.Marshal(r)
	must(t, err)
	rec, _, err := s.sys.Load(s.dir(p.Key))
	must(t, err)
	for what, text := range map[string]string{"the journal": string(asJSON), "details": string(p.Details), "the record": fmt.Sprintf("%+v", rec),
		"printed": fmt.Sprintf("%v %+v %#v %s", r.CSI.Secrets, *r.CSI, *r.CSI, r.CSI.Secrets)} {
		if strings.Contains(text, canary) {
			t.Errorf("%s shows it: %s", what, text)
		}
	}
	// A restart has forgotten them: what is published goes on, and what is not waits for the controller.
	var again volume.Request
	must(t, json.Unmarshal(asJSON, &again))
	prepare(t, w.source(t, nil), again)
	released(t, s, p)
	if _, err := s.Prepare(ctxOf(t), again); fault.ReasonOf(err) != fault.DriverUnavailable || fault.IsPermanent(err) {
		t.Errorf("without its secrets: %v", err)
	}
}
