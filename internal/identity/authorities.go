package identity

import (
	"crypto/x509"
	"errors"
	"slices"
	"time"
)

const (
	// Settle is how long a CA is trusted before it signs, so that everybody has it in their bundle by then. An agent
	// reads its bundle from a ConfigMap, which kubelet brings within minutes, or gets it with its certificate, at
	// least every [AgentValidity].
	Settle = 24 * time.Hour
	// successorBefore is how long before the end of a CA its successor is made.
	successorBefore = 2 * 365 * 24 * time.Hour
)

// Authorities are the CAs of an installation, the oldest first. What each is for follows from its age, so that every
// replica that reads the same CAs does the same.
type Authorities []*CA

// NewAuthorities sorts CAs.
func NewAuthorities(cas ...*CA) Authorities {
	slices.SortFunc(cas, func(a, b *CA) int { return a.cert.NotBefore.Compare(b.cert.NotBefore) })
	return cas
}

// Signer is the CA that signs now: the youngest that is settled, else the oldest that is valid.
func (a Authorities) Signer(now time.Time) (*CA, error) {
	var signer *CA
	for _, ca := range a {
		if ca.valid(now) && (signer == nil || now.Sub(ca.made()) >= Settle) {
			signer = ca
		}
	}
	if signer == nil {
		return nil, errors.New("no CA is valid now: all ended, or this machine's clock is wrong")
	}
	return signer, nil
}

// Live are the CAs that have not ended.
func (a Authorities) Live(now time.Time) Authorities {
	return slices.DeleteFunc(slices.Clone(a), func(ca *CA) bool { return !now.Before(ca.cert.NotAfter) })
}

// Bundle is whom to trust now: every CA that has not ended.
func (a Authorities) Bundle(now time.Time) (*Bundle, error) {
	var certs []*x509.Certificate
	for _, ca := range a.Live(now) {
		certs = append(certs, ca.cert)
	}
	return NewBundle(certs...)
}

// NeedSuccessor says that it is time to make another CA.
func (a Authorities) NeedSuccessor(now time.Time) bool {
	return len(a) == 0 || a[len(a)-1].cert.NotAfter.Sub(now) < successorBefore
}
