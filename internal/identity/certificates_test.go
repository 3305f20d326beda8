package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// start is when the tests' clocks begin.
var start = time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)

func newCA(t testing.TB, at time.Time) *CA {
	t.Helper()
	ca, err := NewCA(at)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// signed makes a certificate with its key by one of a CA's methods.
func signed(t testing.TB, sign func(key *ecdsa.PublicKey) ([][]byte, error)) *tls.Certificate {
	t.Helper()
	key := newKey(t)
	chain, err := sign(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(chain[0])
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: chain, PrivateKey: key, Leaf: leaf}
}

func agentCert(t testing.TB, ca *CA, at time.Time, node string) *tls.Certificate {
	return signed(t, func(key *ecdsa.PublicKey) ([][]byte, error) { return ca.SignAgent(at, node, key) })
}

func controllerCert(t testing.TB, ca *CA, at time.Time) *tls.Certificate {
	return signed(t, func(key *ecdsa.PublicKey) ([][]byte, error) { return ca.SignController(at, key) })
}

func serverCert(t testing.TB, ca *CA, at time.Time, names ...string) *tls.Certificate {
	return signed(t, func(key *ecdsa.PublicKey) ([][]byte, error) { return ca.SignServer(at, names, key) })
}

func bundleOf(t testing.TB, cas ...*CA) *Bundle {
	t.Helper()
	var certs []*x509.Certificate
	for _, ca := range cas {
		certs = append(certs, ca.cert)
	}
	b, err := NewBundle(certs...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestWhoACertificateNames(t *testing.T) {
	uri := func(s string) *url.URL {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	for text, want := range map[string]string{
		"spiffe://sandbox.flux.io/controller":             "the controller",
		"spiffe://sandbox.flux.io/node/a":                 "the agent of node a",
		"spiffe://sandbox.flux.io/node/ip-10-0-0-1.local": "the agent of node ip-10-0-0-1.local",
		"spiffe://sandbox.flux.io/node/controller":        "the agent of node controller",
		"spiffe://sandbox.flux.io/node/":                  "",
		"spiffe://sandbox.flux.io/node/a/b":               "",
		"spiffe://sandbox.flux.io/node/../controller":     "",
		"spiffe://sandbox.flux.io/node/A":                 "",
		"spiffe://sandbox.flux.io/a":                      "",
		"spiffe://sandbox.flux.io/":                       "",
		"spiffe://sandbox.flux.io":                        "",
		"spiffe://sandbox.flux.io/controller?x":           "",
		"spiffe://sandbox.flux.io/controller#x":           "",
		"spiffe://sandbox.flux.io:1/controller":           "",
		"spiffe://u@sandbox.flux.io/controller":           "",
		"spiffe://sandbox.flux.io/node/%61":               "",
		"spiffe://other.example/controller":               "",
		"https://sandbox.flux.io/controller":              "",
		"spiffe:/controller":                              "",
	} {
		id, err := Of(&x509.Certificate{URIs: []*url.URL{uri(text)}})
		if got := id.String(); want == "" && err == nil || want != "" && (err != nil || got != want) {
			t.Errorf("%s names %s (%v), want %q", text, id, err, want)
		}
		if err == nil && id.URI().String() != text {
			t.Errorf("%s is written as %s", text, id.URI())
		}
	}
	both := []*url.URL{Controller().URI(), uri("spiffe://sandbox.flux.io/node/a")}
	if id, err := Of(&x509.Certificate{URIs: both}); err == nil {
		t.Errorf("a certificate with two URIs names %s", id)
	}
	if id, err := Of(&x509.Certificate{}); err == nil {
		t.Errorf("a certificate without a URI names %s", id)
	}
}

func TestNodesThatCannotBe(t *testing.T) {
	for _, name := range []string{"", "A", "a_b", "-a", "a-", ".a", "a..b", "a/b", "a b", "a\n", strings.Repeat("a", 254)} {
		if id, err := Agent(name); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Agent(%q) = %s, %v", name, id, err)
		}
	}
	if id, err := Agent("node-1.example"); err != nil || id.Node() != "node-1.example" || Controller().Node() != "" {
		t.Errorf("Agent = %v, %v", id, err)
	}
}

// What a CA signs says one thing only, whatever else the profile of a certificate could say.
func TestWhatIsSigned(t *testing.T) {
	ca := newCA(t, start)
	bundle := bundleOf(t, ca)
	for name, tc := range map[string]struct {
		cert     *tls.Certificate
		usage    x509.ExtKeyUsage
		other    x509.ExtKeyUsage
		id       string
		validity time.Duration
	}{
		"agent":      {agentCert(t, ca, start, "a"), x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth, "the agent of node a", AgentValidity},
		"controller": {controllerCert(t, ca, start), x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth, "the controller", ControllerValidity},
		"server":     {serverCert(t, ca, start, "svc.ns"), x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth, "nobody", ControllerValidity},
	} {
		leaf := tc.cert.Leaf
		id, _ := Of(leaf)
		if id.String() != tc.id || len(leaf.IPAddresses)+len(leaf.EmailAddresses)+len(leaf.Subject.Names) != 0 || len(leaf.DNSNames) > 0 && tc.id != "nobody" {
			t.Errorf("%s: names %s, DNS %v", name, id, leaf.DNSNames)
		}
		if leaf.IsCA || leaf.KeyUsage != x509.KeyUsageDigitalSignature || leaf.SerialNumber.BitLen() < 64 {
			t.Errorf("%s: CA %v, usage %v, serial %v", name, leaf.IsCA, leaf.KeyUsage, leaf.SerialNumber)
		}
		if !leaf.NotBefore.Equal(start.Add(-Skew)) || !leaf.NotAfter.Equal(start.Add(tc.validity)) {
			t.Errorf("%s: valid from %s to %s", name, leaf.NotBefore, leaf.NotAfter)
		}
		chain := []*x509.Certificate{leaf}
		if err := bundle.Verify(chain, tc.usage, start); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if bundle.Verify(chain, tc.other, start) == nil {
			t.Errorf("%s can be used as a certificate of the other side", name)
		}
		for when, ok := range map[time.Duration]bool{-Skew: true, -Skew - time.Second: false, tc.validity: true, tc.validity + time.Second: false} {
			if err := bundle.Verify(chain, tc.usage, start.Add(when)); (err == nil) != ok {
				t.Errorf("%s, %s after it was signed: %v", name, when, err)
			}
		}
		// Nor can it sign, although its key is real.
		forger := &CA{cert: leaf, key: tc.cert.PrivateKey.(*ecdsa.PrivateKey)}
		key := newKey(t)
		forged, err := forger.SignController(start, &key.PublicKey)
		if err != nil {
			t.Fatal(err)
		}
		der, err := x509.ParseCertificate(forged[0])
		if err != nil {
			t.Fatal(err)
		}
		if bundle.Verify([]*x509.Certificate{der, leaf}, x509.ExtKeyUsageClientAuth, start) == nil {
			t.Errorf("%s: signed a certificate of the controller that is accepted", name)
		}
	}
	if _, err := ca.SignAgent(start, "no/node", &newKey(t).PublicKey); !errdefs.IsInvalidArgument(err) {
		t.Errorf("an impossible node: %v", err)
	}
	if _, err := ca.SignServer(start, nil, &newKey(t).PublicKey); err == nil {
		t.Error("a server without a name")
	}
}

func TestNothingOutlivesItsCA(t *testing.T) {
	ca := newCA(t, start)
	nearEnd := start.Add(CAValidity - time.Minute)
	if c := agentCert(t, ca, nearEnd, "a"); !c.Leaf.NotAfter.Equal(ca.cert.NotAfter) {
		t.Errorf("valid until %s, its CA until %s", c.Leaf.NotAfter, ca.cert.NotAfter)
	}
	for _, at := range []time.Time{start.Add(CAValidity), start.Add(-time.Hour)} {
		if _, err := ca.SignAgent(at, "a", &newKey(t).PublicKey); err == nil {
			t.Errorf("a CA that is not valid at %s signs", at)
		}
	}
}

func TestCASurvivesItsFile(t *testing.T) {
	ca, other := newCA(t, start), newCA(t, start)
	cert, key, err := ca.PEM()
	if err != nil {
		t.Fatal(err)
	}
	otherCert, otherKey, err := other.PEM()
	if err != nil {
		t.Fatal(err)
	}
	read, err := ParseCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	if read.Name() != ca.Name() || ca.Name() == other.Name() {
		t.Errorf("names %s, %s and %s", read.Name(), ca.Name(), other.Name())
	}
	if err := bundleOf(t, ca).Verify([]*x509.Certificate{agentCert(t, read, start, "a").Leaf}, x509.ExtKeyUsageServerAuth, start); err != nil {
		t.Error(err)
	}
	for name, files := range map[string][2][]byte{
		"another key":      {cert, otherKey},
		"two certificates": {append(cert, otherCert...), key},
		"no certificate":   {nil, key},
		"no key":           {cert, nil},
		"swapped":          {key, cert},
		"rubbish":          {[]byte("x"), []byte("y")},
		"two keys":         {cert, append(key, otherKey...)},
	} {
		if _, err := ParseCA(files[0], files[1]); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// The order of events in the life of two CAs: made, trusted, signing, ended.
func TestSuccession(t *testing.T) {
	first := newCA(t, start)
	cas := NewAuthorities(first)
	const day = 24 * time.Hour
	if cas.NeedSuccessor(start.Add(CAValidity - successorBefore)) {
		t.Error("a successor is made too early")
	}
	due := start.Add(CAValidity - successorBefore + time.Second)
	if !cas.NeedSuccessor(due) || !Authorities(nil).NeedSuccessor(due) {
		t.Error("no successor is made")
	}
	second := newCA(t, due)
	cas = NewAuthorities(second, first)
	if cas.NeedSuccessor(due) {
		t.Error("a third is made")
	}
	for _, tc := range []struct {
		at     time.Time
		signer *CA
		trust  int
	}{
		{start, first, 2}, // second not valid yet
		{due, first, 2},
		{due.Add(Settle - time.Second), first, 2},
		{due.Add(Settle), second, 2},
		{start.Add(CAValidity - time.Second), second, 2},
		{start.Add(CAValidity), second, 1},
		{due.Add(CAValidity - day), second, 1},
		{due.Add(CAValidity), nil, 0},
	} {
		signer, err := cas.Signer(tc.at)
		if signer != tc.signer || (err == nil) != (tc.signer != nil) {
			t.Errorf("at %s the signer is %v, %v", tc.at, signer, err)
		}
		bundle, err := cas.Bundle(tc.at)
		if (err == nil) != (tc.trust > 0) || err == nil && len(bundle.DER()) != tc.trust {
			t.Errorf("at %s the bundle is %v, %v; want %d", tc.at, bundle, err, tc.trust)
		}
	}
	// Right after a CA was replaced by force nobody has settled, and the new one signs at once.
	fresh := newCA(t, due)
	if signer, err := NewAuthorities(fresh).Signer(due); signer != fresh {
		t.Errorf("the only CA does not sign: %v", err)
	}
}

func TestBundleFileFollowsTheFile(t *testing.T) {
	a, b := newCA(t, start), newCA(t, start)
	var text []byte
	var readErr error
	f := NewBundleFile(func() ([]byte, error) { return text, readErr })
	if _, err := f.Bundle(); err == nil {
		t.Error("an empty file is a bundle")
	}
	text = bundleOf(t, a).PEM()
	first, err := f.Bundle()
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := f.Bundle(); again != first {
		t.Error("the same file is parsed again")
	}
	text = bundleOf(t, a, b).PEM()
	second, err := f.Bundle()
	if err != nil || len(second.DER()) != 2 {
		t.Errorf("a second CA: %v, %v", second, err)
	}
	if back, err := ParseBundleDER(second.DER()); err != nil || string(back.PEM()) != string(text) {
		t.Errorf("DER and PEM differ: %v", err)
	}
	for name, bad := range map[string][]byte{"cut off": text[:len(text)-40], "no CA": pemOf(agentCert(t, a, start, "x")), "key": keyPEM(t, a)} {
		text = bad
		if _, err := f.Bundle(); err == nil {
			t.Errorf("%s: trusted", name)
		}
	}
	text, readErr = bundleOf(t, a).PEM(), net.ErrClosed
	if _, err := f.Bundle(); err == nil {
		t.Error("a file that cannot be read is trusted")
	}
	if _, err := ParseBundleDER([][]byte{{1, 2}}); err == nil {
		t.Error("rubbish in DER is trusted")
	}
}

func pemOf(c *tls.Certificate) []byte { return (&Bundle{certs: []*x509.Certificate{c.Leaf}}).PEM() }

func keyPEM(t *testing.T, ca *CA) []byte {
	_, key, err := ca.PEM()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestRequests(t *testing.T) {
	a, err := Agent("a")
	if err != nil {
		t.Fatal(err)
	}
	b, err := Agent("b")
	if err != nil {
		t.Fatal(err)
	}
	key := newKey(t)
	for name, id := range map[string]ID{"names its node": a, "names nobody": {}} {
		csr, err := NewRequest(key, id)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := CheckRequest(csr, a); err != nil || !key.PublicKey.Equal(got) {
			t.Errorf("%s: %v", name, err)
		}
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	request := func(key any, change func(*x509.CertificateRequest)) []byte {
		template := &x509.CertificateRequest{}
		change(template)
		der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	plain := func(*x509.CertificateRequest) {}
	forged := request(key, plain)
	forged[len(forged)-1] ^= 1
	for name, tc := range map[string]struct {
		der  []byte
		says string
	}{
		"another node":   {request(key, func(r *x509.CertificateRequest) { r.URIs = []*url.URL{b.URI()} }), "is the agent of node a"},
		"the controller": {request(key, func(r *x509.CertificateRequest) { r.URIs = []*url.URL{Controller().URI()} }), "sandbox.flux.io/controller"},
		"both":           {request(key, func(r *x509.CertificateRequest) { r.URIs = []*url.URL{a.URI(), b.URI()} }), "node/b"},
		"a DNS name":     {request(key, func(r *x509.CertificateRequest) { r.DNSNames = []string{"controller.svc"} }), "leave them out"},
		"an address":     {request(key, func(r *x509.CertificateRequest) { r.IPAddresses = []net.IP{{1, 2, 3, 4}} }), "leave them out"},
		"a subject":      {request(key, func(r *x509.CertificateRequest) { r.Subject = pkix.Name{CommonName: "controller"} }), "leave them out"},
		"another type":   {request(p384, plain), "P-256"},
		"not its key":    {forged, "not signed"},
		"rubbish":        {[]byte("rubbish"), "PKCS #10"},
		"nothing":        {nil, "PKCS #10"},
	} {
		if _, err := CheckRequest(tc.der, a); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
