// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// TestSecrecy: while a restored container runs, and after a refusal, everything that thaw keeps on the node is root's alone.
func TestSecrecy(t *testing.T) {
	ctx, s := start(t, workloads.Synthetic)
	ref := frozenSynthetic(ctx, t, s)
	pod, _ := lazily(ctx, t, s, ref)
	if err := verify(ctx, pod); err != nil {
		t.Fatal(err)
	}
	refused(ctx, t, s, ref, stack.PodOptions{}, stack.ContainerOptions{Env: synthetic, Annotations: map[string]string{"thaw.dev/policy": "x"}})
	const logs = "/var/log/thaw/"
	seen := make(map[string]int)
	for _, root := range []string{stack.ThawStateDir, s.ThawCache(), logs} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if os.IsNotExist(err) {
				return nil
			}
			if err != nil {
				return err
			}
			info, err := d.Info()
			if os.IsNotExist(err) {
				return nil
			}
			if err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil {
				return err
			}
			seen[root]++
			kind := info.Mode().Type()
			if kind == fs.ModeSymlink || d.Name() == "stats-restore" || path == logs { // CRIU's counters; the stack's folder
				return nil
			}
			if st.Uid != 0 || st.Gid != 0 || info.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s has mode %v and belongs to %d:%d", path, info.Mode(), st.Uid, st.Gid)
			}
			// What is below is a container's or comes from an image; the folder itself lets nobody in.
			if d.IsDir() && (filepath.Base(path) == "snapshotter" || strings.HasPrefix(filepath.Base(path), "mount")) {
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	for _, root := range []string{stack.ThawStateDir, s.ThawCache()} {
		if seen[root] < 5 {
			t.Errorf("%d files below %s", seen[root], root)
		}
	}
}
