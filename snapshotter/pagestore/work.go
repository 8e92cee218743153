// SPDX-License-Identifier: Apache-2.0

package pagestore

import (
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"thaw.dev/thaw/snapshotter/pageblob"
	"thaw.dev/thaw/snapshotter/pageindex"
)

// work is a worker: it takes requests until the store closes.
func (s *Store) work() {
	var buf buffers
	for {
		t := s.next()
		if t == nil {
			return
		}
		begin := time.Now()
		s.run(t, &buf)
		if s.opts.Observe != nil {
			s.opts.Observe(time.Since(begin), t.size, t.urgency == Demand)
		}
		s.mu.Lock()
		s.queue.end(t, time.Now())
		t.wants[0].blob.drop()
		s.mu.Unlock()
		s.wake.Broadcast()
		s.evict()
	}
}

// next waits for a request; nil means that the store closes.
func (s *Store) next() *task {
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.closed {
		t, wait := s.queue.take(time.Now(), &s.opts)
		if t != nil {
			return t
		}
		if wait > 0 {
			if s.queue.timer == nil {
				s.queue.timer = time.AfterFunc(wait, s.wakeAll)
			} else {
				s.queue.timer.Reset(wait)
			}
		}
		s.wake.Wait()
	}
	return nil
}

// wakeAll wakes the workers; with the lock none can be between having found
// nothing to do and waiting.
func (s *Store) wakeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wake.Broadcast()
}

// buffers are one worker's, used again for each chunk.
type buffers struct{ frame, pages []byte }

func grow(p *[]byte, n int) []byte {
	if cap(*p) < n {
		*p = make([]byte, n)
	}
	return (*p)[:n]
}

// run fetches a request's chunks and hands each out as soon as it is there.
func (s *Store) run(t *task, buf *buffers) {
	b := t.wants[0].blob
	size := b.index.Size()
	s.requests.Add(1)
	stream, err := t.wants[0].src.OpenRange(s.ctx, b.index.Digest, size, b.index.Offset(t.wants[0].chunk), t.size, "")
	if err == nil {
		defer stream.Close()
	}
	for _, w := range t.wants {
		if err == nil {
			frame := grow(&buf.frame, int(b.index.Chunks[w.chunk].Size))
			if _, err = io.ReadFull(stream, frame); err == nil {
				s.settle(w, s.keep(w, frame, stream.Host(), buf))
				continue
			}
		}
		s.settle(w, err)
	}
}

func (s *Store) settle(w *want, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(w.blob.wants, w.chunk)
	w.finish(err)
}

// keep verifies, decodes and stores a chunk. A damaged one is fetched once more,
// from elsewhere if that is possible.
func (s *Store) keep(w *want, frame []byte, host string, buf *buffers) error {
	b := w.blob
	c := b.index.Chunks[w.chunk]
	pages := grow(&buf.pages, int(c.Pages)*pageindex.PageSize)
	err := b.decode(pages, frame, w.chunk)
	if err != nil {
		s.damaged.Add(1)
		log.G(s.ctx).WithError(err).WithField("host", host).WithField("blob", b.index.Digest).Warnf("chunk %d is damaged, fetching it again", w.chunk)
		if host, err = s.again(w, frame, host); err != nil {
			return err
		}
		if err := b.decode(pages, frame, w.chunk); err != nil {
			s.damaged.Add(1)
			return fmt.Errorf("chunk %d of page blob %s from %s (push the checkpoint image again: the registry's copy is damaged): %w: %w",
				w.chunk, b.index.Digest, host, err, errdefs.ErrDataLoss)
		}
	}
	if err := b.write(pages, int64(b.index.FirstPage(w.chunk))*pageindex.PageSize); err != nil {
		return err
	}
	if err := b.setPresent(w.chunk); err != nil {
		return err
	}
	s.chunks.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.folders[b.key()]; f != nil && f.open == b {
		f.size += int64(len(pages))
		s.bytes.Add(int64(len(pages)))
	}
	return nil
}

// decode verifies, opens and decompresses a chunk.
func (b *Blob) decode(pages, frame []byte, chunk int) error {
	if b.seal != nil {
		return pageblob.DecodeSealed(pages, b.index.Chunks[chunk], frame, b.seal, chunk)
	}
	return pageblob.Decode(pages, b.index.Chunks[chunk], frame)
}

func (s *Store) again(w *want, frame []byte, avoid string) (host string, err error) {
	b := w.blob
	s.requests.Add(1)
	stream, err := w.src.OpenRange(s.ctx, b.index.Digest, b.index.Size(), b.index.Offset(w.chunk), int64(len(frame)), avoid)
	if err != nil {
		return "", err
	}
	defer stream.Close()
	_, err = io.ReadFull(stream, frame)
	return stream.Host(), err
}

// write puts pages into the data file. When the disk is full, it makes room by
// evicting blobs that nobody uses, one after another.
func (b *Blob) write(pages []byte, offset int64) error {
	// A file that was cut short would grow again, with zeros in place of pages that count as present.
	if err := b.sound(); err != nil {
		return fmt.Errorf("page store: %w: %w", err, errdefs.ErrDataLoss)
	}
	for {
		evictions := b.store.Evictions()
		_, err := b.data.WriteAt(pages, offset)
		switch {
		case err == nil:
			return nil
		case !full(err):
			return fmt.Errorf("page store: %w", err)
		case !b.store.MakeRoom(evictions):
			return fmt.Errorf("page store: %w", b.store.noSpace(err))
		}
	}
}
