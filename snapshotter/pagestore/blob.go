// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/pagestore/pagefile"
	"thaw.dev/thaw/snapshotter/seal"
)

// Blob is one page blob in the store. It is used by as many as acquired it.
type Blob struct {
	files
	store *Store
	index pageindex.Blob
	seal  *seal.Blob // opens its chunks; nil if they are in plain

	// Guarded by store.mu:
	refs     int
	wants    map[int]*want
	detached bool // its folder has another blob, or nobody
	forget   bool // its folder is removed when nobody uses it any more
}

// Acquire opens a blob's folder, which is made if there is none or if the one there
// is cannot be trusted. Until the blob is released, it is not evicted.
//
// The blob of an encrypted checkpoint is opened with its key, nil for others. Its folder's name is
// made of that key: a page index which lists the blob's chunks, but was not made by
// somebody who has the key, does not come to what other images' restores have opened.
func (s *Store) Acquire(index *pageindex.Blob, opener *seal.Blob) (*Blob, error) {
	key := folderKey(index, opener)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	f := s.folders[key]
	if f != nil && f.open != nil {
		err := f.open.sound()
		if err == nil {
			err = f.open.inPlace()
		}
		if err == nil {
			f.open.refs++
			f.open.forget = false
			return f.open, nil
		}
		if scarce(err) {
			return nil, fmt.Errorf("page store: %w", err)
		}
		log.L.WithError(err).WithField("blob", index.Digest).Warn("page store: pages are fetched anew")
		s.detach(f)
	}
	b := &Blob{
		files: files{dir: filepath.Join(s.opts.Dir, key), boot: s.boot, chunks: len(index.Chunks), size: int64(index.Pages()) * pageindex.PageSize},
		store: s, index: *index, seal: opener, refs: 1, wants: make(map[int]*want),
	}
	if err := s.openFiles(b); err != nil {
		return nil, fmt.Errorf("page store: %w", err)
	}
	if f := s.folders[key]; f != nil {
		s.bytes.Add(-f.size)
	}
	f = &folder{key: key, used: time.Now(), open: b, size: b.presentBytes()}
	s.folders[key] = f
	s.bytes.Add(f.size)
	return b, nil
}

// openFiles opens a blob's folder, or makes it. What says nothing about the folder, such as
// a lack of file descriptors, is an error and leaves it as it is. store.mu is held.
func (s *Store) openFiles(b *Blob) error {
	err := b.open()
	if err == nil || scarce(err) {
		return err
	}
	// Missing, damaged or of another boot: begin anew.
	if gone, err := s.discard(b.key()); err == nil {
		if err := os.RemoveAll(gone); err != nil {
			log.L.WithError(err).Warn("page store: stale folder not removed")
		}
	}
	for err = b.create(s.opts.Dir); full(err); err = b.create(s.opts.Dir) {
		if !s.removeOldest() {
			return s.noSpace(err)
		}
	}
	if err != nil {
		return err
	}
	return b.open()
}

// detach makes room for another blob in the place of one that is in use. Those who use it go on
// with its files, which have no name any more. store.mu is held.
func (s *Store) detach(f *folder) {
	f.open.detached = true
	s.detached[f.open] = struct{}{}
	delete(s.folders, f.key)
	s.bytes.Add(-f.size)
}

// key is the name of the folder.
func (b *Blob) key() string { return filepath.Base(b.dir) }

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
	b.store.evict()
}

// drop gives a reference back; store.mu is held.
func (b *Blob) drop() {
	if b.refs--; b.refs > 0 || b.store.closed {
		return
	}
	// For the next who acquires it, who would not be told of an error of the disk.
	err := b.sound()
	b.close()
	if b.detached {
		delete(b.store.detached, b)
		return
	}
	f := b.store.folders[b.key()]
	f.open, f.used = nil, time.Now()
	if err == nil {
		err = os.Chtimes(filepath.Join(b.dir, pagefile.BootFile), f.used, f.used)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log.L.WithError(err).Warn("page store: blob is not used again")
	}
	if b.forget {
		b.store.remove(f)
	}
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
	return b.fetch(ctx, src, chunks, u, time.Now())
}

// fetch is Fetch for somebody who asked at a time.
func (b *Blob) fetch(ctx context.Context, src Source, chunks []int, u Urgency, asked time.Time) error {
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
			if (w.src != src || w.began.Before(asked)) && ctx.Err() == nil {
				// Another image's registry failed, or this one a while ago, for somebody who
				// had waited since: neither says that the chunk cannot be had now.
				if err = b.fetch(ctx, src, []int{w.chunk}, u, asked); err == nil {
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
