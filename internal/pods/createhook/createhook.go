// Package createhook is how the runtime waits for a node's agent before a container of a Pod begins, for Pods that would
// rather not start than start without their volumes.
//
// NRI alone cannot promise that: containerd starts a container all the same when a plugin is gone or too slow. So the
// agent's plugin adds an OCI hook of kind createRuntime to such a container when it is made. runc runs the hook, the
// program flux-sandbox-hook, when the container's mounts are there and before it pivots, outside of NRI's lock; what the
// hook fails with is why the container does not start. The hook only asks the agent, by a unix socket, and waits for its
// answer. An agent that is away, being replaced say, is waited for as long as the hook may take.
//
// The protocol is one JSON object each way on one connection.
package createhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"
)

// Patience is how long the start of a container waits for its volumes. kubelet gives the runtime two minutes for it
// (runtimeRequestTimeout).
const Patience = time.Minute

// Request asks for a container's volumes.
type Request struct {
	// PodUID and Container say which container it is, ID and PID which instance, and its init.
	PodUID    string `json:"podUID"`
	Container string `json:"container"`
	ID        string `json:"id"`
	PID       int    `json:"pid"`
	// Root is the directory that the container will pivot to, in its mount namespace.
	Root string `json:"root"`
	// Targets are those that must have their volumes.
	Targets []string `json:"targets"`
	// Within is how long the answer is waited for. Ask sets it.
	Within time.Duration `json:"within"`
}

// answer is empty when every volume is attached.
type answer struct {
	Error string `json:"error,omitempty"`
}

// margin is how much sooner the agent has to answer than it is waited for: it knows best what is missing.
const margin = 500 * time.Millisecond

// reconnect is the time between two attempts to reach an agent.
const reconnect = 100 * time.Millisecond

// Ask asks the agent behind a socket until it answers, or ctx ends. Its answer is nil, or why the container must not start.
func Ask(ctx context.Context, socket string, r Request) error {
	for {
		again, err := askOnce(ctx, socket, r)
		if err == nil || !again {
			return err
		}
		timer := time.NewTimer(reconnect)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("the node's agent of FluxSandbox did not answer in time, so that the required volumes %v are not there: is it running? %w", r.Targets, err)
		}
	}
}

// askOnce says with an error whether it may be asked again: not where the agent has answered.
func askOnce(ctx context.Context, socket string, r Request) (again bool, err error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return true, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	r.Within = Patience
	if deadline, ok := ctx.Deadline(); ok {
		r.Within = time.Until(deadline)
	}
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return true, err
	}
	var a answer
	if err := json.NewDecoder(conn).Decode(&a); err != nil {
		return true, err
	}
	if a.Error != "" {
		return false, errors.New(a.Error)
	}
	return false, nil
}

// Serve answers requests until ctx ends, and closes the listener then. The context of a call ends with its hook, or when
// that must be answered.
func Serve(ctx context.Context, l net.Listener, attach func(context.Context, Request) error) error {
	defer context.AfterFunc(ctx, func() { l.Close() })()
	for {
		conn, err := l.Accept()
		if err != nil {
			l.Close()
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		go serveOne(ctx, conn, attach)
	}
}

func serveOne(ctx context.Context, conn net.Conn, attach func(context.Context, Request) error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	var r Request
	decoder := json.NewDecoder(conn)
	if err := decoder.Decode(&r); err != nil {
		return // a hook that was killed
	}
	within, end := context.WithTimeout(ctx, r.Within-margin)
	defer end()
	go func() {
		var more json.RawMessage
		_ = decoder.Decode(&more) // ends with the connection
		cancel()
	}()
	var a answer
	if err := attach(within, r); err != nil {
		a.Error = err.Error()
	}
	if ctx.Err() != nil {
		return // without an answer the next agent is asked
	}
	_ = json.NewEncoder(conn).Encode(a) // a hook that is gone asks no more
}
