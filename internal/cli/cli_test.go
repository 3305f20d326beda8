package cli_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/cli"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/grpcapitest"
)

var update = flag.Bool("update", false, "write what the sessions print to testdata")

// result is what one command line did.
type result struct {
	code        int
	out, errOut string
}

// fluxctl runs a command line against a server that looks at everything five minutes after it was made.
func fluxctl(ctx context.Context, address string, in io.Reader, args ...string) result {
	var out, errOut bytes.Buffer
	code := cli.Main(ctx, args, cli.Env{
		In: in, Out: &out, Err: &errOut, Clock: clocktesting.NewFakePassiveClock(grpcapitest.Epoch.Add(5 * time.Minute)),
		Getenv: func(name string) string { return map[string]string{cli.AddressEnv: address, "SECRET": "s3cret"}[name] },
	})
	return result{code, out.String(), errOut.String()}
}

// The parts of the output that differ from run to run.
var variable = []struct {
	pattern *regexp.Regexp
	name    string
}{
	{regexp.MustCompile(`[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`), "<uid>"},
	{regexp.MustCompile(`\br-[0-9a-f]{16}\b`), "<request>"},
	{regexp.MustCompile(`\b[0-9a-f]{16}\b`), "<hash>"},
	{regexp.MustCompile(`unix:///\S+\.sock`), "<address>"},
	{regexp.MustCompile(`"?resourceVersion"?: "[0-9]+"`), `resourceVersion: <version>`},
	{regexp.MustCompile(`\bop-[0-9]+\b`), "<operation>"},
	{regexp.MustCompile(`sandbox-[a-z0-9]{8}\b`), "sandbox-<random>"},
	{regexp.MustCompile(`\bpool-[a-z0-9]{5}\b`), "pool-<random>"},
}

