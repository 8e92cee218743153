// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pageindex"
)

// Blob is one page blob in the store. It is used by as many as acquired it.
type Blob struct {
	store *Store
	index pageindex.Blob
	dir   string

	data    *os.File
	present []byte // the mapped bitmap

	// Guarded by store.mu:
	refs  int
	wants map[int]*want
}

// Acquire opens a blob's folder, which is made if there is none. Until the blob
// is released, it is not evicted.
func (s *Store) Acquire(index *pageindex.Blob) (*Blob, error) {
	key := index.Key()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	f := s.folders[key]
	if f != nil && f.open != nil {
		f.open.refs++
		return f.open, nil
	}
	b := &Blob{store: s, index: *index, dir: filepath.Join(s.opts.Dir, key), refs: 1, wants: make(map[int]*want)}
	if f != nil {
		s.bytes.Add(-f.size)
		delete(s.folders, key)
	}
	err := b.open()
	if err != nil {
		// Missing, damaged or of another boot: begin anew.
		if gone, derr := s.discard(key); derr == nil || errors.Is(derr, os.ErrNotExist) {
			if rerr := os.RemoveAll(gone); rerr != nil {
				log.L.WithError(rerr).Warn("page store: stale folder not removed")
			}
		}
		if err = b.create(); err == nil {
			err = b.open()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("page store: %w", err)
	}
	f = &folder{key: key, used: time.Now(), open: b, size: b.presentBytes()}
	s.folders[key] = f
	s.bytes.Add(f.size)
	return b, nil
}

// key is the name of the folder.
func (b *Blob) key() string { return filepath.Base(b.dir) }

func (b *Blob) dataSize() int64 { return int64(b.index.Pages()) * pageindex.PageSize }

// bitmapSize is a whole number of pages so that the bitmap can be mapped and
// changed in whole words.
func (b *Blob) bitmapSize() int64 {
	n := (int64(len(b.index.Chunks)) + 7) / 8
	return max((n+pageindex.PageSize-1)/pageindex.PageSize, 1) * pageindex.PageSize
}

// create makes the folder, whole or not at all.
func (b *Blob) create() error {
	tmp, err := os.MkdirTemp(b.store.opts.Dir, tmpPrefix) // mode 0700
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	if err := createSized(filepath.Join(tmp, "data"), b.dataSize(), false); err != nil {
		return err
	}
	if err := createSized(filepath.Join(tmp, "present"), b.bitmapSize(), true); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tmp, "boot"), b.store.boot, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, b.dir)
}

func createSized(path string, size int64, allocate bool) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Truncate(size); err != nil || !allocate {
		return err
	}
	// The bitmap is written through a mapping, where a full disk would be a
	// fatal signal: it gets its blocks now.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return &os.PathError{Op: "fallocate", Path: path, Err: err}
	}
	return nil
}

var errStale = errors.New("stale or damaged")

func (b *Blob) open() (err error) {
	if !b.store.current(b.dir) {
		return errStale
	}
	data, err := openSized(filepath.Join(b.dir, "data"), b.dataSize())
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			data.Close()
		}
	}()
	bitmap, err := openSized(filepath.Join(b.dir, "present"), b.bitmapSize())
	if err != nil {
		return err
	}
	defer bitmap.Close()
	b.present, err = unix.Mmap(int(bitmap.Fd()), 0, int(b.bitmapSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return &os.PathError{Op: "mmap", Path: bitmap.Name(), Err: err}
	}
	b.data = data
	return nil
}

