package kube

import (
	"context"
	"encoding/json"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// newRESTClient is a client of sandbox.flux.io.
func newRESTClient(config *rest.Config) (*rest.RESTClient, error) {
	return newRESTClientOf(config, v1alpha1.GroupVersion)
}

// newRESTClientOf is a client of one of our API groups.
func newRESTClientOf(config *rest.Config, version schema.GroupVersion) (*rest.RESTClient, error) {
	c := rest.CopyConfig(config)
	c.APIPath = "/apis"
	c.GroupVersion = &version
	c.NegotiatedSerializer = codecs
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	if c.QPS == 0 && c.RateLimiter == nil {
		// client-go would allow 5 requests a second. The API server has its own way (priority and fairness).
		c.QPS = -1
	}
	return rest.RESTClientFor(c)
}

// client makes the requests for one kind. Errors are the API server's, or the connection's.
type client[T store.Object] struct {
	rest     rest.Interface
	resource string
}

func (c client[T]) get(ctx context.Context, key store.Key) (*record[T], error) {
	r := &record[T]{}
	return r, c.rest.Get().Namespace(key.Namespace).Resource(c.resource).Name(key.Name).Do(ctx).Into(r)
}

func (c client[T]) create(ctx context.Context, namespace string, object []byte) (*record[T], error) {
	r := &record[T]{}
	return r, c.rest.Post().Namespace(namespace).Resource(c.resource).
		SetHeader("Content-Type", runtime.ContentTypeJSON).Body(object).Do(ctx).Into(r)
}

// patch applies a JSON Patch to the object, or to a subresource.
func (c client[T]) patch(ctx context.Context, key store.Key, patch []byte, subresource ...string) (*record[T], error) {
	r := &record[T]{}
	return r, c.rest.Patch(types.JSONPatchType).Namespace(key.Namespace).Resource(c.resource).Name(key.Name).
		SubResource(subresource...).Body(patch).Do(ctx).Into(r)
}

// deleteWith deletes the object if it still is in this state. It returns the object when it stays for its finalizers, nil
// when it is gone.
func (c client[T]) deleteWith(ctx context.Context, now *record[T], o metav1.DeleteOptions) (*record[T], error) {
	uid, version := now.uid(), now.object.GetResourceVersion()
	o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "DeleteOptions"}
	o.Preconditions = &metav1.Preconditions{UID: &uid, ResourceVersion: &version}
	options, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	key := now.key()
	answer, err := c.rest.Delete().Namespace(key.Namespace).Resource(c.resource).Name(key.Name).
		SetHeader("Content-Type", runtime.ContentTypeJSON).Body(options).Do(ctx).Get()
	r, _ := answer.(*record[T])
	return r, err
}

func (c client[T]) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	l := &recordList[T]{}
	return l, c.rest.Get().Resource(c.resource).VersionedParams(&options, parameterCodec).Do(ctx).Into(l)
}

func (c client[T]) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	options.Watch = true
	r := c.rest.Get().Resource(c.resource).VersionedParams(&options, parameterCodec)
	if options.TimeoutSeconds != nil {
		r = r.Timeout(time.Duration(*options.TimeoutSeconds) * time.Second)
	}
	return r.Watch(ctx)
}
