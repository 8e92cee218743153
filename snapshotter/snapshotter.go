// SPDX-License-Identifier: Apache-2.0

// Package snapshotter is the node daemon: it puts together the restores of the
// node, the page store, the keeper of userfaultfds, containerd's snapshots
// service, and metrics, and serves them until it is told to stop.
//
//	STATE/thaw.sock         api.Node over ttrpc, for shims and the thaw command; api.Pages
//	STATE/keeper.sock       hand-over of userfaultfds (package keeper)
//	STATE/snapshotter.sock  containerd's snapshots service over gRPC
//	metrics.address         GET /metrics, GET /healthz
//
// Nothing that it keeps needs it to end in good order: after a kill the next run
// removes stale sockets and half-made files and goes on with the restores.
package snapshotter

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/ttrpc"
	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/config"
	"thaw.dev/thaw/snapshotter/keeper"
	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/policy"
	"thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/restore"
	"thaw.dev/thaw/snapshotter/seal/wrap"
	"thaw.dev/thaw/snapshotter/snapshots"
)

// stopTimeout bounds how long requests that are under way may take to end.
const stopTimeout = 5 * time.Second

// Run runs the daemon until the context is cancelled. ready, if not nil, is
// called when everything serves.
func Run(ctx context.Context, cfg *config.Config, ready func()) (err error) {
	// A root filesystem's own mode is that of the folder which the snapshots
	// service makes for it: under a stricter umask only root could enter it. What
	// is for this user alone is made with such a mode.
	unix.Umask(0o022)
	unlock, err := lockState(cfg.StateDir)
	if err != nil {
		return err
	}
	defer unlock()

	tracer := startTracing(ctx)
	defer tracer.close(ctx)

	criuFound, err := newCRIUCheck(cfg.CRIU)
	if err != nil {
		return err
	}
	trust, err := policy.New(policy.Options{
		Repositories: cfg.Trust.Repositories, RequireDigest: cfg.Trust.RequireDigest,
		VerifiersDir: cfg.Trust.VerifiersDir, VerdictLifetime: time.Duration(cfg.Trust.VerdictLifetime),
	})
	if err != nil {
		return fmt.Errorf("configuration: %w", err)
	}
	m := newMetrics()
	pages, err := pagestore.Open(ctx, pagestore.Options{
		Dir:            filepath.Join(cfg.CacheDir, "pages"),
		Parallel:       cfg.Limits.ParallelFetches,
		RequestSize:    int64(cfg.Limits.RequestSize),
		CacheSize:      int64(cfg.Limits.CacheSize),
		Quiet:          time.Duration(cfg.Background.Quiet),
		BackgroundRate: int64(cfg.Background.BytesPerSecond),
		Observe:        m.fetched,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pages.Close()) }()
	m.pages(pages)

	images := &restore.Containerd{Address: cfg.Containerd.Address}
	defer func() { err = errors.Join(err, images.Close()) }()
	hosts := registry.Hosts(ctx, registry.HostOptions{
		CertsDir: cfg.Registry.CertsDir, DockerConfig: cfg.Registry.DockerConfig, Connections: cfg.Limits.ParallelFetches + 4,
	})
	restores, err := restore.Open(ctx, restore.Options{
		StateDir: cfg.StateDir,
		CacheDir: cfg.CacheDir,
		Images:   images,
		Registry: registry.New(registry.Options{
			Hosts: hosts, Timeout: time.Duration(cfg.Registry.Timeout), WholeTimeout: time.Duration(cfg.Registry.MetadataTimeout),
			StallTimeout: time.Duration(cfg.Registry.StallTimeout), Observe: m.received,
		}),
		Pages: pages,
		Limits: restore.Limits{
			MaxMemory: int64(cfg.Limits.MaxMemory), MaxState: int64(cfg.Limits.MaxState),
			MaxPageIndex: int64(cfg.Limits.MaxPageIndex), Unused: cfg.Limits.UnusedImages,
			UnusedSize: int64(cfg.Limits.UnusedImagesSize),
		},
		MetadataCacheSize: int64(cfg.Limits.MetadataCacheSize),
		Policy:            cfg.Policy,
		FillDelay:         time.Duration(cfg.Background.Delay),
		Trust:             trust,
		Keys:              &wrap.Keys{Dir: cfg.Decryption.KeysDir, ProviderConfig: cfg.Decryption.KeyproviderConfig},
		CheckCRIU:         criuFound.check,
		Admit:             admitImages,
	})
	if err != nil {
		return err
	}
	defer restores.Close()
	m.restores(restores)

	// A server that fails ends all others, and so does an error here, before what
	// they serve is closed.
	ctx, cancel := context.WithCancel(ctx)
	g, ctx := errgroup.WithContext(ctx)
	defer func() {
		cancel()
		err = errors.Join(err, g.Wait())
	}()
	node, err := ttrpc.NewServer(append(tracer.options(), ttrpc.WithServerHandshaker(ttrpc.UnixSocketRequireSameUser()))...)
	if err != nil {
		return err
	}
	api.RegisterNodeService(node, &service{restores: restores, metrics: m})
	tracer.serve(node)
	if cfg.PageServer.Enable {
		lend := newPages(ctx, restores, cfg.PageServer.Address)
		api.RegisterPagesService(node, lend)
		g.Go(func() error {
			<-ctx.Done()
			lend.stop()
			return nil
		})
	}
	if err := serveNode(ctx, g, node, cfg.Socket()); err != nil {
		return err
	}
	if err := serveKeeper(ctx, g, cfg.KeeperSocket()); err != nil {
		return err
	}
	if err := serveMetrics(ctx, g, cfg.Metrics.Address, m.handler()); err != nil {
		return err
	}
	if cfg.Snapshotter.Enable {
		s, err := snapshots.New(ctx, cfg.Snapshotter.Root, hosts)
		if err != nil {
			return err
		}
		l, err := listen(cfg.Snapshotter.Socket)
		if err != nil {
			return errors.Join(err, s.Close())
		}
		g.Go(func() error { return s.Serve(ctx, sameUser{l, ctx}) })
	}

	lasting := []string{cfg.Socket(), cfg.KeeperSocket(), restores.RecordDir(), restores.ImagesDir()}
	if cfg.Snapshotter.Enable {
		lasting = append(lasting, cfg.Snapshotter.Socket)
	}
	if err := watch(ctx, g, lasting); err != nil {
		return err
	}

	notify(ctx, daemon.SdNotifyReady)
	if ready != nil {
		ready()
	}
	log.G(ctx).WithField("socket", cfg.Socket()).Info("thaw-snapshotter is ready")
	<-ctx.Done()
	notify(ctx, daemon.SdNotifyStopping)
	return nil
}

