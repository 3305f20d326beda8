package grpcapi_test

import (
	"context"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
	"github.com/flux-sandbox/flux-sandbox/internal/volume/volumetest"
)

// badInput is a malformed request and what is said of it.
type badInput struct {
	name   string
	call   func(context.Context, *grpcapitest.Env) error
	code   codes.Code
	reason fault.Reason
}

// TestBadInput sends each malformed request and checks that nothing in the store changes.
func TestBadInput(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Run(sandbox("a", func(sb *sandboxv1.Sandbox) {
		sb.Spec.VolumeMounts = []*sandboxv1.VolumeMount{{Source: "/srv/models", Target: "/models", Mode: "ro"}}
	}))
	e.Run(sandbox("t", func(sb *sandboxv1.Sandbox) { sb.Spec.TenantId = volumetest.Tenant }))
	table := badInputs()
	if len(table) < 60 {
		t.Errorf("%d malformed requests only", len(table))
	}
	before := e.Dump()
	for _, c := range table {
		t.Run(c.name, func(t *testing.T) {
			wantError(t, c.call(t.Context(), e), c.code, c.reason)
			if after := e.Dump(); after != before {
				t.Errorf("it changed the store from\n%s\nto\n%s", before, after)
				before = after
			}
		})
	}
}

func badInputs() []badInput {
	long := func(n int) string { return strings.Repeat("x", n) }
	bad := codes.InvalidArgument
	var table []badInput

	refs := map[string]struct {
		ref    *sandboxv1.SandboxRef
		reason fault.Reason
	}{
		"missing":           {nil, fault.InvalidRequest},
		"empty":             {&sandboxv1.SandboxRef{}, fault.InvalidRequest},
		"namespace alone":   {&sandboxv1.SandboxRef{Namespace: "default"}, fault.InvalidRequest},
		"namespace and uid": {&sandboxv1.SandboxRef{Namespace: "default", Uid: "00000000-0000-0000-0000-000000000000"}, fault.InvalidRequest},
		"uid no UUID":       {&sandboxv1.SandboxRef{Name: "a", Uid: "7"}, fault.InvalidRequest},
		"uid upper case":    {&sandboxv1.SandboxRef{Uid: "ABCDEF00-0000-0000-0000-000000000000"}, fault.InvalidRequest},
		"id beside name":    {&sandboxv1.SandboxRef{Id: "default/a", Name: "a"}, fault.InvalidRequest},
		"id bare name":      {&sandboxv1.SandboxRef{Id: "a"}, fault.InvalidRequest},
		"id empty name":     {&sandboxv1.SandboxRef{Id: "default/"}, fault.InvalidName},
		"id empty space":    {&sandboxv1.SandboxRef{Id: "/a"}, fault.InvalidName},
		"id three parts":    {&sandboxv1.SandboxRef{Id: "default/a/b"}, fault.InvalidName},
		"name upper case":   {&sandboxv1.SandboxRef{Name: "A"}, fault.InvalidName},
		"name with dots":    {&sandboxv1.SandboxRef{Name: "../a"}, fault.InvalidName},
		"name too long":     {&sandboxv1.SandboxRef{Name: long(254)}, fault.InvalidName},
		"namespace bad":     {&sandboxv1.SandboxRef{Namespace: "a.b", Name: "a"}, fault.InvalidName},
	}
	// Every method reads references by the same function; each gets some of them.
	methods := []func(*sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error{
		func(r *sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error {
			return func(ctx context.Context, e *grpcapitest.Env) error {
				req := add("", "/srv/data", "/data")
				req.Sandbox = r
				_, err := e.Volumes.AddSandVolume(ctx, req)
				return err
			}
		},
		func(r *sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error {
			return func(ctx context.Context, e *grpcapitest.Env) error {
				_, err := e.Volumes.RemoveSandVolume(ctx, &sandboxv1.RemoveSandVolumeRequest{Sandbox: r, Target: "/data"})
				return err
			}
		},
		func(r *sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error {
			return func(ctx context.Context, e *grpcapitest.Env) error {
				_, err := e.Volumes.ListSandVolumes(ctx, &sandboxv1.ListSandVolumesRequest{Sandbox: r})
				return err
			}
		},
		func(r *sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error {
			return func(ctx context.Context, e *grpcapitest.Env) error {
				_, err := e.Sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: r})
				return err
			}
		},
		func(r *sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error {
			return func(ctx context.Context, e *grpcapitest.Env) error {
				_, err := e.Sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Sandbox: r})
				return err
			}
		},
		func(r *sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error {
			return func(ctx context.Context, e *grpcapitest.Env) error {
				_, err := e.Sandboxes.PauseSandbox(ctx, &sandboxv1.PauseSandboxRequest{Sandbox: r, Paused: true})
				return err
			}
		},
		func(r *sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error {
			return func(ctx context.Context, e *grpcapitest.Env) error {
				first := start("", "echo")
				first.GetStart().Sandbox = r
				_, _, err := talk(ctx, e, first)
				return err
			}
		},
		func(r *sandboxv1.SandboxRef) func(context.Context, *grpcapitest.Env) error {
			return func(ctx context.Context, e *grpcapitest.Env) error {
				_, err := logs(ctx, e, &sandboxv1.LogsRequest{Sandbox: r})
				return err
			}
		},
	}
	for name, c := range refs {
		for _, method := range methods {
			table = append(table, badInput{"ref/" + name, method(c.ref), bad, c.reason})
		}
	}

	adds := map[string]struct {
		change func(*sandboxv1.AddSandVolumeRequest)
		code   codes.Code
		reason fault.Reason
	}{
		"no volume":            {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume = nil }, bad, fault.InvalidRequest},
		"empty volume":         {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume = &sandboxv1.DynamicVolume{} }, bad, fault.InvalidVolumeType},
		"unknown type":         {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.VolumeType = "nfs" }, bad, fault.InvalidVolumeType},
		"type in capitals":     {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.VolumeType = "Local" }, bad, fault.InvalidVolumeType},
		"no source":            {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Source = "" }, bad, fault.InvalidSource},
		"relative source":      {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Source = "srv/data" }, bad, fault.InvalidSource},
		"source climbs":        {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Source = "/srv/../etc" }, bad, fault.InvalidSource},
		"source is the node":   {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Source = "/" }, bad, fault.InvalidSource},
		"claim in capitals":    {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.VolumeType, r.Volume.Source = "pvc", "Claim" }, bad, fault.InvalidSource},
		"image with spaces":    {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.VolumeType, r.Volume.Source = "snapshot", "a b" }, bad, fault.InvalidSource},
		"no target":            {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "" }, bad, fault.InvalidTarget},
		"relative target":      {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "data" }, bad, fault.InvalidTarget},
		"target not clean":     {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/data/" }, bad, fault.InvalidTarget},
		"target climbs":        {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/data/../etc" }, bad, fault.InvalidTarget},
		"target with newline":  {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/da\nta" }, bad, fault.InvalidTarget},
		"target with NUL":      {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/da\x00ta" }, bad, fault.InvalidTarget},
		"target too long":      {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/" + strings.Repeat("abc/", 256) + "d" }, bad, fault.InvalidTarget},
		"component too long":   {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/" + long(256) }, bad, fault.InvalidTarget},
		"target is the root":   {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/" }, codes.PermissionDenied, fault.TargetDenied},
		"target is /etc":       {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/etc" }, codes.PermissionDenied, fault.TargetDenied},
		"target in /proc":      {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/proc/self" }, codes.PermissionDenied, fault.TargetDenied},
		"target around secret": {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/var/run" }, codes.PermissionDenied, fault.TargetDenied},
		"mode unknown":         {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Mode = "rwx" }, bad, fault.InvalidMode},
		"size no quantity":     {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.SizeLimit = "lots" }, bad, fault.InvalidSize},
		"size negative":        {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.SizeLimit = "-1Gi" }, bad, fault.InvalidSize},
		"size zero":            {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.SizeLimit = "0" }, bad, fault.InvalidSize},
		"size without unit":    {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.SizeLimit = "50" }, bad, fault.InvalidSize},
		"size overflows":       {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.SizeLimit = "9999999Ei" }, bad, fault.InvalidSize},
		"tenant bad":           {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.TenantId = "Acme Inc" }, bad, fault.InvalidTenant},
		"tenant too long":      {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.TenantId = long(64) }, bad, fault.InvalidTenant},
		"tenant another":       {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.TenantId = "evil" }, codes.PermissionDenied, fault.TenantMismatch},
		"subPath absolute":     {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.SubPath = "/etc" }, bad, fault.InvalidSubPath},
		"subPath climbs":       {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.SubPath = "../x" }, bad, fault.InvalidSubPath},
		"onFailure unknown":    {func(r *sandboxv1.AddSandVolumeRequest) { r.OnFailure = "Retry" }, bad, fault.InvalidOnFailure},
		"onFailure misplaced":  {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.OnFailure = "Keep" }, bad, fault.InvalidOnFailure},
		"request id too long":  {func(r *sandboxv1.AddSandVolumeRequest) { r.RequestId = long(129) }, bad, fault.InvalidRequest},
		"request id spaces":    {func(r *sandboxv1.AddSandVolumeRequest) { r.RequestId = "a b" }, bad, fault.InvalidRequest},
		"static target taken":  {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/models" }, codes.AlreadyExists, fault.TargetInUse},
		"nested in a static":   {func(r *sandboxv1.AddSandVolumeRequest) { r.Volume.Target = "/models/x" }, codes.FailedPrecondition, fault.TargetNested},
	}
	for name, c := range adds {
		table = append(table, badInput{"add/" + name, func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Volumes.AddSandVolume(ctx, add("a", "/srv/data", "/data", c.change))
			return err
		}, c.code, c.reason})
	}

	// What every layer refuses, through this one.
	inTenant := func(ctx context.Context, e *grpcapitest.Env, spec *sandboxv1.SandboxSpec) error {
		spec.Image, spec.TenantId = "busybox:1", volumetest.Tenant
		_, err := e.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Sandbox: &sandboxv1.Sandbox{Name: "new", Spec: spec}})
		return err
	}
	for _, c := range volumetest.Malformed() {
		if !sendable(c.Entry) {
			continue
		}
		code := status.Code(fault.ToGRPC(c.Kind))
		table = append(table, badInput{"add/" + c.Name, func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Volumes.AddSandVolume(ctx, add("t", "", "", func(r *sandboxv1.AddSandVolumeRequest) {
				r.Volume, r.OnFailure, r.RequestId = convert.DynamicVolumeProto(c.Entry), string(c.Entry.OnFailure), c.Entry.RequestID
				r.Volume.OnFailure = ""
			}))
			return err
		}, code, c.Reason})
		if c.Entry.RequestID != volumetest.Valid().RequestID {
			continue // A new sandbox's entries are given theirs by the server.
		}
		table = append(table, badInput{"create with/" + c.Name, func(ctx context.Context, e *grpcapitest.Env) error {
			return inTenant(ctx, e, &sandboxv1.SandboxSpec{DynamicVolumes: []*sandboxv1.DynamicVolume{convert.DynamicVolumeProto(c.Entry)}})
		}, code, c.Reason})
	}
	for _, c := range volumetest.Conflicts() {
		table = append(table, badInput{"create with/" + c.Name, func(ctx context.Context, e *grpcapitest.Env) error {
			spec := &sandboxv1.SandboxSpec{}
			for _, target := range c.Static {
				spec.VolumeMounts = append(spec.VolumeMounts, &sandboxv1.VolumeMount{Source: "/srv/data", Target: target})
			}
			for _, target := range c.Dynamic {
				spec.DynamicVolumes = append(spec.DynamicVolumes, &sandboxv1.DynamicVolume{VolumeType: "local", Source: "/srv/data", Target: target})
			}
			return inTenant(ctx, e, spec)
		}, status.Code(fault.ToGRPC(c.Kind)), c.Reason})
	}

	removes := map[string]struct {
		req    *sandboxv1.RemoveSandVolumeRequest
		code   codes.Code
		reason fault.Reason
	}{
		"no target":       {remove("a", ""), bad, fault.InvalidTarget},
		"relative target": {remove("a", "data"), bad, fault.InvalidTarget},
		"target climbs":   {remove("a", "/data/.."), bad, fault.InvalidTarget},
		"request id":      {remove("a", "/data", func(r *sandboxv1.RemoveSandVolumeRequest) { r.RequestId = "\x7f" }), bad, fault.InvalidRequest},
		"static":          {remove("a", "/models"), codes.FailedPrecondition, fault.Immutable},
	}
	for name, c := range removes {
		table = append(table, badInput{"remove/" + name, func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Volumes.RemoveSandVolume(ctx, c.req)
			return err
		}, c.code, c.reason})
	}

	limits := func(k, v string) func(*sandboxv1.Sandbox) {
		return func(sb *sandboxv1.Sandbox) {
			sb.Spec.Resources = &sandboxv1.Resources{Limits: map[string]string{k: v}}
		}
	}
	env := func(vars ...*sandboxv1.EnvVar) func(*sandboxv1.Sandbox) {
		return func(sb *sandboxv1.Sandbox) { sb.Spec.Env = vars }
	}
	dynamic := func(targets ...string) func(*sandboxv1.Sandbox) {
		return func(sb *sandboxv1.Sandbox) {
			for _, target := range targets {
				sb.Spec.DynamicVolumes = append(sb.Spec.DynamicVolumes, &sandboxv1.DynamicVolume{VolumeType: "local", Source: "/srv/data", Target: target})
			}
		}
	}
	creates := map[string]struct {
		change func(*sandboxv1.Sandbox)
		code   codes.Code
		reason fault.Reason
	}{
		"no spec":               {func(sb *sandboxv1.Sandbox) { sb.Spec = nil }, bad, fault.InvalidRequest},
		"no image":              {func(sb *sandboxv1.Sandbox) { sb.Spec.Image = "" }, bad, fault.InvalidImage},
		"runtimes":              {func(sb *sandboxv1.Sandbox) { sb.Spec.Runtimes = []string{"csi"} }, bad, fault.InvalidRequest},
		"claims without a Pod":  {func(sb *sandboxv1.Sandbox) { sb.Spec.VolumeClaimTemplates = []string{`{"metadata":{"name":"a"}}`} }, bad, fault.InvalidRequest},
		"claims that are none":  {func(sb *sandboxv1.Sandbox) { sb.Spec.VolumeClaimTemplates = []string{`{"meta":{}}`} }, bad, fault.InvalidRequest},
		"image with spaces":     {func(sb *sandboxv1.Sandbox) { sb.Spec.Image = "busy box" }, bad, fault.InvalidImage},
		"image an option":       {func(sb *sandboxv1.Sandbox) { sb.Spec.Image = "--help" }, bad, fault.InvalidImage},
		"image too long":        {func(sb *sandboxv1.Sandbox) { sb.Spec.Image = long(1025) }, bad, fault.InvalidImage},
		"name upper case":       {func(sb *sandboxv1.Sandbox) { sb.Name = "Box" }, bad, fault.InvalidName},
		"name with dot":         {func(sb *sandboxv1.Sandbox) { sb.Name = "a.b" }, bad, fault.InvalidName},
		"name too long":         {func(sb *sandboxv1.Sandbox) { sb.Name = long(64) }, bad, fault.InvalidName},
		"namespace bad":         {func(sb *sandboxv1.Sandbox) { sb.Namespace = "a/b" }, bad, fault.InvalidName},
		"group bad":             {func(sb *sandboxv1.Sandbox) { sb.Spec.Group = "../x" }, bad, fault.InvalidName},
		"sub-group bad":         {func(sb *sandboxv1.Sandbox) { sb.Spec.SubGroup = "-" }, bad, fault.InvalidName},
		"group unknown":         {func(sb *sandboxv1.Sandbox) { sb.Spec.Group = "nobody" }, codes.FailedPrecondition, fault.GroupNotFound},
		"sub-group unknown":     {func(sb *sandboxv1.Sandbox) { sb.Spec.Group, sb.Spec.SubGroup = "parts", "train" }, codes.FailedPrecondition, fault.GroupNotFound},
		"namespace no group":    {func(sb *sandboxv1.Sandbox) { sb.Namespace = "elsewhere" }, codes.FailedPrecondition, fault.GroupNotFound},
		"tenant upper case":     {func(sb *sandboxv1.Sandbox) { sb.Spec.TenantId = "ACME" }, bad, fault.InvalidTenant},
		"tenant too long":       {func(sb *sandboxv1.Sandbox) { sb.Spec.TenantId = long(64) }, bad, fault.InvalidTenant},
		"tenant climbs":         {func(sb *sandboxv1.Sandbox) { sb.Spec.TenantId = ".." }, bad, fault.InvalidTenant},
		"label key":             {func(sb *sandboxv1.Sandbox) { sb.Labels = map[string]string{"a b": "c"} }, bad, fault.InvalidRequest},
		"label value":           {func(sb *sandboxv1.Sandbox) { sb.Labels = map[string]string{"a": "b c"} }, bad, fault.InvalidRequest},
		"annotation key":        {func(sb *sandboxv1.Sandbox) { sb.Annotations = map[string]string{"": "x"} }, bad, fault.InvalidRequest},
		"annotations too big":   {func(sb *sandboxv1.Sandbox) { sb.Annotations = map[string]string{"a": long(256<<10 + 1)} }, bad, fault.InvalidRequest},
		"restart policy":        {func(sb *sandboxv1.Sandbox) { sb.Spec.RestartPolicy = "Sometimes" }, bad, fault.InvalidRequest},
		"working dir relative":  {func(sb *sandboxv1.Sandbox) { sb.Spec.WorkingDir = "work" }, bad, fault.InvalidRequest},
		"working dir not clean": {func(sb *sandboxv1.Sandbox) { sb.Spec.WorkingDir = "/a/../b" }, bad, fault.InvalidRequest},
		"NUL in command":        {func(sb *sandboxv1.Sandbox) { sb.Spec.Command = []string{"a\x00b"} }, bad, fault.InvalidRequest},
		"NUL in args":           {func(sb *sandboxv1.Sandbox) { sb.Spec.Args = []string{"a\x00b"} }, bad, fault.InvalidRequest},
		"command too big":       {func(sb *sandboxv1.Sandbox) { sb.Spec.Command = []string{long(1<<20 + 1)} }, bad, fault.InvalidRequest},
		"env without name":      {env(&sandboxv1.EnvVar{Value: "x"}), bad, fault.InvalidRequest},
		"env name with =":       {env(&sandboxv1.EnvVar{Name: "A=B"}), bad, fault.InvalidRequest},
		"env twice":             {env(&sandboxv1.EnvVar{Name: "A"}, &sandboxv1.EnvVar{Name: "A"}), bad, fault.InvalidRequest},
		"env value NUL":         {env(&sandboxv1.EnvVar{Name: "A", Value: "\x00"}), bad, fault.InvalidRequest},
		"cpu no quantity":       {limits("cpu", "two"), bad, fault.InvalidRequest},
		"cpu negative":          {limits("cpu", "-1"), bad, fault.InvalidRequest},
		"cpu too small":         {limits("cpu", "1m"), bad, fault.InvalidRequest},
		"memory without unit":   {limits("memory", "64"), bad, fault.InvalidRequest},
		"memory zero":           {limits("memory", "0"), bad, fault.InvalidRequest},
		"unknown resource":      {limits("gpu", "1"), bad, fault.InvalidRequest},
		"request above limit": {func(sb *sandboxv1.Sandbox) {
			sb.Spec.Resources = &sandboxv1.Resources{Limits: map[string]string{"cpu": "1"}, Requests: map[string]string{"cpu": "2"}}
		}, bad, fault.InvalidRequest},
		"shutdown in the past": {func(sb *sandboxv1.Sandbox) { sb.Spec.ShutdownTime = timestamppb.New(grpcapitest.Epoch) }, bad, fault.InvalidRequest},
		"static target": {func(sb *sandboxv1.Sandbox) {
			sb.Spec.VolumeMounts = []*sandboxv1.VolumeMount{{Source: "/srv/x", Target: "/etc"}}
		}, codes.PermissionDenied, fault.TargetDenied},
		"static source": {func(sb *sandboxv1.Sandbox) { sb.Spec.VolumeMounts = []*sandboxv1.VolumeMount{{Target: "/x"}} }, bad, fault.InvalidSource},
		"static mode": {func(sb *sandboxv1.Sandbox) {
			sb.Spec.VolumeMounts = []*sandboxv1.VolumeMount{{Source: "/srv/x", Target: "/x", Mode: "wo"}}
		}, bad, fault.InvalidMode},
		"too many static":  {func(sb *sandboxv1.Sandbox) { sb.Spec.VolumeMounts = make([]*sandboxv1.VolumeMount, 33) }, codes.FailedPrecondition, fault.TooManyVolumes},
		"too many dynamic": {dynamic(make([]string, 33)...), codes.FailedPrecondition, fault.TooManyVolumes},
		"targets twice":    {dynamic("/x", "/x"), codes.AlreadyExists, fault.TargetInUse},
		"targets nested":   {dynamic("/x", "/x/y"), codes.FailedPrecondition, fault.TargetNested},
		"volume of another": {func(sb *sandboxv1.Sandbox) {
			dynamic("/x")(sb)
			sb.Spec.DynamicVolumes[0].TenantId = "evil"
		}, codes.PermissionDenied, fault.TenantMismatch},
		"size required in group": {func(sb *sandboxv1.Sandbox) {
			dynamic("/x")(sb)
			sb.Spec.Group = "strict"
		}, codes.FailedPrecondition, fault.SizeRequired},
		"exists": {func(sb *sandboxv1.Sandbox) { sb.Name = "a" }, codes.AlreadyExists, fault.SandboxExists},
	}
	for name, c := range creates {
		table = append(table, badInput{"create/" + name, func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Sandbox: sandbox("new", c.change)})
			return err
		}, c.code, c.reason})
	}

	execs := map[string]func(*sandboxv1.ExecStart){
		"no command":       func(s *sandboxv1.ExecStart) { s.Command = nil },
		"empty command":    func(s *sandboxv1.ExecStart) { s.Command = []string{""} },
		"NUL in command":   func(s *sandboxv1.ExecStart) { s.Command = []string{"echo", "\x00"} },
		"command too big":  func(s *sandboxv1.ExecStart) { s.Command = []string{"echo", long(1 << 20)} },
		"env without name": func(s *sandboxv1.ExecStart) { s.Env = []*sandboxv1.EnvVar{{}} },
		"relative dir":     func(s *sandboxv1.ExecStart) { s.WorkingDir = "." },
	}
	for name, change := range execs {
		table = append(table, badInput{"exec/" + name, func(ctx context.Context, e *grpcapitest.Env) error {
			first := start("a", "echo")
			change(first.GetStart())
			_, _, err := talk(ctx, e, first)
			return err
		}, bad, fault.InvalidRequest})
	}

	others := map[string]struct {
		call   func(context.Context, *grpcapitest.Env) error
		reason fault.Reason
	}{
		"create nothing": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{})
			return err
		}, fault.InvalidRequest},
		"page size of sandboxes": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{PageSize: -1})
			return err
		}, fault.InvalidRequest},
		"page token of sandboxes": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{PageToken: "%%%"})
			return err
		}, fault.InvalidRequest},
		"namespace of a list": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: "A"})
			return err
		}, fault.InvalidName},
		"label selector": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{LabelSelector: "a in"})
			return err
		}, fault.InvalidRequest},
		"page size of volumes": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Volumes.ListSandVolumes(ctx, &sandboxv1.ListSandVolumesRequest{Sandbox: named("a"), PageSize: -1})
			return err
		}, fault.InvalidRequest},
		"page token of volumes": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Volumes.ListSandVolumes(ctx, &sandboxv1.ListSandVolumesRequest{Sandbox: named("a"), PageToken: "bm9uc2Vuc2U"})
			return err
		}, fault.InvalidRequest},
		"tail": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := logs(ctx, e, &sandboxv1.LogsRequest{Sandbox: named("a"), Tail: -1})
			return err
		}, fault.InvalidRequest},
		"watch namespace": {func(ctx context.Context, e *grpcapitest.Env) error {
			return watchError(ctx, e, &sandboxv1.WatchSandboxesRequest{Namespace: "A"})
		}, fault.InvalidName},
		"watch both": {func(ctx context.Context, e *grpcapitest.Env) error {
			return watchError(ctx, e, &sandboxv1.WatchSandboxesRequest{Namespace: "default", Sandbox: named("a")})
		}, fault.InvalidRequest},
		"watch nobody": {func(ctx context.Context, e *grpcapitest.Env) error {
			return watchError(ctx, e, &sandboxv1.WatchSandboxesRequest{Sandbox: &sandboxv1.SandboxRef{}})
		}, fault.InvalidRequest},
		"pull nothing": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Images.PullImage(ctx, &sandboxv1.PullImageRequest{})
			return err
		}, fault.InvalidImage},
		"pull nonsense": {func(ctx context.Context, e *grpcapitest.Env) error {
			_, err := e.Images.PullImage(ctx, &sandboxv1.PullImageRequest{Name: "http://x y"})
			return err
		}, fault.InvalidImage},
	}
	for name, c := range others {
		table = append(table, badInput{"other/" + name, c.call, bad, c.reason})
	}
	return append(table, badClaims()...)
}

// sendable says whether the messages can express an entry: strings are UTF-8 in protobuf, and a request to detach
// is none of a client's.
func sendable(e v1alpha1.DynamicVolume) bool {
	for _, text := range []string{string(e.VolumeType), e.Source, e.Target, string(e.Mode), e.SizeLimit, e.TenantID, e.SubPath, string(e.OnFailure), e.RequestID} {
		if !utf8.ValidString(text) {
			return false
		}
	}
	return e.Detach == nil
}

func watchError(ctx context.Context, e *grpcapitest.Env, req *sandboxv1.WatchSandboxesRequest) error {
	stream, err := e.Sandboxes.WatchSandboxes(ctx, req)
	if err != nil {
		return err
	}
	_, err = stream.Recv()
	return err
}
