// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/admit"
	"thaw.dev/thaw/shim/profile"
	"thaw.dev/thaw/shim/verify"
)

// profilesDir is the folder of what runc makes of seccomp profiles. It is on the
// tmpfs of the daemon's socket, for root only.
func profilesDir(node string) string { return filepath.Join(filepath.Dir(node), "seccomp") }

// profile finds out what runc makes of the spec's seccomp section, while the container
// is created. It is not broken off: what it began would stay.
func (c *restored) profile(runtime string) {
	defer close(c.profiled)
	if admit.WantsFilter(c.spec) {
		c.filter, c.filterErr = profile.Filter(context.Background(), profilesDir(c.service.node.address), runtime, c.spec.Linux.Seccomp)
	}
}

// errNotVerified is for a restore whose end CRIU did not tell.
var errNotVerified = errors.New("the restored processes were not compared with the spec: criu did not say that all are restored")

// verdict is what came of comparing the restored processes with the spec.
type verdict struct {
	known chan struct{} // closed when the others are set
	once  sync.Once
	pids  []int
	err   error
}

// verify is called when CRIU has restored all processes, credentials last, and before it lets
// them run, for which it needs some milliseconds more. What the kernel shows of them must be what
// the spec grants, or they are killed.
func (c *restored) verify() {
	pids, err := verify.Container(c.spec, c.cgroups)
	if err != nil {
		c.fail(err)
	}
	c.looked.pids = pids
	c.endVerify(err)
}

func (c *restored) endVerify(err error) {
	c.looked.once.Do(func() {
		c.looked.err = err
		close(c.looked.known)
	})
}

// verified returns nil if the processes of the container were found to be what its spec
// grants, its first process among them, unless that has ended already.
func (c *restored) verified(ctx context.Context, pid int) error {
	select {
	case <-c.looked.known:
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errNotVerified, ctx.Err())
	}
	if c.looked.err != nil {
		return c.looked.err
	}
	if !slices.Contains(c.looked.pids, pid) && unix.Kill(pid, 0) == nil {
		return fmt.Errorf("the restored container's first process, %d, is not in its cgroup %s", pid, c.cgroups[0])
	}
	return nil
}
