// Package failpoint lets a test stop the process at a named step.
//
// A step is declared once, as a package-level variable, so that the list of all steps is read off the
// code and a crash matrix can prove that it killed the process at each:
//
//	var beforeMove = failpoint.Declare("attach/move/before")
//
//	if err := beforeMove.Hit(); err != nil { … }
//
// Failpoints work only in a binary built with the tag "failpoint"; in any other, Hit does nothing and
// costs nothing. The environment variable FLUX_FAILPOINTS arms them: "name=kill" or "name=error(text)"
// or "name=hang", or "name=pause(FILE)", which makes FILE and goes on when it is removed; several separated by ";".
// "N*" before the action lets the first N-1 hits pass.
package failpoint

import (
	"slices"
	"sync"
)

// Env is the environment variable that arms failpoints.
const Env = "FLUX_FAILPOINTS"

// Point is one declared step.
type Point struct {
	name string
	arm  arming
}

var (
	mu     sync.Mutex // guards points
	points = map[string]*Point{}
)

// Declare makes a point, or returns the one of that name. Call it for package-level variables only.
func Declare(name string) *Point {
	mu.Lock()
	defer mu.Unlock()
	if p, ok := points[name]; ok {
		return p
	}
	p := &Point{name: name, arm: parse(name)}
	points[name] = p
	return p
}

// Name is the point's name.
func (p *Point) Name() string { return p.name }

// Names are the names of all declared points, sorted.
func Names() []string {
	mu.Lock()
	defer mu.Unlock()
	names := make([]string, 0, len(points))
	for n := range points {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Steps declares a point before and after each named step of one operation, and returns an observer that
// hits them: the operation calls it with done=false before a step and done=true after it. Errors that
// are armed at these points cannot be returned through an observer; they are for kill, hang and pause. A step that
// is not in the list panics, in a build with failpoints: the crash matrix would miss it.
func Steps(operation string, steps []string) func(step string, done bool) {
	if !Enabled {
		return func(string, bool) {}
	}
	type pair struct{ before, after *Point }
	byStep := make(map[string]pair, len(steps))
	for _, s := range steps {
		byStep[s] = pair{
			before: Declare(operation + "/" + s + "/before"),
			after:  Declare(operation + "/" + s + "/after"),
		}
	}
	return func(step string, done bool) {
		p, ok := byStep[step]
		if !ok {
			panic("failpoint: step " + step + " of " + operation + " is not in its list")
		}
		if done {
			_ = p.after.Hit()
		} else {
			_ = p.before.Hit()
		}
	}
}

// Step runs one step of an operation under an observer's eyes, which is told before it (done false) and, unless it fails,
// after it. A nil observer sees nothing.
func Step(observe func(step string, done bool), name string, f func() error) error {
	if observe == nil {
		return f()
	}
	observe(name, false)
	if err := f(); err != nil {
		return err
	}
	observe(name, true)
	return nil
}
