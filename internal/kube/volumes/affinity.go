package volumes

import (
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/scheduler"
)

// nodeNameField is the one field by which a node can be selected (k8s.io/api/core/v1, NodeSelectorTerm.matchFields).
const nodeNameField = "metadata.name"

// reach are the nodes that can use a volume: those of its node affinity; all where there is none.
func reach(pv *corev1.PersistentVolume) *scheduler.Reach {
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil
	}
	terms := pv.Spec.NodeAffinity.Required.NodeSelectorTerms
	return &scheduler.Reach{
		Volume: "PersistentVolume " + pv.Name,
		Likely: names(terms),
		Has: func(node string, labels map[string]string) bool {
			return slices.ContainsFunc(terms, func(t corev1.NodeSelectorTerm) bool { return selects(t, node, labels) })
		},
	}
}

// selects says whether a node meets all of a term. One without requirements selects nothing, as Kubernetes has it.
func selects(t corev1.NodeSelectorTerm, node string, labels map[string]string) bool {
	if len(t.MatchExpressions)+len(t.MatchFields) == 0 {
		return false
	}
	for _, r := range t.MatchExpressions {
		value, ok := labels[r.Key]
		if !meets(r, value, ok) {
			return false
		}
	}
	for _, r := range t.MatchFields {
		if r.Key != nodeNameField || !meets(r, node, true) {
			return false
		}
	}
	return true
}

// meets is one requirement. One of an operator that is not known is met by nobody.
func meets(r corev1.NodeSelectorRequirement, value string, present bool) bool {
	switch r.Operator {
	case corev1.NodeSelectorOpIn:
		return present && slices.Contains(r.Values, value)
	case corev1.NodeSelectorOpNotIn:
		return !present || !slices.Contains(r.Values, value)
	case corev1.NodeSelectorOpExists:
		return present
	case corev1.NodeSelectorOpDoesNotExist:
		return !present
	case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
		if !present || len(r.Values) != 1 {
			return false
		}
		have, err1 := strconv.ParseInt(value, 10, 64)
		bound, err2 := strconv.ParseInt(r.Values[0], 10, 64)
		if err1 != nil || err2 != nil {
			return false
		}
		return r.Operator == corev1.NodeSelectorOpGt && have > bound || r.Operator == corev1.NodeSelectorOpLt && have < bound
	}
	return false
}

// names are the nodes that the terms name, if each names some: by the label that is a node's name nearly everywhere.
func names(terms []corev1.NodeSelectorTerm) []string {
	var all []string
	for _, t := range terms {
		here := required(t.MatchExpressions, corev1.LabelHostname)
		if here == nil {
			here = required(t.MatchFields, nodeNameField)
		}
		if here == nil {
			return nil
		}
		all = append(all, here...)
	}
	return all
}

// domains are the topology domains of a volume: its own label's, else those that its node affinity requires (design,
// ruling 15); none when neither says.
func domains(pv *corev1.PersistentVolume, key string) []string {
	if d := pv.Labels[key]; d != "" {
		return []string{d}
	}
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return nil
	}
	var all []string
	for _, t := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		if len(t.MatchExpressions)+len(t.MatchFields) == 0 {
			continue
		}
		here := required(t.MatchExpressions, key)
		if here == nil {
			return nil // it may be anywhere by this one
		}
		for _, d := range here {
			if !slices.Contains(all, d) {
				all = append(all, d)
			}
		}
	}
	return all
}

// required are the values of which a key must have one; nil when there is no such requirement.
func required(requirements []corev1.NodeSelectorRequirement, key string) []string {
	var values []string
	for _, r := range requirements {
		switch {
		case r.Key != key || r.Operator != corev1.NodeSelectorOpIn:
		case values == nil:
			values = slices.Clone(r.Values)
		default:
			values = slices.DeleteFunc(values, func(v string) bool { return !slices.Contains(r.Values, v) })
		}
	}
	return values
}
