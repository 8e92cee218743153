// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"fmt"
	"sort"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/pagestore"
)

// Memory is a checkpoint that somebody restores without a shim: it is laid out as
// for a restore, and the pages of its processes can be read. Nothing is checked
// against any container's spec.
type Memory struct {
	manager *Manager
	held    *restored
}

// Memory fetches and lays out the checkpoint with that manifest from the
// repository of an image. Release it before the manager is closed.
func (m *Manager) Memory(ctx context.Context, image string, manifest v1.Descriptor) (_ *Memory, err error) {
	r := &restored{record: record{Image: image, Manifest: manifest.Digest.String()}}
	if r.repo, err = m.repository(image); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			m.letGo(r)
		}
	}()
	if r.layout, err = m.layouts.acquire(ctx, r.repo.Repository, manifest); err != nil {
		return nil, fmt.Errorf("checkpoint of %s: %w", image, classed(err))
	}
	if err := m.take(r); err != nil {
		return nil, err
	}
	return &Memory{manager: m, held: r}, nil
}

// Release gives back the memory, which must not be in use any more.
func (m *Memory) Release() { m.manager.letGo(m.held) }

// ImagesDir is the folder with CRIU's images, all but the lazy pages; it is shared
// and read-only.
func (m *Memory) ImagesDir() string { return m.held.layout.images() }

// Waits between attempts to fetch what could not be fetched.
const (
	firstPause = time.Second
	lastPause  = 30 * time.Second
)

// Await returns when pages of a process are in the page store, and how many of the
// count pages from an address on there are without a gap. It gives up with the
// context only: a registry that fails may come back, and who asked has nothing to
// go on with.
func (m *Memory) Await(ctx context.Context, pid uint32, address uint64, count int) (int, error) {
	pieces := m.pieces(pid, address, count)
	if len(pieces) == 0 {
		return 0, fmt.Errorf("process %d has no lazy page at %#x in the checkpoint of %s: are CRIU's images those of this checkpoint? %w", pid, address, m.held.record.Image, errdefs.ErrNotFound)
	}
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := m.fetch(ctx, pieces)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		log.G(ctx).WithError(err).WithField("image", m.held.record.Image).Warn("pages not fetched: whoever asked for them waits")
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
	n := 0
	for _, p := range pieces {
		n += int(p.Pages)
	}
	return n, nil
}

// Read reads whole pages for which Await has returned.
func (m *Memory) Read(pid uint32, address uint64, p []byte) error {
	for _, piece := range m.pieces(pid, address, len(p)/pageindex.PageSize) {
		n := piece.Pages * pageindex.PageSize
		if piece.Blob == pageindex.Zero {
			clear(p[:n])
		} else if err := m.held.blobs[piece.Blob].ReadPages(piece.Page, p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	if len(p) != 0 {
		return fmt.Errorf("process %d has %d bytes less at %#x: %w", pid, len(p), address, errdefs.ErrNotFound)
	}
	return nil
}

// pieces cuts the parts out of a process's runs that cover pages from an address
// on, up to the first gap.
func (m *Memory) pieces(pid uint32, address uint64, count int) (out []pageindex.Run) {
	proc, ok := m.held.layout.index.Process(pid)
	if !ok {
		return nil
	}
	runs := proc.Runs
	runs = runs[sort.Search(len(runs), func(i int) bool { return runs[i].End() > address }):]
	for left := uint64(count); left > 0 && len(runs) > 0 && runs[0].Start <= address; runs = runs[1:] {
		r := runs[0]
		if skip := (address - r.Start) / pageindex.PageSize; r.Blob != pageindex.Zero {
			r.Page += skip
		}
		r.Pages = min((r.End()-address)/pageindex.PageSize, left)
		r.Start = address
		out = append(out, r)
		address, left = r.End(), left-r.Pages
	}
	return out
}

// fetch brings the chunks of pieces into the page store.
func (m *Memory) fetch(ctx context.Context, pieces []pageindex.Run) error {
	chunks := make(map[int][]int)
	for _, p := range pieces {
		if p.Blob == pageindex.Zero {
			continue
		}
		b := &m.held.layout.index.Blobs[p.Blob]
		for c := b.ChunkOf(p.Page); c < len(b.Chunks) && b.FirstPage(c) < p.Page+p.Pages; c++ {
			if !m.held.blobs[p.Blob].Present(c) {
				chunks[p.Blob] = append(chunks[p.Blob], c)
			}
		}
	}
	// Demand: the answers to a client come in order, whatever it asks for, and a process may wait.
	g, ctx := errgroup.WithContext(ctx)
	for blob, list := range chunks {
		g.Go(func() error {
			return m.held.blobs[blob].Fetch(ctx, source{m.held.repo.Repository}, list, pagestore.Demand)
		})
	}
	return g.Wait()
}
