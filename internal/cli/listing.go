package cli

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// inNamespaces is the namespace of a request to list objects; empty for all of them.
func (a *app) inNamespaces(all bool) string {
	if all {
		return ""
	}
	return a.namespace
}

// named reads what a person types for a set or a claim: NAME, or namespace/NAME.
func (a *app) named(what string) (namespace, name string) {
	if namespace, name, ok := strings.Cut(what, "/"); ok {
		return namespace, name
	}
	return a.namespace, what
}

// listing is a table of named objects, with their namespace where these are all.
type listing struct {
	app  *app
	noun string
	all  bool
	head []string
	rows [][]string
}

func (a *app) listing(noun string, all bool, columns ...string) *listing {
	l := &listing{app: a, noun: noun, all: all}
	l.head = l.cells("NAMESPACE", "NAME", columns)
	return l
}

func (l *listing) cells(namespace, name string, more []string) []string {
	if l.all {
		return append([]string{namespace, name}, more...)
	}
	return append([]string{name}, more...)
}

func (l *listing) add(o metav1.Object, cells ...string) {
	l.rows = append(l.rows, l.cells(o.GetNamespace(), o.GetName(), cells))
}

// print prints the table, or that there is nothing.
func (l *listing) print() error {
	if len(l.rows) == 0 {
		where := "namespace " + l.app.namespace
		if l.all {
			where = "any namespace"
		}
		_, err := fmt.Fprintf(l.app.Err, "no %s in %s\n", l.noun, where)
		return err
	}
	t := newTable(l.app.Out, l.head...)
	for _, cells := range l.rows {
		t.row(cells...)
	}
	return t.flush()
}
