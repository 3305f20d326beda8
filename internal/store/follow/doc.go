// Package follow is the queue behind store.Objects.Follow.
//
// A backend has one Hub per kind, and tells it of every change, in order. Each reader has a Queue, which
// keeps at most the latest state of each object: a change of an object that still waits replaces that
// state and keeps its place. So publishing never waits for a reader, and a queue holds no more than the
// objects that exist and the deletions of those that its reader has seen; an object that came and went
// unseen leaves nothing.
//
// The objects in a queue are shared and never changed; a reader gets a copy, made when it takes it.
package follow
