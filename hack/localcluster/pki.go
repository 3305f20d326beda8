package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"time"
)

// lifetime of the CA and of every certificate. There is no renewal: a cluster that is older is made anew.
const lifetime = 365 * 24 * time.Hour

// servers are the certificates for serving, with their names and addresses.
var servers = map[string][]string{
	"kube-apiserver": {
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost",
		firstIP, nodeIP, "127.0.0.1",
	},
	"kube-controller-manager": {nodeIP},
	"kube-scheduler":          {nodeIP},
	"kubelet":                 {nodeName, nodeIP},
}

// users are those of the components and the administrator, with their groups. Their rights are those that RBAC's
// built-in bindings and the Node authorizer give to these names.
var users = map[string]struct{ name, group string }{
	"admin":                   {"admin", "system:masters"},
	"kube-controller-manager": {"system:kube-controller-manager", ""},
	"kube-scheduler":          {"system:kube-scheduler", ""},
	"kube-proxy":              {"system:kube-proxy", ""},
	"kubelet":                 {"system:node:" + nodeName, "system:nodes"},
	"kubelet-client":          {"kube-apiserver-kubelet-client", "system:masters"}, // the API server as kubelet's client
}

// writePKI makes the CA, the certificates, the key for the tokens of ServiceAccounts and the kubeconfigs, once.
func (l layout) writePKI() error {
	last := l.admin() // written last
	if _, err := os.Stat(last); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	ca, caPEM, err := l.newCA()
	if err != nil {
		return fmt.Errorf("make the cluster's CA: %w", err)
	}
	if _, err := l.writeKey("service-accounts"); err != nil {
		return err
	}
	for name, names := range servers {
		c := certificate(name, "")
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		for _, n := range names {
			if ip := net.ParseIP(n); ip != nil {
				c.IPAddresses = append(c.IPAddresses, ip)
			} else {
				c.DNSNames = append(c.DNSNames, n)
			}
		}
		if _, _, err := l.issue(ca, c, name); err != nil {
			return fmt.Errorf("issue the certificate of %s: %w", name, err)
		}
	}
	admin := []byte(nil)
	for name, user := range users {
		c := certificate(user.name, user.group)
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		cert, key, err := l.issue(ca, c, name+"-user")
		if err != nil {
			return fmt.Errorf("issue the certificate of the user %s: %w", user.name, err)
		}
		config, err := kubeconfig(user.name, caPEM, cert, key)
		if err != nil {
			return err
		}
		if name == "admin" {
			admin = config
		} else if err := writeFile(l.kubeconfig(name), config); err != nil {
			return err
		}
	}
	return writeFile(last, admin)
}

type issuer struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func (l layout) newCA() (issuer, []byte, error) {
	key, err := l.writeKey("ca")
	if err != nil {
		return issuer{}, nil, err
	}
	c := certificate("flux-localcluster", "")
	c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, x509.KeyUsageCertSign|x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		return issuer{}, nil, err
	}
	if c, err = x509.ParseCertificate(der); err != nil {
		return issuer{}, nil, err
	}
	content := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return issuer{c, key}, content, writeFile(l.pki("ca.crt"), content)
}

// issue makes a key and a certificate and writes them to NAME.key and NAME.crt. It returns the PEM of certificate and key.
func (l layout) issue(by issuer, c *x509.Certificate, name string) (cert, key []byte, err error) {
	signer, err := l.writeKey(name)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by.cert, signer.Public(), by.key)
	if err != nil {
		return nil, nil, err
	}
	cert = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := writeFile(l.pki(name+".crt"), cert); err != nil {
		return nil, nil, err
	}
	key, err = os.ReadFile(l.pki(name + ".key"))
	return cert, key, err
}

func (l layout) writeKey(name string) (crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writeFile(l.pki(name+".key"), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
}

func certificate(name, group string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100)) // crypto/rand does not fail
	c := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Minute),
		NotAfter:     time.Now().Add(lifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
	}
	if group != "" {
		c.Subject.Organization = []string{group}
	}
	return c
}

// kubeconfig is a file for one user, as JSON, which is YAML.
func kubeconfig(user string, ca, cert, key []byte) ([]byte, error) {
	type object = map[string]any
	return json.MarshalIndent(object{
		"apiVersion": "v1", "kind": "Config", "current-context": nodeName,
		"contexts": []object{{"name": nodeName, "context": object{"cluster": nodeName, "user": user}}},
		"clusters": []object{{"name": nodeName, "cluster": object{"server": apiURL, "certificate-authority-data": ca}}},
		"users":    []object{{"name": user, "user": object{"client-certificate-data": cert, "client-key-data": key}}},
	}, "", "  ")
}
