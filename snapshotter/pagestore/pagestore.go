// SPDX-License-Identifier: Apache-2.0

// Package pagestore keeps the content of page blobs on a node: verified,
// decompressed, and in files that fault handlers map.
//
//	DIR/KEY/data     the blob's pages at their uncompressed offsets; sparse
//	DIR/KEY/present  bitmap: bit i%8 of byte i/8 is set when chunk i is in data
//	DIR/KEY/boot     format version and boot ID; its mtime is the last use
//	DIR/.tmp-*       half-made or half-removed; cleaned at the start
//
// KEY is pageindex.Blob.Key: it says what the content must be, so all images
// that refer to the same content share a folder. That of an encrypted checkpoint's blob is
// made with the blob's key, too, and ends in ".sealed". A bit is set only after the
// chunk's pages were written; both are seen by every process that maps the files
// at once. That holds for one boot only: what was written may not have reached
// the disk when a machine goes down, so content of another boot is discarded. So is a
// folder of which it comes out that it was not kept (package pagefile) or that is gone: who
// acquires the blob next gets a new one, and those who use the old one find out themselves.
//
// Each chunk is fetched once however many ask for it. Requests on which a
// process waits overtake all others; a few for what will be touched soon run beside
// them; all others run only while no process waits.
package pagestore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pagestore/pagefile"
)

// formatVersion is the layout of a folder; content of another is discarded.
const formatVersion = "1"

// Source is where a blob's bytes come from.
type Source interface {
	// OpenRange returns a reader of exactly length bytes of a blob of size bytes
	// at the offset. It has done all retrying. A host to avoid is one whose
	// bytes were found damaged; empty is none.
	OpenRange(ctx context.Context, blob digest.Digest, size, offset, length int64, avoid string) (Stream, error)
}

// Stream reads a range.
type Stream interface {
	io.ReadCloser
	// Host is where the last bytes came from.
	Host() string
}

// Options configure a Store.
type Options struct {
	// Dir is the store's folder. Only one Store at a time may use it.
	Dir string
	// Parallel is the most requests that run at once.
	Parallel int
	// RequestSize is the most bytes that one request asks for; a single chunk
	// may be larger.
	RequestSize int64
	// CacheSize is what the store may take on disk, in bytes. Blobs in use are
	// kept even if they are more.
	CacheSize int64
	// Quiet is how long no process must have waited before requests in the
	// background go on.
	Quiet time.Duration
	// BackgroundRate limits requests in the background, in bytes a second; 0 is
	// no limit.
	BackgroundRate int64
	// Observe, if set, is told of each request: how long it took, its bytes,
	// and whether a process waited for it.
	Observe func(took time.Duration, bytes int64, demand bool)

	bootID string // for tests
}

// Stats count since the store was opened.
type Stats struct {
	Chunks    int64 // fetched and verified
	Requests  int64
	Hits      int64 // chunks asked for that were there
	Shared    int64 // chunks asked for that somebody else was fetching
	Damaged   int64 // chunks whose digest did not match
	Evictions int64 // blobs removed to make room
	Bytes     int64 // on disk now
}

// Store is the node's page store. Its methods may be called at the same time.
type Store struct {
	opts   Options
	boot   []byte
	lock   *os.File
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	chunks, requests, hits, shared, damaged, evictions, bytes atomic.Int64

	mu       sync.Mutex
	wake     *sync.Cond // workers wait for work
	folders  map[string]*folder
	detached map[*Blob]struct{} // in use, but in no folder any more
	queue    scheduler
	closed   bool

	discarded int // folders with temporary names so far
}

// folder is one blob's folder on disk.
type folder struct {
	key  string
	used time.Time
	size int64 // bytes of present pages
	open *Blob // nil when nobody uses it
}

// Open opens the store and starts its workers. Close it.
func Open(ctx context.Context, opts Options) (_ *Store, err error) {
	if opts.bootID == "" {
		p, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
		if err != nil {
			return nil, fmt.Errorf("page store: %w", err)
		}
		opts.bootID = strings.TrimSpace(string(p))
	}
	if err := os.MkdirAll(opts.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("page store: %w", err)
	}
	s := &Store{
		opts:     opts,
		boot:     []byte(formatVersion + " " + opts.bootID + "\n"),
		folders:  make(map[string]*folder),
		detached: make(map[*Blob]struct{}),
	}
	s.wake = sync.NewCond(&s.mu)
	if s.lock, err = lockDir(opts.Dir); err != nil {
		return nil, err
	}
	if err := s.scan(ctx); err != nil {
		s.lock.Close()
		return nil, err
	}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.evict()
	for range max(opts.Parallel, 1) {
		s.wg.Go(s.work)
	}
	return s, nil
}

