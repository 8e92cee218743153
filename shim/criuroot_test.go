// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"golang.org/x/sys/unix"
)

// TestRemoveCRIURoot: what a killed runc has left mounted is unmounted, and nothing that was mounted is touched.
func TestRemoveCRIURoot(t *testing.T) {
	dir := t.TempDir()
	root := criuRoot(&runcoptions.Options{Root: filepath.Join(dir, "runc")}, "ns", "box")
	if err := removeCRIURoot(root); err != nil { // there is none
		t.Error(err)
	}
	rootfs, volume := filepath.Join(dir, "rootfs"), filepath.Join(dir, "volume")
	kept := []string{filepath.Join(rootfs, "file"), filepath.Join(volume, "file")}
	for _, d := range []string{root, filepath.Join(rootfs, "data"), volume} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range kept {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range [][2]string{{rootfs, root}, {volume, filepath.Join(root, "data")}} {
		err := unix.Mount(m[0], m[1], "", unix.MS_BIND, "")
		if errors.Is(err, unix.EPERM) {
			t.Skip("no mounts can be made here: root is needed")
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(m[1], unix.MNT_DETACH) })
	}
	if err := removeCRIURoot(root); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(filepath.Join(dir, "runc")); err != nil { // as runc does
		t.Error(err)
	}
	for _, f := range kept {
		if _, err := os.Stat(f); err != nil {
			t.Error(err)
		}
	}
}
