package house

import (
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"
)

// A name that says nothing collects what belongs nowhere.
func TestNoPackageIsNamedAfterNothing(t *testing.T) {
	empty := []string{"util", "utils", "common", "helper", "helpers", "misc", "shared", "base", "lib"}
	for _, p := range sources(t).pkgs {
		for _, part := range append(strings.Split(p.dir, "/"), p.name()) {
			if slices.Contains(empty, part) {
				t.Errorf("%s: the name %q does not say what is in it", p.dir, part)
			}
		}
	}
}

// The shortest package comment that can explain anything, in characters. A command is a thin main: what it
// runs is explained where that is.
const (
	minDoc        = 90
	minCommandDoc = 60
)

func TestEveryPackageExplainsItself(t *testing.T) {
	for _, p := range sources(t).pkgs {
		longest, code := "", false
		for _, f := range p.files {
			code = code || !f.test
			if f.ast.Doc != nil && !f.test && len(f.ast.Doc.Text()) > len(longest) {
				longest = f.ast.Doc.Text()
			}
		}
		switch name := p.name(); {
		case !code: // tests only
		case len(longest) < minDoc && name != "main", len(longest) < minCommandDoc:
			t.Errorf("%s: its package comment has %d characters: what is it for, what does it promise?", p.dir, len(longest))
		case name != "main" && !strings.HasPrefix(longest, "Package "+name+" "):
			t.Errorf("%s: its package comment does not begin with %q", p.dir, "Package "+name)
		}
	}
}

// Waiting for time to pass is a race with a delay: wait for the condition, with a timer that can be stopped
// and, where time matters, an injected clock. In tests testenv.Poll and testenv.Eventually wait, and in the bubble of
// testing/synctest a timer on its clock. There are no exceptions.
func TestNobodySleeps(t *testing.T) {
	s := sources(t)
	for _, p := range s.pkgs {
		for _, f := range p.files {
			name := f.localName("time")
			if name == "" {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Sleep" {
					if x, ok := sel.X.(*ast.Ident); ok && x.Name == name {
						t.Errorf("%s: time.Sleep", s.at(n))
					}
				}
				return true
			})
		}
	}
}

// A test that skips itself looks like one that passed. internal/testenv skips only where that is right, and
// never in CI.
func TestOnlyTestenvSkips(t *testing.T) {
	s := sources(t)
	for _, p := range s.pkgs {
		if p.dir == "internal/testenv" {
			continue
		}
		for _, f := range p.files {
			ast.Inspect(f.ast, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				sel, ok := call.Fun.(*ast.SelectorExpr)
				if ok && slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, sel.Sel.Name) {
					t.Errorf("%s: %s: ask internal/testenv for what the test needs", s.at(n), sel.Sel.Name)
				}
				return true
			})
		}
	}
}

// A note to oneself in the source is a promise that nobody keeps.
func TestNoUnfinishedWork(t *testing.T) {
	s := sources(t)
	words := []string{"TO" + "DO", "FIX" + "ME", "XX" + "X"}
	for _, p := range s.pkgs {
		for _, f := range p.files {
			for _, group := range f.ast.Comments {
				for _, w := range words {
					if slices.Contains(strings.FieldsFunc(group.Text(), notLetter), w) {
						t.Errorf("%s: %s: do it, or file an issue", s.at(group), w)
					}
				}
			}
		}
	}
}

func notLetter(r rune) bool { return (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') }

// A lock whose purpose is not written down is held too long or not at all.
func TestEveryMutexSaysWhatItGuards(t *testing.T) {
	s := sources(t)
	for _, p := range s.pkgs {
		for _, f := range p.files {
			name := f.localName("sync")
			if f.test || name == "" {
				continue
			}
			ast.Inspect(f.ast, func(n ast.Node) bool {
				switch d := n.(type) {
				case *ast.GenDecl: // a lone var: its comment is the declaration's
					if d.Tok == token.VAR && len(d.Specs) == 1 && d.Doc != nil {
						return false
					}
				case *ast.StructType:
					for _, field := range d.Fields.List {
						// A struct of a mutex alone has the comment of its type.
						if isMutex(field.Type, name) && field.Doc == nil && field.Comment == nil && len(d.Fields.List) > 1 {
							t.Errorf("%s: a mutex without a comment: what does it guard?", s.at(field))
						}
					}
				case *ast.ValueSpec:
					if isMutex(d.Type, name) && d.Doc == nil && d.Comment == nil {
						t.Errorf("%s: a mutex without a comment: what does it guard?", s.at(n))
					}
				}
				return true
			})
		}
	}
}

func isMutex(e ast.Expr, syncName string) bool {
	sel, ok := e.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	x, ok := sel.X.(*ast.Ident)
	return ok && x.Name == syncName && (sel.Sel.Name == "Mutex" || sel.Sel.Name == "RWMutex")
}
