package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupName is the API group of SandboxSet and SandboxClaim, Category the category of resources that tells ours from
// those of others.
const (
	GroupName = "agents.kruise.io"
	Category  = "flux"
)

// GroupVersion is the group and version of the types in this package.
var GroupVersion = schema.GroupVersion{Group: GroupName, Version: "v1alpha1"}

// AddToScheme registers the types of this package with a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &SandboxSet{}, &SandboxSetList{}, &SandboxClaim{}, &SandboxClaimList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
