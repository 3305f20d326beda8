//go:build failpoint

package crash

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/flux-sandbox/flux-sandbox/test/machine"
)

// patience bounds each wait for something that goes on by itself.
const patience = 30 * time.Second

func TestMain(m *testing.M) { os.Exit(machine.Main(m)) }

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// await looks until it finds nothing wrong. The error is what the last look found that was not cut short.
func await(ctx context.Context, look func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	var last error
	for {
		err := look(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("after %s: %w", patience, last)
		}
	}
}
