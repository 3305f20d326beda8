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
	observe := Steps("test-steps", []string{"a", "b"})
	for _, want := range []string{"test/one", "test-steps/a/before", "test-steps/a/after", "test-steps/b/before", "test-steps/b/after"} {
		if !slices.Contains(Names(), want) {
			t.Errorf("%s is not listed", want)
		}
	}
	observe("a", false) // an unarmed point does nothing
	observe("a", true)
	if err := p.Hit(); err != nil {
		t.Error(err)
	}
	defer func() {
		if recover() == nil {
			t.Error("a step that is not in its list was accepted: the crash matrix would miss it")
		}
	}()
	observe("c", false)
}
