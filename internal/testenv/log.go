package testenv

import (
	"strings"
	"sync"
)

// Log keeps what is logged while others look at it.
type Log struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String is all that was logged so far.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Has says whether a text was logged.
func (l *Log) Has(text string) bool { return strings.Contains(l.String(), text) }
