package mount

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

func TestProbe(t *testing.T) {
	testenv.NeedRoot(t)
	features := Probe()
	check(t, Require(features))
	for _, f := range features {
		t.Logf("%-45s ok=%-5v needed=%-5v %-5s %s", f.Name, f.OK, f.Needed, f.Since, f.Detail)
		if f.Name == "" || f.Since == "" || f.Purpose == "" || f.OK == (f.Detail != "") {
			t.Errorf("incomplete: %+v", f)
		}
	}
	if got := hostMounts(t, "size=64k"); got != "" {
		t.Error("on the host:", got)
	}
}

func TestRequireNamesWhatIsMissing(t *testing.T) {
	err := Require(Features{{Name: "one", OK: true, Needed: true}, {Name: "two", Needed: true, Since: "5.6", Detail: "not implemented"}, {Name: "three"}})
	if reason(err) != ReasonKernelFeature || !errdefs.IsNotImplemented(err) || !strings.Contains(err.Error(), "two (Linux 5.6") ||
		strings.Contains(err.Error(), "one (") || strings.Contains(err.Error(), "three") {
		t.Error(err)
	}
}
