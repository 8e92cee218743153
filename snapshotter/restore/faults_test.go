// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/api"
)

var allChunks = []uint32{0, 1, 2}

func (n *node) fetch(id string) error {
	return n.manager.Fetch(n.t.Context(), &api.FetchRequest{RestoreId: ID("k8s.io", id), Chunks: allChunks, Urgency: api.Urgency_DEMAND})
}

// TestStateRemoved: a restore goes on after somebody has removed the state folder and the daemon was started anew.
func TestStateRemoved(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	if _, err := n.prepare("lazy", nil); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(n.opts.StateDir); err != nil {
		t.Fatal(err)
	}
	n.stop()
	n.start()
	if list := n.manager.List(); len(list) != 1 {
		t.Fatalf("%+v", list)
	}
	if err := n.fetch("lazy"); err != nil {
		t.Error(err)
	}
	if _, err := n.prepare("next", nil); err != nil {
		t.Error(err)
	}
}

// TestImagesRemoved: an image that was removed under the daemon is laid out again.
func TestImagesRemoved(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	old, err := n.prepare("old", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Dir(old.ImagesDir)); err != nil {
		t.Fatal(err)
	}
	resp, err := n.prepare("next", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(resp.ImagesDir); err != nil {
		t.Error(err)
	}
	for _, id := range []string{"old", "next"} {
		if err := n.manager.Release(t.Context(), ID("k8s.io", id)); err != nil {
			t.Error(err)
		}
	}
}

// TestCacheRemoved: what was cached is fetched again after somebody has removed the cache folder.
func TestCacheRemoved(t *testing.T) {
	n := newNode(t)
	n.push(newSample(t))
	if _, err := n.prepare("old", nil); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(n.opts.CacheDir); err != nil {
		t.Fatal(err)
	}
	if err := n.fetch("old"); err != nil { // it has its files open
		t.Error(err)
	}
	other := newSample(t)
	other.state[len(other.state)-1].data = []byte("y")
	n.push(other)
	resp, err := n.prepare("next", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.fetch("next"); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(resp.Stores[0].Data); err != nil || string(got) != string(other.pages) {
		t.Errorf("wrong pages: %v", err)
	}
}

// TestFullDisk: unused pages make room for a checkpoint's metadata; when nothing is left to remove, the restore is refused.
func TestFullDisk(t *testing.T) {
	n := newNode(t)
	n.stop()
	n.opts.CacheDir = t.TempDir()
	if err := unix.Mount("none", n.opts.CacheDir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(n.opts.CacheDir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	n.start()
	fill := func(name string) {
		if err := os.WriteFile(filepath.Join(n.opts.CacheDir, name), make([]byte, 2<<20), 0o600); err == nil {
			t.Fatal("the disk is not full")
		}
	}
	n.push(newSample(t))
	if _, err := n.prepare("old", nil); err != nil {
		t.Fatal(err)
	}
	if err := n.fetch("old"); err != nil {
		t.Fatal(err)
	}
	if err := n.manager.Release(t.Context(), ID("k8s.io", "old")); err != nil {
		t.Fatal(err)
	}
	fill("one")
	other := newSample(t)
	other.state[len(other.state)-1].data = []byte("y")
	n.push(other)
	if _, err := n.prepare("next", nil); err != nil {
		t.Error(err)
	}
	if n.store.Stats().Evictions == 0 {
		t.Error("nothing had to be evicted")
	}
	fill("two")
	third := newSample(t)
	third.state[len(third.state)-1].data = []byte("z")
	n.push(third)
	if _, err := n.prepare("third", nil); !errdefs.IsResourceExhausted(err) {
		t.Errorf("got %v", err)
	}
}
