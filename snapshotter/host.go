// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"

	"github.com/containerd/errdefs"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"thaw.dev/thaw/criu"
	"thaw.dev/thaw/criu/admit"
	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/config"
)

// criuCheck checks the node's CRIU. Its version is asked for once for each
// binary that is found at its place.
type criuCheck struct {
	path    string
	minimum criu.Version
	kernel  criu.Version

	mu    sync.Mutex
	last  os.FileInfo
	found *criu.Binary
}

func newCRIUCheck(c config.CRIU) (*criuCheck, error) {
	minimum, err := criu.ParseVersion(c.MinimumVersion)
	if err != nil {
		return nil, fmt.Errorf("criu.minimum_version: %w", err)
	}
	kernel, err := criu.KernelVersion()
	if err != nil {
		return nil, fmt.Errorf("kernel version: %w", err)
	}
	return &criuCheck{path: c.Path, minimum: minimum, kernel: kernel}, nil
}

// check returns nil if the node's CRIU can restore.
func (c *criuCheck) check(ctx context.Context) error {
	b, err := c.binary(ctx)
	if err != nil {
		return err
	}
	if b.Version.Less(c.minimum) {
		return fmt.Errorf("CRIU %s at %s is too old: criu.minimum_version in thaw's configuration is %s: %w", b.Version, b.Path, c.minimum, errdefs.ErrFailedPrecondition)
	}
	return b.Check(c.kernel)
}

func (c *criuCheck) binary(ctx context.Context) (*criu.Binary, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var info os.FileInfo
	if path, err := exec.LookPath(c.path); err == nil {
		info, _ = os.Stat(path)
	}
	if same(c.last, info) {
		return c.found, nil
	}
	b, err := criu.Find(ctx, c.path)
	if err != nil {
		return nil, err
	}
	c.last, c.found = info, b
	return b, nil
}

// same reports whether two files are the same and unchanged.
func same(a, b os.FileInfo) bool {
	return a != nil && b != nil && os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// admitImages decides whether CRIU images may be restored under a spec, in a root
// filesystem and with the spec's seccomp filter if they are known.
func admitImages(_ context.Context, images, rootfs string, filter []byte, spec *specs.Spec) error {
	d, err := image.Open(images)
	if err != nil {
		return err
	}
	defer d.Close()
	return admit.Check(d, spec, admit.Options{Rootfs: rootfs, Filter: filter})
}
