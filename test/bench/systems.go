// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"time"

	"thaw.dev/thaw/snapshotter/publish"
	"thaw.dev/thaw/test/baseline"
	"thaw.dev/thaw/test/stack"
	"thaw.dev/thaw/test/stack/registry"
)

// trial is one measurement under way.
type trial struct {
	row      *row
	registry *registry.Registry
	began    time.Time
	traffic  registry.Traffic
}

// start begins the time; everything before it is preparation.
func (t *trial) start() error {
	if err := back(); err != nil {
		return err
	}
	t.traffic = t.registry.Traffic(nil)
	t.began = time.Now()
	return nil
}

// stop ends the time.
func (t *trial) stop() {
	t.row.TTFR = float64(time.Since(t.began).Microseconds()) / 1000
	after := t.registry.Traffic(nil)
	t.row.BytesFetched, t.row.Requests = after.Sent-t.traffic.Sent, after.Requests-t.traffic.Requests
}

// lane is a checkpoint that the node reaches over one link.
type lane struct {
	*checkpoint
	link     string
	registry string // host:port
}

// system is a way to have a subject's first reply.
type system struct {
	name, cache string
	workingSet  bool
	measure     func(context.Context, *trial) error
}

// own are the systems that need no others' software, in the order in which they take turns: a warm node is one on which the image
// was just restored.
func (l *lane) own() []system {
	return []system{
		{thaw, "cold", false, l.thawCold},
		{eager, "cold", false, l.eager},
		{thaw, "cold", true, l.thawColdWithSet},
		{thaw, "warm", true, l.thawWarm},
		{criuLocal, "warm", false, l.criuLocal},
		{coldStart, "cold", false, l.cold},
	}
}

// reply waits for the first correct reply and ends the time.
func (l *lane) reply(ctx context.Context, t *trial, ip string, fresh bool) error {
	err := l.ask(ctx, ip, fresh)
	t.stop()
	return err
}

// pod runs what is measured, a container in a new pod of a handler, and after its first reply, but before it is removed, more.
func (l *lane) pod(ctx context.Context, t *trial, handler string, o stack.ContainerOptions, more func(*stack.Container) error) (err error) {
	pod, err := l.s.RunPod(ctx, stack.PodOptions{Name: handler, Handler: handler})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pod.Remove(context.WithoutCancel(ctx))) }()
	o.Env = l.env
	c, err := pod.Create(ctx, o)
	if err != nil {
		return err
	}
	if err := t.start(); err != nil {
		return err
	}
	if err := c.Start(ctx); err != nil {
		return err
	}
	if err := l.reply(ctx, t, pod.IP, handler != thaw); err != nil {
		return err
	}
	return more(c)
}

func (l *lane) cold(ctx context.Context, t *trial) error {
	return l.pod(ctx, t, "runc", stack.ContainerOptions{Image: l.s.Workload(l.workload)}, func(*stack.Container) error { return nil })
}

// reports is how long shims take to tell the daemon what happened: they do so every second.
const reports = 1200 * time.Millisecond

// restored restores by thaw and adds to the row what the daemon knows of it.
func (l *lane) restored(ctx context.Context, t *trial, image string) error {
	return l.pod(ctx, t, thaw, stack.ContainerOptions{Image: image}, func(c *stack.Container) error {
		if err := sleep(ctx, reports); err != nil {
			return err
		}
		st, err := restoreStatus(ctx, c.ID)
		if err != nil {
			return err
		}
		t.row.RemoteFaults, t.row.Faults = st.RemoteFaults, st.Faults
		t.row.WaitP50, t.row.WaitP99 = float64(st.FaultWaitP50Ns)/1000, float64(st.FaultWaitP99Ns)/1000
		return nil
	})
}

// sleep waits for something of which nobody tells.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// thawCold restores on a node and from a registry that know nothing of what is touched first, and notes what was.
func (l *lane) thawCold(ctx context.Context, t *trial) error {
	if err := l.s.ClearThawCache(ctx); err != nil {
		return err
	}
	image := l.plain(l.registry)
	if err := l.restored(ctx, t, image); err != nil {
		return err
	}
	img, err := publish.Read(ctx, image, certsDir)
	if err != nil {
		return err
	}
	set, err := recordedSet(ctx, img)
	if err != nil {
		return err
	}
	l.touched = set.Within(l.pages)
	return nil
}

// thawColdWithSet restores on a node that has nothing of the checkpoint, from a registry that has a working set of it.
func (l *lane) thawColdWithSet(ctx context.Context, t *trial) error {
	if err := l.s.ClearThawCache(ctx); err != nil {
		return err
	}
	return l.restored(ctx, t, l.published(l.registry))
}

// thawWarm restores once more on a node on which the image was just restored: what its first reply touches is cached.
func (l *lane) thawWarm(ctx context.Context, t *trial) error {
	return l.restored(ctx, t, l.published(l.registry))
}

func (l *lane) bundle(ctx context.Context, measure func(*baseline.Bundle) error) (err error) {
	b, err := baseline.New(ctx, l.s, l.plain(l.registry), l.env)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Remove(context.WithoutCancel(ctx))) }()
	return measure(b)
}

func (l *lane) eager(ctx context.Context, t *trial) error {
	return l.bundle(ctx, func(b *baseline.Bundle) error {
		if err := t.start(); err != nil {
			return err
		}
		if err := baseline.Unpack(ctx, l.plain(l.registry), b.Images()); err != nil {
			return err
		}
		if err := b.Restore(ctx, false); err != nil {
			return err
		}
		return l.reply(ctx, t, b.Pod.IP, false)
	})
}

func (l *lane) criuLocal(ctx context.Context, t *trial) error {
	return l.bundle(ctx, func(b *baseline.Bundle) error {
		if err := b.Link(l.images); err != nil {
			return err
		}
		if err := t.start(); err != nil {
			return err
		}
		if err := b.Restore(ctx, true); err != nil {
			return err
		}
		return l.reply(ctx, t, b.Pod.IP, false)
	})
}

// peer makes a system of one of others.
func (l *lane) peer(name string, p peer) system {
	return system{name, "cold", false, func(ctx context.Context, t *trial) (err error) {
		var unready error
		ip, remove, err := p.Trial(ctx, func() { unready = t.start() })
		if err = errors.Join(err, unready); err != nil {
			if remove != nil {
				err = errors.Join(err, remove(context.WithoutCancel(ctx)))
			}
			return err
		}
		defer func() { err = errors.Join(err, remove(context.WithoutCancel(ctx))) }()
		return l.reply(ctx, t, ip, false)
	}}
}

// forPeers describes the lane to systems of others.
func (l *lane) forPeers() baseline.Checkpoint {
	return baseline.Checkpoint{
		Name: l.name(), Registry: l.registry, Env: l.env, Images: l.images, Image: l.plain(l.registry), Warm: l.warm,
		Base: l.s.Workload(l.workload),
	}
}
