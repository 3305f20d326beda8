package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"time"
)

// Lifetimes; the package comment says why.
const (
	// Skew is how far the clocks of two machines may be apart: a certificate is valid from that much before it was
	// signed.
	Skew = 5 * time.Minute
	// AgentValidity is how long an agent's certificate lives.
	AgentValidity = 6 * time.Hour
	// ControllerValidity is how long the controller's certificates live, as a client and as a server.
	ControllerValidity = time.Hour
	// CAValidity is how long a CA lives.
	CAValidity = 10 * 365 * 24 * time.Hour
)

// CA signs certificates.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewCA makes a CA with a key of its own (ECDSA P-256), which it signs itself.
func NewCA(now time.Time) (*CA, error) {
	key, err := NewKey()
	if err != nil {
		return nil, err
	}
	spki, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, err
	}
	// A name of its own, so that a chain is never tried with another CA's key.
	sum := sha256.Sum256(spki)
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "FluxSandbox CA " + hex.EncodeToString(sum[:4])},
		NotBefore:             now.Add(-Skew),
		NotAfter:              now.Add(CAValidity),
		KeyUsage:              x509.KeyUsageCertSign,
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true, // it signs holders, no further CA
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a CA: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	return &CA{cert: cert, key: key}, err
}

// NewKey makes a key of the one type that is used: ECDSA P-256.
func NewKey() (*ecdsa.PrivateKey, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }

// ParseCA reads what PEM wrote. That the two belong together is checked.
func ParseCA(certPEM, keyPEM []byte) (*CA, error) {
	certs, err := parseCertificates(certPEM)
	if err != nil {
		return nil, fmt.Errorf("CA certificate: %w", err)
	}
	if len(certs) != 1 || !certs[0].IsCA {
		return nil, errors.New("CA certificate: there must be one, and it must be a CA's")
	}
	block, rest := pem.Decode(keyPEM)
	if block == nil || block.Type != "PRIVATE KEY" || len(rest) > 0 {
		return nil, errors.New("CA key: it is not one private key in PEM (PKCS #8)")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("CA key: it is not a private key in PKCS #8") // the cause may quote the key
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !key.PublicKey.Equal(certs[0].PublicKey) {
		return nil, errors.New("CA key: it is not the key of the CA's certificate")
	}
	return &CA{cert: certs[0], key: key}, nil
}

// PEM writes certificate and key (PKCS #8).
func (ca *CA) PEM() (cert, key []byte, err error) {
	der, err := x509.MarshalPKCS8PrivateKey(ca.key)
	if err != nil {
		return nil, nil, fmt.Errorf("CA key: %w", err)
	}
	cert = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
	return cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// Name is a short name of the CA's own, fit for a file.
func (ca *CA) Name() string {
	sum := sha256.Sum256(ca.cert.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:4])
}

// made is when the CA was made.
func (ca *CA) made() time.Time { return ca.cert.NotBefore.Add(Skew) }

func (ca *CA) valid(now time.Time) bool {
	return !now.Before(ca.cert.NotBefore) && now.Before(ca.cert.NotAfter)
}

// SignAgent signs the certificate of a node's agent, for serving. The chain is in DER, the leaf first.
func (ca *CA) SignAgent(now time.Time, node string, key crypto.PublicKey) ([][]byte, error) {
	id, err := Agent(node)
	if err != nil {
		return nil, err
	}
	return ca.sign(now, AgentValidity, key, &x509.Certificate{
		URIs: []*url.URL{id.URI()}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}

// SignController signs the certificate with which the controller commands agents.
func (ca *CA) SignController(now time.Time, key crypto.PublicKey) ([][]byte, error) {
	return ca.sign(now, ControllerValidity, key, &x509.Certificate{
		URIs: []*url.URL{Controller().URI()}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// SignServer signs the certificate of the controller's gRPC servers, which are called by these DNS names.
func (ca *CA) SignServer(now time.Time, names []string, key crypto.PublicKey) ([][]byte, error) {
	if len(names) == 0 {
		return nil, errors.New("a server's certificate needs a DNS name")
	}
	return ca.sign(now, ControllerValidity, key, &x509.Certificate{
		DNSNames: names, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}

// sign completes a template. Without a serial number in it, x509 makes a random one.
func (ca *CA) sign(now time.Time, validity time.Duration, key crypto.PublicKey, template *x509.Certificate) ([][]byte, error) {
	if !ca.valid(now) {
		return nil, fmt.Errorf("%s is not valid now (%s): it ended, or this machine's clock is wrong", ca.cert.Subject.CommonName, now.UTC().Format(time.RFC3339))
	}
	template.NotBefore, template.NotAfter = now.Add(-Skew), now.Add(validity)
	if template.NotAfter.After(ca.cert.NotAfter) {
		template.NotAfter = ca.cert.NotAfter
	}
	template.KeyUsage, template.BasicConstraintsValid = x509.KeyUsageDigitalSignature, true
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key, ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate: %w", err)
	}
	return [][]byte{der}, nil
}
