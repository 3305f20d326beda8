package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
)

func (a *app) imageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "image",
		Aliases: []string{"images"},
		Short:   "Bring images to the node",
		Args:    noSuchCommand,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.imageImportCommand(), a.imagePullCommand(), &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the node's images", Example: "  fluxctl image ls", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.connect("list the images", func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				resp, err := s.images.ListImages(ctx, &sandboxv1.ListImagesRequest{})
				if err != nil {
					return err
				}
				return a.showImages(resp.GetImages())
			})
		},
	})
	return cmd
}

func (a *app) imageImportCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "import FILE",
		Short: "Import an image archive",
		Long:  `Import an image from an archive as docker save or an OCI tool writes it. FILE "-" is fluxctl's input.`,
		Example: `  fluxctl image import busybox.tar
  docker save busybox | fluxctl image import -`,
		Args: exactly("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			in := a.In
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return fmt.Errorf("cannot read the image archive: %w", err)
				}
				defer func() { _ = f.Close() }()
				in = f
			}
			return a.connect("import the image archive", func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				stream, err := s.images.ImportImage(ctx)
				if err != nil {
					return err
				}
				buffer := make([]byte, 256<<10)
				for {
					n, err := in.Read(buffer)
					if n > 0 && stream.Send(&sandboxv1.ImportImageRequest{Chunk: append([]byte(nil), buffer[:n]...)}) != nil {
						break // CloseAndRecv says why.
					}
					if errors.Is(err, io.EOF) {
						break
					}
					if err != nil {
						return err
					}
				}
				resp, err := stream.CloseAndRecv()
				if err != nil {
					return err
				}
				return a.showImages(resp.GetImages())
			})
		},
	}
}

func (a *app) imagePullCommand() *cobra.Command {
	return &cobra.Command{
		Use: "pull IMAGE", Short: "Pull an image from a registry", Example: "  fluxctl image pull docker.io/library/busybox:latest", Args: exactly("IMAGE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.connect("pull the image "+args[0], func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				resp, err := s.images.PullImage(ctx, &sandboxv1.PullImageRequest{Name: args[0]})
				if err != nil {
					return err
				}
				return a.showImages(resp.GetImages())
			})
		},
	}
}

// image is an image as JSON or YAML.
type image struct {
	Name      string `json:"name"`
	Digest    string `json:"digest"`
	SizeBytes int64  `json:"sizeBytes"`
}

func (a *app) showImages(messages []*sandboxv1.Image) error {
	images := make([]image, len(messages))
	for i, m := range messages {
		images[i] = image{Name: m.GetName(), Digest: m.GetDigest(), SizeBytes: m.GetSizeBytes()}
	}
	return a.show(images, func() error {
		if len(images) == 0 {
			_, err := fmt.Fprintln(a.Err, "no images: bring one with: fluxctl image import FILE")
			return err
		}
		t := newTable(a.Out, "NAME", "SIZE", "DIGEST")
		for _, i := range images {
			t.row(i.Name, bytes(i.SizeBytes), i.Digest)
		}
		return t.flush()
	})
}

// check is a check of doctor as JSON or YAML.
type check struct {
	Name     string `json:"name"`
	Status   string `json:"status"`
	Required bool   `json:"required"`
	Detail   string `json:"detail,omitempty"`
}

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Show what the node can do",
		Long: `Show what the server's node can do, and what it lacks. The exit code is 1 when something is missing without
which it cannot work.`,
		Example: "  fluxctl doctor",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.connect("examine the node", func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				resp, err := s.node.Doctor(ctx, &sandboxv1.DoctorRequest{})
				if err != nil {
					return err
				}
				checks := make([]check, len(resp.GetChecks()))
				broken := false
				for i, c := range resp.GetChecks() {
					checks[i] = check{Name: c.GetName(), Status: c.GetStatus(), Required: c.GetRequired(), Detail: c.GetDetail()}
					broken = broken || c.GetRequired() && c.GetStatus() == "MISSING"
				}
				err = a.show(checks, func() error {
					t := newTable(a.Out, "CHECK", "STATUS", "REQUIRED", "DETAIL")
					for _, c := range checks {
						required := "no"
						if c.Required {
							required = "yes"
						}
						t.row(c.Name, c.Status, required, c.Detail)
					}
					return t.flush()
				})
				if err == nil && broken {
					return exitError(exitFailed)
				}
				return err
			})
		},
	}
}
