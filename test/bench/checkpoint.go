// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/snapshotter/workingset"
	"thaw.dev/thaw/test/baseline"
	"thaw.dev/thaw/test/stack"
)

// certsDir is where the node, and so also the bench, is told how to reach registries.
const certsDir = "/etc/containerd/certs.d"

// checkpoint is a subject that was checkpointed to the registry, twice: in the second repository a working set is published
// beside the image.
type checkpoint struct {
	*subject
	s      *stack.Stack
	images string // complete CRIU images, on disk

	state, index int64 // bytes in the registry
	pages        *pageindex.Index
	set          []workingset.Chunk // what was published
	touched      []workingset.Chunk // by the first reply of the last restore without a set
}

// Repositories of the two images.
const (
	plainRepository     = "checkpoints/"
	publishedRepository = "published/"
)

func (c *checkpoint) plain(registry string) string {
	return registry + "/" + plainRepository + c.name() + ":1"
}

func (c *checkpoint) published(registry string) string {
	return registry + "/" + publishedRepository + c.name() + ":1"
}

// take makes the checkpoint.
func take(ctx context.Context, s *stack.Stack, of *subject) (_ *checkpoint, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	began := time.Now()
	c := &checkpoint{subject: of, s: s, images: filepath.Join(s.Dir, "images-"+of.name())}
	if err := s.PushWorkloads(ctx, of.workload); err != nil {
		return nil, err
	}
	ref := c.plain(s.Registry.Addr())
	if err := c.freeze(ctx, ref); err != nil {
		return nil, err
	}
	img, err := publish.Read(ctx, ref, certsDir)
	if err != nil {
		return nil, err
	}
	c.state, c.index = img.Checkpoint.State.Size, img.Checkpoint.PageIndex.Size
	if c.pages, err = img.PageIndex(ctx); err != nil {
		return nil, err
	}
	if c.mib == 0 {
		config, err := img.Config(ctx)
		if err != nil {
			return nil, err
		}
		c.mib = int(config.Memory.Total >> 20)
	}
	if err := c.publishSet(ctx); err != nil {
		return nil, fmt.Errorf("working set: %w", err)
	}
	if err := baseline.Unpack(ctx, ref, c.images); err != nil {
		return nil, err
	}
	fmt.Fprintf(os.Stderr, "%-9s %5d MiB  checkpoint and working set (%d chunks, %.1f MiB): %.1f s\n",
		c.workload, c.mib, len(c.set), float64(c.size(c.set))/mebibyte, time.Since(began).Seconds())
	return c, nil
}

// freeze starts the program, warms it up, checkpoints it to ref, and ends it.
func (c *checkpoint) freeze(ctx context.Context, ref string) (err error) {
	pod, err := c.s.RunPod(ctx, stack.PodOptions{Name: "template", Handler: "thaw"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pod.Remove(context.WithoutCancel(ctx))) }()
	container, err := pod.Run(ctx, stack.ContainerOptions{Image: c.s.Workload(c.workload), Env: c.env})
	if err != nil {
		return err
	}
	if err := c.warm(ctx, pod.IP); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(c.s.Bin, "thaw"), "checkpoint", container.ID, "--push", ref)
	cmd.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+stack.ContainerdSocket)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("thaw checkpoint: %w: %s", err, stderr.String())
	}
	return nil
}

// publishSet copies the image to a repository in which it has a working set: what a restored container touches until it has been
// quiet after its first reply.
func (c *checkpoint) publishSet(ctx context.Context) (err error) {
	from, to := c.plain(c.s.Registry.Addr()), c.published(c.s.Registry.Addr())
	if err := copyIndex(ctx, from, to); err != nil {
		return err
	}
	pod, err := c.s.RunPod(ctx, stack.PodOptions{Name: "record", Handler: "thaw"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pod.Remove(context.WithoutCancel(ctx))) }()
	container, err := pod.Run(ctx, stack.ContainerOptions{Image: from, Env: c.env})
	if err != nil {
		return err
	}
	if err := c.ask(ctx, pod.IP, false); err != nil {
		return err
	}
	pace := time.NewTicker(100 * time.Millisecond)
	defer pace.Stop()
	for {
		status, err := restoreStatus(ctx, container.ID)
		if err != nil {
			return err
		}
		if status.RecordedChunks > 0 {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-pace.C:
		}
	}
	img, err := publish.Read(ctx, to, certsDir)
	if err != nil {
		return err
	}
	set, err := recordedSet(ctx, img)
	if err != nil {
		return err
	}
	if set.Partial {
		return errors.New("the recording was cut short")
	}
	c.set = set.Within(c.pages)
	_, err = publish.PushWorkingSet(ctx, img, set, certsDir)
	return err
}

// recordedSet is what the node recorded last of an image.
func recordedSet(ctx context.Context, img *publish.Image) (*workingset.Set, error) {
	var resp *api.WorkingSetResponse
	err := askNode(ctx, func(n api.NodeService) (err error) {
		resp, err = n.WorkingSet(ctx, &api.WorkingSetRequest{Digest: img.Checkpoint.Manifest.Digest.String()})
		return err
	})
	if err != nil {
		return nil, err
	}
	return workingset.Parse(resp.WorkingSet)
}

// copyIndex copies an image within a plain-HTTP registry, which mounts its blobs.
func copyIndex(ctx context.Context, from, to string) error {
	src, err := name.ParseReference(from, name.Insecure)
	if err != nil {
		return err
	}
	dst, err := name.ParseReference(to, name.Insecure)
	if err != nil {
		return err
	}
	index, err := remote.Index(src, remote.WithContext(ctx))
	if err != nil {
		return err
	}
	return remote.WriteIndex(dst, index, remote.WithContext(ctx))
}

// Names of measurements, of thaw, for each subject and link.
const (
	stateSize     = "state"
	indexSize     = "page index"
	setSize       = "published working set"
	touchedChunks = "chunks touched by the first reply"
	setUntouched  = "of the published working set not touched by the first reply"
)

// sizes adds what the checkpoint consists of, and how good its working set is.
func (b *bench) sizes(l *lane) {
	m := measure{System: thaw, Workload: l.workload, MemoryMiB: l.mib, Link: l.link}
	for _, s := range []struct {
		name  string
		bytes int64
	}{{stateSize, l.state}, {indexSize, l.index}, {setSize, l.size(l.set)}} {
		m.Name, m.Value, m.Unit = s.name, float64(s.bytes)/mebibyte, "MiB"
		b.add(m)
	}
	if len(l.touched) == 0 {
		return // no restore without a set was measured
	}
	m.Name, m.Value, m.Unit = touchedChunks, float64(len(l.touched)), "chunks"
	b.add(m)
	touched := make(map[workingset.Chunk]bool)
	for _, c := range l.touched {
		touched[c] = true
	}
	untouched := slices.DeleteFunc(slices.Clone(l.set), func(c workingset.Chunk) bool { return touched[c] })
	m.Name, m.Value, m.Unit = setUntouched, 100*float64(l.size(untouched))/float64(l.size(l.set)), "%"
	b.add(m)
}

// size is how many bytes of the registry's hold chunks.
func (c *checkpoint) size(chunks []workingset.Chunk) int64 {
	var n int64
	for _, k := range chunks {
		n += int64(c.pages.Blobs[k.Blob].Chunks[k.Chunk].Size)
	}
	return n
}

func (c *checkpoint) remove() error { return os.RemoveAll(c.images) }
