package sourcetest

import (
	"errors"
	"fmt"
	"sync"
)

// ErrInjected is in the chain of every error that Faults makes.
var ErrInjected = errors.New("injected fault")

// Faults lets one call fail of all that a Source makes to the machine. A nil *Faults lets every call pass.
type Faults struct {
	mu     sync.Mutex // guards the fields below
	failAt int
	calls  []string
}

// Call is told of a call before it is made; if it returns an error, the call is not made and fails with that.
func (f *Faults) Call(name string) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, name)
	if f.failAt == len(f.calls) {
		return fmt.Errorf("call %d, %s: %w", f.failAt, name, ErrInjected)
	}
	return nil
}

// Calls are the names of the calls so far.
func (f *Faults) Calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.calls...)
}
