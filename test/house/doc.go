// Package house holds the rules of the house as tests: which package may import which, that every package
// explains itself, and a few things that no package does.
//
// The rules are read off the source by its syntax alone, so they hold for every build tag and cost a second.
// The table of layers in layers_test.go is the one place that says who may import whom; docs/architecture.md
// tells why. A rule that is in the way is changed there, with its reason, and not worked around.
package house
