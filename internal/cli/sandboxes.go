package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
)

func (a *app) runCommand() *cobra.Command {
	var (
		sb                             = &sandboxv1.Sandbox{Spec: &sandboxv1.SandboxSpec{}}
		envs, labels, volumes, statics []string
		cpu, memory                    string
		file, template, pod            string
		wait                           bool
	)
	cmd := &cobra.Command{
		Use:   "run [flags] [-- COMMAND [ARG…]]",
		Short: "Create a sandbox and wait until it runs",
		Long: `Create a sandbox and wait until it runs.

COMMAND replaces the image's entrypoint, and the ARGs its arguments.

--volume adds a dynamic volume, which can be removed while the sandbox runs. Its value is a list of
pairs: type (local), source, target, mode (rw or ro), size, sub-path, tenant; and the words ro and
force-mount. -v adds a static volume, which stays as long as the sandbox.

On Kubernetes a sandbox can be a Pod: one that is made from --template and goes with the sandbox, or
one of somebody else's, say a Deployment's, which --pod names and which is never deleted.

--file takes all of that from a Sandbox in YAML or JSON instead, such as Kubernetes takes and "get -o yaml"
prints: its name (unless --name gives another), namespace (unless -n does), labels, annotations and spec.`,
		Example: `  fluxctl run --name a --image busybox -- sleep infinity
  fluxctl run --name worker --template pod.yaml --volume type=pvc,source=cache,target=/cache
  fluxctl run --name web --pod web-6d4b75cb6d-hx2vz/main
  fluxctl run --image python --tenant acme --cpu 500m --memory 256Mi \
      --volume source=/srv/flux/acme/work,target=/work,size=1Gi \
      -v /srv/flux/shared/models:/models:ro -- python3 /job/main.py
  fluxctl get a -o yaml | fluxctl run --file - --name b`,
		Args: func(cmd *cobra.Command, args []string) error {
			if dash := cmd.ArgsLenAtDash(); dash > 0 || dash < 0 && len(args) > 0 {
				return usagef("%q: the command to run comes after --", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if file != "" {
				m, err := a.manifest(cmd, file, args)
				if err != nil {
					return err
				}
				return a.create(cmd, m, wait)
			}
			sb.Namespace = a.namespace
			if len(args) > 0 {
				sb.Spec.Command, sb.Spec.Args = args[:1], args[1:]
			}
			var err error
			if template != "" {
				if sb.Spec.Template, err = a.readTemplate(template); err != nil {
					return err
				}
			}
			if pod != "" {
				if sb.Spec.PodRef, err = parsePod(pod); err != nil {
					return err
				}
			}
			if sb.Spec.Env, err = a.parseEnv(envs); err != nil {
				return err
			}
			if sb.Labels, err = parseLabels(labels); err != nil {
				return err
			}
			for _, text := range volumes {
				v, err := parseVolume(text)
				if err != nil {
					return err
				}
				sb.Spec.DynamicVolumes = append(sb.Spec.DynamicVolumes, v)
			}
			for _, text := range statics {
				v, err := parseStatic(text)
				if err != nil {
					return err
				}
				sb.Spec.VolumeMounts = append(sb.Spec.VolumeMounts, v)
			}
			limits := map[string]string{}
			if cpu != "" {
				limits["cpu"] = cpu
			}
			if memory != "" {
				limits["memory"] = memory
			}
			if len(limits) > 0 {
				sb.Spec.Resources = &sandboxv1.Resources{Limits: limits}
			}
			return a.create(cmd, sb, wait)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&sb.Spec.Image, "image", "", "the image; the group's when not given")
	flags.StringVar(&sb.Name, "name", "", "the sandbox's name; made up when not given")
	flags.StringVar(&sb.Spec.TenantId, "tenant", "", "the tenant whose sandbox it is")
	flags.StringVar(&sb.Spec.Group, "group", "", "the sandbox group (default \"default\")")
	flags.StringVar(&sb.Spec.SubGroup, "sub-group", "", "the part of the group; its first when not given")
	flags.StringArrayVarP(&envs, "env", "e", nil, "NAME=VALUE in the environment; NAME takes fluxctl's own value; may be repeated")
	flags.StringArrayVarP(&labels, "label", "l", nil, "KEY=VALUE as a label; may be repeated")
	flags.StringVarP(&sb.Spec.WorkingDir, "workdir", "w", "", "the working directory; the image's when not given")
	flags.StringVar(&cpu, "cpu", "", "the most CPU that it may use, such as 500m or 2")
	flags.StringVar(&memory, "memory", "", "the most memory that it may use, such as 256Mi")
	flags.StringVar(&sb.Spec.RestartPolicy, "restart", "", "Always, OnFailure or Never (default Always)")
	flags.StringArrayVar(&volumes, "volume", nil, "a dynamic volume: source=/srv/data,target=/data[,mode=ro][,size=1Gi]…; may be repeated")
	flags.StringArrayVarP(&statics, "mount", "v", nil, "a static volume: SOURCE:TARGET[:ro]; may be repeated")
	flags.StringVarP(&file, "file", "f", "", "a file with a Sandbox in YAML or JSON, - for fluxctl's input; instead of the other flags")
	flags.StringVar(&template, "template", "", "on Kubernetes: be a Pod that is made from this file, a Pod or a PodTemplateSpec in YAML; - for stdin")
	flags.StringVar(&pod, "pod", "", "on Kubernetes: be this Pod of somebody else's: NAME, or NAME/CONTAINER for another container than the first")
	flags.BoolVar(&wait, "wait", true, "wait until it runs or has ended")
	return cmd
}

// create makes a sandbox and says what became of it.
func (a *app) create(cmd *cobra.Command, sb *sandboxv1.Sandbox, wait bool) error {
	return a.connect("run the sandbox", func(s server) error {
		ctx, cancel := a.bounded(cmd.Context())
		defer cancel()
		created, err := s.sandboxes.CreateSandbox(ctx, &sandboxv1.CreateSandboxRequest{Sandbox: sb, Wait: wait})
		if err != nil {
			return err
		}
		return a.showSandbox(created, func() error { return a.tellSandbox(created) })
	})
}

func (a *app) psCommand() *cobra.Command {
	var all bool
	var selector string
	cmd := &cobra.Command{
		Use:     "ps",
		Aliases: []string{"ls", "list"},
		Short:   "List sandboxes",
		Example: `  fluxctl ps
  fluxctl ps -A -l app=demo
  fluxctl ps -o json`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.connect("list the sandboxes", func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				req := &sandboxv1.ListSandboxesRequest{Namespace: a.namespace, LabelSelector: selector}
				if all {
					req.Namespace = ""
				}
				list := &v1alpha1.SandboxList{
					TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "SandboxList"},
					Items:    []v1alpha1.Sandbox{},
				}
				for {
					page, err := s.sandboxes.ListSandboxes(ctx, req)
					if err != nil {
						return err
					}
					for _, m := range page.GetSandboxes() {
						sb, err := convert.Sandbox(m)
						if err != nil {
							return err
						}
						list.Items = append(list.Items, *sb)
					}
					if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
						break
					}
				}
				return a.show(list, func() error { return a.sandboxTable(list.Items, all) })
			})
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "list the sandboxes of all namespaces")
	cmd.Flags().StringVarP(&selector, "selector", "l", "", "list only what has these labels, as in app=demo")
	return cmd
}

