//go:build failpoint

package clusterdriver_test

import (
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/flux-sandbox/flux-sandbox/internal/failpoint"
)

// TestKilledAtEveryStep kills the process before and after it calls the driver. The next one makes one volume of it, or
// deletes it.
func TestKilledAtEveryStep(t *testing.T) {
	count := 0
	for _, point := range failpoint.Names() {
		made, deleted := strings.HasPrefix(point, "csi-provision/"), strings.HasPrefix(point, "csi-reclaim/")
		if !made && !deleted {
			continue
		}
		count++
		t.Run(point, func(t *testing.T) {
			w := newWorld(t)
			n := w.node("a", nil)
			class := w.class("c", nil)
			claim := n.claim("a", class, nil)
			var pv *corev1.PersistentVolume
			if deleted {
				n.start()
				pv = w.volume(claim)
				n.stop()
				w.phase(pv, corev1.VolumeReleased)
			}
			n.killAt(point)
			if made {
				_, err := w.admin.CoreV1().PersistentVolumes().Get(t.Context(), "pvc-"+string(claim.UID), metav1.GetOptions{})
				if !apierrors.IsNotFound(err) {
					t.Errorf("there is a PersistentVolume before the driver's answer: %v", err)
				}
			}
			if want := 2; strings.HasSuffix(point, "/after") == made && len(n.files()) != want {
				t.Errorf("the pool has %v", n.files())
			}
			n.start()
			if made {
				pv = w.volume(claim)
				n.has(pv)
				w.phase(pv, corev1.VolumeReleased)
			}
			w.gone(pv)
			n.has()
		})
	}
	if count != 4 {
		t.Errorf("%d steps were killed at, want 4", count)
	}
}

// killAt runs the driver until it is killed at a step.
func (n *node) killAt(point string) {
	n.Helper()
	child := n.command(failpoint.Env + "=" + point + "=kill")
	out, err := child.CombinedOutput()
	status, _ := child.ProcessState.Sys().(syscall.WaitStatus)
	if !status.Signaled() || status.Signal() != syscall.SIGKILL {
		n.Fatalf("it was not killed at %s: %v: %s", point, err, out)
	}
}
