package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
)

func (a *app) volumeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "volume",
		Aliases: []string{"volumes", "vol"},
		Short:   "Attach volumes to running sandboxes, and detach them; make and delete named ones",
		Args:    noSuchCommand,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.volumeAddCommand(), a.volumeRmCommand(), a.volumeLsCommand(), a.volumeCreateCommand())
	return cmd
}

// addResult is what volume add prints as JSON or YAML.
type addResult struct {
	Volume         v1alpha1.VolumeStatus `json:"volume"`
	AlreadyMounted bool                  `json:"alreadyMounted,omitempty"`
	Warnings       []string              `json:"warnings,omitempty"`
}

func (a *app) volumeAddCommand() *cobra.Command {
	v := &sandboxv1.DynamicVolume{}
	var readOnly, keep bool
	cmd := &cobra.Command{
		Use:   "add NAME --source SOURCE --target TARGET",
		Short: "Attach a volume to a sandbox while it runs",
		Long: `Attach a volume to a sandbox while it runs, and wait until it is mounted.

The same volume at the same target again is no error: it waits while the volume is being attached, does nothing
when it is mounted, and tries again when that failed. If the volume cannot be attached nothing is left behind;
with --keep the sandbox goes on asking for it, and what may pass is tried again.`,
		Example: `  fluxctl volume add a --source /srv/flux/acme/data --target /data
  fluxctl volume add a --source /srv/flux/shared/models --target /models --ro
  fluxctl volume add a --source /srv/flux/acme/scratch --target /scratch --size 1Gi`,
		Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case v.Source == "":
				return usagef("--source is missing")
			case v.Target == "":
				return usagef("--target is missing")
			case readOnly && v.Mode != "" && v.Mode != "ro":
				return usagef("--ro and --mode %s exclude each other", v.Mode)
			case readOnly:
				v.Mode = "ro"
			}
			req := &sandboxv1.AddSandVolumeRequest{Sandbox: a.ref(args[0]), Volume: v}
			if keep {
				req.OnFailure = string(v1alpha1.OnFailureKeep)
			}
			return a.connect(fmt.Sprintf("add the volume %s to sandbox %s", v.Target, args[0]), func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				resp, err := s.volumes.AddSandVolume(ctx, req)
				if err != nil {
					return err
				}
				for _, w := range resp.GetWarnings() {
					if _, err := fmt.Fprintf(a.Err, "warning: %s\n", w); err != nil {
						return err
					}
				}
				row := convert.VolumeStatus(resp.GetVolume())
				return a.show(addResult{Volume: row, AlreadyMounted: resp.GetAlreadyMounted(), Warnings: resp.GetWarnings()}, func() error {
					done := "mounted"
					if resp.GetAlreadyMounted() {
						done = "was mounted already"
					}
					_, err := fmt.Fprintf(a.Out, "volume %s of sandbox %s %s (%s %s, %s)\n", row.Target, args[0], done, row.VolumeType, row.Source, row.Mode)
					return err
				})
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&v.VolumeType, "type", "local", "local, pvc, pv, snapshot or oss")
	flags.StringVar(&v.Source, "source", "", "where the data is: a path on the node, a claim, a volume, an image or a bucket")
	flags.StringVar(&v.Target, "target", "", "where it appears in the sandbox")
	flags.StringVar(&v.Mode, "mode", "", "rw or ro (default rw)")
	flags.BoolVar(&readOnly, "ro", false, "short for --mode ro")
	flags.StringVar(&v.SizeLimit, "size", "", "the most that it may hold, such as 1Gi")
	flags.StringVar(&v.TenantId, "tenant", "", "the tenant whose data it is; the sandbox's when not given")
	flags.StringVar(&v.SubPath, "sub-path", "", "a directory in the volume to be mounted instead of its root")
	flags.BoolVar(&v.ForceMount, "force-mount", false, "mount it also from another topology domain")
	flags.BoolVar(&keep, "keep", false, "keep the entry if it fails, and try again what may pass")
	return cmd
}