// TestSessions runs the command lines of each file in testdata and compares what they print. A line "$ fluxctl …"
// is a command line; "< text" before it is its input. What follows is its stdout, its stderr with "! " before each
// line, and its exit code if it is not 0. The server's actors are told by file name what to do.
func TestSessions(t *testing.T) {
	fates := map[string]map[string]grpcapitest.Fate{
		"volumes": {
			"/srv/busy":    {Holders: []v1alpha1.VolumeHolder{{PID: 4711, Command: "python3", Kind: "cwd"}, {PID: 4712, Command: "tail", Kind: "fd"}}},
			"/srv/missing": {Reason: fault.SourceNotFound, Message: "/srv/missing does not exist on node-1: create it there"},
			"/srv/far": {Row: func(r *v1alpha1.VolumeStatus) {
				r.Topology, r.VolumeDomain, r.SandboxDomain, r.CapacityBytes = v1alpha1.TopologyForced, "pod-1", "pod-2", 3<<29
			}},
		},
		"sandboxes": {
			"missing:1": {Reason: fault.ImageNotFound, Message: "no image missing:1 on node-1: import it with: fluxctl image import"},
			"ends:1":    {Phase: v1alpha1.SandboxSucceeded},
		},
	}
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no sessions", err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		t.Run(name, func(t *testing.T) {
			e := grpcapitest.Start(t, nil)
			for what, fate := range fates[name] {
				e.Scheduler.Set(what, fate)
			}
			if name == "claims" {
				e.MustSet("pool", 3)
				for set, fate := range claimFates {
					e.Pools.Set(set, fate)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := session(t, e.Address, string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != string(want) {
				t.Errorf("the session went\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// claimFates are what becomes of claims, by their set.
var claimFates = map[string]grpcapitest.ClaimFate{
	"slow":  {Hold: true},
	"short": {Claimed: 1},
	"bad":   {Reason: fault.VolumeNotFound, Message: "there is no PersistentVolume v, which is to be mounted at /data: create it first, or correct pvName"},
	"late":  {Reason: "StartingSandbox", Message: "the time is over (claimTimeout): sandbox late-1: it is Pending"},
	"full": {Refuse: fault.New(errdefs.ErrPermissionDenied, fault.Forbidden,
		"create sandbox claim default/a: exceeded quota: q, requested: count/sandboxclaims.agents.kruise.io=1, used: 5, limited: 5")},
}

func session(t *testing.T, address, script string) string {
	var out strings.Builder
	input := ""
	for line := range strings.Lines(script) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "# ") {
			fmt.Fprintf(&out, "%s\n", line)
		}
		if text, ok := strings.CutPrefix(line, "< "); ok {
			fmt.Fprintf(&out, "%s\n", line)
			input = text
		}
		command, ok := strings.CutPrefix(line, "$ fluxctl ")
		if !ok {
			continue
		}
		r := fluxctl(t.Context(), address, strings.NewReader(input), strings.Fields(command)...)
		input = ""
		fmt.Fprintf(&out, "$ fluxctl %s\n%s", command, mask(r.out))
		for l := range strings.Lines(mask(r.errOut)) {
			fmt.Fprintf(&out, "! %s", l)
		}
		if r.code != 0 {
			fmt.Fprintf(&out, "[exit %d]\n", r.code)
		}
		out.WriteString("\n")
	}
	return out.String()
}

func mask(s string) string {
	for _, v := range variable {
		s = v.pattern.ReplaceAllString(s, v.name)
	}
	// The width of columns follows the masked values.
	return s
}

func TestNoServer(t *testing.T) {
	r := fluxctl(t.Context(), "unix://"+filepath.Join(t.TempDir(), "x.sock"), nil, "ps")
	if r.code != 1 || !strings.Contains(r.errOut, "start it with: flux-sandbox serve") || strings.Count(r.errOut, "\n") != 1 {
		t.Errorf("got %+v", r)
	}
}

func TestTimeout(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	e.Scheduler.Set("late:1", grpcapitest.Fate{Hold: true})
	r := fluxctl(t.Context(), e.Address, nil, "run", "--name", "a", "--image", "late:1", "--timeout", "300ms")
	if r.code != 1 || strings.Count(r.errOut, "\n") != 1 {
		t.Errorf("got %+v", r)
	}
}

func TestExecPassesEverythingThrough(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	if r := fluxctl(t.Context(), e.Address, nil, "run", "--name", "a", "--image", "busybox:1"); r.code != 0 {
		t.Fatal(r)
	}
	big := strings.Repeat("0123456789abcde\n", 100_000)
	r := fluxctl(t.Context(), e.Address, strings.NewReader(big), "exec", "a", "-i", "--", "cat")
	if r.code != 0 || r.out != big {
		t.Errorf("exit code %d, %d bytes of %d, %s", r.code, len(r.out), len(big), r.errOut)
	}
}

func TestInterruptEndsTheCommand(t *testing.T) {
	e := grpcapitest.Start(t, nil)
	if r := fluxctl(t.Context(), e.Address, nil, "run", "--name", "a", "--image", "busybox:1"); r.code != 0 {
		t.Fatal(r)
	}
	for _, args := range [][]string{{"exec", "a", "--", "hang"}, {"logs", "a", "-f"}} {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var r result
		wg.Go(func() { r = fluxctl(ctx, e.Address, nil, args...) })
		if args[0] == "exec" {
			<-e.Agent.Started()
		}
		cancel()
		wg.Wait()
		if r.code != 130 {
			t.Errorf("%q: %+v", args, r)
		}
		if args[0] == "exec" {
			<-e.Agent.Cancelled()
		}
	}
}

// TestHelp checks that every command explains itself with an example.
func TestHelp(t *testing.T) {
	for _, args := range []string{"", "run", "ps", "get", "exec", "logs", "rm", "pause", "resume", "volume add", "volume rm", "volume ls",
		"claim", "claim ls", "claim get", "claim rm", "set ls", "set get", "set rm", "image import", "image ls", "image pull", "doctor"} {
		r := fluxctl(t.Context(), "", nil, append(strings.Fields(args), "--help")...)
		if r.code != 0 || !strings.Contains(r.out, "Examples:\n  fluxctl ") {
			t.Errorf("fluxctl %s --help: %+v", args, r)
		}
	}
}

func TestCompletion(t *testing.T) {
	r := fluxctl(t.Context(), "", nil, "completion", "bash")
	if r.code != 0 || !strings.Contains(r.out, "__start_fluxctl") {
		t.Errorf("got exit code %d, %s", r.code, r.errOut)
	}
}
