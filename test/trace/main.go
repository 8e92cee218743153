// SPDX-License-Identifier: Apache-2.0

//go:build linux

// trace restores a small container again and again with tracing on and prints where the time goes between the request to
// start it and its first instruction, out of the spans of containerd, the shim and the daemon, and of CRIU's log.
//
// After these runs come some in which the kernel functions are sampled that runc and CRIU wait in; that costs time, so they
// are not in the first table.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"time"

	"thaw.dev/thaw/test/collector"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/workloads"
)

// memory of the server that is restored: its size makes no difference here.
const memory = "64"

func main() {
	runs := flag.Int("runs", 20, "restores that are measured")
	sampled := flag.Int("sampled", 5, "restores in which waits in the kernel are sampled")
	spans := flag.Bool("spans", false, "print all spans of the last restore too")
	flag.Parse()
	stack.Isolate()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *runs, *sampled, *spans); err != nil {
		fmt.Fprintln(os.Stderr, "trace:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, runs, sampled int, all bool) (err error) {
	c, err := collector.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.Setenv(); err != nil {
		return err
	}
	s, err := stack.Start(ctx, stack.Options{Progress: os.Stderr})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	image, err := checkpoint(ctx, s)
	if err != nil {
		return err
	}
	if _, err := restore(ctx, s, image, nil); err != nil { // what it fetches and records, the others have
		return err
	}
	var t table
	for i := range runs {
		var id string
		took, err := restore(ctx, s, image, func(container *stack.Container) error {
			id = container.ID
			return nil
		})
		if err != nil {
			return err
		}
		trace, err := c.Await(ctx, func(t collector.Trace) bool { return complete(t, id) })
		if err != nil {
			return err
		}
		t.add(trace, took)
		fmt.Fprintf(os.Stderr, "restore %d of %d: first instruction after %s ms, first reply after %s ms\n", i+1, runs, ms(t.first[i]), ms(took))
		if all && i == runs-1 {
			printSpans(os.Stdout, trace)
		}
	}
	t.print(os.Stdout)
	if sampled == 0 {
		return nil
	}
	var w waits
	for range sampled {
		if _, err := restore(ctx, s, image, func(*stack.Container) error { return w.begin() }); err != nil {
			return err
		}
		w.end()
	}
	w.print(os.Stdout, sampled)
	return nil
}

// complete says whether all of the restore of a container has arrived. CRIU's phases come last, and its end is the last of them.
func complete(t collector.Trace, id string) bool {
	return t[0].Attributes["container.id"] == id && t[0].Name == startContainer && t.Find("criu.end") != nil
}

// checkpoint makes the checkpoint image.
func checkpoint(ctx context.Context, s *stack.Stack) (ref string, err error) {
	if err := s.PushWorkloads(ctx, workloads.Synthetic); err != nil {
		return "", err
	}
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "template", Handler: "thaw"})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, pod.Remove(context.WithoutCancel(ctx))) }()
	c, err := pod.Run(ctx, options(s.Workload(workloads.Synthetic)))
	if err != nil {
		return "", err
	}
	if err := reply(ctx, pod); err != nil {
		return "", err
	}
	ref = s.Registry.Ref("checkpoints/trace:1")
	cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "thaw"), "checkpoint", c.ID, "--push", ref)
	cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("thaw checkpoint: %w: %s", err, out)
	}
	return ref, s.EnsureImage(ctx, ref, nil)
}

func options(image string) stack.ContainerOptions {
	return stack.ContainerOptions{Image: image, Env: map[string]string{"MEMORY_MIB": memory}}
}

func reply(ctx context.Context, pod *stack.Pod) error {
	_, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080/touch")
	return err
}

// restore restores the image in a new pod and tells how long it took from the request to start until the first reply. ready is
// called before that request.
func restore(ctx context.Context, s *stack.Stack, image string, ready func(*stack.Container) error) (took time.Duration, err error) {
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "restored", Handler: "thaw"})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, pod.Remove(context.WithoutCancel(ctx))) }()
	c, err := pod.Create(ctx, options(image))
	if err != nil {
		return 0, err
	}
	if ready != nil {
		if err := ready(c); err != nil {
			return 0, err
		}
	}
	began := time.Now()
	if err := c.Start(ctx); err != nil {
		return 0, err
	}
	err = reply(ctx, pod)
	return time.Since(began), err
}
