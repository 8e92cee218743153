// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/seal/wrap"
)

// UnpackAll downloads a whole checkpoint and writes it to dir, which must not
// exist, as complete CRIU images with all pages in their files: what `runc
// restore` needs without thaw. All of it is verified, and checked as before a
// restore on this machine. Encrypted checkpoints are refused.
func UnpackAll(ctx context.Context, repo *registry.Repository, manifest v1.Descriptor, dir string, limits Limits) (err error) {
	tmp, err := os.MkdirTemp(filepath.Dir(dir), tmpPrefix)
	if err != nil {
		return fmt.Errorf("unpack checkpoint: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	meta, err := openMetadata(filepath.Join(tmp, "metadata"), limits.MaxState+limits.MaxPageIndex)
	if err != nil {
		return err
	}
	all, err := openLayouts(filepath.Join(tmp, "images"), limits, meta, &wrap.Keys{})
	if err != nil {
		return err
	}
	l, err := all.acquire(ctx, repo, manifest)
	if err != nil {
		return err
	}
	places, err := openPlaces(l)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, places.close()) }()
	for i := range l.index.Blobs {
		if err := places.unpackBlob(ctx, repo, i, filepath.Join(tmp, "blob")); err != nil {
			return err
		}
	}
	if err := os.Rename(l.images(), dir); err != nil {
		return fmt.Errorf("unpack checkpoint: %w", err)
	}
	return nil
}

// place is where pages of a blob go: into a pages file, at an offset.
type place struct {
	page, pages uint64
	file        *os.File
	offset      int64
}

// places are the places of all pages of all blobs.
type places struct {
	index *pageindex.Index
	files []*os.File
	of    [][]place // by blob and chunk: see at
	first []int     // by blob: its chunk 0 in of
}

func openPlaces(l *layout) (_ *places, err error) {
	images, err := image.Open(l.images())
	if err != nil {
		return nil, err
	}
	defer images.Close()
	p := &places{index: l.index, first: make([]int, len(l.index.Blobs))}
	chunks := 0
	for i := range l.index.Blobs {
		p.first[i] = chunks
		chunks += len(l.index.Blobs[i].Chunks)
	}
	p.of = make([][]place, chunks)
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	maps, err := images.Pagemaps()
	if err != nil {
		return nil, err
	}
	for _, m := range maps {
		proc, ok := l.index.Process(uint32(m.ID))
		if !ok || m.Shared {
			continue
		}
		f, err := os.OpenFile(filepath.Join(l.images(), m.File()), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("unpack checkpoint: %w", err)
		}
		p.files = append(p.files, f)
		p.addProcess(m, slices.Clone(proc.Runs), f)
	}
	return p, nil
}

// addProcess notes where the runs of a process go. That they are exactly the
// lazy ranges of its pagemap was checked when the checkpoint was laid out.
func (p *places) addProcess(m *image.Pagemap, runs []pageindex.Run, f *os.File) {
	for r := range m.Lazy() {
		end := r.Start + r.Pages*pageindex.PageSize
		for len(runs) > 0 && runs[0].Start < end {
			run := runs[0]
			if run.End() > end {
				n := (end - run.Start) / pageindex.PageSize
				runs[0].Start, runs[0].Pages = end, run.Pages-n
				if run.Blob != pageindex.Zero {
					runs[0].Page += n
				}
				run.Pages = n
			} else {
				runs = runs[1:]
			}
			if run.Blob != pageindex.Zero {
				p.addRun(run, f, r.Offset+int64(run.Start-r.Start))
			}
		}
	}
}

func (p *places) addRun(r pageindex.Run, f *os.File, offset int64) {
	b := &p.index.Blobs[r.Blob]
	for r.Pages > 0 {
		c := b.ChunkOf(r.Page)
		n := min(r.Pages, b.FirstPage(c+1)-r.Page)
		at := p.first[r.Blob] + c
		p.of[at] = append(p.of[at], place{page: r.Page, pages: n, file: f, offset: offset})
		r.Page, r.Pages, offset = r.Page+n, r.Pages-n, offset+int64(n)*pageindex.PageSize
	}
}

func (p *places) close() error {
	var errs []error
	for _, f := range p.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// unpackBlob downloads a blob to a file and writes its pages to their places.
func (p *places) unpackBlob(ctx context.Context, repo *registry.Repository, i int, path string) (err error) {
	b := &p.index.Blobs[i]
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("unpack checkpoint: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(path)) }()
	desc := v1.Descriptor{MediaType: checkpoint.MediaTypePages, Digest: b.Digest, Size: b.Size()}
	if err := repo.CopyBlob(ctx, desc, f); err != nil {
		return err
	}
	workers := runtime.GOMAXPROCS(0)
	g, ctx := errgroup.WithContext(ctx)
	for w := range workers {
		g.Go(func() error {
			for c := w; c < len(b.Chunks); c += workers {
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := p.unpackChunk(i, c, f); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

func (p *places) unpackChunk(blob, c int, from io.ReaderAt) error {
	b := &p.index.Blobs[blob]
	chunk := b.Chunks[c]
	frame := make([]byte, chunk.Size)
	if _, err := from.ReadAt(frame, b.Offset(c)); err != nil {
		return fmt.Errorf("unpack checkpoint: %w", err)
	}
	content := make([]byte, int(chunk.Pages)*pageindex.PageSize)
	if err := pageblob.Decode(content, chunk, frame); err != nil {
		return fmt.Errorf("chunk %d of %s: %w", c, b.Digest, err)
	}
	for _, pl := range p.of[p.first[blob]+c] {
		at := (pl.page - b.FirstPage(c)) * pageindex.PageSize
		if _, err := pl.file.WriteAt(content[at:at+pl.pages*pageindex.PageSize], pl.offset); err != nil {
			return fmt.Errorf("unpack checkpoint: %w", err)
		}
	}
	return nil
}
