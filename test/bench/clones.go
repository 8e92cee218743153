// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"thaw.dev/thaw/test/baseline"
	"thaw.dev/thaw/test/stack"
)

const (
	// clones are restored at the same time, of the synthetic server of clonesMiB.
	clones    = 32
	clonesMiB = 64
	// cloneRuns is how often.
	cloneRuns = 3
	// preparing is how many clones are made ready or removed at a time.
	preparing = 4
)

// clone is a restore that was made ready.
type clone struct {
	ip     string
	start  func(context.Context) error
	remove func(context.Context) error
}

// clones measures many restores of one image that are started together, by thaw (cold, with a published working set) and by CRIU's own
// daemon from local files.
func (b *bench) clones(ctx context.Context, l *lane) error {
	thawed := func(ctx context.Context) (_ clone, err error) {
		pod, err := l.s.RunPod(ctx, stack.PodOptions{Name: "clone", Handler: thaw})
		if err != nil {
			return clone{}, err
		}
		c, err := pod.Create(ctx, stack.ContainerOptions{Image: l.published(l.registry), Env: l.env})
		if err != nil {
			return clone{}, errors.Join(err, pod.Remove(context.WithoutCancel(ctx)))
		}
		return clone{pod.IP, c.Start, pod.Remove}, nil
	}
	local := func(ctx context.Context) (clone, error) {
		bundle, err := baseline.New(ctx, l.s, l.plain(l.registry), l.env)
		if err != nil {
			return clone{}, err
		}
		start := func(ctx context.Context) error { return bundle.Restore(ctx, true) }
		return clone{bundle.Pod.IP, start, bundle.Remove}, bundle.Link(l.images)
	}
	for run := range min(b.runs, cloneRuns) {
		for _, s := range []struct {
			name, cache string
			set         bool
			prepare     func(context.Context) (clone, error)
		}{
			{thaw, "cold", true, thawed},
			{criuLocal, "warm", false, local},
		} {
			if !b.wants(s.name) {
				continue
			}
			if s.name == thaw {
				if err := l.s.ClearThawCache(ctx); err != nil {
					return err
				}
			}
			r := row{
				System: s.name, Workload: l.workload, MemoryMiB: l.mib, Link: l.link, Cache: s.cache, WorkingSet: s.set, Clones: clones, Run: run,
			}
			ctx, cancel := context.WithTimeout(ctx, trialTimeout)
			err := b.together(ctx, l, &r, s.prepare)
			cancel()
			b.keep(r, err)
		}
	}
	return nil
}

// together makes clones ready, starts them all at once, and waits until each has replied.
func (b *bench) together(ctx context.Context, l *lane, r *row, prepare func(context.Context) (clone, error)) (err error) {
	made := make([]clone, clones)
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		var g errgroup.Group
		g.SetLimit(preparing)
		for _, c := range made {
			if c.remove != nil {
				g.Go(func() error { return c.remove(ctx) })
			}
		}
		err = errors.Join(err, g.Wait())
	}()
	g, prepareCtx := errgroup.WithContext(ctx)
	g.SetLimit(preparing)
	for i := range made {
		g.Go(func() (err error) {
			made[i], err = prepare(prepareCtx)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("make clones ready: %w", err)
	}
	t := &trial{row: r, registry: b.s.Registry}
	var running errgroup.Group
	if err := t.start(); err != nil {
		return err
	}
	for _, c := range made {
		running.Go(func() error {
			if err := c.start(ctx); err != nil {
				return err
			}
			return l.ask(ctx, c.ip, false)
		})
	}
	err = running.Wait()
	t.stop()
	return err
}
