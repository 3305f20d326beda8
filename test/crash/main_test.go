//go:build failpoint

package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// patience bounds each wait for something that goes on by itself.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	code := m.Run()
	if err := machine.Clean(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// await looks until it finds nothing wrong; the error is the last look's.
func await(ctx context.Context, look func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := look()
		if err == nil {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("after %s", patience), err)
		}
	}
}
