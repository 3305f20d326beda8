package kube

import (
	agentsv1alpha1 "github.com/flux-sandbox/flux-sandbox/api/agents/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/parts"
)

type (
	sandbox = v1alpha1.Sandbox
	group   = v1alpha1.SandboxGroup
	set     = agentsv1alpha1.SandboxSet
	claim   = agentsv1alpha1.SandboxClaim
)

// kind is what the code for all kinds must know of one.
type kind[T store.Object] struct {
	parts.Kind[T]
	resource string // its plural, as in URLs
}

var (
	sandboxKind = kind[*sandbox]{parts.Sandboxes, "sandboxes"}
	groupKind   = kind[*group]{parts.Groups, "sandboxgroups"}
	setKind     = kind[*set]{parts.Sets, "sandboxsets"}
	claimKind   = kind[*claim]{parts.Claims, "sandboxclaims"}
)
