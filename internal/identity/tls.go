package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"k8s.io/utils/clock"
)

// Credentials are what one party shows and whom it trusts. Every configuration made of them calls the functions at
// each handshake, from any goroutine, so what they return may change at any time. Their errors end the handshake.
type Credentials struct {
	// Certificate is the party's own, with its key; a [Renewer] has it.
	Certificate func() (*tls.Certificate, error)
	// Bundle is the CAs to trust.
	Bundle func() (*Bundle, error)
	// Clock decides what has expired; the system's when nil.
	Clock clock.PassiveClock
}

func (c Credentials) now() time.Time {
	if c.Clock == nil {
		return time.Now()
	}
	return c.Clock.Now()
}

// alpn is the protocol of gRPC, the only one that is spoken.
var alpn = []string{"h2"}

// AgentServer is the configuration of an agent's server. Whoever connects must show the controller's certificate,
// signed by a CA of the bundle and valid now; another agent is refused like a stranger.
func (c Credentials) AgentServer() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			own, err := c.Certificate()
			if err != nil {
				return nil, err
			}
			bundle, err := c.Bundle()
			if err != nil {
				return nil, err
			}
			return &tls.Config{
				MinVersion:             tls.VersionTLS13,
				NextProtos:             alpn,
				SessionTicketsDisabled: true,
				Certificates:           []tls.Certificate{*own},
				// By Go's own verification, as its alerts tell the other side most: no certificate, unknown CA, expired.
				ClientAuth: tls.RequireAndVerifyClientCert,
				ClientCAs:  bundle.pool,
				Time:       c.now,
				VerifyConnection: func(state tls.ConnectionState) error {
					return expect(state, Controller())
				},
			}, nil
		},
	}
}

// ControllerClient is the configuration with which the controller dials the agent of a node. What answers must be the
// agent of exactly that node, whatever address it answers at. The error says that no node can have that name.
func (c Credentials) ControllerClient(node string) (*tls.Config, error) {
	id, err := Agent(node)
	if err != nil {
		return nil, err
	}
	config := verifying(func(state tls.ConnectionState) error {
		bundle, err := c.Bundle()
		if err != nil {
			return err
		}
		if err := bundle.Verify(state.PeerCertificates, x509.ExtKeyUsageServerAuth, c.now()); err != nil {
			return fmt.Errorf("what answers for %s is not to be trusted: %w", id, err)
		}
		return expect(state, id)
	})
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return c.Certificate() }
	return config, nil
}

// ControllerServer is the configuration of the controller's gRPC servers. Callers show no certificate: they are told
// by their tokens.
func (c Credentials) ControllerServer() *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		NextProtos:             alpn,
		SessionTicketsDisabled: true,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.Certificate() },
	}
}

// ServiceClient is the configuration with which agents and users dial the controller's gRPC servers: what answers
// must have a certificate for the DNS name (or IP address), whatever address was dialled. Of the credentials, only
// Bundle and Clock count; with a nil Bundle the CAs of this machine are trusted.
func (c Credentials) ServiceClient(name string) *tls.Config {
	return verifying(func(state tls.ConnectionState) error {
		err := c.verifyService(state.PeerCertificates, name)
		if err != nil {
			return fmt.Errorf("what answers for %s is not to be trusted: %w", name, err)
		}
		return nil
	})
}

func (c Credentials) verifyService(chain []*x509.Certificate, name string) error {
	if len(chain) == 0 {
		return errors.New("no certificate was shown")
	}
	bundle := &Bundle{} // its nil pool stands for the machine's CAs
	if c.Bundle != nil {
		var err error
		if bundle, err = c.Bundle(); err != nil {
			return err
		}
	}
	if err := bundle.Verify(chain, x509.ExtKeyUsageServerAuth, c.now()); err != nil {
		return err
	}
	return chain[0].VerifyHostname(name)
}

// verifying is the configuration of a client that verifies the server by a function of its own, as the CAs to trust
// cannot be given to crypto/tls by a function. It is called for every connection, and nothing else is trusted.
func verifying(verify func(tls.ConnectionState) error) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         alpn,
		InsecureSkipVerify: true, // crypto/tls does not verify: verify does
		VerifyConnection:   verify,
	}
}

// expect refuses a peer, whose certificate is verified, that is somebody else.
func expect(state tls.ConnectionState, want ID) error {
	if len(state.PeerCertificates) == 0 {
		return fmt.Errorf("no certificate was shown; it must be that of %s", want)
	}
	got, err := Of(state.PeerCertificates[0])
	if err != nil {
		return fmt.Errorf("the peer is not %s: %w", want, err)
	}
	if got != want {
		return fmt.Errorf("the peer is %s, and it must be %s", got, want)
	}
	return nil
}
