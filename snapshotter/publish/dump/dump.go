// SPDX-License-Identifier: Apache-2.0

// Package dump freezes a running container of containerd and takes what a
// checkpoint image is made of: CRIU's images, the changes in the root
// filesystem, the spec and the base image.
//
// The container is frozen from before CRIU looks at it until both the dump and
// the changes in its root filesystem are taken, so that they belong together.
// The dump goes to memory, which is what keeps that time short.
package dump

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/log"
	"github.com/containerd/typeurl/v2"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/publish"
)

// Options say how a container is dumped.
type Options struct {
	// Dir is a folder on a tmpfs for the dump. Empty means the first of
	// /run/thaw and /dev/shm with enough room.
	Dir string
	// LogDir is where CRIU's log is kept after a failure. Empty means
	// /var/log/thaw.
	LogDir string
	// LeaveRunning lets the container go on after the dump. Otherwise it stays
	// frozen until Done.
	LeaveRunning bool
	// Base names the base image in place of the one that containerd knows the
	// container by.
	Base string
	// CertsDir is containerd's registry configuration folder, in case the base
	// image has to be looked up in its registry.
	CertsDir string
}

// cleanupTimeout bounds what is done after a cancelled or finished dump.
const cleanupTimeout = 30 * time.Second

// resumePace is how often a containerd that is away is asked to let a container go on.
const resumePace = 100 * time.Millisecond

// Dump is a container's checkpoint on this node. Done must be called.
type Dump struct {
	// Source is what to publish. It is valid until Done.
	Source *publish.Source
	// Frozen is how long the container was frozen. Without LeaveRunning it is
	// the time until the dump was complete.
	Frozen time.Duration

	client       *containerd.Client
	task         containerd.Task
	info         containers.Container
	namespace    string
	leaveRunning bool
	paused       bool
	release      []func(context.Context) error // in reverse order
}

// Take dumps a container that Find returned.
func Take(ctx context.Context, client *containerd.Client, c *Container, opts Options) (_ *Dump, err error) {
	ctx = namespaces.WithNamespace(ctx, c.Namespace)
	d := &Dump{client: client, namespace: c.Namespace, info: c.info, leaveRunning: opts.LeaveRunning}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Done(ctx, false))
		}
	}()
	if d.task, err = c.task(ctx); err != nil {
		return nil, err
	}
	leased, done, err := client.WithLease(ctx)
	if err != nil {
		return nil, fmt.Errorf("containerd gives no lease: %w", err)
	}
	d.release = append(d.release, done)
	base, err := baseOf(leased, client, c, opts)
	if err != nil {
		return nil, err
	}
	room, err := memoryDir(opts.Dir, c.memory(ctx, d.task))
	if err != nil {
		return nil, err
	}
	d.release = append(d.release, func(context.Context) error { return room.remove() })
	dir := room.path
	images, work := filepath.Join(dir, "images"), filepath.Join(dir, "work")
	for _, p := range []string{images, work} {
		if err := os.Mkdir(p, 0o700); err != nil {
			return nil, err
		}
	}
	src, err := d.freeze(leased, c, images, work, opts)
	if err != nil {
		return nil, err
	}
	src.Base = base
	if src.Images, err = image.Open(images); err != nil {
		return nil, err
	}
	d.release = append(d.release, func(context.Context) error { return src.Images.Close() })
	if !src.Images.Has("inventory.img") {
		return nil, fmt.Errorf("CRIU's images are not in %s: containerd runs in another mount namespace; run thaw in the same one, e.g. with nsenter --mount", images)
	}
	describe(src, c, work)
	d.Source = src
	return d, nil
}

