package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
)

func (a *app) setCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "set",
		Aliases: []string{"sets", "sbs"},
		Short:   "On Kubernetes: look at SandboxSets, and delete them",
		Args:    noSuchCommand,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.setLsCommand(), a.setGetCommand(), a.setRmCommand())
	return cmd
}

func (a *app) setLsCommand() *cobra.Command {
	var all bool
	var selector string
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List SandboxSets",
		Example: `  fluxctl set ls
  fluxctl set ls -A -o json`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.connect("list the sandbox sets", func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				list := &agentsv1alpha1.SandboxSetList{
					TypeMeta: metav1.TypeMeta{APIVersion: agentsv1alpha1.GroupVersion.String(), Kind: "SandboxSetList"},
					Items:    []agentsv1alpha1.SandboxSet{},
				}
				req := &sandboxv1.ListSandboxSetsRequest{Namespace: a.inNamespaces(all), LabelSelector: selector}
				for {
					page, err := s.sets.ListSandboxSets(ctx, req)
					if err != nil {
						return err
					}
					for _, m := range page.GetSets() {
						set, err := convert.Set(m)
						if err != nil {
							return err
						}
						list.Items = append(list.Items, *set)
					}
					if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
						break
					}
				}
				return a.show(list, func() error {
					rows := a.listing("sandbox sets", all, "REPLICAS", "AVAILABLE", "UPDATEREVISION", "AGE", "MESSAGE")
					for i := range list.Items {
						set := &list.Items[i]
						rows.add(set, strconv.Itoa(int(set.Spec.Replicas)), strconv.Itoa(int(set.Status.AvailableReplicas)), set.Status.UpdateRevision,
							a.age(set.CreationTimestamp.Time), setTrouble(set))
					}
					return rows.print()
				})
			})
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "list the sets of all namespaces")
	cmd.Flags().StringVarP(&selector, "selector", "l", "", "list only what has these labels, as in app=demo")
	return cmd
}

// setTrouble says what keeps a set from having all that it should; empty when it has.
func setTrouble(set *agentsv1alpha1.SandboxSet) string {
	c := meta.FindStatusCondition(set.Status.Conditions, agentsv1alpha1.SetReady)
	if c == nil || c.Status == metav1.ConditionTrue {
		return ""
	}
	return because(c.Reason, c.Message)
}

func (a *app) setGetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "get NAME",
		Short: "Show a SandboxSet",
		Example: `  fluxctl set get pool
  fluxctl set get pool -o yaml`,
		Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.connect("get sandbox set "+args[0], func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				namespace, name := a.named(args[0])
				m, err := s.sets.GetSandboxSet(ctx, &sandboxv1.GetSandboxSetRequest{Namespace: namespace, Name: name})
				if err != nil {
					return err
				}
				set, err := convert.Set(m)
				if err != nil {
					return err
				}
				return a.show(set, func() error { return a.describeSet(set) })
			})
		},
	}
}

// describeSet prints everything about a set that a person may want to know.
func (a *app) describeSet(set *agentsv1alpha1.SandboxSet) error {
	t := newTable(a.Out)
	line := func(name, value string) {
		if value != "" {
			t.row(name+":", value)
		}
	}
	line("Name", set.Name)
	line("Namespace", set.Namespace)
	line("UID", string(set.UID))
	line("Message", setTrouble(set))
	line("Age", a.age(set.CreationTimestamp.Time))
	line("Replicas", strconv.Itoa(int(set.Spec.Replicas)))
	line("Available", strconv.Itoa(int(set.Status.AvailableReplicas)))
	line("Updated", fmt.Sprintf("%d of %d", set.Status.UpdatedReplicas, set.Status.Replicas))
	line("Revision", set.Status.UpdateRevision)
	var runtimes, images, claims []string
	for _, r := range set.Spec.Runtimes {
		runtimes = append(runtimes, r.Name)
	}
	for _, c := range set.Spec.Template.Spec.Containers {
		images = append(images, c.Image)
	}
	for _, c := range set.Spec.VolumeClaimTemplates {
		claims = append(claims, c.Name)
	}
	line("Runtimes", strings.Join(runtimes, ", "))
	line("Images", strings.Join(images, ", "))
	line("Claims", strings.Join(claims, ", "))
	return t.flush()
}

func (a *app) setRmCommand() *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use:     "rm NAME…",
		Aliases: []string{"delete"},
		Short:   "Delete SandboxSets with the sandboxes that nobody has claimed",
		Example: `  fluxctl set rm pool
  fluxctl set rm --wait=false pool`,
		Args: someNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.deleteEach(cmd, "sandbox set", "sandboxSets", args, wait, func(ctx context.Context, s server, what string) error {
				namespace, name := a.named(what)
				_, err := s.sets.DeleteSandboxSet(ctx, &sandboxv1.DeleteSandboxSetRequest{Namespace: namespace, Name: name, Wait: wait})
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until its sandboxes are gone")
	return cmd
}