func (a *app) sandboxTable(items []v1alpha1.Sandbox, all bool) error {
	rows := a.listing("sandboxes", all, "STATUS", "AGE", "VOLUMES", "NODE", "TENANT", "MESSAGE")
	for i := range items {
		sb := &items[i]
		rows.add(sb, phase(sb), a.age(sb.CreationTimestamp.Time), sb.Status.VolumesReady, sb.Status.Node, sb.Spec.TenantID,
			because(sb.Status.Reason, sb.Status.Message))
	}
	return rows.print()
}

// phase is the word for where a sandbox is.
func phase(sb *v1alpha1.Sandbox) string {
	switch {
	case sb.DeletionTimestamp != nil:
		return string(v1alpha1.SandboxTerminating)
	case sb.Status.Phase == "":
		return string(v1alpha1.SandboxPending)
	}
	return string(sb.Status.Phase)
}

func (a *app) getCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "get NAME",
		Short: "Show a sandbox",
		Example: `  fluxctl get a
  fluxctl get a -o yaml`,
		Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.connect("get sandbox "+args[0], func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				m, err := s.sandboxes.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Sandbox: a.ref(args[0])})
				if err != nil {
					return err
				}
				return a.showSandbox(m, func() error { return a.describe(m) })
			})
		},
	}
}

// showSandbox prints a sandbox as the Kubernetes object, or calls table.
func (a *app) showSandbox(m *sandboxv1.Sandbox, table func() error) error {
	sb, err := convert.Sandbox(m)
	if err != nil {
		return err
	}
	return a.show(sb, table)
}

// tellSandbox prints in a line where a sandbox is.
func (a *app) tellSandbox(m *sandboxv1.Sandbox) error {
	sb, err := convert.Sandbox(m)
	if err != nil {
		return err
	}
	line := fmt.Sprintf("sandbox %s/%s is %s", sb.Namespace, sb.Name, phase(sb))
	if sb.Status.Node != "" {
		line += " on " + sb.Status.Node
	}
	if sb.Status.ExitCode != nil {
		line += fmt.Sprintf(", exit code %d", *sb.Status.ExitCode)
	}
	if n := sb.Status.VolumesReady; n != "" && n != "0/0" {
		line += ", volumes " + n
	}
	if why := because(sb.Status.Reason, sb.Status.Message); why != "" {
		line += " (" + oneLine(why) + ")"
	}
	_, err = fmt.Fprintln(a.Out, line)
	return err
}

