// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	runcoptions "github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/process"
	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
)

// criuRoot is where `runc restore` binds a container's root filesystem for CRIU
// (runc, libcontainer/criu_linux.go): in the folder of its own state.
func criuRoot(opts *runcoptions.Options, namespace, id string) string {
	root := opts.GetRoot()
	if root == "" {
		root = process.RuncRoot
	}
	return filepath.Join(root, namespace, id, "criu-root")
}

// removeCRIURoot unmounts that again if runc was killed before it could. It must be
// done before `runc delete`, which deletes whatever is below the folder of its state: the
// root filesystem, and volumes of the pod, which runc binds into that for a moment and
// which appear at both places if their mounts are shared. runc cannot mount anything
// there any more when this has returned without error.
func removeCRIURoot(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	err := mount.UnmountRecursive(path, unix.MNT_DETACH)
	if err == nil {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("the container's root filesystem stays mounted in runc's folder (unmount it before that is deleted): %w", err)
	}
	return nil
}
