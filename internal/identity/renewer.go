package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

const (
	// recheck is how often a Renewer looks whether its certificate still holds, a local question, and thereby notices
	// a clock that was set.
	recheck = time.Minute
	// firstBackoff and maxBackoff bound the time between attempts to get a certificate; it doubles, and half of it is
	// chance, so that the agents of a cluster do not ask all at once.
	firstBackoff = time.Second
	maxBackoff   = time.Minute
	// issueTimeout bounds one attempt.
	issueTimeout = 30 * time.Second
)

// Issued is a certificate with those who vouch for it.
type Issued struct {
	// Chain is in DER, the leaf first.
	Chain [][]byte
	// Bundle is the CAs to trust, as the issuer sees them.
	Bundle *Bundle
}

// Issuer signs certificates.
type Issuer interface {
	// Issue signs a certificate for the key of a certificate signing request (PKCS #10, DER). It is called by one
	// goroutine, again after any error.
	Issue(ctx context.Context, csr []byte) (*Issued, error)
}

// IssuerFunc is an Issuer that is a function.
type IssuerFunc func(ctx context.Context, csr []byte) (*Issued, error)

// Issue calls the function.
func (f IssuerFunc) Issue(ctx context.Context, csr []byte) (*Issued, error) { return f(ctx, csr) }

// RenewerOptions are what a Renewer is made of.
type RenewerOptions struct {
	// Issuer is required.
	Issuer Issuer
	// ID is whom the certificate must name; the zero ID for a server's, which has DNS names.
	ID ID
	// Usage is what the certificate must be for.
	Usage x509.ExtKeyUsage
	// Trust is the CAs that the other side trusts as far as is known here. A certificate that they do not vouch for
	// is renewed. Nil: those that came with the certificate.
	Trust func() (*Bundle, error)
	// Renewed is told the result of every attempt, for metrics; may be nil.
	Renewed func(error)
	// Clock is the system's when nil.
	Clock clock.Clock
	// Logger is slog's default when nil.
	Logger *slog.Logger
}

// Renewer keeps a certificate fresh. Its key is made anew for each certificate and is in memory only. Methods may be
// called from any goroutine.
type Renewer struct {
	options RenewerOptions
	log     *slog.Logger
	ready   chan struct{}

	mu      sync.RWMutex // guards what follows
	current *tls.Certificate
	bundle  *Bundle
	got     time.Time // when the current one came
	due     time.Time // when it is to be renewed
	failure error     // of the last attempt
}

// NewRenewer makes a Renewer; call Run.
func NewRenewer(options RenewerOptions) *Renewer {
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	if options.Renewed == nil {
		options.Renewed = func(error) {}
	}
	return &Renewer{options: options, log: options.Logger, ready: make(chan struct{})}
}

// Ready is closed when there is a first certificate.
func (r *Renewer) Ready() <-chan struct{} { return r.ready }

// Certificate is the current one, as [Credentials] wants it. One that has expired is returned like any other: the
// peer refuses it and can say why. Before the first there is an error.
func (r *Renewer) Certificate() (*tls.Certificate, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.current != nil {
		return r.current, nil
	}
	if r.failure != nil {
		return nil, fmt.Errorf("there is no certificate yet: %w", r.failure)
	}
	return nil, errors.New("there is no certificate yet")
}

// Bundle is the CAs that came with the certificate.
func (r *Renewer) Bundle() (*Bundle, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.bundle == nil {
		return nil, errors.New("there is no trust bundle yet: it comes with the certificate")
	}
	return r.bundle, nil
}

// NotAfter is when the current certificate ends, for metrics and probes; zero before the first.
func (r *Renewer) NotAfter() time.Time {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.current == nil {
		return time.Time{}
	}
	return r.current.Leaf.NotAfter
}

