package mount

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"
)

func benchTree(b *testing.B, source string) *Tree {
	root, err := OpenRoot(source)
	check(b, err)
	defer root.Close()
	tree, err := Clone(root)
	check(b, err)
	check(b, tree.SetAttributes(Attributes{ReadOnly: true}))
	return tree
}

// BenchmarkAttachDetach measures clone, set attributes, attach and detach of a
// read-only bind.
func BenchmarkAttachDetach(b *testing.B) {
	ctx := context.Background()
	pair := func(b *testing.B, ns *Namespace, source string) {
		placed, err := ns.Attach(ctx, benchTree(b, source), "/data/vol", nil)
		check(b, err)
		_, err = ns.Detach(ctx, "/data/vol", placed.Identity, DetachOptions{})
		check(b, err)
	}
	for _, kernel := range []struct {
		name   string
		modern bool
	}{{"modern", true}, {"floor", false}} {
		b.Run("persistent thread/"+kernel.name, func(b *testing.B) {
			s := newSandbox(b)
			ns := s.enter(kernel.modern)
			source := newSource(b)
			for b.Loop() {
				pair(b, ns, source)
			}
		})
	}
	b.Run("fresh thread", func(b *testing.B) {
		s := newSandbox(b)
		source := newSource(b)
		for b.Loop() {
			ns, err := Enter(s.proc)
			check(b, err)
			pair(b, ns, source)
			ns.Close()
		}
	})
}

// BenchmarkHalves measures making a tree, attach and detach one by one, on a
// persistent thread.
func BenchmarkHalves(b *testing.B) {
	s := newSandbox(b)
	ns := s.enter(modern())
	source := newSource(b)
	var trees, attaches, detaches durations
	for b.Loop() {
		start := time.Now()
		tree := benchTree(b, source)
		trees.since(start)
		start = time.Now()
		placed, err := ns.Attach(context.Background(), tree, "/data/vol", nil)
		attaches.since(start)
		check(b, err)
		start = time.Now()
		_, err = ns.Detach(context.Background(), "", placed.Identity, DetachOptions{})
		detaches.since(start)
		check(b, err)
	}
	trees.report(b, "tree")
	attaches.report(b, "attach")
	detaches.report(b, "detach")
}

type durations []time.Duration

func (d *durations) since(start time.Time) { *d = append(*d, time.Since(start)) }

func (d durations) report(b *testing.B, name string) {
	slices.Sort(d)
	for _, p := range []int{50, 99} {
		b.ReportMetric(float64(d[len(d)*p/100].Nanoseconds())/1e3, fmt.Sprintf("p%d-%s-µs", p, name))
	}
}

func BenchmarkHolding(b *testing.B) {
	s := newSandbox(b)
	placed, err := s.enter(modern()).Attach(context.Background(), benchTree(b, newSource(b)), "/vol", nil)
	check(b, err)
	for b.Loop() {
		_, err := Holding(context.Background(), Match{Device: placed.Identity.Device, Root: placed.Identity.Root})
		check(b, err)
	}
}

func BenchmarkUsers(b *testing.B) {
	s := newSandbox(b)
	placed, err := s.enter(modern()).Attach(context.Background(), benchTree(b, newSource(b)), "/vol", nil)
	check(b, err)
	for b.Loop() {
		_, err := Users(context.Background(), placed.Identity)
		check(b, err)
	}
}
