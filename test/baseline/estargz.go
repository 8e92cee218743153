// SPDX-License-Identifier: Apache-2.0

//go:build linux

package baseline

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/proxy"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/errdefs"
	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"thaw.dev/thaw/test/stack"
)

// Estargz restores with CRIU's own lazy-pages daemon, which reads the memory from complete CRIU images in a layer in the eStargz
// format that stargz-snapshotter mounts lazily.
//
// Each trial has a stargz-snapshotter of its own, with empty caches: the one that thaw-snapshotter embeds, in a second
// process, with the library's defaults. Nothing is prefetched, and the background fetch, which is on by default, does not meet
// the first reply: it waits until nothing was asked for during five seconds.
type Estargz struct {
	s     *stack.Stack
	c     Checkpoint
	image name.Reference
}

// NewEstargz writes the checkpoint as an image with an eStargz layer to the stack's registry.
func NewEstargz(ctx context.Context, s *stack.Stack, c Checkpoint) (*Estargz, error) {
	const repository = "estargz/"
	to, err := name.ParseReference(s.Registry.Ref(repository+c.Name+":1"), name.Insecure)
	if err != nil {
		return nil, err
	}
	if !exists(ctx, to) {
		if err := pushEstargz(ctx, c.Images, s.Dir, to); err != nil {
			return nil, fmt.Errorf("eStargz: %w", err)
		}
	}
	e := &Estargz{s: s, c: c}
	e.image, err = name.ParseReference(c.Registry+"/"+repository+c.Name+":1", name.Insecure)
	return e, err
}

// Trial makes a pod and a snapshotter ready and calls start. Then it mounts the layer, restores, and returns as soon as the program runs.
// The program's server has the address ip; remove takes all away again.
func (e *Estargz) Trial(ctx context.Context, start func()) (ip string, remove func(context.Context) error, err error) {
	l, err := startStargz(ctx, e.s)
	if err != nil {
		return "", nil, err
	}
	b, err := New(ctx, e.s, e.c.Image, e.c.Env)
	if err != nil {
		return "", nil, errors.Join(err, l.remove(context.WithoutCancel(ctx)))
	}
	remove = func(ctx context.Context) error { return errors.Join(b.Remove(ctx), l.remove(ctx)) }
	start()
	if err := e.restore(ctx, l, b); err != nil {
		return "", nil, errors.Join(err, remove(context.WithoutCancel(ctx)))
	}
	return b.Pod.IP, remove, nil
}

func (e *Estargz) restore(ctx context.Context, l *stargz, b *Bundle) error {
	images, err := l.mount(ctx, e.image)
	if err != nil {
		return err
	}
	if err := b.Link(images); err != nil {
		return err
	}
	return b.Restore(ctx, true)
}

// Close leaves the image in the registry.
func (e *Estargz) Close(context.Context) error { return nil }

// stargz is a running stargz-snapshotter.
type stargz struct {
	dir     string // caches, on disk
	state   string // sockets, on a tmpfs
	process *exec.Cmd
	ended   chan struct{}
	conn    *grpc.ClientConn
	mounted string
}

const stargzConfig = `state_dir = %q
cache_dir = %q
[metrics]
  address = ""
`

