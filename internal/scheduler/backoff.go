package scheduler

import "time"

// Transient failures are tried again after 1 s, 2 s, 4 s … but at least every 5 min (design, ruling 10).
const (
	firstRetry = time.Second
	lastRetry  = 5 * time.Minute
)

// retryDelay is the wait after the n-th failed attempt, n from 1.
func retryDelay(n int32) time.Duration {
	if n > 10 {
		return lastRetry
	}
	return min(firstRetry<<(max(n, 1)-1), lastRetry)
}