// freeze pauses the container, takes dump and root filesystem, and lets it run
// again if it is to.
func (d *Dump) freeze(ctx context.Context, c *Container, images, work string, opts Options) (*publish.Source, error) {
	src := &publish.Source{Spec: c.info.Spec.GetValue()}
	if err := d.pause(ctx); err != nil {
		return nil, err
	}
	src.Created = time.Now()
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.criu(gctx, c, images, work, opts) })
	var changes v1.Descriptor
	g.Go(func() (err error) {
		if c.info.SnapshotKey == "" {
			return nil
		}
		changes, err = rootfsChanges(gctx, d.client, c)
		if err != nil {
			return fmt.Errorf("changes in the root filesystem of container %s: %w", short(c.info.ID), err)
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	d.Frozen = time.Since(src.Created)
	if d.leaveRunning {
		if err := d.resume(ctx); err != nil {
			return nil, err
		}
	}
	if changes.Digest != "" {
		src.Rootfs = contentOpener(c.Namespace, d.client.ContentStore(), changes)
	}
	return src, nil
}

func (d *Dump) criu(ctx context.Context, c *Container, images, work string, opts Options) error {
	o, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{
		ImagePath:           images,
		WorkPath:            work,
		OpenTcp:             true,
		ExternalUnixSockets: true,
		FileLocks:           true,
		Terminal:            c.spec.Process != nil && c.spec.Process.Terminal,
		// Exit stays false: the container is killed when the image is in the
		// registry, not before.
	})
	if err != nil {
		return err
	}
	_, err = d.client.TaskService().Checkpoint(ctx, &tasks.CheckpointTaskRequest{ContainerID: c.info.ID, Options: o})
	if err == nil {
		return nil
	}
	if ctx.Err() != nil { // given up by us: no failure of CRIU's
		return ctx.Err()
	}
	return explain(c.info.ID, work, opts.LogDir, errgrpc.ToNative(err))
}

// pause freezes the container. It is not given up half-way: containerd would
// freeze the container all the same, and nobody would know.
func (d *Dump) pause(ctx context.Context) error {
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	d.paused = true // it may be, even after an error
	if err := d.task.Pause(whole); err != nil {
		return fmt.Errorf("container %s cannot be frozen: %w", short(d.info.ID), err)
	}
	return ctx.Err()
}

// resume lets a frozen container go on, even if ctx has been cancelled. It waits for a containerd that is restarted.
func (d *Dump) resume(ctx context.Context) error {
	if !d.paused {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	pace := time.NewTicker(resumePace)
	defer pace.Stop()
	for {
		err := d.task.Resume(ctx)
		if err != nil {
			s, serr := d.task.Status(ctx)
			if errdefs.IsNotFound(serr) || serr == nil && s.Status != containerd.Paused && s.Status != containerd.Pausing {
				err = nil // it was not frozen after all, or is gone
			}
		}
		if err == nil {
			d.paused = false
			return nil
		}
		if errdefs.IsUnavailable(err) {
			select {
			case <-pace.C:
				continue
			case <-ctx.Done():
			}
		}
		return fmt.Errorf("container %s stays frozen: %w: try ctr task resume", short(d.info.ID), err)
	}
}

// Done releases the dump. If the container is still frozen it is killed when
// the checkpoint was published, and goes on running when it was not. Done does
// its work even if ctx has been cancelled.
func (d *Dump) Done(ctx context.Context, published bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	ctx = namespaces.WithNamespace(ctx, d.namespace)
	var errs []error
	if d.paused && published {
		errs = append(errs, d.stop(ctx))
	} else {
		errs = append(errs, d.resume(ctx))
	}
	for i := len(d.release) - 1; i >= 0; i-- {
		errs = append(errs, d.release[i](ctx))
	}
	d.release = nil
	return errors.Join(errs...)
}

// stop kills the frozen container and waits until it is gone: what is left can
// be deleted.
func (d *Dump) stop(ctx context.Context) error {
	exited, err := d.task.Wait(ctx)
	if err != nil {
		return fmt.Errorf("container %s: %w", short(d.info.ID), err)
	}
	if err := d.task.Kill(ctx, unix.SIGKILL, containerd.WithKillAll); err != nil && !errdefs.IsNotFound(err) {
		return errors.Join(fmt.Errorf("container %s cannot be stopped: %w", short(d.info.ID), err), d.resume(ctx))
	}
	// Frozen tasks take the signal when they thaw. Where the runtime has let
	// them go already, there is nothing to resume.
	if err := d.task.Resume(ctx); err != nil {
		log.G(ctx).WithError(err).Debug("resume after kill")
	}
	d.paused = false
	select {
	case <-exited:
	case <-ctx.Done():
		return fmt.Errorf("container %s did not end: %w", short(d.info.ID), ctx.Err())
	}
	if d.info.Labels[labelKind] != "container" {
		return nil
	}
	return d.settle(ctx)
}

// settlePoll is how often CRI is asked whether it knows that a container ended.
const settlePoll = 10 * time.Millisecond

// settle waits until CRI has noticed that its container is gone: until then it
// refuses to delete it. CRI has no other way to say so to somebody who was not
// listening to its events from before.
func (d *Dump) settle(ctx context.Context) error {
	conn, ok := d.client.Conn().(grpc.ClientConnInterface)
	if !ok {
		return nil
	}
	tick := time.NewTicker(settlePoll)
	defer tick.Stop()
	for client := cri.NewRuntimeServiceClient(conn); ; {
		s, err := client.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: d.info.ID})
		if err != nil || s.GetStatus().GetState() != cri.ContainerState_CONTAINER_RUNNING {
			return nil // it may have been deleted meanwhile
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("CRI did not notice that container %s ended: %w", short(d.info.ID), ctx.Err())
		}
	}
}

func short(id string) string {
	const n = 13
	if len(id) > 4*n {
		return id[:n]
	}
	return id
}