// startStargz starts a snapshotter with empty caches and returns when it answers.
func startStargz(ctx context.Context, s *stack.Stack) (_ *stargz, err error) {
	l := &stargz{ended: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.remove(context.WithoutCancel(ctx)))
		}
	}()
	if l.dir, err = os.MkdirTemp(s.Dir, "stargz-"); err != nil {
		return nil, err
	}
	if l.state, err = os.MkdirTemp("/run", "stargz-"); err != nil {
		return nil, err
	}
	config := filepath.Join(l.state, "config.toml")
	if err := os.WriteFile(config, fmt.Appendf(nil, stargzConfig, l.state, l.dir), 0o600); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(s.Logs(), "stargz.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	l.process = exec.Command(filepath.Join(s.Bin, "thaw-snapshotter"), "--config", config)
	l.process.Stdout, l.process.Stderr = log, log
	// A group of its own, because an interrupt from the terminal is not for it.
	l.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := l.process.Start(); err != nil {
		return nil, err
	}
	ready, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		err := l.process.Wait()
		close(l.ended)
		cancel(fmt.Errorf("stargz-snapshotter ended (%v): see %s", err, log.Name()))
	}()
	l.conn, err = grpc.NewClient("unix://"+filepath.Join(l.state, "snapshotter.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second}}))
	if err != nil {
		return nil, err
	}
	if _, err := l.snapshotter().Stat(namespaces.WithNamespace(ready, stack.CRINamespace), "none"); !errdefs.IsNotFound(err) {
		return nil, errors.Join(err, context.Cause(ready))
	}
	return l, nil
}

func (l *stargz) snapshotter() snapshots.Snapshotter {
	return proxy.NewSnapshotter(snapshotsapi.NewSnapshotsClient(l.conn), "stargz")
}

// mount mounts an image's only layer at the folder that it returns, as containerd does when it pulls: with labels that say where
// the layer is.
func (l *stargz) mount(ctx context.Context, ref name.Reference) (string, error) {
	image, err := remote.Image(ref, remote.WithContext(ctx))
	if err != nil {
		return "", err
	}
	manifest, err := image.Manifest()
	if err != nil {
		return "", err
	}
	if len(manifest.Layers) != 1 {
		return "", fmt.Errorf("%s has %d layers instead of one", ref, len(manifest.Layers))
	}
	layer := manifest.Layers[0]
	const committed = "layer"
	ctx = namespaces.WithNamespace(ctx, stack.CRINamespace)
	_, err = l.snapshotter().Prepare(ctx, "prepare", "", snapshots.WithLabels(map[string]string{
		"containerd.io/snapshot.ref":        committed,
		snapshotters.TargetRefLabel:         ref.Name(),
		snapshotters.TargetLayerDigestLabel: layer.Digest.String(),
		snapshotters.TargetImageLayersLabel: layer.Digest.String(),
		estargz.TOCJSONDigestAnnotation:     layer.Annotations[estargz.TOCJSONDigestAnnotation],
	}))
	// That it is there already is how it says that it is mounted and need not be unpacked.
	if !errdefs.IsAlreadyExists(err) {
		return "", fmt.Errorf("stargz-snapshotter did not mount %s: %w", ref, err)
	}
	mounts, err := l.snapshotter().View(ctx, "view", committed)
	if err != nil {
		return "", err
	}
	at := filepath.Join(l.state, "layer")
	if err := os.Mkdir(at, 0o700); err != nil {
		return "", err
	}
	l.mounted = at
	return at, mount.All(mounts, at)
}

// stopTimeout bounds how long a snapshotter may take to end.
const stopTimeout = 20 * time.Second

// remove ends the snapshotter and removes its mounts and caches.
func (l *stargz) remove(ctx context.Context) error {
	var errs []error
	if l.mounted != "" {
		errs = append(errs, mount.UnmountAll(l.mounted, unix.MNT_DETACH))
	}
	if l.conn != nil {
		errs = append(errs, l.conn.Close())
	}
	if l.process != nil && l.process.Process != nil {
		errs = append(errs, l.stop(ctx))
	}
	if l.dir != "" {
		// If it was killed, its mounts are still there.
		errs = append(errs, mount.UnmountRecursive(l.dir, unix.MNT_DETACH), os.RemoveAll(l.dir))
	}
	if l.state != "" {
		errs = append(errs, os.RemoveAll(l.state))
	}
	return errors.Join(errs...)
}

// stop ends the process in order, and kills it if that takes too long.
func (l *stargz) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if err := l.process.Process.Signal(unix.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-l.ended:
		return nil
	case <-ctx.Done():
	}
	err := l.process.Process.Kill()
	<-l.ended
	return errors.Join(fmt.Errorf("stargz-snapshotter did not end on SIGTERM: %w", ctx.Err()), err)
}