func notify(ctx context.Context, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.G(ctx).WithError(err).Warn("service manager not notified")
	}
}

// lockState makes the state folder and makes sure that one daemon has it.
func lockState(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another thaw-snapshotter uses %s: stop that or give this one its own state_dir: %w", dir, errdefs.ErrFailedPrecondition)
	}
	return func() { f.Close() }, nil
}

// listen makes a unix socket for this user alone, in place of a stale one.
func listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	// The state folder's lock is held: nobody serves the old one.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("socket: %w", err), l.Close())
	}
	return l, nil
}

func serveNode(ctx context.Context, g *errgroup.Group, s *ttrpc.Server, path string) error {
	l, err := listen(path)
	if err != nil {
		return err
	}
	served := make(chan struct{})
	g.Go(func() error {
		defer close(served)
		// Not the group's context: requests under way end in good order.
		if err := s.Serve(context.WithoutCancel(ctx), l); err != nil && !errors.Is(err, ttrpc.ErrServerClosed) {
			return fmt.Errorf("ttrpc: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if s.Shutdown(sctx) != nil {
			s.Close()
		}
		<-served
		return nil
	})
	return nil
}

func serveKeeper(ctx context.Context, g *errgroup.Group, path string) error {
	s, err := keeper.Listen(path)
	if err != nil {
		return err
	}
	g.Go(func() error { return s.Serve(ctx) })
	return nil
}

func serveMetrics(ctx context.Context, g *errgroup.Group, address string, h http.Handler) error {
	if address == "" {
		return nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("metrics (choose another metrics.address, or \"\" for none): %w", err)
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second}
	g.Go(func() error {
		if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("metrics: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		return s.Close()
	})
	return nil
}
