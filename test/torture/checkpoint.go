// SPDX-License-Identifier: Apache-2.0

//go:build linux

package torture

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
)

// checkpoint is a dump as a node has it: CRIU's images without the lazy pages,
// the page index, and the page blobs as a registry would hold them.
type checkpoint struct {
	images string // CRIU's images, to restore from
	index  *pageindex.Index
	blobs  [][]byte
}

// makeCheckpoint reads CRIU's images in dir and takes the lazy pages out of them.
func makeCheckpoint(ctx context.Context, dir string) (*checkpoint, error) {
	d, err := image.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	maps, err := d.Pagemaps()
	if err != nil {
		return nil, err
	}
	tasks, err := d.Tasks()
	if err != nil {
		return nil, err
	}
	for name, content := range image.MakeEager(tasks, maps) {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return nil, err
		}
	}
	c := &checkpoint{images: dir}
	w := pageblob.NewWriter(ctx, pageblob.Options{
		Open: func() (pageblob.Sink, error) { return &sink{c: c}, nil },
		// Several blobs, as a large checkpoint has.
		MaxBlob: 2 << 20,
	})
	for _, m := range maps {
		if m.Shared {
			continue
		}
		if err := addProcess(w, d, m); err != nil {
			w.Abort(err)
			return nil, err
		}
	}
	if c.index, _, _, err = w.Close(); err != nil {
		return nil, err
	}
	for _, m := range maps {
		if m.Shared || m.LazySize() == 0 {
			continue
		}
		if err := dropLazy(d, m); err != nil {
			return nil, err
		}
	}
	var pids []uint32
	for _, m := range maps {
		if !m.Shared {
			pids = append(pids, uint32(m.ID))
		}
	}
	parent := filepath.Join(dir, image.Parent)
	if err := os.Mkdir(parent, 0o700); err != nil {
		return nil, err
	}
	for name, content := range image.EmptyParent(pids) {
		if err := os.WriteFile(filepath.Join(parent, name), content, 0o600); err != nil {
			return nil, err
		}
	}
	// What a node reads is the encoded form.
	encoded, err := c.index.Encode()
	if err != nil {
		return nil, err
	}
	c.index, err = pageindex.Parse(encoded)
	return c, err
}

func addProcess(w *pageblob.Writer, d *image.Dir, m *image.Pagemap) error {
	f, err := d.OpenPages(m)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := w.Begin(uint32(m.ID)); err != nil {
		return err
	}
	for r := range m.Lazy() {
		pages := make([]byte, int64(r.Pages)*image.PageSize)
		if _, err := f.ReadAt(pages, r.Offset); err != nil {
			return err
		}
		if err := w.Add(r.Start, pages); err != nil {
			return err
		}
	}
	return nil
}

// dropLazy replaces a pages file by one in which lazy pages are holes.
func dropLazy(d *image.Dir, m *image.Pagemap) error {
	full, err := d.OpenPages(m)
	if err != nil {
		return err
	}
	defer full.Close()
	var eager bytes.Buffer
	if err := m.CompactEager(&eager, full); err != nil {
		return err
	}
	path := filepath.Join(d.Path(), m.File())
	if err := os.Remove(path); err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(m.ExpandEager(f, &eager), f.Close())
}

// sink keeps a page blob in memory.
type sink struct {
	c *checkpoint
	bytes.Buffer
}

func (s *sink) Commit(_ digest.Digest, _ int64) error {
	s.c.blobs = append(s.c.blobs, s.Bytes())
	return nil
}

func (s *sink) Abort(error) {}

// store is a page store on disk, which it fills as a Fetcher in random order
// and after random times.
type store struct {
	c     *checkpoint
	files []pager.Store
	// latency is the most that a chunk takes.
	latency time.Duration
	// failures is the share of requests without demand that fail.
	failures float64

	mu   sync.Mutex
	data []*os.File
	bits []*os.File
	have []map[uint32]bool
}

// newStore makes the files of a page store below dir; a share of the chunks are
// there from the beginning.
func newStore(c *checkpoint, dir string, share float64) (*store, error) {
	s := &store{c: c}
	for i := range c.index.Blobs {
		b := &c.index.Blobs[i]
		files := pager.Store{Data: filepath.Join(dir, fmt.Sprint("data-", i)), Present: filepath.Join(dir, fmt.Sprint("present-", i))}
		s.files = append(s.files, files)
		data, err := create(files.Data, int64(b.Pages())*pageindex.PageSize)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.data = append(s.data, data)
		bits, err := create(files.Present, int64(len(b.Chunks)+7)/8)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.bits = append(s.bits, bits)
		s.have = append(s.have, map[uint32]bool{})
		for k := range b.Chunks {
			if rand.Float64() >= share {
				continue
			}
			if err := s.put(uint32(i), uint32(k)); err != nil {
				return nil, errors.Join(err, s.close())
			}
		}
	}
	return s, nil
}

func create(path string, size int64) (*os.File, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if err := f.Truncate(size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (s *store) close() error {
	var errs []error
	for _, f := range append(s.data, s.bits...) {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// put verifies and decompresses a chunk and marks it as present.
func (s *store) put(blob, chunk uint32) error {
	b := &s.c.index.Blobs[blob]
	k := b.Chunks[chunk]
	at := b.Offset(int(chunk))
	content := make([]byte, k.Pages*pageindex.PageSize)
	if err := pageblob.Decode(content, k, s.c.blobs[blob][at:at+int64(k.Size)]); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.have[blob][chunk] {
		return nil
	}
	if _, err := s.data[blob].WriteAt(content, int64(b.FirstPage(int(chunk)))*pageindex.PageSize); err != nil {
		return err
	}
	s.have[blob][chunk] = true
	var bits byte
	for i := range uint32(8) {
		if s.have[blob][chunk/8*8+i] {
			bits |= 1 << i
		}
	}
	_, err := s.bits[blob].WriteAt([]byte{bits}, int64(chunk/8))
	return err
}

var errBackground = errors.New("the registry is away for a moment")

// Fetch implements pager.Fetcher.
func (s *store) Fetch(ctx context.Context, blob uint32, chunks []uint32, u pager.Urgency) error {
	for _, i := range rand.Perm(len(chunks)) {
		if s.latency > 0 {
			select {
			case <-time.After(rand.N(s.latency)):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if u != pager.Demand && rand.Float64() < s.failures {
			return errBackground
		}
		if err := s.put(blob, chunks[i]); err != nil {
			return err
		}
	}
	return nil
}

// some returns a share of all chunks, in random order.
func (c *checkpoint) some(share float64) (list []pager.Chunk) {
	for b := range c.index.Blobs {
		for _, i := range rand.Perm(len(c.index.Blobs[b].Chunks)) {
			if rand.Float64() < share {
				list = append(list, pager.Chunk{Blob: uint32(b), Chunk: uint32(i)})
			}
		}
	}
	return list
}
