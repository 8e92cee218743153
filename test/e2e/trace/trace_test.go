// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package trace tests that one trace covers a restore from the request to containerd to the first instruction.
package trace

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"thaw.dev/thaw/test/collector"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

func TestMain(m *testing.M) { stack.Main(m) }

var options = stack.ContainerOptions{Env: map[string]string{"MEMORY_MIB": "16"}}

// frozen makes a checkpoint image.
func frozen(ctx context.Context, t *testing.T, s *stack.Stack) (ref string) {
	t.Helper()
	if err := s.PushWorkloads(ctx, workloads.Synthetic); err != nil {
		t.Fatal(err)
	}
	pod, c := run(ctx, t, s, s.Workload(workloads.Synthetic))
	ref = s.Registry.Ref("checkpoints/trace:1")
	cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "thaw"), "checkpoint", c.ID, "--push", ref)
	cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("thaw checkpoint: %v: %s", err, out)
	}
	if err := pod.Remove(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.EnsureImage(ctx, ref, nil); err != nil {
		t.Fatal(err)
	}
	return ref
}

// run runs a container until its first reply.
func run(ctx context.Context, t *testing.T, s *stack.Stack, image string) (*stack.Pod, *stack.Container) {
	t.Helper()
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "traced", Handler: "thaw"})
	if err != nil {
		t.Fatal(err)
	}
	o := options
	o.Image = image
	c, err := pod.Run(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080/touch"); err != nil {
		t.Fatal(err)
	}
	return pod, c
}

// Names of calls, as the tracing of gRPC and ttrpc has them.
const (
	request = "runtime.v1.RuntimeService/StartContainer"
	create  = "containerd.task.v3.Task/Create"
	start   = "containerd.task.v3.Task/Start"
	prepare = "thaw.node.v1.Node/Prepare"
	admit   = "thaw.node.v1.Node/Admit"
)

func TestRestore(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	c, err := collector.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Setenv(); err != nil {
		t.Fatal(err)
	}
	s, err := stack.Start(ctx, stack.Options{Progress: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	ref := frozen(ctx, t, s)
	_, restored := run(ctx, t, s, ref)
	trace, err := c.Await(ctx, func(tr collector.Trace) bool {
		return tr[0].Name == request && tr[0].Attributes["container.id"] == restored.ID && tr.Find("criu.end") != nil && tr.Find("thaw.restore.Layout") != nil
	})
	if err != nil {
		t.Fatal(err)
	}

	// Each span with the nearest of its parents; of a call, the end at which it arrived.
	for name, want := range map[string][]string{
		create:                 {create, "container.NewTask", request},
		prepare:                {prepare, create},
		"thaw.restore.Resolve": {prepare, prepare, create},
		"thaw.restore.Layout":  {prepare, prepare, create},
		"thaw.restore.Fetch":   {"thaw.restore.Layout", prepare},
		"thaw.restore.Unpack":  {"thaw.restore.Layout", prepare},
		"thaw.shim.Ready":      {create},
		"thaw.shim.CreateTask": {create},
		start:                  {start, "client.task.Start", request},
		admit:                  {admit, start},
		"thaw.shim.Restore":    {start},
		"thaw.shim.HandOver":   {"thaw.shim.Restore", start},
		"criu.images":          {"thaw.shim.Restore", start},
		"criu.mounts":          {"thaw.shim.Restore", start},
		"criu.restorer":        {"thaw.shim.Restore", start},
		"criu.resume":          {"thaw.shim.Restore", start},
	} {
		span := trace.Find(name)
		if span == nil {
			t.Errorf("no %s", name)
			continue
		}
		if got := trace.Parents(span); len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
			t.Errorf("%s is below %q", name, got)
		}
		if span.Failed {
			t.Errorf("%s has failed", name)
		}
	}
	// CRIU's phases have their real times: they lie within `runc restore`, one after another.
	restore := trace.Find("thaw.shim.Restore")
	// The time at which CRIU's log was opened is known to a tick of the kernel's clock.
	const tick = 10 * time.Millisecond
	last := restore.Start.Add(-tick)
	for _, name := range []string{"criu.images", "criu.fork", "criu.mounts", "criu.memory", "criu.restorer", "criu.resume", "criu.end"} {
		span := trace.Find(name)
		if span == nil || span.Start.Before(last) || span.End.After(restore.End) {
			t.Errorf("%s: %+v, after %v, within %v to %v", name, span, last, restore.Start, restore.End)
			continue
		}
		last = span.End
	}
	if restore.Attributes["pages.total"] == "" || restore.Attributes["faults"] == "" {
		t.Errorf("attributes of the restore: %v", restore.Attributes)
	}
	// What is done page by page and second by second is in no trace, or a trace would have no end.
	for _, name := range []string{"thaw.node.v1.Node/Fetch", "thaw.node.v1.Node/Report"} {
		for _, tr := range c.Traces() {
			if tr.Find(name) != nil {
				t.Errorf("%s is traced", name)
			}
		}
	}
}
