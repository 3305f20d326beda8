package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"net/url"

	"github.com/containerd/errdefs"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// NewRequest makes a certificate signing request (PKCS #10, DER) that names the holder it is for; the zero ID names
// nobody.
func NewRequest(key crypto.Signer, id ID) ([]byte, error) {
	template := &x509.CertificateRequest{}
	if uri := id.URI(); uri != nil {
		template.URIs = []*url.URL{uri}
	}
	return x509.CreateCertificateRequest(rand.Reader, template, key)
}

// CheckRequest checks a certificate signing request for a holder and returns the key to certify. A request decides
// nothing but the key: one that names anything else than its holder is refused, so that a wrong configuration is seen
// at once and not by a certificate that does not fit. Errors are of the kind ErrInvalidArgument.
func CheckRequest(der []byte, id ID) (crypto.PublicKey, error) {
	r, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, refused("the certificate signing request cannot be read: send PKCS #10 in DER")
	}
	if err := r.CheckSignature(); err != nil {
		return nil, refused("the certificate signing request is not signed with the key that it is for")
	}
	key, ok := r.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, refused("the certificate signing request is for a key of another type than ECDSA P-256")
	}
	for _, uri := range r.URIs {
		if want := id.URI(); want == nil || uri.String() != want.String() {
			return nil, refused("the certificate signing request is for %.300q, and the caller is %s: is the node's name configured right?", uri.String(), id)
		}
	}
	if len(r.DNSNames)+len(r.IPAddresses)+len(r.EmailAddresses)+len(r.Subject.Names) > 0 {
		return nil, refused("the certificate signing request asks for names beside its one URI: leave them out")
	}
	return key, nil
}

func refused(format string, args ...any) error {
	return fault.New(errdefs.ErrInvalidArgument, fault.InvalidRequest, format, args...)
}
