package kube

import (
	"sync/atomic"
	"testing"

	"github.com/flux-sandbox/flux-sandbox/internal/store"
	"github.com/flux-sandbox/flux-sandbox/internal/store/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Backend {
		c := newCluster(t)
		var countdown atomic.Int64
		return storetest.Backend{
			Store:         c.open(failing(&countdown)),
			KnownMetadata: true,
			FailWrite:     func(n int) { countdown.Store(int64(n)) },
			Raw:           func(key store.Key) map[string]any { return c.raw(key.Namespace, key.Name).Object },
			EditRaw:       func(key store.Key, edit func(map[string]any)) { c.edit(key.Namespace, key.Name, edit) },
		}
	})
}
