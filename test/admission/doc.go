// Package admission tests config/crd and config/admission against a real API server: what is refused at "kubectl
// apply", and in which words.
package admission
