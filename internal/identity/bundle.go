package identity

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Bundle is the CAs that are trusted: one as a rule, two while a successor takes over. It never changes.
type Bundle struct {
	certs []*x509.Certificate
	pool  *x509.CertPool
}

// NewBundle is a bundle of CA certificates. None at all, or one that is no CA's, is an error.
func NewBundle(certs ...*x509.Certificate) (*Bundle, error) {
	if len(certs) == 0 {
		return nil, errors.New("the trust bundle has no certificate")
	}
	b := &Bundle{certs: certs, pool: x509.NewCertPool()}
	for _, c := range certs {
		if !c.IsCA {
			return nil, fmt.Errorf("the certificate %q in the trust bundle is no CA's", c.Subject.CommonName)
		}
		b.pool.AddCert(c)
	}
	return b, nil
}

// ParseBundle reads a bundle in PEM.
func ParseBundle(text []byte) (*Bundle, error) {
	certs, err := parseCertificates(text)
	if err != nil {
		return nil, fmt.Errorf("trust bundle: %w", err)
	}
	return NewBundle(certs...)
}

// ParseBundleDER reads a bundle of certificates in DER.
func ParseBundleDER(ders [][]byte) (*Bundle, error) {
	certs := make([]*x509.Certificate, len(ders))
	for i, der := range ders {
		var err error
		if certs[i], err = x509.ParseCertificate(der); err != nil {
			return nil, fmt.Errorf("trust bundle: %w", err)
		}
	}
	return NewBundle(certs...)
}

// PEM is the bundle as a file has it.
func (b *Bundle) PEM() []byte {
	var out bytes.Buffer
	for _, c := range b.certs {
		out.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}))
	}
	return out.Bytes()
}

// DER is the bundle's certificates.
func (b *Bundle) DER() [][]byte {
	out := make([][]byte, len(b.certs))
	for i, c := range b.certs {
		out[i] = c.Raw
	}
	return out
}

// Verify checks that a chain, the leaf first, leads to a CA of the bundle, is valid now, and is for the usage.
func (b *Bundle) Verify(chain []*x509.Certificate, usage x509.ExtKeyUsage, now time.Time) error {
	if len(chain) == 0 {
		return errors.New("no certificate was shown")
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: b.pool, Intermediates: between, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage}})
	return err
}

// BundleFile is a bundle in a file that somebody else replaces, such as kubelet the one of a ConfigMap. Each reading
// is a fresh one, so what is trusted changes with the file. It is safe for concurrent use.
type BundleFile struct {
	read func() ([]byte, error)
	mu   sync.Mutex // guards what follows
	text []byte
	last *Bundle
}

// NewBundleFile is a bundle that read returns the PEM of. The function decides how: an agent that works in the host's
// mount namespace has to read its Pod's file beneath a directory that it opened before.
func NewBundleFile(read func() ([]byte, error)) *BundleFile { return &BundleFile{read: read} }

// Bundle is what the file holds now. A file that cannot be read, or parsed, trusts nobody.
func (f *BundleFile) Bundle() (*Bundle, error) {
	text, err := f.read()
	if err != nil {
		return nil, fmt.Errorf("read the trust bundle: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last != nil && bytes.Equal(text, f.text) {
		return f.last, nil
	}
	b, err := ParseBundle(text)
	if err != nil {
		return nil, err
	}
	f.text, f.last = text, b
	return b, nil
}

// parseCertificates reads the certificates of a PEM text, which may hold nothing else.
func parseCertificates(text []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for len(bytes.TrimSpace(text)) > 0 {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil || block.Type != "CERTIFICATE" {
			return nil, errors.New("it is not a list of certificates in PEM")
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}
