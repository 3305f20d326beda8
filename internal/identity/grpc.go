package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
)

// ConnectionAge is how long a connection to an agent takes new calls, a tenth more or less: half the life of the
// certificate that it was opened with.
const ConnectionAge = ControllerValidity / 2

// handshakeTimeout bounds how long a connection may take to become one.
const handshakeTimeout = 10 * time.Second

// ServerOptions are the options of a gRPC server with TLS whose connections take new calls for a time (age, as
// [ConnectionAge]; calls that run then go on) and whose refusals are reported: gRPC itself tells nobody. The error
// that refused gets says who was refused and why; it may be called from any goroutine, and may be nil.
func ServerOptions(config *tls.Config, age time.Duration, refused func(error)) []grpc.ServerOption {
	if refused == nil {
		refused = func(error) {}
	}
	return []grpc.ServerOption{
		grpc.Creds(&reporting{TransportCredentials: credentials.NewTLS(config), refused: refused}),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: age}),
		grpc.ConnectionTimeout(handshakeTimeout),
	}
}

// reporting are credentials that report failed handshakes.
type reporting struct {
	credentials.TransportCredentials
	refused func(error)
}

func (r *reporting) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	held := &heldConn{Conn: raw}
	conn, info, err := r.TransportCredentials.ServerHandshake(held)
	if err != nil {
		r.refused(fmt.Errorf("refused a connection from %s by %s: %w", raw.RemoteAddr(), holder(err), err))
		held.linger()
		return nil, nil, err
	}
	held.established.Store(true)
	return conn, info, nil
}

func (r *reporting) Clone() credentials.TransportCredentials {
	return &reporting{TransportCredentials: r.TransportCredentials.Clone(), refused: r.refused}
}

// holder is whom the certificate that was refused claims to be, as far as the error has it.
func holder(err error) string {
	var verification *tls.CertificateVerificationError
	if errors.As(err, &verification) && len(verification.UnverifiedCertificates) > 0 {
		return claim(verification.UnverifiedCertificates[0])
	}
	var header tls.RecordHeaderError
	if errors.As(err, &header) {
		return "a peer that does not speak TLS"
	}
	return "a peer"
}

func claim(cert *x509.Certificate) string {
	id, err := Of(cert)
	if err != nil {
		return "a peer whose certificate names nobody"
	}
	return "a peer whose certificate claims to be " + id.String()
}

// lingerTime bounds how long a refused peer has to read why.
const lingerTime = time.Second

// heldConn is a connection that is not closed before its handshake has succeeded. A client of TLS 1.3 that is refused
// has begun to send already; were the connection closed upon that, the alert that says why would be lost to it.
type heldConn struct {
	net.Conn
	established atomic.Bool
}

// Close closes the connection if its handshake has succeeded.
func (c *heldConn) Close() error {
	if !c.established.Load() {
		return nil
	}
	return c.Conn.Close()
}

// SyscallConn lets gRPC set the options of the socket.
func (c *heldConn) SyscallConn() (syscall.RawConn, error) {
	if s, ok := c.Conn.(syscall.Conn); ok {
		return s.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}

// linger ends sending, reads until the peer has closed its side, for a time, and closes.
func (c *heldConn) linger() {
	defer c.Conn.Close()
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil || c.SetReadDeadline(time.Now().Add(lingerTime)) != nil {
		return
	}
	_, _ = io.Copy(io.Discard, c.Conn) // ends with the peer or the deadline
}
