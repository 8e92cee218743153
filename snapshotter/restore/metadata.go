// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/tracing"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/registry"
)

// metadata is a cache on disk of manifests, configs, states and page indexes,
// each in a file named after its digest. Files are verified whenever they are
// read, so a damaged one is the same as a missing one.
type metadata struct {
	dir   string
	limit int64 // bytes
	// pages is on the same disk and gives up what is unused when that is full; nil: there is none.
	pages *pagestore.Store

	mu sync.Mutex // of trim
}

const tmpPrefix = ".tmp-"

func openMetadata(dir string, limit int64) (*metadata, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("metadata cache: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("metadata cache: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return nil, fmt.Errorf("metadata cache: %w", err)
			}
		}
	}
	return &metadata{dir: dir, limit: limit}, nil
}

// bytes returns a small blob or manifest from the cache or the registry.
func (m *metadata) bytes(ctx context.Context, repo *registry.Repository, desc v1.Descriptor, manifest bool, limit int64) ([]byte, error) {
	if desc.Size > limit { // the cache may have it nevertheless, as something larger
		return nil, fmt.Errorf("%s is %d bytes large, allowed are %d: %w", desc.Digest, desc.Size, limit, errdefs.ErrResourceExhausted)
	}
	ctx, span := startFetch(ctx, desc)
	defer span.End()
	if f, err := m.open(desc); err == nil {
		defer f.Close()
		p := make([]byte, desc.Size)
		_, err := io.ReadFull(f, p)
		return p, err
	}
	span.AddEvent("not cached")
	get := repo.Blob
	if manifest {
		get = repo.Manifest
	}
	p, err := get(ctx, desc, limit)
	if err != nil {
		return nil, err
	}
	f, err := m.store(desc, func(f *os.File) error {
		_, err := f.Write(p)
		return err
	})
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		// The content is here and right; only the next restore must fetch again.
		log.G(ctx).WithError(err).Warn("metadata not cached")
	}
	return p, nil
}

// file returns an open file with a blob's verified content from the cache or
// the registry. The caller closes it.
func (m *metadata) file(ctx context.Context, repo *registry.Repository, desc v1.Descriptor) (*os.File, error) {
	ctx, span := startFetch(ctx, desc)
	defer span.End()
	if f, err := m.open(desc); err == nil {
		return f, nil
	}
	span.AddEvent("not cached")
	return m.store(desc, func(f *os.File) error { return repo.CopyBlob(ctx, desc, f) })
}

func startFetch(ctx context.Context, desc v1.Descriptor) (context.Context, *tracing.Span) {
	return startSpan(ctx, "Fetch", tracing.WithAttribute("media_type", desc.MediaType), tracing.WithAttribute("bytes", desc.Size))
}

func (m *metadata) path(desc v1.Descriptor) string {
	return filepath.Join(m.dir, desc.Digest.Encoded())
}

// open opens a cached blob after its digest was verified.
func (m *metadata) open(desc v1.Descriptor) (_ *os.File, err error) {
	path := m.path(desc)
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
			// Damaged: out of the way of the new one.
			if rerr := os.Remove(path); rerr != nil && !errors.Is(rerr, os.ErrNotExist) {
				log.L.WithError(rerr).Warn("damaged metadata not removed")
			}
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() != desc.Size {
		return nil, fmt.Errorf("%s has %d bytes instead of %d", path, info.Size(), desc.Size)
	}
	v := desc.Digest.Verifier()
	if _, err := io.Copy(v, f); err != nil {
		return nil, err
	}
	if !v.Verified() {
		return nil, fmt.Errorf("%s is damaged", path)
	}
	now := time.Now()
	if err := os.Chtimes(path, now, now); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	_, err = f.Seek(0, io.SeekStart)
	return f, err
}

// store makes a file of what write, which verifies it, writes. It returns the
// file, open at its beginning. On a full disk it makes room in the page store.
func (m *metadata) store(desc v1.Descriptor, write func(*os.File) error) (*os.File, error) {
	for {
		var evictions int64
		if m.pages != nil {
			evictions = m.pages.Evictions()
		}
		f, err := m.storeOnce(desc, write)
		if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
			return f, err
		}
		if m.pages == nil || !m.pages.MakeRoom(evictions) {
			return nil, fmt.Errorf("metadata cache: the disk of %s is full and nothing is left to evict (free some space or lower limits.cache_size): %w: %w", m.dir, err, errdefs.ErrResourceExhausted)
		}
	}
}

func (m *metadata) storeOnce(desc v1.Descriptor, write func(*os.File) error) (_ *os.File, err error) {
	if err := os.MkdirAll(m.dir, 0o700); err != nil { // removed under a daemon that runs
		return nil, fmt.Errorf("metadata cache: %w", err)
	}
	f, err := os.CreateTemp(m.dir, tmpPrefix)
	if err != nil {
		return nil, fmt.Errorf("metadata cache: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	if err := write(f); err != nil {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("metadata cache: %w", err)
	}
	if err := os.Rename(f.Name(), m.path(desc)); err != nil {
		return nil, fmt.Errorf("metadata cache: %w", err)
	}
	m.trim(desc.Digest)
	return f, nil
}

// trim removes what was not used for the longest time until the cache is within
// its limit; what was just stored stays.
func (m *metadata) trim(keep digest.Digest) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		entries, err := os.ReadDir(m.dir)
		if err != nil {
			return
		}
		var total int64
		var oldest string
		var when time.Time
		for _, e := range entries {
			info, err := e.Info()
			if err != nil {
				continue
			}
			total += info.Size()
			if name := e.Name(); name != keep.Encoded() && !strings.HasPrefix(name, tmpPrefix) && (oldest == "" || info.ModTime().Before(when)) {
				oldest, when = name, info.ModTime()
			}
		}
		if total <= m.limit || oldest == "" || os.Remove(filepath.Join(m.dir, oldest)) != nil {
			return
		}
	}
}
