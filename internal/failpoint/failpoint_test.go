package failpoint

import (
	"slices"
	"testing"
)

func TestDeclaredPointsAreListed(t *testing.T) {
	p := Declare("test/one")
	if Declare("test/one") != p {
		t.Error("a name was declared twice and gave two points")
	}
	if !slices.Contains(Names(), "test/one") {
		t.Error("it is not listed")
	}
	if err := p.Hit(); err != nil {
		t.Error("a point that is not armed did something:", err)
	}
}

func TestStepsAreListedInABuildWithFailpoints(t *testing.T) {
	observe := Steps("test-steps", []string{"a", "b"})
	observe("a", false) // a point that is not armed does nothing
	observe("a", true)
	for _, want := range []string{"test-steps/a/before", "test-steps/a/after", "test-steps/b/before", "test-steps/b/after"} {
		if slices.Contains(Names(), want) != Enabled {
			t.Errorf("%s: listed is not %v", want, Enabled)
		}
	}
	defer func() {
		if (recover() != nil) != Enabled {
			t.Errorf("a step that is not in its list must panic in a build with failpoints, and there alone")
		}
	}()
	observe("c", false)
}