// describe prints everything about a sandbox that a person may want to know.
func (a *app) describe(m *sandboxv1.Sandbox) error {
	sb, err := convert.Sandbox(m)
	if err != nil {
		return err
	}
	t := newTable(a.Out)
	line := func(name, value string) {
		if value != "" {
			t.row(name+":", value)
		}
	}
	line("Name", sb.Name)
	line("Namespace", sb.Namespace)
	line("UID", string(sb.UID))
	line("Status", phase(sb))
	line("Message", because(sb.Status.Reason, sb.Status.Message))
	line("Age", a.age(sb.CreationTimestamp.Time))
	line("Tenant", sb.Spec.TenantID)
	line("Group", strings.Trim(sb.Spec.Group+"/"+sb.Spec.SubGroup, "/"))
	line("Image", sb.Spec.Image)
	line("Command", strings.Join(append(sb.Spec.Command, sb.Spec.Args...), " "))
	line("Node", sb.Status.Node)
	line("Container", sb.Status.ContainerID)
	if cpu := sb.Spec.Resources.Limits.Cpu(); !cpu.IsZero() {
		line("CPU", cpu.String())
	}
	if memory := sb.Spec.Resources.Limits.Memory(); !memory.IsZero() {
		line("Memory", memory.String())
	}
	if sb.Status.Restarts > 0 {
		line("Restarts", fmt.Sprint(sb.Status.Restarts))
	}
	if sb.Status.ExitCode != nil {
		line("Exit code", fmt.Sprint(*sb.Status.ExitCode))
	}
	if sb.Spec.ShutdownTime != nil {
		line("Shutdown", sb.Spec.ShutdownTime.UTC().Format("2006-01-02 15:04:05 UTC"))
	}
	line("Volumes", sb.Status.VolumesReady)
	if err := t.flush(); err != nil || len(sb.Status.Volumes) == 0 {
		return err
	}
	if _, err := fmt.Fprintln(a.Out); err != nil {
		return err
	}
	return a.volumeTable(sb.Status.Volumes)
}

func (a *app) rmCommand() *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use:     "rm NAME…",
		Aliases: []string{"delete"},
		Short:   "Delete sandboxes",
		Long: `Delete sandboxes: their volumes are detached, their processes ended, their root filesystems removed. What is
in their volumes stays.`,
		Example: `  fluxctl rm a b
  fluxctl rm --wait=false a`,
		Args: someNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.deleteEach(cmd, "sandbox", "sandboxes", args, wait, func(ctx context.Context, s server, name string) error {
				_, err := s.sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Sandbox: a.ref(name), Wait: wait})
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until nothing of it is left")
	return cmd
}

// someNames is the Args of a command that takes one name or more.
func someNames(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usagef("NAME is missing")
	}
	return nil
}

// deleteEach deletes the objects of these names, and goes on when one cannot be deleted. noun and plural are what they are.
func (a *app) deleteEach(cmd *cobra.Command, noun, plural string, names []string, wait bool, do func(ctx context.Context, s server, name string) error) error {
	end := "is gone"
	if !wait {
		end = "is being deleted"
	}
	gone, failed := []string{}, false
	for _, name := range names {
		err := a.connect("delete "+noun+" "+name, func(s server) error {
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			return do(ctx, s, name)
		})
		var usage usageError
		switch {
		case errors.As(err, &usage) || cmd.Context().Err() != nil:
			return err
		case err != nil: // the others are deleted all the same
			a.printError(err)
			failed = true
			continue
		}
		gone = append(gone, name)
		if a.output == outTable {
			if _, err := fmt.Fprintf(a.Out, "%s %s %s\n", noun, name, end); err != nil {
				return err
			}
		}
	}
	if err := a.show(map[string]any{plural: gone, "gone": wait}, func() error { return nil }); err != nil {
		return err
	}
	if failed {
		return exitError(exitFailed)
	}
	return nil
}

func (a *app) pauseCommand(paused bool) *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use:   "pause NAME",
		Short: "Stop a sandbox's process and keep its root filesystem",
		Long:  `Stop a sandbox's process and detach its volumes. Its root filesystem and its wishes for volumes are kept.`,
		Example: `  fluxctl pause a
  fluxctl resume a`,
	}
	if !paused {
		cmd.Use, cmd.Short, cmd.Long = "resume NAME", "Start a paused sandbox again",
			`Start a paused sandbox's process again, on its old root filesystem and with its volumes attached.`
	}
	cmd.Args = exactly("NAME")
	cmd.RunE = func(c *cobra.Command, args []string) error {
		return a.connect(strings.Fields(cmd.Use)[0]+" sandbox "+args[0], func(s server) error {
			ctx, cancel := a.bounded(c.Context())
			defer cancel()
			m, err := s.sandboxes.PauseSandbox(ctx, &sandboxv1.PauseSandboxRequest{Sandbox: a.ref(args[0]), Paused: paused, Wait: wait})
			if err != nil {
				return err
			}
			return a.showSandbox(m, func() error { return a.tellSandbox(m) })
		})
	}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until it is done")
	return cmd
}
