package churn

// tally is how much there was to do until a moment.
type tally struct {
	// sandboxes and Pods that were made, anchors among other Pods, changes of Pods in place, sandboxes that were given to claims, claims
	// that were made.
	sandboxes, pods, anchors, images, resizes, given, claims int
	// starts of the controller, and faults that were injected into its calls.
	starts, faults int
	calls          map[call]int
}

func (w *world) tally() tally {
	w.Helper()
	t := tally{faults: int(w.way.faults.Load()), calls: w.audit.seen(w)}
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	t.sandboxes, t.pods, t.given, t.claims = w.ledger.created, w.ledger.podsMade, len(w.ledger.given), w.ledger.asked
	t.anchors, t.images, t.resizes = w.ledger.anchors, w.ledger.images, w.ledger.resizes
	for _, r := range w.replicas {
		t.starts += r.started
	}
	return t
}

// bounds are what the controller may ask for. Each is some twice what a run shows: they are there for what grows without
// anything to do, or with all that there is.
var bounds = []struct {
	verb, resource string
	most           func(t tally) int
}{
	// A sandbox is Pending, Starting, Running, Ready, and all of it again with each Pod; so is each of its volumes.
	{"patch", "sandboxes/status", func(t tally) int { return 10*t.pods + 6*t.given + 2*t.sandboxes }},
	// The finalizer comes and goes, a claim takes it.
	{"patch", "sandboxes", func(t tally) int { return 4*t.sandboxes + 2*t.given + t.pods }},
	{"create", "sandboxes", func(t tally) int { return 2 * t.sandboxes }},
	{"delete", "sandboxes", func(t tally) int { return 2*t.sandboxes + 100 }},
	{"create", "pods", func(t tally) int { return 2 * (t.pods + t.anchors) }},
	{"delete", "pods", func(t tally) int { return 3*(t.pods+t.anchors) + 200 }},
	{"patch", "pods", func(t tally) int { return 3*(t.images+t.resizes) + 50 }},
	{"patch", "pods/resize", func(t tally) int { return 3*t.resizes + 50 }},
	{"patch", "persistentvolumeclaims", func(t tally) int { return 2*t.sandboxes + 4*t.anchors + 200 }},
	{"get", "pods", func(t tally) int { return 8 * t.pods }},
	{"patch", "sandboxsets/status", func(t tally) int { return 4 * (t.sandboxes + t.pods) }},
	{"patch", "sandboxclaims/status", func(t tally) int { return 8 * t.claims }},
	{"create", "events", func(t tally) int { return 4*t.sandboxes + 3*t.pods + 4*t.claims }},
	{"list", "", func(t tally) int { return 20*t.starts + 2*t.faults }},
	{"watch", "", func(t tally) int { return 40*t.starts + 2*t.faults }},
	{"", "", func(t tally) int { return 45*(t.pods+t.anchors) + 60*t.starts + 2*t.faults + 10*t.claims }},
}

// report tells what was asked of the API server since a moment, and holds that it is bounded by what was to be done.
func (w *world) report(before tally) {
	w.Helper()
	t := w.tally()
	calls := since(t.calls, before.calls, "")
	own := since(calls, nil, controller)
	t.sandboxes -= before.sandboxes
	t.pods -= before.pods
	t.starts -= before.starts
	tell(w, "%d anchors were made; the images of %d Pods were changed in place, and the resources of %d", t.anchors, t.images, t.resizes)
	if asked := w.counts["claims with inplaceUpdate"]; asked > 20 && (t.images == 0 || t.resizes == 0) {
		w.Errorf("%d claims had inplaceUpdate, and no Pod was changed in place (images %d, resources %d)", asked, t.images, t.resizes)
	}
	tell(w, "%d sandboxes were made, with %d Pods, %d of them given to claims, of which there were %d; the controller was started %d times; %d faults were injected; the agents had %d calls",
		t.sandboxes, t.pods, t.given, t.claims, t.starts, t.faults, w.fleet.calls.Load())
	tell(w, "calls of the controller:\n%s", table(own))
	by := map[call]int{}
	for c, n := range calls {
		by[call{agent: c.agent}] += n
	}
	tell(w, "calls by user agent:\n%s", table(by))
	for _, b := range bounds {
		n := 0
		for c, k := range own {
			if (b.verb == "" || c.verb == b.verb) && (b.resource == "" || c.resource == b.resource) && c.resource != "leases" {
				n += k
			}
		}
		if most := b.most(t); n > most {
			w.Errorf("the controller called %q %q %d times, which is more than %d", b.verb, b.resource, n, most)
		}
	}
	if t.pods > 0 {
		tell(w, "for each Pod that was made the controller called %.1f times, %.1f of them writes", float64(total(own))/float64(t.pods), float64(total(writes(own)))/float64(t.pods))
	}
}
