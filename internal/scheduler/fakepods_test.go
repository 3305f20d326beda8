package scheduler

import (
	"context"
	"fmt"
	"iter"
	"sync"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/flux-sandbox/flux-sandbox/api/sandbox/v1alpha1"
	"github.com/flux-sandbox/flux-sandbox/internal/fault"
	"github.com/flux-sandbox/flux-sandbox/internal/store"
)

// fakePods are the Pods of one namespace, by name. The test plays kube-scheduler and kubelet.
type fakePods struct {
	signal chan store.Key

	mu      sync.Mutex // guards all below
	unknown bool       // nothing is known yet
	pods    map[string]*Pod
	// owner is the sandbox that owns a Pod, by the Pod's UID.
	owner    map[types.UID]types.UID
	refuse   error // what Create answers
	creates  int
	deletes  int
	kills    int
	updates  int
	made     int
	forgot   map[types.UID]bool
	followed map[string]store.Key
	// lingers: a deleted Pod has to be taken away by gone.
	lingers bool
}

func newFakePods() *fakePods {
	return &fakePods{signal: make(chan store.Key, 1000), pods: map[string]*Pod{}, owner: map[types.UID]types.UID{}, forgot: map[types.UID]bool{},
		followed: map[string]store.Key{}}
}

func (f *fakePods) orNil() Pods {
	if f == nil {
		return nil
	}
	return f
}

func (f *fakePods) Follow(ctx context.Context) iter.Seq[store.Key] {
	return func(yield func(store.Key) bool) {
		for {
			select {
			case <-ctx.Done():
				return
			case key := <-f.signal:
				if !yield(key) {
					return
				}
			}
		}
	}
}

func podName(sb *v1alpha1.Sandbox) string {
	if sb.Spec.PodRef != nil {
		return sb.Spec.PodRef.Name
	}
	return sb.Name
}

func (f *fakePods) Get(sb *v1alpha1.Sandbox) (*Pod, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.followed[podName(sb)] = store.KeyOf(sb)
	if f.unknown {
		return nil, fault.New(errdefs.ErrUnavailable, fault.Internal, "not read yet")
	}
	pod := f.pods[podName(sb)]
	if pod == nil || sb.Spec.Template != nil && f.owner[pod.UID] != sb.UID {
		return nil, nil
	}
	copied := *pod
	return &copied, nil
}

func (f *fakePods) Read(_ context.Context, sb *v1alpha1.Sandbox) (*Pod, error) { return f.Get(sb) }

func (f *fakePods) Create(_ context.Context, sb *v1alpha1.Sandbox) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.creates++
	if f.refuse != nil {
		return f.refuse
	}
	if pod := f.pods[sb.Name]; pod != nil {
		if f.owner[pod.UID] == sb.UID {
			return nil
		}
		return fault.New(errdefs.ErrAlreadyExists, fault.PodNameTaken, "Pod %s is somebody else's", sb.Name)
	}
	f.owner[f.put(sb.Name)] = sb.UID
	return nil
}

// put makes a Pod. The lock is held.
func (f *fakePods) put(name string) types.UID {
	f.made++
	uid := types.UID(fmt.Sprintf("pod-%d", f.made))
	f.pods[name] = &Pod{Name: name, UID: uid, Phase: corev1.PodPending, Container: "main"}
	f.told(name)
	return uid
}

func (f *fakePods) told(name string) {
	if key, ok := f.followed[name]; ok {
		f.signal <- key
	}
}

func (f *fakePods) Delete(_ context.Context, sb *v1alpha1.Sandbox, uid types.UID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deletes++
	pod := f.pods[sb.Name]
	if pod == nil || pod.UID != uid || f.owner[uid] != sb.UID {
		return nil
	}
	if pod.Deleting = true; !f.lingers {
		delete(f.pods, sb.Name)
	}
	f.told(sb.Name)
	return nil
}

func (f *fakePods) Kill(ctx context.Context, sb *v1alpha1.Sandbox, uid types.UID) error {
	f.mu.Lock()
	f.kills++
	f.lingers = false
	f.mu.Unlock()
	return f.Delete(ctx, sb, uid)
}

func (f *fakePods) Update(_ context.Context, sb *v1alpha1.Sandbox, uid types.UID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.updates++
	if f.refuse != nil {
		return f.refuse
	}
	if pod := f.pods[sb.Name]; pod != nil && pod.UID == uid {
		pod.Outdated, pod.Updated, pod.Updating = false, true, "Restarting"
		f.told(sb.Name)
	}
	return nil
}

func (f *fakePods) Forget(uid types.UID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.forgot[uid] = true
}

// change alters a Pod, and tells of it.
func (f *fakePods) change(name string, alter func(*Pod)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	alter(f.pods[name])
	f.told(name)
}

// foreign makes a Pod that no sandbox owns.
func (f *fakePods) foreign(name string) types.UID {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.put(name)
}

// gone is the end of a Pod.
func (f *fakePods) gone(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.pods, name)
	f.told(name)
}

func (f *fakePods) get(name string) *Pod {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pods[name] == nil {
		return nil
	}
	copied := *f.pods[name]
	return &copied
}

func (f *fakePods) count() (creates, deletes int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.creates, f.deletes
}
