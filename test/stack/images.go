// SPDX-License-Identifier: Apache-2.0

//go:build linux

package stack

import (
	"context"

	"thaw.dev/thaw/test/workloads"
)

const pauseImage = workloads.Pause + ":" + workloads.Tag

// PushWorkloads writes workloads' images to the stack's registry.
func (s *Stack) PushWorkloads(ctx context.Context, names ...string) error {
	root, err := Root()
	if err != nil {
		return err
	}
	return workloads.Push(ctx, root, s.Registry.Addr(), names...)
}

// Workload is the reference of a workload's image in the stack's registry.
func (s *Stack) Workload(name string) string { return s.Registry.Ref(name + ":" + workloads.Tag) }