func (a *app) volumeRmCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:     "rm SANDBOX TARGET | rm VOLUME",
		Aliases: []string{"remove"},
		Short:   "Detach a volume from a sandbox while it runs; or delete a named volume",
		Long: `With a sandbox and a target: detach a volume from a sandbox while it runs. The data in it stays.
With one name: delete the named volume of a standalone server, with its data. One that a sandbox names is refused.

A volume in use is not detached, and fluxctl shows who uses it. With --force it is taken out of the sandbox's
tree all the same: new look-ups no longer find it, and files that are open go on.`,
		Example: `  fluxctl volume rm a /data
  fluxctl volume rm a /data --force
  fluxctl volume rm scratch`,
		Args: between(1, "SANDBOX or VOLUME", "TARGET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				if force {
					return usagef("--force is for a volume of a sandbox: TARGET is missing")
				}
				return a.deleteVolume(cmd, args[0])
			}
			name, target := args[0], args[1]
			return a.connect(fmt.Sprintf("remove the volume %s from sandbox %s", target, name), func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				resp, err := s.volumes.RemoveSandVolume(ctx, &sandboxv1.RemoveSandVolumeRequest{Sandbox: a.ref(name), Target: target, Force: force})
				if err != nil {
					return err
				}
				result := resp.GetResult()
				return a.show(map[string]any{"result": result.String(), "volume": convert.VolumeStatus(resp.GetVolume())}, func() error {
					done := map[sandboxv1.RemoveSandVolumeResponse_Result]string{
						sandboxv1.RemoveSandVolumeResponse_DETACHED: "is detached",
						sandboxv1.RemoveSandVolumeResponse_LAZY:     "is detached; open files on it go on until they are closed",
						sandboxv1.RemoveSandVolumeResponse_ABSENT:   "was not there",
					}[result]
					_, err := fmt.Fprintf(a.Out, "volume %s of sandbox %s %s\n", target, name, done)
					return err
				})
			})
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "detach it although it is in use")
	return cmd
}

func (a *app) volumeLsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ls [SANDBOX]",
		Aliases: []string{"list"},
		Short:   "List the volumes of a sandbox; or, without one, the named volumes of a standalone server",
		Example: `  fluxctl volume ls a
  fluxctl volume ls a -o yaml
  fluxctl volume ls`,
		Args: between(0, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return a.listVolumes(cmd)
			}
			return a.connect("list the volumes of sandbox "+args[0], func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				rows := []v1alpha1.VolumeStatus{}
				req := &sandboxv1.ListSandVolumesRequest{Sandbox: a.ref(args[0])}
				for {
					page, err := s.volumes.ListSandVolumes(ctx, req)
					if err != nil {
						return err
					}
					for _, m := range page.GetVolumes() {
						rows = append(rows, convert.VolumeStatus(m))
					}
					if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
						break
					}
				}
				return a.show(rows, func() error {
					if len(rows) == 0 {
						_, err := fmt.Fprintf(a.Err, "sandbox %s has no volumes\n", args[0])
						return err
					}
					return a.volumeTable(rows)
				})
			})
		},
	}
}

func (a *app) volumeTable(rows []v1alpha1.VolumeStatus) error {
	t := newTable(a.Out, "TARGET", "STATUS", "AGE", "KIND", "TYPE", "SOURCE", "MODE", "SIZE", "MESSAGE")
	for _, r := range rows {
		status := string(r.Phase)
		if r.DetachState != "" && !strings.EqualFold(string(r.DetachState), r.Reason) {
			status += "/" + string(r.DetachState)
		}
		source := r.Source
		if r.SubPath != "" {
			source += " (" + r.SubPath + ")"
		}
		size := r.SizeLimit
		if size == "" && r.CapacityBytes > 0 {
			size = bytes(r.CapacityBytes)
		}
		t.row(r.Target, status, a.age(r.Since.Time), string(r.Kind), string(r.VolumeType), source, string(r.Mode), size, because(r.Reason, r.Message))
	}
	return t.flush()
}
