package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	sandboxv1 "github.com/flux-sandbox/flux-sandbox/api/proto/sandbox/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi/convert"
)

// afterTimeout is how much longer than the claim may take is waited for it, as its end has to be written and told.
const afterTimeout = 30 * time.Second

func (a *app) claimCommand() *cobra.Command {
	var (
		spec                  = &sandboxv1.SandboxClaimSpec{}
		name, image           string
		replicas              int32
		volumes, envs, labels []string
		timeout               time.Duration
		wait                  bool
	)
	cmd := &cobra.Command{
		Use:     "claim SET",
		Aliases: []string{"claims", "sbc"},
		Short:   "On Kubernetes: take sandboxes out of a SandboxSet, with volumes mounted into them",
		Long: `Take sandboxes out of the warm pool of a SandboxSet, with PersistentVolumes mounted into them while they run, and
print their names, one per line, when all of that is there. It makes a SandboxClaim, which they belong to:
"claim rm" deletes both.

--volume mounts a PersistentVolume. Its value is a list of pairs: pv, target, subPath; and the word readOnly.

A claim that cannot be met says why, and is kept for "claim get" to show. When its time (--timeout) is over it fails, or
is completed with the sandboxes that were claimed by then: their names are printed, and fluxctl fails.`,
		Example: `  fluxctl claim pool --volume pv=shared-data,target=/data
  fluxctl claim pool --name job-7 --replicas 3 --volume pv=models,target=/models,subPath=v1,readOnly --timeout 5m
  fluxctl claim pool --env MODE=batch --label app=demo --wait=false
  kubectl exec $(fluxctl claim pool) -- df -h
  fluxctl claim get job-7`,
		Args: exactly("SET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec.TemplateName = args[0]
			if cmd.Flags().Changed("replicas") {
				spec.Replicas = ptr.To(replicas)
			}
			if cmd.Flags().Changed("timeout") {
				spec.ClaimTimeout, a.timeout = durationpb.New(timeout), timeout+afterTimeout
			}
			if image != "" {
				spec.InplaceUpdate = &sandboxv1.InplaceUpdate{Image: image}
			}
			for _, text := range volumes {
				v, err := parseClaimVolume(text)
				if err != nil {
					return err
				}
				spec.DynamicVolumesMount = append(spec.DynamicVolumesMount, v)
			}
			env, err := a.parseEnv(envs)
			if err != nil {
				return err
			}
			for _, e := range env {
				if spec.EnvVars == nil {
					spec.EnvVars = map[string]string{}
				}
				spec.EnvVars[e.GetName()] = e.GetValue()
			}
			if spec.Labels, err = parseLabels(labels); err != nil {
				return err
			}
			return a.claim(cmd, &sandboxv1.SandboxClaim{Namespace: a.namespace, Name: name, Labels: spec.Labels, Spec: spec}, wait)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&name, "name", "", "the claim's name; made of the set's when not given")
	flags.Int32Var(&replicas, "replicas", 1, "how many sandboxes")
	flags.StringArrayVar(&volumes, "volume", nil, "a PersistentVolume: pv=NAME,target=/data[,subPath=a/b][,readOnly]; may be repeated")
	flags.StringArrayVarP(&envs, "env", "e", nil, "NAME=VALUE in the environment, for which sandboxes are made anew; NAME takes fluxctl's own value; may be repeated")
	flags.StringArrayVarP(&labels, "label", "l", nil, "KEY=VALUE as a label of the claim and its sandboxes; may be repeated")
	flags.StringVar(&image, "image", "", "an image that the container is updated to in place")
	// In place of the flag that all commands have: who gives up before the claim does would leave it behind.
	flags.DurationVar(&timeout, "timeout", time.Minute, "how long the claim may take")
	flags.BoolVar(&wait, "wait", true, "wait until the sandboxes are there")
	cmd.AddCommand(a.claimLsCommand(), a.claimGetCommand(), a.claimRmCommand())
	return cmd
}

// claim makes a claim and prints what it is given.
func (a *app) claim(cmd *cobra.Command, claim *sandboxv1.SandboxClaim, wait bool) error {
	return a.connect("claim sandboxes of "+claim.GetSpec().GetTemplateName(), func(s server) error {
		ctx, cancel := a.bounded(cmd.Context())
		defer cancel()
		// Made first and then waited for, so that its name is known whatever comes.
		m, err := s.claims.CreateSandboxClaim(ctx, &sandboxv1.CreateSandboxClaimRequest{Claim: claim})
		if err != nil {
			return err
		}
		if !wait {
			return a.showClaim(m, a.tellClaim)
		}
		if a.output == outTable {
			if _, err := fmt.Fprintf(a.Err, "made sandbox claim %s/%s\n", m.GetNamespace(), m.GetName()); err != nil {
				return err
			}
		}
		if m, err = awaitClaim(ctx, s, m.GetNamespace(), m.GetName()); err != nil {
			return err
		}
		if err := a.showClaim(m, a.claimedNames); err != nil {
			return err
		}
		return short(m)
	})
}

// awaitClaim waits until a claim is Completed, for as long as ctx goes on: a server waits no longer than it is set to.
func awaitClaim(ctx context.Context, s server, namespace, name string) (*sandboxv1.SandboxClaim, error) {
	for {
		m, err := s.claims.GetSandboxClaim(ctx, &sandboxv1.GetSandboxClaimRequest{Namespace: namespace, Name: name, Wait: true})
		deadline, bounded := ctx.Deadline()
		if fault.ReasonOf(fault.FromGRPC(err)) != fault.OperationPending || bounded && time.Until(deadline) < time.Second {
			return m, err
		}
	}
}

// short is the error of a claim that was given fewer sandboxes than it asked for.
func short(m *sandboxv1.SandboxClaim) error {
	claim, err := convert.Claim(m)
	if err != nil || !meta.IsStatusConditionTrue(claim.Status.Conditions, agentsv1alpha1.ClaimPartially) {
		return err
	}
	return errors.New(claimedCondition(claim).Message)
}

// claimedCondition is a claim's condition Claimed; empty when there is none yet.
func claimedCondition(claim *agentsv1alpha1.SandboxClaim) metav1.Condition {
	if c := meta.FindStatusCondition(claim.Status.Conditions, agentsv1alpha1.ClaimClaimed); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// claimTrouble says what a claim waits for, or why it has failed; empty when it has all that it asked for.
func claimTrouble(claim *agentsv1alpha1.SandboxClaim) string {
	c := claimedCondition(claim)
	if c.Status == metav1.ConditionTrue {
		return ""
	}
	return because(c.Reason, c.Message)
}

// showClaim prints a claim as the Kubernetes object, or calls table.
func (a *app) showClaim(m *sandboxv1.SandboxClaim, table func(*agentsv1alpha1.SandboxClaim) error) error {
	claim, err := convert.Claim(m)
	if err != nil {
		return err
	}
	return a.show(claim, func() error { return table(claim) })
}

func claimPhase(claim *agentsv1alpha1.SandboxClaim) string {
	switch {
	case claim.DeletionTimestamp != nil:
		return "Terminating"
	case claim.Status.Phase == "":
		return string(agentsv1alpha1.ClaimPending)
	}
	return string(claim.Status.Phase)
}

// tellClaim prints in a line where a claim is.
func (a *app) tellClaim(claim *agentsv1alpha1.SandboxClaim) error {
	line := fmt.Sprintf("sandbox claim %s/%s is %s", claim.Namespace, claim.Name, claimPhase(claim))
	if why := claimTrouble(claim); why != "" {
		line += " (" + oneLine(why) + ")"
	}
	_, err := fmt.Fprintln(a.Out, line)
	return err
}

// claimedNames prints the sandboxes of a claim, for people and for scripts.
func (a *app) claimedNames(claim *agentsv1alpha1.SandboxClaim) error {
	for _, name := range claim.Status.SandboxNames {
		if _, err := fmt.Fprintln(a.Out, oneLine(name)); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) claimLsCommand() *cobra.Command {
	var all bool
	var selector string
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List SandboxClaims",
		Example: `  fluxctl claim ls
  fluxctl claim ls -A -l app=demo
  fluxctl claim ls -o json`,
		Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.connect("list the sandbox claims", func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				list := &agentsv1alpha1.SandboxClaimList{
					TypeMeta: metav1.TypeMeta{APIVersion: agentsv1alpha1.GroupVersion.String(), Kind: "SandboxClaimList"},
					Items:    []agentsv1alpha1.SandboxClaim{},
				}
				req := &sandboxv1.ListSandboxClaimsRequest{Namespace: a.inNamespaces(all), LabelSelector: selector}
				for {
					page, err := s.claims.ListSandboxClaims(ctx, req)
					if err != nil {
						return err
					}
					for _, m := range page.GetClaims() {
						claim, err := convert.Claim(m)
						if err != nil {
							return err
						}
						list.Items = append(list.Items, *claim)
					}
					if req.PageToken = page.GetNextPageToken(); req.PageToken == "" {
						break
					}
				}
				return a.show(list, func() error {
					rows := a.listing("sandbox claims", all, "PHASE", "TEMPLATE", "DESIRED", "CLAIMED", "AGE", "MESSAGE")
					for i := range list.Items {
						c := &list.Items[i]
						rows.add(c, claimPhase(c), c.Spec.TemplateName, strconv.Itoa(int(ptr.Deref(c.Spec.Replicas, 1))), strconv.Itoa(int(c.Status.ClaimedReplicas)),
							a.age(c.CreationTimestamp.Time), claimTrouble(c))
					}
					return rows.print()
				})
			})
		},
	}
	cmd.Flags().BoolVarP(&all, "all-namespaces", "A", false, "list the claims of all namespaces")
	cmd.Flags().StringVarP(&selector, "selector", "l", "", "list only what has these labels, as in app=demo")
	return cmd
}

