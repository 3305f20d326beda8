package agent_test

import (
	"errors"
	"testing"
)

func errorsIs(err, kind error) bool { return errors.Is(err, kind) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
