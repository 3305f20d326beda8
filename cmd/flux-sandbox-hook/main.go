// Command flux-sandbox-hook is the OCI hook of containers of Pods that require volumes (package createhook). The runtime
// gives it the container's state on its standard input; the arguments are the agent's socket, the Pod's UID, the name of
// the container, the required targets, joined by commas, and how long to wait for them. It ends with an error, which the runtime shows, if the
// container must not start.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/flux-sandbox/flux-sandbox/internal/pods/createhook"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "flux-sandbox:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 5 {
		return errors.New("flux-sandbox-hook is started by a container runtime: SOCKET POD-UID CONTAINER TARGETS PATIENCE")
	}
	patience, err := time.ParseDuration(args[4])
	if err != nil {
		return err
	}
	// https://github.com/opencontainers/runtime-spec, runtime.md, "State".
	var state struct {
		ID     string `json:"id"`
		PID    int    `json:"pid"`
		Bundle string `json:"bundle"`
	}
	if err := json.NewDecoder(os.Stdin).Decode(&state); err != nil {
		return fmt.Errorf("the container's state: %w", err)
	}
	root, err := rootOf(state.Bundle)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return createhook.Ask(ctx, args[0], createhook.Request{PodUID: args[1], Container: args[2], ID: state.ID, PID: state.PID,
		Root: root, Targets: strings.Split(args[3], ",")})
}

// rootOf is the directory that a container of this bundle pivots to.
func rootOf(bundle string) (string, error) {
	data, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return "", fmt.Errorf("the container's bundle: %w", err)
	}
	var config struct {
		Root struct {
			Path string `json:"path"`
		} `json:"root"`
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return "", fmt.Errorf("the container's bundle: %w", err)
	}
	if filepath.IsAbs(config.Root.Path) {
		return filepath.Clean(config.Root.Path), nil
	}
	return filepath.Join(bundle, config.Root.Path), nil
}
