package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"testing"
)

// program is a testing.TB outside of a test: the helpers that tests have serve here too. A fatal error ends the part of
// the benchmark that it comes from, after the clean-up.
type program struct {
	testing.TB // nil: it is here for the method that nobody else can have
	name       string
	ctx        context.Context
	cleanups   []func()
	errs       []error
}

// fatal is what a fatal error panics with.
type fatal struct{}

func runPart(name string, f func(*program)) (err error) {
	ctx, cancel := context.WithCancel(context.Background())
	p := &program{name: name, ctx: ctx}
	p.try(func() { f(p) })
	cancel() // as testing does it: before the clean-up
	for _, cleanup := range slices.Backward(p.cleanups) {
		p.try(cleanup)
	}
	return errors.Join(p.errs...)
}

func (p *program) try(f func()) {
	defer func() {
		switch r := recover(); r.(type) {
		case nil, fatal:
		default:
			p.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	f()
}

func (p *program) Helper()                  {}
func (p *program) Name() string             { return p.name }
func (p *program) Context() context.Context { return p.ctx }
func (p *program) Cleanup(f func())         { p.cleanups = append(p.cleanups, f) }
func (p *program) Failed() bool             { return len(p.errs) > 0 }

func (p *program) Error(args ...any) {
	p.errs = append(p.errs, errors.New(p.name+": "+fmt.Sprint(args...)))
}
func (p *program) Errorf(format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf(p.name+": "+format, args...))
}

func (p *program) Fatal(args ...any) {
	p.Error(args...)
	panic(fatal{})
}

func (p *program) Fatalf(format string, args ...any) {
	p.Errorf(format, args...)
	panic(fatal{})
}

// Skipf ends the part: a benchmark that lacks something has failed.
func (p *program) Skipf(format string, args ...any) { p.Fatalf(format, args...) }

func (p *program) Log(args ...any)                 { fmt.Fprintln(os.Stderr, args...) }
func (p *program) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (p *program) must(err error) {
	if err != nil {
		p.Fatal(err)
	}
}
