package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// Somebody with fluxctl alone takes sandboxes out of a pool, with volumes, adds and removes further ones, and gives them back.
func TestClaimsByFluxctl(t *testing.T) {
	c := pools(t)
	c.shared("shared-pv-1", "shared-pv-2")
	c.claimsGoFirst()
	c.apply(read(t, "../admission/testdata/on-demand-set.yaml"))
	const set = "shared-storage-template"
	user, viewer := c.caller("user", "flux-sandbox-user"), c.caller("viewer", "flux-sandbox-viewer")
	for _, a := range []*caller{user, viewer} {
		c.wait("the pool is ready", func() (bool, string) {
			out, err := a.fluxctl("set", "ls")
			fields := strings.Fields(out)
			return err == nil && len(fields) > 9 && slices.Equal(fields[6:9], []string{set, "3", "3"}), out
		})
	}
	if out := user.run(t, "set", "get", set, "-o", "yaml"); !strings.Contains(out, "kind: SandboxSet\n") || !strings.Contains(out, "- name: csi\n") {
		t.Errorf("set get: %s", out)
	}
	warm := c.names("get", "sandbox")
	refused := func(a *caller, words string, args ...string) {
		t.Helper()
		if out, err := a.fluxctl(args...); err == nil || !strings.Contains(out, words) {
			t.Errorf("fluxctl %q: %v: %s\nlacks: %s", args, err, indent(out), words)
		}
	}
	refused(viewer, "a Role with that verb on sandboxclaims.agents.kruise.io there gives the right [FORBIDDEN]", "claim", set)
	refused(viewer, "[FORBIDDEN]", "set", "rm", set)
	// The API server's words and the controller's, each as kubectl shows them.
	refused(user, "labels of agents.kruise.io and sandbox.flux.io say whose a sandbox is, and cannot be given by a claim: use names of your own [INVALID_REQUEST]",
		"claim", set, "--label", "agents.kruise.io/claim-name=x")
	refused(user, "there is no PersistentVolume shared-pv-3, which is to be mounted at /data: create it first, or correct pvName; it is kept: look with: fluxctl claim get wrong [VOLUME_NOT_FOUND]",
		"claim", set, "--name", "wrong", "--volume", "pv=shared-pv-3,target=/data")
	user.run(t, "claim", "rm", "wrong")
	if now := c.names("get", "sandbox"); !slices.Equal(now, warm) {
		t.Errorf("the pool was %v and is %v", warm, now)
	}

	lines := strings.Fields(user.run(t, "claim", set, "--name", "job", "--label", "app=demo", "--wait",
		"--volume", "pv=shared-pv-1,target=/data", "--volume", "pv=shared-pv-2,target=/part,subPath=sub/dir,readOnly"))
	pod := lines[len(lines)-1]
	if !slices.Contains(warm, pod) {
		t.Fatalf("%q is none of the warm %v", lines, warm)
	}
	inPod := func(script, want string) {
		t.Helper()
		if out, err := c.kubectl("exec", pod, "--", "sh", "-c", script); err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v: %s", script, err, indent(out))
		}
	}
	inPod("cat /data/hello && touch /data/new", "from shared-pv-1\n")
	inPod("cat /part/hello && ! touch /part/new", "from sub/dir of shared-pv-2\n")
	if names := c.names("get", "sandbox", "-l", "agents.kruise.io/claim-name=job,app=demo"); !slices.Equal(names, []string{pod}) {
		t.Errorf("the claim's are %v", names)
	}
	if out := user.run(t, "claim", "get", "job"); !strings.Contains(out, "Completed") || !strings.Contains(out, pod) {
		t.Errorf("claim get: %s", out)
	}

	// A claimed sandbox is like any other.
	if out := user.run(t, "volume", "ls", pod); strings.Count(out, "Mounted") != 2 || !strings.Contains(out, "/part") {
		t.Errorf("volume ls: %s", out)
	}
	user.run(t, "volume", "add", pod, "--type", "pv", "--source", "shared-pv-2", "--target", "/more")
	inPod("cat /more/hello && touch /more/new", "from shared-pv-2\n")
	for _, target := range []string{"/more", "/part"} {
		user.run(t, "volume", "rm", pod, target)
		inPod("! grep ' "+target+" ' /proc/self/mounts && echo gone", "gone\n")
	}
	if out := user.run(t, "volume", "ls", pod); strings.Count(out, "Mounted") != 1 || strings.Contains(out, "/part") {
		t.Errorf("volume ls: %s", out)
	}
	if n := c.restarts(pod); n != 0 {
		t.Errorf("the container was restarted %d times", n)
	}

	user.run(t, "claim", "rm", "job")
	if slices.Contains(c.names("get", "sandbox"), pod) {
		t.Error("the claim is deleted, and its sandbox is there")
	}
	if out := user.run(t, "claim", "ls"); out != fmt.Sprintf("no sandbox claims in namespace %s\n", c.namespace) {
		t.Errorf("claim ls: %s", out)
	}
	user.run(t, "set", "rm", set)
	if names := c.names("get", "sandbox"); len(names) > 0 {
		t.Errorf("the set is deleted, and there are %v", names)
	}
}
