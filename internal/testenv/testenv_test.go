package testenv_test

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/testenv"
)

// recorder is a testing.TB that notes how a test was ended and ends it as the real one does.
type recorder struct {
	testing.TB
	skipped, failed bool
	message         string
}

func (r *recorder) Helper() {}

func (r *recorder) Skipf(format string, args ...any) {
	r.skipped, r.message = true, fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failed, r.message = true, fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func run(f func(testing.TB)) *recorder {
	r := &recorder{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(r)
	}()
	<-done
	return r
}

func TestMissingProgramSkipsAtHomeAndFailsInCI(t *testing.T) {
	for ci, wantFail := range map[string]bool{"": false, "false": false, "true": true} {
		t.Run("CI="+ci, func(t *testing.T) {
			t.Setenv("CI", ci)
			r := run(func(tb testing.TB) { testenv.NeedBinary(tb, "sh", "no-such-program") })
			if r.failed != wantFail || r.skipped == wantFail {
				t.Errorf("failed %v, skipped %v; want failed %v", r.failed, r.skipped, wantFail)
			}
			if !strings.Contains(r.message, "no-such-program") || strings.Contains(r.message, "sh,") {
				t.Errorf("message %q does not name what is missing, and only that", r.message)
			}
		})
	}
}

func TestPresentProgramIsReturned(t *testing.T) {
	var path string
	r := run(func(tb testing.TB) { path = testenv.NeedBinary(tb, "sh") })
	if r.failed || r.skipped || !strings.HasSuffix(path, "/sh") {
		t.Errorf("NeedBinary(sh) = %q, failed %v, skipped %v", path, r.failed, r.skipped)
	}
}

func TestContainerdThatIsNamedMustExist(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedBinary(t, "runc")
	t.Setenv(testenv.ContainerdEnv, "/no/such/containerd")
	if r := run(func(tb testing.TB) { testenv.NeedContainerd(tb) }); !r.failed {
		t.Error("a containerd that was asked for by name and is not there does not fail the test")
	}
}

func TestLongFollowsTheSoakVariable(t *testing.T) {
	t.Setenv(testenv.SoakEnv, "")
	if n := testenv.Long(1, 100); n != 1 {
		t.Errorf("normal run: %d rounds", n)
	}
	t.Setenv(testenv.SoakEnv, "1")
	if n := testenv.Long(1, 100); n != 100 {
		t.Errorf("soak run: %d rounds", n)
	}
}
