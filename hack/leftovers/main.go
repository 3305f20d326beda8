// Leftovers lists what runs of FluxSandbox left on this machine: mounts (in every mount namespace), loop
// devices, network namespaces and interfaces, processes, cgroups, and files outside the checkout.
// Everything that the project makes has "flux" in its name, and that is what is looked for; hack/clean-run.sh
// gives tests a temporary directory of such a name.
//
//	leftovers > before; …; leftovers -since before
//
// With -since it prints only what is not in that list, and waits a while for it to go by itself: processes
// that were told to end, and the mounts and devices that go with them. Exit status: 0 if nothing is left, 1 if
// something is, 2 if it could not be found out. It only looks; it removes nothing.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

func main() {
	since := flag.String("since", "", "print and fail on what is not in this `file`, the output of an earlier run")
	wait := flag.Duration("wait", 5*time.Second, "with -since: how long to wait for leftovers to go by themselves")
	flag.Parse()

	h := host{root: "/", self: os.Getpid()}
	if *since == "" {
		for _, fact := range h.facts() {
			fmt.Println(fact)
		}
		return
	}
	before, err := os.ReadFile(*since)
	if err != nil {
		fmt.Fprintln(os.Stderr, "leftovers:", err)
		os.Exit(2)
	}
	left := settle(func() []string { return added(strings.Split(string(before), "\n"), h.facts()) }, *wait)
	for _, fact := range left {
		fmt.Println("left behind:", fact)
	}
	if len(left) > 0 {
		os.Exit(1)
	}
}

// settle looks until nothing is left or the time is over, and returns what is left.
func settle(look func() []string, wait time.Duration) []string {
	deadline := time.After(wait)
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for {
		left := look()
		if len(left) == 0 {
			return nil
		}
		select {
		case <-again.C:
		case <-deadline:
			return left
		}
	}
}

// added are the facts that are in after and not in before.
func added(before, after []string) []string {
	return slices.DeleteFunc(slices.Clone(after), func(fact string) bool { return slices.Contains(before, fact) })
}
