// SPDX-License-Identifier: Apache-2.0

// Package snapshots is containerd's snapshots service for root filesystems, by
// embedding stargz-snapshotter: layers in the eStargz format are mounted lazily,
// others are unpacked as overlayfs does it. Restoring memory does not depend on
// it; a node may use another snapshotter.
package snapshots

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/reference"
	"github.com/containerd/errdefs"
	stargz "github.com/containerd/stargz-snapshotter/service"
	"google.golang.org/grpc"
)

// stopTimeout bounds how long calls that are under way may take to end.
const stopTimeout = 5 * time.Second

// Service is the snapshots service.
type Service struct {
	snapshotter snapshots.Snapshotter
	grpc        *grpc.Server
}

// New makes the service, which keeps its files under root and reads lazy layers
// from the registries that hosts returns. It mounts again what an earlier run
// had mounted. Serve or Close it.
func New(ctx context.Context, root string, hosts docker.RegistryHosts) (*Service, error) {
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, fmt.Errorf("snapshots service: %w", err)
	}
	if err := stargz.Supported(root); err != nil {
		return nil, fmt.Errorf("snapshots service cannot keep snapshots in %s (choose another snapshotter.root, or set snapshotter.enable to false): %w", root, err)
	}
	s, err := stargz.NewStargzSnapshotterService(ctx, root, &stargz.Config{},
		stargz.WithCustomRegistryHosts(func(ref reference.Spec) ([]docker.RegistryHost, error) { return hosts(ref.Hostname()) }))
	if err != nil {
		return nil, fmt.Errorf("snapshots service: %w", err)
	}
	g := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(g, snapshotservice.FromSnapshotter(s))
	return &Service{snapshotter: s, grpc: g}, nil
}

// Serve serves until the context is cancelled, then closes the service.
func (s *Service) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() {
		defer time.AfterFunc(stopTimeout, s.grpc.Stop).Stop()
		s.grpc.GracefulStop()
	})
	err := s.grpc.Serve(l)
	if stop() && err == nil {
		err = errors.New("it ended by itself")
	}
	if err != nil {
		err = fmt.Errorf("snapshots service: %w", err)
	}
	return errors.Join(err, s.Close())
}

// Close unmounts what the service has mounted.
func (s *Service) Close() error {
	s.grpc.Stop()
	// Snapshots that were removed since containerd last asked for a clean-up are
	// still mounted, and Close does not know them any more. An empty store has
	// nothing to look through (ErrNotFound).
	if c, ok := s.snapshotter.(snapshots.Cleaner); ok {
		if err := c.Cleanup(context.Background()); err != nil && !errdefs.IsNotFound(err) {
			return errors.Join(fmt.Errorf("snapshots service: %w", err), s.snapshotter.Close())
		}
	}
	return s.snapshotter.Close()
}
