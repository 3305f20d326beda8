package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
)

// attacher does what VolumeAttachments of a driver ask for, by its controller service, and says so in their status. Its
// finalizer keeps one until its volume is detached.
type attacher struct {
	driver string
	conn   *grpc.ClientConn
	client kubernetes.Interface
	queue  workqueue.TypedRateLimitingInterface[string]
}

// callTimeout bounds a call of the driver.
const callTimeout = 15 * time.Second

func newAttacher(driver, socket string) (*attacher, error) {
	config, err := rest.InClusterConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](200*time.Millisecond, 10*time.Second)
	return &attacher{driver: driver, conn: conn, client: client, queue: workqueue.NewTypedRateLimitingQueue(limiter)}, nil
}

func (a *attacher) close() { _ = a.conn.Close() } // at the program's end

func (a *attacher) finalizer() string { return "external-attacher/" + a.driver }

// run attaches and detaches until ctx ends.
func (a *attacher) run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactory(a.client, 0)
	attachments := factory.Storage().V1().VolumeAttachments()
	changed := func(o any) {
		if va, ok := o.(*storagev1.VolumeAttachment); ok && va.Spec.Attacher == a.driver {
			a.queue.Add(va.Name)
		}
	}
	if _, err := attachments.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: changed, UpdateFunc: func(_, o any) { changed(o) }}); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	context.AfterFunc(ctx, a.queue.ShutDown)
	var workers sync.WaitGroup
	for range 4 { // one that hangs is not to keep up the others
		workers.Go(func() {
			for {
				name, over := a.queue.Get()
				if over {
					return
				}
				if err := a.settle(ctx, name); err != nil {
					slog.Warn("a VolumeAttachment is tried again", "name", name, "error", err)
					a.queue.AddRateLimited(name)
				} else {
					a.queue.Forget(name)
				}
				a.queue.Done(name)
			}
		})
	}
	workers.Wait()
	factory.Shutdown()
	return nil
}

func (a *attacher) settle(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	va, err := a.client.StorageV1().VolumeAttachments().Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	case va.DeletionTimestamp != nil:
		return a.detach(ctx, va)
	case va.Status.Attached:
		return nil
	}
	return a.attach(ctx, va)
}

func (a *attacher) attach(ctx context.Context, va *storagev1.VolumeAttachment) error {
	api := a.client.StorageV1().VolumeAttachments()
	if !slices.Contains(va.Finalizers, a.finalizer()) {
		va.Finalizers = append(va.Finalizers, a.finalizer())
		var err error
		if va, err = api.Update(ctx, va, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	response, err := a.publish(ctx, va)
	if err != nil {
		va.Status.AttachError = &storagev1.VolumeError{Time: metav1.Now(), Message: err.Error()}
	} else {
		va.Status = storagev1.VolumeAttachmentStatus{Attached: true, AttachmentMetadata: response.GetPublishContext()}
	}
	_, told := api.UpdateStatus(ctx, va, metav1.UpdateOptions{})
	return errors.Join(err, told)
}

func (a *attacher) publish(ctx context.Context, va *storagev1.VolumeAttachment) (*csi.ControllerPublishVolumeResponse, error) {
	volume, node, err := a.of(ctx, va)
	if err != nil {
		return nil, err
	}
	return csi.NewControllerClient(a.conn).ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: node,
		VolumeCapability: &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}})
}

func (a *attacher) detach(ctx context.Context, va *storagev1.VolumeAttachment) error {
	i := slices.Index(va.Finalizers, a.finalizer())
	if i < 0 {
		return nil
	}
	volume, node, err := a.of(ctx, va)
	if err == nil {
		_, err = csi.NewControllerClient(a.conn).ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: node})
	}
	api := a.client.StorageV1().VolumeAttachments()
	if err != nil {
		va.Status.DetachError = &storagev1.VolumeError{Time: metav1.Now(), Message: err.Error()}
		_, told := api.UpdateStatus(ctx, va, metav1.UpdateOptions{})
		return errors.Join(err, told)
	}
	va.Finalizers = slices.Delete(va.Finalizers, i, i+1)
	_, err = api.Update(ctx, va, metav1.UpdateOptions{})
	return err
}

// of is the handle of an attachment's volume, and the node as the driver calls it.
func (a *attacher) of(ctx context.Context, va *storagev1.VolumeAttachment) (volume, node string, err error) {
	if va.Spec.Source.PersistentVolumeName == nil {
		return "", "", errors.New("it names no PersistentVolume")
	}
	pv, err := a.client.CoreV1().PersistentVolumes().Get(ctx, *va.Spec.Source.PersistentVolumeName, metav1.GetOptions{})
	if err != nil {
		return "", "", err
	}
	if pv.Spec.CSI == nil {
		return "", "", fmt.Errorf("PersistentVolume %s is of no CSI driver", pv.Name)
	}
	on, err := a.client.StorageV1().CSINodes().Get(ctx, va.Spec.NodeName, metav1.GetOptions{})
	if err != nil {
		return "", "", err
	}
	for _, d := range on.Spec.Drivers {
		if d.Name == a.driver {
			return pv.Spec.CSI.VolumeHandle, d.NodeID, nil
		}
	}
	return "", "", fmt.Errorf("node %s does not have the driver", va.Spec.NodeName)
}
