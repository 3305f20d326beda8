package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
)

// namedVolume is a named volume as JSON or YAML.
type namedVolume struct {
	Namespace    string   `json:"namespace"`
	Name         string   `json:"name"`
	TenantID     string   `json:"tenantId,omitempty"`
	SizeBytes    int64    `json:"sizeBytes"`
	Filesystem   string   `json:"filesystem"`
	Preallocated bool     `json:"preallocated,omitempty"`
	Sandboxes    []string `json:"sandboxes,omitempty"`
}

func named(m *sandboxv1.NamedVolume) namedVolume {
	return namedVolume{Namespace: m.GetNamespace(), Name: m.GetName(), TenantID: m.GetTenantId(), SizeBytes: m.GetSizeBytes(),
		Filesystem: m.GetFilesystem(), Preallocated: m.GetPreallocated(), Sandboxes: m.GetSandboxes()}
}

func (a *app) volumeCreateCommand() *cobra.Command {
	req := &sandboxv1.CreateVolumeRequest{}
	cmd := &cobra.Command{
		Use:   "create NAME --size SIZE",
		Short: "Make a named volume of a fixed size, on a standalone server",
		Long: `Make a named volume: a filesystem of a fixed size, which sandboxes use by its name (--type pvc), one after another or
several at once. It stays until it is deleted. On Kubernetes, make a PersistentVolumeClaim instead.

A volume that is there with the same properties is no error.`,
		Example: `  fluxctl volume create scratch --size 1Gi
  fluxctl volume create cache --size 20Gi --fs xfs --preallocate --tenant acme
  fluxctl volume add a --type pvc --source scratch --target /scratch`,
		Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if req.Size == "" {
				return usagef("--size is missing")
			}
			req.Namespace, req.Name = a.namespace, args[0]
			return a.connect("make the volume "+args[0], func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				m, err := s.named.CreateVolume(ctx, req)
				if err != nil {
					return err
				}
				return a.show(named(m), func() error {
					_, err := fmt.Fprintf(a.Out, "volume %s has %s (%s)\n", m.GetName(), bytes(m.GetSizeBytes()), m.GetFilesystem())
					return err
				})
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&req.Size, "size", "", "how much it holds, such as 1Gi")
	flags.StringVar(&req.Filesystem, "fs", "ext4", "ext4 or xfs")
	flags.BoolVar(&req.Preallocate, "preallocate", false, "take its space now, not when it is written to")
	flags.StringVar(&req.TenantId, "tenant", "", "the tenant whose sandboxes may use it; those without a tenant when not given")
	return cmd
}

func (a *app) listVolumes(cmd *cobra.Command) error {
	return a.connect("list the named volumes", func(s server) error {
		ctx, cancel := a.bounded(cmd.Context())
		defer cancel()
		resp, err := s.named.ListVolumes(ctx, &sandboxv1.ListVolumesRequest{Namespace: a.namespace})
		if err != nil {
			return err
		}
		list := []namedVolume{}
		for _, m := range resp.GetVolumes() {
			list = append(list, named(m))
		}
		return a.show(list, func() error {
			if len(list) == 0 {
				_, err := fmt.Fprintln(a.Err, "there are no named volumes; those of a sandbox: fluxctl volume ls SANDBOX")
				return err
			}
			t := newTable(a.Out, "NAME", "SIZE", "FILESYSTEM", "TENANT", "USED BY")
			for _, v := range list {
				t.row(v.Name, bytes(v.SizeBytes), v.Filesystem, v.TenantID, strings.Join(v.Sandboxes, ", "))
			}
			return t.flush()
		})
	})
}

func (a *app) deleteVolume(cmd *cobra.Command, name string) error {
	return a.connect("delete the volume "+name, func(s server) error {
		ctx, cancel := a.bounded(cmd.Context())
		defer cancel()
		resp, err := s.named.DeleteVolume(ctx, &sandboxv1.DeleteVolumeRequest{Namespace: a.namespace, Name: name})
		if err != nil {
			return err
		}
		return a.show(map[string]any{"deleted": resp.GetDeleted()}, func() error {
			done := "is deleted, with its data"
			if !resp.GetDeleted() {
				done = "was not there"
			}
			_, err := fmt.Fprintf(a.Out, "volume %s %s\n", name, done)
			return err
		})
	})
}
