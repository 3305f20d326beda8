package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/flux-sandbox/flux-sandbox"

// file is one parsed Go file.
type file struct {
	name string // from the module's root
	test bool   // ends in _test.go
	ast  *ast.File
}

// imports are the paths of what the file imports.
func (f file) imports() []string {
	var paths []string
	for _, spec := range f.ast.Imports {
		p, _ := strconv.Unquote(spec.Path.Value)
		paths = append(paths, p)
	}
	return paths
}

// localName is the name by which the file uses a standard package, or "" if it does not import it.
func (f file) localName(importPath string) string {
	for _, spec := range f.ast.Imports {
		if p, _ := strconv.Unquote(spec.Path.Value); p == importPath {
			if spec.Name != nil {
				return spec.Name.Name
			}
			return path.Base(importPath)
		}
	}
	return ""
}

// pkg is the Go files of one directory.
type pkg struct {
	dir   string // from the module's root: "internal/mount"
	files []file
}

// name is the name in the package clause of the package itself.
func (p pkg) name() string {
	for _, f := range p.files {
		if n := f.ast.Name.Name; !f.test || !strings.HasSuffix(n, "_test") {
			return n
		}
	}
	return ""
}

type source struct {
	fset *token.FileSet
	pkgs []pkg
}

// at tells where a node is: "internal/mount/tree.go:12".
func (s source) at(n ast.Node) string {
	p := s.fset.Position(n.Pos())
	return p.Filename + ":" + strconv.Itoa(p.Line)
}

// read parses every Go file of the module once.
var read = sync.OnceValues(func() (source, error) {
	s := source{fset: token.NewFileSet()}
	root := os.DirFS("../..")
	index := map[string]int{}
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return skipDir(root, name)
		}
		if filepath.Ext(name) != ".go" {
			return nil
		}
		text, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		parsed, err := parser.ParseFile(s.fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		dir := path.Dir(name)
		i, ok := index[dir]
		if !ok {
			i = len(s.pkgs)
			index[dir] = i
			s.pkgs = append(s.pkgs, pkg{dir: dir})
		}
		s.pkgs[i].files = append(s.pkgs[i].files, file{name: name, test: strings.HasSuffix(name, "_test.go"), ast: parsed})
		return nil
	})
	return s, err
})

// skipDir leaves out what the go command leaves out, and modules of their own.
func skipDir(root fs.FS, name string) error {
	base := path.Base(name)
	if name == "." {
		return nil
	}
	if strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") || base == "testdata" || name == "bin" || name == "dist" {
		return fs.SkipDir
	}
	if _, err := fs.Stat(root, name+"/go.mod"); err == nil {
		return fs.SkipDir
	}
	return nil
}

func sources(t *testing.T) source {
	t.Helper()
	s, err := read()
	if err != nil {
		t.Fatal(err)
	}
	if len(s.pkgs) < 10 {
		t.Fatalf("only %d packages found: the rules are not looking at the project", len(s.pkgs))
	}
	return s
}
