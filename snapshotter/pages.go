// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"fmt"
	"net"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/criu/pageserver"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/restore"
)

// pages serves api.Pages.
type pages struct {
	restores *restore.Manager
	address  net.IP
	ctx      context.Context // ends all calls
	cancel   context.CancelFunc

	mu      sync.Mutex
	stopped bool
	calls   sync.WaitGroup
}

var _ api.PagesService = (*pages)(nil)

func newPages(ctx context.Context, restores *restore.Manager, address string) *pages {
	p := &pages{restores: restores, address: net.ParseIP(address)}
	p.ctx, p.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return p
}

// stop ends all page servers and waits for them.
func (p *pages) stop() {
	p.mu.Lock()
	p.stopped = true
	p.mu.Unlock()
	p.cancel()
	p.calls.Wait()
}

var errStopping = fmt.Errorf("thaw-snapshotter is stopping: %w", errdefs.ErrUnavailable)

// Serve serves until its context ends, which it does with the caller's connection.
func (p *pages) Serve(ctx context.Context, req *api.ServeRequest, answer api.Pages_ServeServer) error {
	p.mu.Lock()
	if p.stopped {
		p.mu.Unlock()
		return api.ToStatus(errStopping)
	}
	p.calls.Add(1)
	p.mu.Unlock()
	defer p.calls.Done()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	err := p.serve(log.WithLogger(ctx, log.G(ctx).WithField("image", req.GetImage())), req, answer)
	if p.ctx.Err() != nil {
		err = errStopping
	}
	return api.ToStatus(err)
}

func (p *pages) serve(ctx context.Context, req *api.ServeRequest, answer api.Pages_ServeServer) error {
	d, err := digest.Parse(req.GetDigest())
	if err != nil || d.Algorithm() != digest.SHA256 || req.GetSize() <= 0 || req.GetSize() > checkpoint.MaxManifestSize || req.GetPort() > 65535 {
		return fmt.Errorf("digest or size of the checkpoint manifest, or port: %w", errdefs.ErrInvalidArgument)
	}
	memory, err := p.restores.Memory(ctx, req.GetImage(), v1.Descriptor{
		MediaType: v1.MediaTypeImageManifest, Digest: d, Size: req.GetSize(), ArtifactType: checkpoint.ArtifactType,
	})
	if err != nil {
		return err
	}
	defer memory.Release()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: p.address, Port: int(req.GetPort())})
	if err != nil {
		return fmt.Errorf("page server (choose another port, or another page_server.address in the configuration): %w: %w", err, errdefs.ErrUnavailable)
	}
	defer l.Close()
	if err := answer.Send(&api.ServeResponse{Address: l.Addr().String(), ImagesDir: memory.ImagesDir()}); err != nil {
		return err
	}
	log.G(ctx).WithField("address", l.Addr()).Info("page server begins")
	defer log.G(ctx).WithField("address", l.Addr()).Info("page server has ended")
	return pageserver.New(memory).Serve(ctx, l)
}