// lockDir makes sure that no other process writes to the store.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("page store: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("page store %s is used by another thaw-snapshotter: stop that or give this one its own cache_dir: %w", dir, errdefs.ErrFailedPrecondition)
	}
	return f, nil
}

// scan finds what earlier runs left, and removes what is half-made or of
// another boot.
func (s *Store) scan(ctx context.Context) error {
	entries, err := os.ReadDir(s.opts.Dir)
	if err != nil {
		return fmt.Errorf("page store: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		path := filepath.Join(s.opts.Dir, e.Name())
		err := errStale
		if !strings.HasPrefix(e.Name(), tmpPrefix) {
			err = current(path, s.boot)
		}
		if scarce(err) {
			return fmt.Errorf("page store: %w", err)
		}
		if err != nil {
			if err := os.RemoveAll(path); err != nil {
				log.G(ctx).WithError(err).Warn("page store: stale folder not removed")
			}
			continue
		}
		f := &folder{key: e.Name()}
		if info, err := os.Stat(filepath.Join(path, pagefile.BootFile)); err == nil {
			f.used = info.ModTime()
		}
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(path, "data"), &st); err == nil {
			f.size = st.Blocks * 512
		}
		s.folders[f.key] = f
		s.bytes.Add(f.size)
	}
	return nil
}

// Close ends all fetches, which fail, and releases the store. Blobs must not be
// used any more.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.wake.Broadcast()
	s.wg.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue.stop()
	for _, f := range s.folders {
		if f.open != nil {
			s.detached[f.open] = struct{}{}
			f.open = nil
		}
	}
	for b := range s.detached {
		for _, w := range b.wants {
			w.finish(errClosed)
		}
		b.close()
	}
	return s.lock.Close()
}

// errClosed is of the class that shims take for a daemon which is restarted.
var errClosed = fmt.Errorf("page store is closed: %w", errdefs.ErrAborted)

// Stats returns the counters.
func (s *Store) Stats() Stats {
	return Stats{
		Chunks: s.chunks.Load(), Requests: s.requests.Load(), Hits: s.hits.Load(), Shared: s.shared.Load(),
		Damaged: s.damaged.Load(), Evictions: s.evictions.Load(), Bytes: s.bytes.Load(),
	}
}

// evict removes unused blobs, longest unused first, until the store is within its
// size.
func (s *Store) evict() {
	for s.bytes.Load() > s.opts.CacheSize && s.MakeRoom(s.Evictions()) {
	}
}

// Evictions is how many blobs were removed so far; see MakeRoom.
func (s *Store) Evictions() int64 { return s.evictions.Load() }

// MakeRoom removes the blob that was not used for the longest time, for somebody who found the disk full. It returns false
// if all are in use. Nothing is removed if something was since the caller asked for Evictions, which it does before it
// writes: many who find the disk full at once shall not remove a blob each.
func (s *Store) MakeRoom(evictions int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.evictions.Load() != evictions || s.removeOldest()
}

// removeOldest removes a blob for MakeRoom. store.mu is held until the blob's space is free: who waits for the
// lock would be told that the disk is full.
func (s *Store) removeOldest() bool {
	var oldest *folder
	for _, f := range s.folders {
		if f.open == nil && (oldest == nil || f.used.Before(oldest.used)) {
			oldest = f
		}
	}
	if oldest == nil {
		return false
	}
	s.remove(oldest)
	s.evictions.Add(1)
	return true
}

// remove removes a folder that nobody uses. store.mu is held.
func (s *Store) remove(f *folder) {
	gone, err := s.discard(f.key)
	delete(s.folders, f.key)
	s.bytes.Add(-f.size)
	if err == nil {
		err = os.RemoveAll(gone)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		log.L.WithError(err).Warn("page store: blob not removed")
	}
}

const tmpPrefix = ".tmp-"

// discard gives a folder a temporary name, which takes no space, and returns that; the caller removes
// it. store.mu is held.
func (s *Store) discard(key string) (string, error) {
	s.discarded++
	tmp := filepath.Join(s.opts.Dir, fmt.Sprintf("%s%d-%d", tmpPrefix, os.Getpid(), s.discarded))
	return tmp, os.Rename(filepath.Join(s.opts.Dir, key), tmp)
}

// full reports whether an error says that there is no space on the disk.
func full(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// noSpace is what to tell when everything was evicted and the disk is full nevertheless.
func (s *Store) noSpace(err error) error {
	return fmt.Errorf("the disk of %s is full and nothing is left to evict (free some space or lower limits.cache_size): %w: %w", s.opts.Dir, err, errdefs.ErrResourceExhausted)
}