func openSized(path string, size int64) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && (info.Size() != size || !info.Mode().IsRegular()) {
		err = errStale
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// close needs store.mu or that nobody else has the blob.
func (b *Blob) close() {
	if err := unix.Munmap(b.present); err != nil {
		log.L.WithError(err).Warn("page store: bitmap not unmapped")
	}
	b.present = nil
	b.data.Close()
}

// hold is another reference for as long as a call lasts: the blob may be
// released by others meanwhile.
func (b *Blob) hold() error {
	b.store.mu.Lock()
	defer b.store.mu.Unlock()
	if b.store.closed {
		return errClosed
	}
	if b.refs == 0 {
		return errReleased
	}
	b.refs++
	return nil
}

var errReleased = fmt.Errorf("page blob was released: %w", errdefs.ErrFailedPrecondition)

// Release undoes one Acquire. The blob must not be used after it.
func (b *Blob) Release() {
	b.store.mu.Lock()
	b.drop()
	b.store.mu.Unlock()
	b.store.evict(0)
}

// drop gives a reference back; store.mu is held.
func (b *Blob) drop() {
	if b.refs--; b.refs > 0 || b.store.closed {
		return
	}
	f := b.store.folders[b.key()]
	f.open, f.used = nil, time.Now()
	if err := os.Chtimes(filepath.Join(b.dir, "boot"), f.used, f.used); err != nil && !errors.Is(err, os.ErrNotExist) {
		log.L.WithError(err).Warn("page store: time of use not recorded")
	}
	b.close()
}

// DataPath is the file with the pages; PresentPath is the bitmap.
func (b *Blob) DataPath() string { return filepath.Join(b.dir, "data") }

// PresentPath is the file with the bitmap.
func (b *Blob) PresentPath() string { return filepath.Join(b.dir, "present") }

// word returns the bitmap's word of a chunk and the chunk's bit in it. The file
// is defined in bytes; on little-endian machines, the only ones thaw runs on,
// words of four have the same bits.
func (b *Blob) word(chunk int) (*uint32, uint32) {
	return (*uint32)(unsafe.Pointer(&b.present[chunk/32*4])), 1 << (chunk % 32)
}

// Present reports whether a chunk is there.
func (b *Blob) Present(chunk int) bool {
	p, bit := b.word(chunk)
	return atomic.LoadUint32(p)&bit != 0
}

func (b *Blob) setPresent(chunk int) {
	p, bit := b.word(chunk)
	atomic.OrUint32(p, bit)
}

// Missing returns how many chunks and compressed bytes are not there yet.
func (b *Blob) Missing() (chunks int, bytes int64) {
	for i, c := range b.index.Chunks {
		if !b.Present(i) {
			chunks++
			bytes += int64(c.Size)
		}
	}
	return chunks, bytes
}

func (b *Blob) presentBytes() (n int64) {
	for i, c := range b.index.Chunks {
		if b.Present(i) {
			n += int64(c.Pages) * pageindex.PageSize
		}
	}
	return n
}

// Fetch returns when the chunks are there, or with the first error. The source is
// used unless somebody else's is at work already.
func (b *Blob) Fetch(ctx context.Context, src Source, chunks []int, u Urgency) error {
	if err := b.checkChunks(chunks); err != nil {
		return err
	}
	if !slices.IsSorted(chunks) { // neighbours go into one request
		chunks = slices.Sorted(slices.Values(chunks))
	}
	if err := b.hold(); err != nil {
		return err
	}
	defer b.Release()
	wants, err := b.enqueue(src, chunks, u)
	if err != nil {
		return err
	}
	for i, w := range wants {
		select {
		case <-w.done:
			if w.err == nil {
				continue
			}
			if w.src != src && ctx.Err() == nil {
				// Another image's registry failed; this one's may not.
				if err = b.Fetch(ctx, src, []int{w.chunk}, u); err == nil {
					continue
				}
			} else {
				err = w.err
			}
		case <-ctx.Done():
			err = ctx.Err()
		}
		b.abandon(wants[i:])
		return err
	}
	return nil
}

func (b *Blob) checkChunks(chunks []int) error {
	for _, c := range chunks {
		if c < 0 || c >= len(b.index.Chunks) {
			return fmt.Errorf("chunk %d of %d: %w", c, len(b.index.Chunks), errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// Prefetch asks for chunks that processes are likely to touch soon, in the order
// in which they will. Neighbours go into one request, requests run beside those on
// which processes wait, and a process that touches one that is still queued makes
// it overtake. wait must be called; it returns when the chunks are there, with the
// first error, or, taking back what is still queued, when the context is done.
func (b *Blob) Prefetch(ctx context.Context, src Source, chunks []int) (wait func() error, err error) {
	if err := b.checkChunks(chunks); err != nil {
		return nil, err
	}
	if err := b.hold(); err != nil {
		return nil, err
	}
	chunks = slices.DeleteFunc(slices.Clone(chunks), b.Present) // which are no hits of the cache
	wants, err := b.enqueue(src, chunks, Soon)
	if err != nil {
		b.Release()
		return nil, err
	}
	return func() (err error) {
		defer b.Release()
		for i, w := range wants {
			select {
			case <-w.done:
				if err == nil {
					err = w.err
				}
			case <-ctx.Done():
				b.abandon(wants[i:])
				return ctx.Err()
			}
		}
		return err
	}, nil
}

func (b *Blob) enqueue(src Source, chunks []int, u Urgency) ([]*want, error) {
	s := b.store
	var wants []*want
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	for _, c := range chunks {
		if b.Present(c) {
			s.hits.Add(1)
			continue
		}
		w := b.wants[c]
		if w == nil {
			w = &want{blob: b, chunk: c, src: src, urgency: u, done: make(chan struct{})}
			b.wants[c] = w
			s.queue.add(w)
		} else {
			s.shared.Add(1)
			if u > w.urgency {
				w.urgency = u
				s.queue.add(w)
			}
		}
		w.waiters++
		wants = append(wants, w)
	}
	if len(wants) > 0 {
		s.wake.Broadcast()
	}
	return wants, nil
}

// abandon takes back what nobody waits for any more and no request is out for.
func (b *Blob) abandon(wants []*want) {
	b.store.mu.Lock()
	defer b.store.mu.Unlock()
	for _, w := range wants {
		if w.waiters--; w.waiters == 0 && w.state == queued {
			w.state = finished
			delete(b.wants, w.chunk)
		}
	}
}

// Fill fetches in the background all that is missing. It returns when
// everything is there, or with the first error.
func (b *Blob) Fill(ctx context.Context, src Source) error {
	if err := b.hold(); err != nil {
		return err
	}
	defer b.Release()
	window := b.store.opts.RequestSize * int64(max(b.store.opts.Parallel, 1))
	var batch []int
	var size int64
	flush := func() error {
		err := b.Fetch(ctx, src, batch, Background)
		batch, size = batch[:0], 0
		return err
	}
	for i, c := range b.index.Chunks {
		if b.Present(i) {
			continue
		}
		batch = append(batch, i)
		if size += int64(c.Size); size >= window {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}
