package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

const usage = `usage: localcluster COMMAND

  up -kube DIR -containerd DIR   start the cluster, or what of it does not run; DIRs are what the build scripts print
  down                           take it away
  status                         what runs, and where everything is
  check                          prove with Pods that it works
  stop NAME...                   end components
  start NAME...                  start them again
`

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	flag.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	flag.Parse()
	if err := command(ctx, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "localcluster:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) error {
	if len(args) == 0 {
		flag.Usage()
		return errors.New("which command?")
	}
	name, args := args[0], args[1:]
	if name == "registry" { // what up starts
		return serveRegistry()
	}
	if os.Geteuid() != 0 {
		return errors.New("a cluster needs root")
	}
	switch name {
	case "up":
		flags := flag.NewFlagSet("up", flag.ExitOnError)
		kube := flags.String("kube", "", "`folder` that hack/localcluster/build.sh prints")
		containerd := flags.String("containerd", "", "`folder` that hack/containerd/build.sh cri prints")
		_ = flags.Parse(args) // it exits
		if *kube == "" || *containerd == "" {
			return errors.New("up needs -kube and -containerd")
		}
		if err := place.lock(); err != nil {
			return err
		}
		if err := place.up(ctx, *kube, *containerd); err != nil {
			return fmt.Errorf("up: %w", err)
		}
		return place.status()
	case "down":
		if err := place.lock(); err != nil {
			return err
		}
		if err := place.down(); err != nil {
			return fmt.Errorf("down: %w", err)
		}
		return nil
	}

	s, err := place.load()
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("there is no cluster: make cluster-up")
	}
	if err != nil {
		return err
	}
	switch name {
	case "status":
		return place.status()
	case "check":
		return place.check(ctx, s)
	case "start", "stop":
		return place.each(ctx, s, name, args)
	}
	flag.Usage()
	return fmt.Errorf("no command %q", name)
}

// each starts or stops components by name.
func (l layout) each(ctx context.Context, s state, do string, names []string) error {
	all := l.components(s)
	for _, name := range names {
		i := slices.IndexFunc(all, func(c component) bool { return c.name == name })
		if i < 0 {
			var known []string
			for _, c := range all {
				known = append(known, c.name)
			}
			return fmt.Errorf("no component %q: there are %s", name, strings.Join(known, ", "))
		}
		var err error
		if do == "start" {
			err = l.start(ctx, all[i])
		} else {
			err = all[i].stop()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// status prints what runs and where everything is. A component that does not run is an error.
func (l layout) status() error {
	s, err := l.load()
	if err != nil {
		return err
	}
	var dead []string
	for _, c := range l.components(s) {
		if processes := running(c.name); len(processes) > 0 {
			fmt.Printf("%-24s %d\n", c.name, processes[0].pid)
		} else {
			fmt.Printf("%-24s not running; log: %s\n", c.name, l.log(c.name))
			dead = append(dead, c.name)
		}
	}
	fmt.Printf(`
kubeconfig   export KUBECONFIG=%s
kubectl      %s
API server   %s
node         %s, %s
Pods         %s, Services %s
registry     %s (plain HTTP), for every image name
containerd   %s
kubelet      %s
audit log    %s
logs         %s
`, l.admin(), filepath.Join(s.Kube, "kubectl"), apiURL, nodeName, nodeIP, podCIDR, services, registry, l.containerd(), l.kubelet(),
		l.auditLog(), l.path("log"))
	if len(dead) > 0 {
		return fmt.Errorf("not running: %s; make cluster-up starts it again", strings.Join(dead, ", "))
	}
	return nil
}
