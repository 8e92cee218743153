// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package e2e tests thaw on the real stack: containers are checkpointed to a registry and restored through CRI.
package e2e

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"thaw.dev/thaw/test/stack"
)

func TestMain(m *testing.M) {
	stack.Isolate()
	status := m.Run()
	if shared.stack != nil {
		if err := shared.stack.Close(); err != nil {
			println("close the stack:", err.Error())
			status = max(status, 1)
		}
	}
	os.Exit(status)
}

// shared is one stack for all tests that do not break it: a start costs seconds.
var shared struct {
	once  sync.Once
	stack *stack.Stack
	err   error
}

// start gives the shared stack with the named workloads in its registry, and fails the test at its end if it left anything
// behind.
func start(t *testing.T, workloads ...string) (context.Context, *stack.Stack) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	shared.once.Do(func() { shared.stack, shared.err = stack.Start(ctx, stack.Options{Progress: os.Stderr}) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	s := shared.stack
	if err := s.PushWorkloads(ctx, workloads...); err != nil {
		t.Fatal(err)
	}
	for _, w := range workloads {
		// Pulled first, so that content and snapshots of images are no leak.
		if err := s.EnsureImage(ctx, s.Workload(w), nil); err != nil {
			t.Fatal(err)
		}
	}
	before, err := s.State(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := s.RemoveAllPods(ctx); err != nil {
			t.Error(err)
		}
		if err := s.AwaitClean(ctx, before); err != nil {
			t.Error(err)
		}
	})
	return ctx, s
}
