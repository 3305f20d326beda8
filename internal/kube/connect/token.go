package connect

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

// Audience is whom the tokens are for that are asked for.
const Audience = "sandbox.flux.io/api"

const (
	// lifetime is the shortest that the API server gives (TokenRequest, expirationSeconds); a token is replaced when it has
	// less than soon of it left.
	lifetime = 10 * time.Minute
	soon     = time.Minute
	// tokenTimeout bounds asking for one.
	tokenTimeout = 30 * time.Second
)

// token is how the caller's token is come by.
func (c *Cluster) token(namespace, account string) (func() (string, error), error) {
	if account == "" {
		return c.own, nil
	}
	var mu sync.Mutex // guards what follows
	var text string
	var until time.Time
	return func() (string, error) {
		mu.Lock()
		defer mu.Unlock()
		if time.Until(until) > soon {
			return text, nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), tokenTimeout)
		defer cancel()
		answer, err := c.client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{Audiences: []string{Audience}, ExpirationSeconds: ptr.To(int64(lifetime / time.Second))},
		}, metav1.CreateOptions{})
		switch {
		case apierrors.IsForbidden(err):
			return "", fmt.Errorf("ask for a token of ServiceAccount %s/%s: %w; name one whose tokens you may make (--service-account), or bring a token (--address, --token-file)", namespace, account, err)
		case apierrors.IsNotFound(err):
			return "", fmt.Errorf("there is no ServiceAccount %s in Namespace %s: create it, or name another (--service-account)", account, namespace)
		case err != nil:
			return "", fmt.Errorf("ask for a token of ServiceAccount %s/%s: %w", namespace, account, err)
		}
		text, until = answer.Status.Token, answer.Status.ExpirationTimestamp.Time
		return text, nil
	}, nil
}

// errSeen ends a request that was never to be sent.
var errSeen = errors.New("seen")

// own is the kubeconfig's own token, wherever it has it from: client-go is asked to sign a request, which is not sent.
func (c *Cluster) own() (string, error) {
	var header string
	signed, err := rest.HTTPWrappersForConfig(c.config, roundTripper(func(r *http.Request) (*http.Response, error) {
		header = r.Header.Get("Authorization")
		return nil, errSeen
	}))
	if err != nil {
		return "", fmt.Errorf("the kubeconfig's credentials: %w", err)
	}
	request, err := http.NewRequest(http.MethodGet, c.config.Host, nil)
	if err != nil {
		return "", err
	}
	if _, err := signed.RoundTrip(request); !errors.Is(err, errSeen) {
		return "", fmt.Errorf("the kubeconfig's credentials: %w", err)
	}
	scheme, token, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "bearer") || token == "" {
		return "", errors.New("the kubeconfig has no token, and a client certificate says nothing to the controller: name a ServiceAccount to call as (--service-account)")
	}
	return token, nil
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
