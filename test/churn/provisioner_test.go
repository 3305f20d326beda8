package churn

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/reference"
	"k8s.io/client-go/util/workqueue"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/scheme"
)

// provision makes a PersistentVolume for each claim of our class that has a node, and deletes those that are released. It is
// what the fake CSI driver's provisioner is.
func (w *world) provision(ctx context.Context) {
	factory := informers.NewSharedInformerFactory(w.client, 0)
	claims, volumes := factory.Core().V1().PersistentVolumeClaims().Informer(), factory.Core().V1().PersistentVolumes().Informer()
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[any]())
	add := func(o any) {
		switch o := o.(type) {
		case *corev1.PersistentVolumeClaim:
			if o.Spec.VolumeName == "" && o.DeletionTimestamp == nil && o.Annotations["volume.kubernetes.io/storage-provisioner"] == provisioner &&
				o.Annotations["volume.kubernetes.io/selected-node"] != "" {
				queue.Add(cache.ObjectName{Namespace: o.Namespace, Name: o.Name})
			}
		case *corev1.PersistentVolume:
			if o.Annotations["pv.kubernetes.io/provisioned-by"] == provisioner && o.Status.Phase == corev1.VolumeReleased && o.DeletionTimestamp == nil {
				queue.Add(o.Name)
			}
		}
	}
	handler := cache.ResourceEventHandlerFuncs{AddFunc: add, UpdateFunc: func(_, o any) { add(o) }}
	must(claims.AddEventHandler(handler))
	must(volumes.AddEventHandler(handler))
	factory.StartWithContext(ctx)
	context.AfterFunc(ctx, queue.ShutDown)
	for {
		item, over := queue.Get()
		if over {
			return
		}
		var err error
		switch key := item.(type) {
		case cache.ObjectName:
			err = w.provisionOne(ctx, key)
		case string:
			err = w.client.CoreV1().PersistentVolumes().Delete(ctx, key, metav1.DeleteOptions{})
		}
		if err == nil || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) {
			queue.Forget(item)
		} else {
			queue.AddRateLimited(item)
		}
		queue.Done(item)
	}
}

func (w *world) provisionOne(ctx context.Context, key cache.ObjectName) error {
	claim, err := w.client.CoreV1().PersistentVolumeClaims(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if err != nil || claim.Spec.VolumeName != "" {
		return err
	}
	ref, err := reference.GetReference(scheme.Scheme, claim)
	if err != nil {
		return err
	}
	name := fmt.Sprint("pvc-", claim.UID)
	_, err = w.client.CoreV1().PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": provisioner}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: claim.Spec.Resources.Requests, AccessModes: claim.Spec.AccessModes, StorageClassName: class, ClaimRef: ref,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: provisioner, VolumeHandle: name}},
		},
	}, metav1.CreateOptions{})
	return err
}
