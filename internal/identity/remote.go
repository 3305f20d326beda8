package identity

import (
	"context"
	"fmt"

	"google.golang.org/grpc"

	nodev1 "github.com/flux-sandbox/flux-sandbox/api/proto/node/v1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// NewRemoteIssuer is the Issuer of an agent: the controller, asked over a connection with TLS. The token is read anew
// for each request, as kubelet replaces it; it never travels over a connection without TLS.
func NewRemoteIssuer(conn grpc.ClientConnInterface, token func() (string, error)) Issuer {
	client := nodev1.NewNodeCertificateServiceClient(conn)
	return IssuerFunc(func(ctx context.Context, csr []byte) (*Issued, error) {
		resp, err := client.Issue(ctx, &nodev1.IssueRequest{Csr: csr}, grpc.PerRPCCredentials(Bearer(token)))
		if err != nil {
			return nil, fmt.Errorf("ask the controller for a certificate: %w", fault.FromGRPC(err))
		}
		bundle, err := ParseBundleDER(resp.GetBundle())
		if err != nil {
			return nil, err
		}
		return &Issued{Chain: resp.GetChain(), Bundle: bundle}, nil
	})
}

// Bearer sends a token with each call (authorization: Bearer), over TLS only. The function is called for each call.
type Bearer func() (string, error)

// GetRequestMetadata is called by gRPC.
func (b Bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := b()
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity makes gRPC refuse to send a token in clear.
func (Bearer) RequireTransportSecurity() bool { return true }
