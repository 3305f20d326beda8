package fault_test

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// reasons reads the constants of type Reason off the source, so that a new one cannot be forgotten.
func reasons(t *testing.T) []fault.Reason {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "fault.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []fault.Reason
	for _, decl := range file.Decls {
		gen, ok := decl.(*ast.GenDecl)
		if !ok || gen.Tok != token.CONST {
			continue
		}
		for _, spec := range gen.Specs {
			value := spec.(*ast.ValueSpec)
			if id, ok := value.Type.(*ast.Ident); !ok || id.Name != "Reason" {
				continue
			}
			word, err := strconv.Unquote(value.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, fault.Reason(word))
		}
	}
	if len(out) < 40 {
		t.Fatalf("found %d reasons only: the test no longer reads them", len(out))
	}
	return out
}

func TestEveryReasonHasAKind(t *testing.T) {
	for _, r := range reasons(t) {
		if errors.Is(fault.KindOf(r), errdefs.ErrUnknown) {
			t.Errorf("reason %s has no kind", r)
		}
	}
}

// reasonsBelow reads the constants named Reason… off the source of a package below.
func reasonsBelow(t *testing.T, file string) []fault.Reason {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out []fault.Reason
	ast.Inspect(parsed, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || !strings.HasPrefix(spec.Names[0].Name, "Reason") || len(spec.Values) != 1 {
			return true
		}
		if word, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value); err == nil {
			out = append(out, fault.Reason(word))
		}
		return true
	})
	if len(out) < 9 {
		t.Fatalf("found %d reasons in %s only: the test no longer reads them", len(out), file)
	}
	return out
}

func TestEveryReasonOfThePackagesBelowHasAKind(t *testing.T) {
	for _, file := range []string{"../mount/errors.go", "../capacity/errors.go"} {
		for _, r := range reasonsBelow(t, file) {
			if errors.Is(fault.KindOf(r), errdefs.ErrUnknown) {
				t.Errorf("reason %s of %s has no kind", r, file)
			}
		}
	}
}

// A status with a string that is no UTF-8 would lose its reason on its way.
func TestWordsOfASandboxCanBeSent(t *testing.T) {
	err := fault.FromGRPC(fault.ToGRPC(fault.New(errdefs.ErrFailedPrecondition, fault.Busy, "used by \xff").With("by", "\xfe")))
	if fault.ReasonOf(err) != fault.Busy || err.Error() != "used by \uFFFD" || fault.MetadataOf(err)["by"] != "\uFFFD" {
		t.Errorf("%v, %s, %v", err, fault.ReasonOf(err), fault.MetadataOf(err))
	}
}

func TestUnknownReasonIsTransient(t *testing.T) {
	err := fault.New(fault.KindOf("FROM_THE_FUTURE"), "FROM_THE_FUTURE", "something new")
	if fault.IsPermanent(err) {
		t.Error("an unknown reason is permanent")
	}
}

// A program compares reasons: two words for one cause, such as INVALID_TARGET and TARGET_INVALID, make it miss one.
func TestNoReasonIsAnotherOneTurnedAround(t *testing.T) {
	all := append(reasons(t), append(reasonsBelow(t, "../mount/errors.go"), reasonsBelow(t, "../capacity/errors.go")...)...)
	seen := map[string]fault.Reason{}
	for _, r := range all {
		words := strings.Split(strings.ReplaceAll(string(r), "SUB_PATH", "SUBPATH"), "_")
		slices.Sort(words)
		key := strings.Join(words, "_")
		if other, ok := seen[key]; ok && other != r {
			t.Errorf("%s and %s are one cause: keep one word", other, r)
		}
		seen[key] = r
	}
}