// Run gets certificates until ctx ends. Errors of the issuer are retried for ever: whatever is wrong, somebody may put
// it right.
func (r *Renewer) Run(ctx context.Context) {
	failures := 0
	for {
		wait := r.holds()
		if wait <= 0 {
			switch err := r.renew(ctx); {
			case ctx.Err() != nil:
				return
			case err != nil:
				wait = Backoff(failures)
				failures++
				r.log.Warn("certificate not renewed", "error", err, "validUntil", r.NotAfter(), "retryIn", wait.Round(time.Millisecond))
			default:
				failures = 0
				continue
			}
		}
		timer := r.options.Clock.NewTimer(wait)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// holds is how long the current certificate need not be looked at again; 0 when it has to be renewed.
func (r *Renewer) holds() time.Duration {
	r.mu.RLock()
	current, got, due := r.current, r.got, r.due
	r.mu.RUnlock()
	if current == nil {
		return 0
	}
	now := r.options.Clock.Now()
	if r.options.Trust != nil {
		bundle, err := r.options.Trust()
		// A bundle that cannot be read is not the certificate's fault; handshakes fail and say so. One that does not
		// vouch for a new certificate either may lag behind the issuer: it is given a minute.
		if err == nil && bundle.Verify([]*x509.Certificate{current.Leaf}, r.options.Usage, now) != nil {
			due = got.Add(recheck)
		}
	}
	return min(due.Sub(now), recheck)
}

// renew gets one certificate.
func (r *Renewer) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, issueTimeout)
	defer cancel()
	cert, bundle, err := r.issue(ctx)
	r.options.Renewed(err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failure = err
	if err != nil {
		return err
	}
	if r.current == nil {
		close(r.ready)
	}
	r.current, r.bundle, r.got = cert, bundle, r.options.Clock.Now()
	r.due = renewAt(r.got, cert.Leaf.NotAfter, rand.Float64())
	r.log.Info("certificate renewed", "validUntil", cert.Leaf.NotAfter, "renewAt", r.due)
	return nil
}

func (r *Renewer) issue(ctx context.Context) (*tls.Certificate, *Bundle, error) {
	key, err := NewKey()
	if err != nil {
		return nil, nil, err
	}
	csr, err := NewRequest(key, r.options.ID)
	if err != nil {
		return nil, nil, err
	}
	issued, err := r.options.Issuer.Issue(ctx, csr)
	if err != nil {
		return nil, nil, err
	}
	chain := make([]*x509.Certificate, len(issued.Chain))
	for i, der := range issued.Chain {
		if chain[i], err = x509.ParseCertificate(der); err != nil {
			return nil, nil, fmt.Errorf("the issuer's certificate cannot be read: %w", err)
		}
	}
	if err := r.check(chain, issued.Bundle, &key.PublicKey); err != nil {
		return nil, nil, fmt.Errorf("the issuer's certificate is of no use: %w", err)
	}
	return &tls.Certificate{Certificate: issued.Chain, PrivateKey: key, Leaf: chain[0]}, issued.Bundle, nil
}

// check refuses a certificate that nobody would accept. Where Trust is not up to date yet, the next look finds that.
func (r *Renewer) check(chain []*x509.Certificate, bundle *Bundle, key *ecdsa.PublicKey) error {
	if bundle == nil {
		return errors.New("no trust bundle came with it")
	}
	if err := bundle.Verify(chain, r.options.Usage, r.options.Clock.Now()); err != nil {
		return err
	}
	if !key.Equal(chain[0].PublicKey) {
		return errors.New("it is for another key")
	}
	if r.options.ID == (ID{}) {
		return nil
	}
	got, err := Of(chain[0])
	if err == nil && got != r.options.ID {
		err = fmt.Errorf("it names %s, and not %s", got, r.options.ID)
	}
	return err
}

// renewAt is two thirds into what is left of a certificate's life, up to a tenth of it earlier by chance (0 to 1), so
// that agents that started together do not stay together.
func renewAt(now, notAfter time.Time, chance float64) time.Time {
	left := notAfter.Sub(now)
	return now.Add(left*2/3 - time.Duration(chance*float64(left)/10))
}

// Backoff is how long to wait before another attempt to get, or to make, what certificates need, after a number of
// failures before this one.
func Backoff(failures int) time.Duration {
	d := maxBackoff
	if failures < 6 {
		d = firstBackoff << failures
	}
	return d/2 + rand.N(d/2)
}
