package churn

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// patient asks again when the API server has had no time for a request, or the connection was lost meanwhile (client and server
// give each other half a minute). Who acts here is to be no reason for a run to fail on a machine that is short of time, and what
// he does can be done twice, as all is named; the controller has no such help.
type patient struct{ next http.RoundTripper }

// tries is how often is asked; the API server takes a minute to give one up.
const tries = 5

// RoundTrip implements http.RoundTripper.
func (p patient) RoundTrip(q *http.Request) (*http.Response, error) {
	for try := 1; ; try++ {
		r, err := p.next.RoundTrip(q)
		late := err == nil && r.StatusCode == http.StatusGatewayTimeout || err != nil && q.Context().Err() == nil
		if !late || try == tries || q.Body != nil && q.GetBody == nil {
			return r, err
		}
		if err == nil {
			r.Body.Close()
		}
		q = q.Clone(q.Context())
		if q.GetBody != nil {
			if q.Body, err = q.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

// A request that the API server gave up, or that was lost, is sent again as it was, and no other is.
func TestPatience(t *testing.T) {
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		body := must(io.ReadAll(r.Body))
		switch n := asked.Add(1); {
		case r.URL.Path == "/refused":
			out.WriteHeader(http.StatusConflict)
		case string(body) != "what is asked":
			out.WriteHeader(http.StatusBadRequest)
		case n < 3 && r.URL.Path == "/lost":
			panic(http.ErrAbortHandler)
		case n < 3 || r.URL.Path == "/never":
			out.WriteHeader(http.StatusGatewayTimeout)
		}
	}))
	defer server.Close()
	client := &http.Client{Transport: patient{http.DefaultTransport}}
	for path, want := range map[string]struct{ code, asked int }{
		"/late": {http.StatusOK, 3}, "/lost": {http.StatusOK, 3}, "/refused": {http.StatusConflict, 1}, "/never": {http.StatusGatewayTimeout, tries},
	} {
		asked.Store(0)
		r := must(client.Post(server.URL+path, "text/plain", strings.NewReader("what is asked")))
		r.Body.Close()
		if r.StatusCode != want.code || int(asked.Load()) != want.asked {
			t.Errorf("%s: code %d after %d requests, want %d after %d", path, r.StatusCode, asked.Load(), want.code, want.asked)
		}
	}
}
