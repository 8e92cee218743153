// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/test/stack"
)

// run runs an image in a pod of its own, of which nothing is left if that fails.
func (k *soak) run(ctx context.Context, c checkpoint, annotations map[string]string) (_ *member, err error) {
	before, err := k.State(ctx)
	if err != nil {
		return nil, err
	}
	m := &member{checkpoint: c}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.tidy(context.WithoutCancel(ctx)))
		}
	}()
	if m.pod, err = k.RunPod(ctx, stack.PodOptions{Name: "soak", Handler: "thaw"}); err != nil {
		return nil, err
	}
	m.container, err = m.pod.Run(ctx, stack.ContainerOptions{Image: c.ref, Args: c.args, Env: c.env, Annotations: annotations})
	if err != nil {
		return nil, err
	}
	if annotations == nil {
		if err := k.ready(ctx, m); err != nil {
			return nil, err
		}
	}
	after, err := k.State(ctx)
	if err != nil {
		return nil, err
	}
	m.lines = make(stack.State)
	for _, line := range after.Leaked(before) {
		m.lines[line] = true
	}
	k.members = append(k.members, m)
	return m, nil
}

// ready waits until a program that was started cold can be checkpointed.
func (k *soak) ready(ctx context.Context, m *member) error {
	if m.workload == torture.workload {
		return logged(ctx, m.container, "ready")
	}
	_, err := stack.FirstReply(ctx, "http://"+m.pod.IP+":8080/touch")
	m.requests = 1
	return err
}

// logged waits until a container has written a line.
func logged(ctx context.Context, c *stack.Container, line string) error {
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	for {
		text, err := c.Log()
		if err == nil && strings.Contains(text, " F "+line) {
			return nil
		}
		if strings.Contains(text, "torture: ") {
			return fmt.Errorf("wrong memory: %s", text)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no %q in %q: %w", line, text, ctx.Err())
		case <-pace.C:
		}
	}
}

// tidy removes the pods that are no member's, as the kubelet does with those of which it does not know.
func (k *soak) tidy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return k.tried(ctx, true, func() error {
		runtime, _ := k.CRI()
		list, err := runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		if err != nil {
			return err
		}
		for _, item := range list.GetItems() {
			if slices.ContainsFunc(k.members, func(m *member) bool { return m.pod.ID == item.GetId() }) {
				continue
			}
			if _, err := runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: item.GetId()}); err != nil {
				return err
			}
			if _, err := runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: item.GetId()}); err != nil {
				return err
			}
		}
		return nil
	})
}

// remove removes a container with its pod.
func (k *soak) remove(ctx context.Context, m *member) error {
	if err := m.pod.Remove(ctx); err != nil {
		return err
	}
	k.members = slices.DeleteFunc(k.members, func(o *member) bool { return o == m })
	return nil
}
