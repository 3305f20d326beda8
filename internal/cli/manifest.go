package cli

import (
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
)

// besideFile are the flags of run that may stand beside --file.
var besideFile = []string{"file", "name", "wait", "address", "ca-file", "server-name", "token-file", "namespace", "output", "timeout"}

// manifest reads the Sandbox that is to be made from a file. What a server has written into it (its status, its uid) is
// left out: it may be a sandbox that was shown.
func (a *app) manifest(cmd *cobra.Command, file string, args []string) (*sandboxv1.Sandbox, error) {
	var besides error
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(besideFile, f.Name) {
			besides = usagef("--%s and --file exclude each other: write it into the file", f.Name)
		}
	})
	if besides == nil && len(args) > 0 {
		besides = usagef("a command and --file exclude each other: write it into the file, as spec.command")
	}
	if besides != nil {
		return nil, besides
	}
	where, read := file, func() ([]byte, error) { return os.ReadFile(file) }
	if file == "-" {
		where, read = "the input", func() ([]byte, error) { return io.ReadAll(a.In) }
	}
	text, err := read()
	if err != nil {
		return nil, fmt.Errorf("cannot read the sandbox: %w", err)
	}
	var sb v1alpha1.Sandbox
	if err := yaml.UnmarshalStrict(text, &sb); err != nil {
		return nil, usagef("%s is no Sandbox: %s", where, oneLine(err.Error()))
	}
	if want := v1alpha1.GroupVersion.String(); sb.APIVersion != want || sb.Kind != "Sandbox" {
		return nil, usagef("%s has apiVersion %q and kind %q: write %s and Sandbox", where, sb.APIVersion, sb.Kind, want)
	}
	if name := cmd.Flags().Lookup("name"); name.Changed {
		sb.Name = name.Value.String()
	}
	if sb.Namespace == "" || cmd.Flags().Changed("namespace") {
		sb.Namespace = a.namespace
	}
	return &sandboxv1.Sandbox{Namespace: sb.Namespace, Name: sb.Name, Labels: sb.Labels, Annotations: sb.Annotations, Spec: convert.SpecProto(sb.Spec)}, nil
}
