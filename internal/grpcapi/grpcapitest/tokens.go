package grpcapitest

import (
	"context"

	"google.golang.org/grpc/metadata"

	"github.com/flux-sandbox/flux-sandbox/internal/grpcapi"
)

// Tokens is for Start: it tells of what each call has for an authorization. Everybody may do everything.
func Tokens(seen func(authorization []string)) func(*grpcapi.Options) {
	return func(o *grpcapi.Options) { o.Authenticator = tokens(seen) }
}

type tokens func([]string)

func (t tokens) Authenticate(ctx context.Context) (grpcapi.Identity, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	t(md.Get("authorization"))
	return grpcapi.Identity{Name: "somebody"}, nil
}
