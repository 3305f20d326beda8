// Package tokens reads the bearer token of a gRPC call and has the API server say whose it is (TokenReview).
//
// An error's text is for the caller, who may be anybody: it never repeats the token, nor what the API server said of
// it, which is the error's cause, for the log.
package tokens

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/metadata"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/fault"
)

// Bearer is the token in a call's metadata (authorization: Bearer <token>, RFC 6750 section 2.1). None, or more than
// one, is an error of the kind ErrUnauthenticated.
func Bearer(ctx context.Context) (string, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	values := md.Get("authorization")
	if len(values) != 1 {
		return "", unauthenticated(nil, "the call has no token, or several: send one as metadata, authorization: Bearer <token>")
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	if token = strings.TrimSpace(token); !strings.EqualFold(scheme, "bearer") || token == "" {
		return "", unauthenticated(nil, "the call's authorization is no bearer token: send authorization: Bearer <token>")
	}
	return token, nil
}

// Review has the API server say whose a token is. It must be meant for the audience; the empty one stands for the API
// server itself. Errors: ErrUnauthenticated; ErrUnavailable, reason AUTH_UNAVAILABLE, when nobody could say.
func Review(ctx context.Context, reviews authenticationclient.TokenReviewInterface, token, audience string) (authenticationv1.UserInfo, error) {
	review := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if audience != "" {
		review.Spec.Audiences = []string{audience}
	}
	answer, err := reviews.Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return authenticationv1.UserInfo{}, Unavailable(err, "the token could not be checked, as the API server did not answer: try again")
	}
	said := answer.Status
	if !said.Authenticated || said.User.Username == "" {
		return authenticationv1.UserInfo{}, unauthenticated(cause(said.Error), "the token is not valid %s: it is expired, was withdrawn or is meant for something else; get a new one", meantFor(audience))
	}
	// An API server that does not know audiences leaves them out, and has not checked ours.
	if audience != "" && !slices.Contains(said.Audiences, audience) {
		return authenticationv1.UserInfo{}, unauthenticated(errors.New("the API server did not confirm the audience"), "the token is not valid %s", meantFor(audience))
	}
	return said.User, nil
}

// Unavailable is the error of a question that the API server did not answer.
func Unavailable(err error, sentence string) error {
	return &fault.Error{Kind: errdefs.ErrUnavailable, Reason: fault.AuthUnavailable, Message: sentence, Err: err}
}

// Cause is what is behind an error of this package, for the log; the error itself if there is nothing.
func Cause(err error) error {
	var f *fault.Error
	if errors.As(err, &f) && f.Err != nil {
		return f.Err
	}
	return err
}

func unauthenticated(cause error, format string, args ...any) error {
	e := fault.New(errdefs.ErrUnauthenticated, fault.Unauthenticated, format, args...)
	e.Err = cause
	return e
}

func cause(text string) error {
	if text == "" {
		return nil
	}
	return errors.New(text)
}

func meantFor(audience string) string {
	if audience == "" {
		return "here"
	}
	return "for the audience " + audience
}
