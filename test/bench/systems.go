// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/test/baseline"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/stack/registry"
	"thaw.dev/thaw/test/workloads"
)

// trial is one measurement under way.
type trial struct {
	row      *row
	registry *registry.Registry
	began    time.Time
	traffic  registry.Traffic
}

// start begins the time; everything before it is preparation.
func (t *trial) start() {
	t.traffic = t.registry.Traffic(nil)
	t.began = time.Now()
}

// reply waits for the first correct reply of a pod and ends the time.
func (t *trial) reply(ctx context.Context, pod *stack.Pod) error {
	b, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080/touch")
	t.row.TTFR = float64(time.Since(t.began).Microseconds()) / 1000
	after := t.registry.Traffic(nil)
	t.row.BytesFetched, t.row.Requests = after.Sent-t.traffic.Sent, after.Requests-t.traffic.Requests
	if err != nil {
		return err
	}
	var answer struct {
		OK       bool
		Requests int
	}
	if err := json.Unmarshal(b, &answer); err != nil || !answer.OK {
		return fmt.Errorf("wrong reply %s", b)
	}
	return nil
}

// workload is the synthetic server of one size and its checkpoint.
type workload struct {
	s      *stack.Stack
	env    map[string]string
	base   string // the program's image
	image  string // the checkpoint image
	images string // the checkpoint's complete CRIU images, on disk
}

// prepare makes the checkpoint.
func prepare(ctx context.Context, s *stack.Stack, mib int) (_ *workload, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	w := &workload{
		s: s, env: map[string]string{"MEMORY_MIB": strconv.Itoa(mib)},
		base:   s.Workload(workloads.Synthetic),
		image:  s.Registry.Ref(fmt.Sprintf("checkpoints/synthetic:%d", mib)),
		images: filepath.Join(s.Dir, fmt.Sprintf("images-%d", mib)),
	}
	if err := s.PushWorkloads(ctx, workloads.Synthetic); err != nil {
		return nil, err
	}
	pod, err := s.RunPod(ctx, stack.PodOptions{Name: "template", Handler: "thaw"})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, pod.Remove(context.WithoutCancel(ctx))) }()
	c, err := pod.Run(ctx, stack.ContainerOptions{Image: w.base, Env: w.env})
	if err != nil {
		return nil, err
	}
	if _, err := stack.FirstReply(ctx, "http://"+pod.IP+":8080/touch"); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(s.Bin, "thaw"), "checkpoint", c.ID, "--push", w.image)
	cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	began := time.Now()
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("thaw checkpoint: %w: %s", err, stderr.String())
	}
	fmt.Fprintf(os.Stderr, "%5d MiB  checkpoint and push: %.1f s\n", mib, time.Since(began).Seconds())
	if err := s.EnsureImage(ctx, w.image, nil); err != nil {
		return nil, err
	}
	return w, baseline.Unpack(ctx, w.image, w.images)
}

func (w *workload) remove() { _ = os.RemoveAll(w.images) }

// pod runs what is measured: a container in a new pod of a handler.
func (w *workload) pod(ctx context.Context, t *trial, handler, image string) (err error) {
	pod, err := w.s.RunPod(ctx, stack.PodOptions{Name: handler, Handler: handler})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pod.Remove(context.WithoutCancel(ctx))) }()
	c, err := pod.Create(ctx, stack.ContainerOptions{Image: image, Env: w.env})
	if err != nil {
		return err
	}
	t.start()
	if err := c.Start(ctx); err != nil {
		return err
	}
	if err := t.reply(ctx, pod); err != nil || image != w.image {
		return err
	}
	t.row.RemoteFaults, err = w.remoteFaults(ctx, c.ID)
	return err
}

// reports is how long shims take to tell the daemon what happened: they do so every second.
const reports = 1200 * time.Millisecond

// remoteFaults asks the daemon how many faults of a restored container waited for the registry, once its shim has told.
func (w *workload) remoteFaults(ctx context.Context, id string) (uint64, error) {
	t := time.NewTimer(reports)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-t.C:
	}
	out, err := exec.CommandContext(ctx, filepath.Join(w.s.Bin, "thaw"), "ps", "--json").Output()
	if err != nil {
		return 0, fmt.Errorf("thaw ps: %w", err)
	}
	var list api.ListResponse
	if err := protojson.Unmarshal(out, &list); err != nil {
		return 0, err
	}
	for _, r := range list.Restores {
		if r.ContainerId == id {
			return r.RemoteFaults, nil
		}
	}
	return 0, errors.New("thaw ps does not list the container: it was not restored")
}

func (w *workload) cold(ctx context.Context, t *trial) error { return w.pod(ctx, t, "runc", w.base) }

func (w *workload) thawCold(ctx context.Context, t *trial) error {
	if err := w.s.ClearThawCache(ctx); err != nil {
		return err
	}
	return w.pod(ctx, t, "thaw", w.image)
}

// thawColdWithSet restores on a node that has nothing of the checkpoint but what an earlier restore recorded: which pages its
// first reply touched.
func (w *workload) thawColdWithSet(ctx context.Context, t *trial) error {
	if err := w.s.ClearThawCache(ctx); err != nil {
		return err
	}
	if err := w.pod(ctx, &trial{row: &row{}, registry: t.registry}, "thaw", w.image); err != nil {
		return err
	}
	if err := w.s.ClearThawCache(ctx, "workingsets"); err != nil {
		return err
	}
	return w.pod(ctx, t, "thaw", w.image)
}

// thawWarm restores once more on a node on which the image was restored before: what its first reply touches is cached.
func (w *workload) thawWarm(ctx context.Context, t *trial) error {
	if err := w.pod(ctx, &trial{row: &row{}, registry: t.registry}, "thaw", w.image); err != nil {
		return err
	}
	return w.pod(ctx, t, "thaw", w.image)
}

func (w *workload) bundle(ctx context.Context, measure func(*baseline.Bundle) error) (err error) {
	b, err := baseline.New(ctx, w.s, w.image, w.env)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Remove(context.WithoutCancel(ctx))) }()
	return measure(b)
}

func (w *workload) eager(ctx context.Context, t *trial) error {
	return w.bundle(ctx, func(b *baseline.Bundle) error {
		t.start()
		if err := baseline.Unpack(ctx, w.image, b.Images()); err != nil {
			return err
		}
		if err := b.Restore(ctx, false); err != nil {
			return err
		}
		return t.reply(ctx, b.Pod)
	})
}

func (w *workload) criuLocal(ctx context.Context, t *trial) error {
	return w.bundle(ctx, func(b *baseline.Bundle) error {
		if err := os.Symlink(w.images, b.Images()); err != nil {
			return err
		}
		t.start()
		if err := b.Restore(ctx, true); err != nil {
			return err
		}
		return t.reply(ctx, b.Pod)
	})
}