func (a *app) claimGetCommand() *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use:   "get NAME",
		Short: "Show a SandboxClaim",
		Long:  `Show a SandboxClaim. With --wait it is shown when it is completed, and the reason when it has failed.`,
		Example: `  fluxctl claim get job-7
  fluxctl claim get job-7 --wait --timeout 5m
  fluxctl claim get job-7 -o yaml`,
		Args: exactly("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.connect("get sandbox claim "+args[0], func(s server) error {
				ctx, cancel := a.bounded(cmd.Context())
				defer cancel()
				namespace, name := a.named(args[0])
				get := awaitClaim
				if !wait {
					get = func(ctx context.Context, s server, namespace, name string) (*sandboxv1.SandboxClaim, error) {
						return s.claims.GetSandboxClaim(ctx, &sandboxv1.GetSandboxClaimRequest{Namespace: namespace, Name: name})
					}
				}
				m, err := get(ctx, s, namespace, name)
				if err != nil {
					return err
				}
				return a.showClaim(m, a.describeClaim)
			})
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until it is over")
	return cmd
}

// describeClaim prints everything about a claim that a person may want to know.
func (a *app) describeClaim(claim *agentsv1alpha1.SandboxClaim) error {
	t := newTable(a.Out)
	line := func(name, value string) {
		if value != "" {
			t.row(name+":", value)
		}
	}
	line("Name", claim.Name)
	line("Namespace", claim.Namespace)
	line("UID", string(claim.UID))
	line("Phase", claimPhase(claim))
	line("Message", claimTrouble(claim))
	line("Age", a.age(claim.CreationTimestamp.Time))
	line("Template", claim.Spec.TemplateName)
	line("Desired", strconv.Itoa(int(ptr.Deref(claim.Spec.Replicas, 1))))
	line("Claimed", strconv.Itoa(int(claim.Status.ClaimedReplicas)))
	if d := claim.Spec.ClaimTimeout; d != nil {
		line("Timeout", d.Duration.String())
	}
	if u := claim.Spec.InplaceUpdate; u != nil {
		line("Image", u.Image)
	}
	line("Sandboxes", strings.Join(claim.Status.SandboxNames, " "))
	if err := t.flush(); err != nil || len(claim.Spec.DynamicVolumesMount) == 0 {
		return err
	}
	if _, err := fmt.Fprintln(a.Out); err != nil {
		return err
	}
	t = newTable(a.Out, "TARGET", "PV", "SUBPATH", "MODE")
	for _, v := range claim.Spec.DynamicVolumesMount {
		t.row(v.MountPath, v.PVName, v.SubPath, map[bool]string{true: "ro", false: "rw"}[v.ReadOnly])
	}
	return t.flush()
}

func (a *app) claimRmCommand() *cobra.Command {
	var wait bool
	cmd := &cobra.Command{
		Use:     "rm NAME…",
		Aliases: []string{"delete"},
		Short:   "Delete SandboxClaims with the sandboxes that they were given",
		Example: `  fluxctl claim rm job-7 job-8
  fluxctl claim rm --wait=false job-7`,
		Args: someNames,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.deleteEach(cmd, "sandbox claim", "sandboxClaims", args, wait, func(ctx context.Context, s server, what string) error {
				namespace, name := a.named(what)
				_, err := s.claims.DeleteSandboxClaim(ctx, &sandboxv1.DeleteSandboxClaimRequest{Namespace: namespace, Name: name, Wait: wait})
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", true, "wait until its sandboxes are gone")
	return cmd
}
