package churn

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// way is the controller's way to the API server: a proxy that gives it the ServiceAccount that it has in a cluster, with
// that one's rights, and that loses and refuses what it may.
type way struct {
	kubeconfig string
	faulty     atomic.Bool
	faults     atomic.Int64

	mu   sync.Mutex // guards dice
	dice *rand.Rand
}

// account is the controller's ServiceAccount.
const account = "system:serviceaccount:" + system + ":flux-sandbox-controller"

func (w *way) start(t *testing.T, config *rest.Config) {
	t.Helper()
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: account, Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + system}}
	transport := must(rest.TransportFor(config))
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(must(url.Parse(config.Host))) },
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      log.New(discard{}, "", 0),
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) { w.serve(proxy, out, r) }))
	server.Config.ErrorLog = log.New(discard{}, "", 0)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	w.kubeconfig = kubeconfig(t, server.URL, server.Certificate().Raw)
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

func (w *way) roll(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dice.IntN(n)
}

// serve passes a request on, or not.
func (w *way) serve(next http.Handler, out http.ResponseWriter, r *http.Request) {
	if !w.faulty.Load() {
		next.ServeHTTP(out, r)
		return
	}
	if r.URL.Query().Get("watch") != "" && w.roll(3) == 0 {
		// It is cut after a while.
		ctx, cancel := context.WithTimeout(r.Context(), time.Duration(1+w.roll(20))*time.Second)
		defer cancel()
		next.ServeHTTP(out, r.WithContext(ctx))
		return
	}
	reads := r.Method == http.MethodGet
	switch dice := w.roll(100); {
	case dice == 0:
		w.faults.Add(1)
		refuse(out, http.StatusServiceUnavailable, "ServiceUnavailable")
	case dice == 1:
		w.faults.Add(1)
		out.Header().Set("Retry-After", "1")
		refuse(out, http.StatusTooManyRequests, "TooManyRequests")
	case dice == 2:
		w.faults.Add(1)
		refuse(out, http.StatusInternalServerError, "InternalError")
	case dice == 3:
		w.faults.Add(1)
		panic(http.ErrAbortHandler) // it was never passed on
	case dice <= 6 && !reads:
		w.faults.Add(1)
		next.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler) // it was done, and nobody is told
	default:
		next.ServeHTTP(out, r)
	}
}

func refuse(out http.ResponseWriter, code int, reason string) {
	out.Header().Set("Content-Type", "application/json")
	out.WriteHeader(code)
	fmt.Fprintf(out, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q,"message":"injected: %s"}`, code, reason, strings.ToLower(reason))
}
