// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	taskapi "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/pkg/oom"
	oomv1 "github.com/containerd/containerd/v2/pkg/oom/v1"
	oomv2 "github.com/containerd/containerd/v2/pkg/oom/v2"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
)

// accounting does for restored containers what runc's task service does for those
// that had a process when they were created, and omits for others: statistics
// of the cgroup, and events when its memory ran out.
type accounting struct {
	ctx       context.Context
	publisher shim.Publisher

	once    sync.Once
	watcher oom.Watcher
	err     error
}

// watch returns the cgroup of a process and reports from now on when it runs
// out of memory, as events of the container with that ID.
func (a *accounting) watch(id string, pid int) (any, error) {
	a.once.Do(func() {
		// Not before it is needed: most shims restore nothing.
		if cgroups.Mode() == cgroups.Unified {
			a.watcher, a.err = oomv2.New(a.publisher)
		} else {
			a.watcher, a.err = oomv1.New(a.publisher)
		}
		if a.err == nil {
			go a.watcher.Run(a.ctx) // ends with the shim's context
		}
	})
	if a.err != nil {
		return nil, a.err
	}
	cg, err := loadCgroup(pid)
	if err != nil {
		return nil, fmt.Errorf("cgroup of process %d: %w", pid, err)
	}
	if err := a.watcher.Add(id, cg); err != nil {
		return cg, fmt.Errorf("watch for lack of memory: %w", err)
	}
	return cg, nil
}

func loadCgroup(pid int) (any, error) {
	if cgroups.Mode() != cgroups.Unified {
		return cgroup1.Load(cgroup1.PidPath(pid))
	}
	path, err := cgroup2.PidGroupPath(pid)
	if err != nil {
		return nil, err
	}
	return cgroup2.Load(path)
}

// stats reads a cgroup's statistics.
func stats(cg any) (*taskapi.StatsResponse, error) {
	var metrics any
	var err error
	switch cg := cg.(type) {
	case cgroup1.Cgroup:
		metrics, err = cg.Stat(cgroup1.IgnoreNotExist)
	case *cgroup2.Manager:
		metrics, err = cg.Stat()
	default:
		return nil, fmt.Errorf("the container has no cgroup: %w", errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	out, err := typeurl.MarshalAnyToProto(metrics)
	if err != nil {
		return nil, err
	}
	return &taskapi.StatsResponse{Stats: out}, nil
}
