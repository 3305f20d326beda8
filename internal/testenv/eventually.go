package testenv

import (
	"testing"
	"time"
)

// The time between two looks of Poll: it doubles, so that what comes at once is seen at once, and what takes long is not
// kept from coming by being looked at.
const (
	firstLook = time.Millisecond
	nextLooks = 20 * time.Millisecond
)

// Poll looks at a condition that nothing announces until it holds, for as long as patience lasts, and says whether it came
// to hold.
func Poll(patience time.Duration, holds func() bool) bool {
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for wait := firstLook; !holds(); wait = min(2*wait, nextLooks) {
		next := time.NewTimer(wait)
		select {
		case <-next.C:
		case <-deadline.C:
			next.Stop()
			return false
		}
	}
	return true
}

// Eventually is Poll for what the test cannot go on without: it ends the test when patience is over. what completes the
// sentence "in vain waited until …".
func Eventually(t testing.TB, patience time.Duration, what string, holds func() bool) {
	t.Helper()
	if !Poll(patience, holds) {
		t.Fatalf("in vain waited %s until %s", patience, what)
	}
}
