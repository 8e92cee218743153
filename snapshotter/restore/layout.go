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

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"thaw.dev/thaw/criu/image"
	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pageindex"
	"thaw.dev/thaw/snapshotter/premount"
	"thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/seal/wrap"
)

// Limits bound one checkpoint image.
type Limits struct {
	MaxMemory    int64 // lazy memory, in bytes
	MaxState     int64 // state, compressed or unpacked, in bytes
	MaxPageIndex int64 // page index, in bytes
	Unused       int   // laid-out images kept after their last use
	UnusedSize   int64 // what these may take of the tmpfs, in bytes
}

// Names in a laid-out image's folder.
const (
	indexFile  = "pageindex"
	configFile = "config.json"
)

// layout is a checkpoint laid out on the state folder's tmpfs:
//
//	DIR/KEY/criu/        CRIU's images, with eager pages in place; read-only
//	DIR/KEY/premount/    what is different if the shim makes mounts for CRIU (package premount)
//	DIR/KEY/pageindex    the verified page index
//	DIR/KEY/config.json  the checkpoint's config
//	DIR/KEY/sealed.json  if the checkpoint is encrypted: its page blobs' keys, and its own as the image has it
//
// KEY is the digest of the checkpoint manifest. A folder appears whole or not at
// all, and is shared by all restores of the image.
type layout struct {
	key    string
	dir    string
	index  *pageindex.Index
	config *checkpoint.Config
	sealed *sealed // nil if the checkpoint is in plain

	ready chan struct{} // closed when laid out, or err is set
	err   error         // written before ready is closed, guarded by layouts.mu

	size int64     // what it takes of the tmpfs, in bytes
	refs int       // guarded by layouts.mu
	used time.Time // when refs became 0
}

// lost reports whether somebody has removed the folder. Restores that run need it no more.
func (l *layout) lost() bool {
	select {
	case <-l.ready:
		_, err := os.Lstat(l.dir)
		return errors.Is(err, os.ErrNotExist)
	default:
		return false
	}
}

func (l *layout) images() string    { return filepath.Join(l.dir, criuDir) }
func (l *layout) indexPath() string { return filepath.Join(l.dir, indexFile) }

// layouts are all laid-out images of the node.
type layouts struct {
	dir    string
	limits Limits
	meta   *metadata
	keys   *wrap.Keys // of encrypted checkpoints
	tune   bool       // the images are for restores by thaw, on this node

	mu  sync.Mutex
	all map[string]*layout
}

// openLayouts prepares the folder. What earlier runs left in it is kept until
// prune is called.
func openLayouts(dir string, limits Limits, meta *metadata, keys *wrap.Keys) (*layouts, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("checkpoint images: %w", err)
	}
	return &layouts{dir: dir, limits: limits, meta: meta, keys: keys, all: make(map[string]*layout)}, nil
}

// prune removes what is on disk but not known: half-made folders, and images
// that no restore has any more.
func (s *layouts) prune() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	for _, e := range entries {
		if _, ok := s.all[e.Name()]; ok {
			continue
		}
		if err := os.RemoveAll(filepath.Join(s.dir, e.Name())); err != nil {
			return fmt.Errorf("checkpoint images: %w", err)
		}
	}
	return nil
}

// adopt takes over what an earlier run laid out, for a restore that goes on.
func (s *layouts) adopt(key string) (*layout, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.all[key]; l != nil {
		l.refs++
		return l, nil
	}
	l := &layout{key: key, dir: filepath.Join(s.dir, key), refs: 1, ready: make(chan struct{})}
	if err := l.load(s.limits); err != nil {
		return nil, err
	}
	close(l.ready)
	s.all[key] = l
	return l, nil
}

func (l *layout) load(limits Limits) error {
	p, err := readBounded(filepath.Join(l.dir, configFile), checkpoint.MaxConfigSize)
	if err != nil {
		return err
	}
	if l.config, err = checkpoint.ParseConfig(p); err != nil {
		return err
	}
	if p, err = readBounded(l.indexPath(), limits.MaxPageIndex); err != nil {
		return err
	}
	if l.index, err = pageindex.Parse(p); err != nil {
		return err
	}
	if l.sealed, err = readSealed(l.dir, len(l.index.Blobs)); err != nil {
		return err
	}
	l.size, err = diskUsage(l.dir)
	return err
}

// diskUsage is what a folder with all below takes on its filesystem, in bytes.
func diskUsage(dir string) (n int64, err error) {
	err = filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return &os.PathError{Op: "lstat", Path: path, Err: err}
		}
		n += st.Blocks * 512
		return nil
	})
	return n, err
}

func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(p)) > limit {
		err = fmt.Errorf("%s is over the limit of %d bytes: %w", path, limit, errdefs.ErrResourceExhausted)
	}
	return p, err
}

// acquire returns the layout of a checkpoint, which is made by the first who
// asks while others wait. Release it. If the checkpoint is encrypted, the node's keys must
// open it each time.
func (s *layouts) acquire(ctx context.Context, repo *registry.Repository, manifest v1.Descriptor) (*layout, error) {
	ctx, span := startSpan(ctx, "Layout")
	defer span.End()
	key := manifest.Digest.Encoded()
	for {
		s.mu.Lock()
		l := s.all[key]
		if l != nil && l.lost() {
			l = nil
		}
		mine := l == nil
		if mine {
			l = &layout{key: key, dir: filepath.Join(s.dir, key), ready: make(chan struct{})}
			s.all[key] = l
		}
		l.refs++
		s.mu.Unlock()
		if mine {
			err := s.lay(ctx, repo, manifest, l)
			s.mu.Lock()
			l.err = err // who gives up waiting reads it in release
			s.mu.Unlock()
			close(l.ready)
		} else {
			select {
			case <-l.ready:
			case <-ctx.Done():
				s.release(l)
				return nil, ctx.Err()
			}
		}
		if l.err == nil {
			if l.sealed != nil && !mine {
				if _, err := s.keys.Unwrap(ctx, l.sealed.Keys); err != nil {
					s.release(l)
					return nil, err
				}
			}
			return l, nil
		}
		s.release(l)
		if !mine && ctx.Err() == nil && !errdefs.IsDataLoss(classed(l.err)) {
			continue // the other's caller may have given up, or its registry failed
		}
		return nil, l.err
	}
}

// release undoes acquire or adopt. A failed layout is forgotten at once; others
// when those that are unused are more than the limits allow.
func (s *layouts) release(l *layout) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.refs--
	if l.err != nil {
		if s.all[l.key] == l {
			delete(s.all, l.key)
		}
		return
	}
	if l.refs > 0 {
		return
	}
	l.used = time.Now()
	for {
		var oldest *layout
		var size int64
		unused := 0
		for _, o := range s.all {
			if o.refs == 0 {
				unused++
				size += o.size
				if oldest == nil || o.used.Before(oldest.used) {
					oldest = o
				}
			}
		}
		if unused == 0 || unused <= s.limits.Unused && size <= s.limits.UnusedSize {
			return
		}
		s.remove(oldest)
	}
}

// remove removes a layout that nobody uses. The lock is held: the same image may be laid out
// again at once.
func (s *layouts) remove(l *layout) {
	delete(s.all, l.key)
	if err := os.RemoveAll(l.dir); err != nil {
		log.L.WithError(err).Warn("laid-out checkpoint image not removed")
	}
	if l.sealed != nil && s.meta.pages != nil {
		for i := range l.index.Blobs {
			s.meta.pages.Forget(&l.index.Blobs[i], l.sealed.opener(i))
		}
	}
}

// lay fetches, verifies and checks a checkpoint and lays it out.
func (s *layouts) lay(ctx context.Context, repo *registry.Repository, desc v1.Descriptor, l *layout) (err error) {
	p, err := s.meta.bytes(ctx, repo, desc, true, checkpoint.MaxManifestSize)
	if err != nil {
		return err
	}
	img, err := checkpoint.ParseManifest(desc, p)
	if err != nil {
		return err
	}
	if n := img.State.Size; n > s.limits.MaxState {
		return fmt.Errorf("the checkpoint's state has %d bytes, limits.max_state allows %d: %w", n, s.limits.MaxState, errdefs.ErrResourceExhausted)
	}
	key := s.unwrapping(ctx, img)
	tmp, err := os.MkdirTemp(s.dir, tmpPrefix)
	if err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	// The index of a large memory is large: it is read while the state is unpacked.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var index errgroup.Group
	index.Go(func() error {
		err := s.layIndex(ctx, repo, img, key, l, tmp)
		if err != nil {
			cancel()
		}
		return err
	})
	if err := s.layState(ctx, repo, img, key, l, tmp); err != nil {
		cancel()
		if first := index.Wait(); first != nil && errors.Is(err, context.Canceled) {
			return first
		}
		return err
	}
	if err := index.Wait(); err != nil {
		return err
	}
	if err := checkPages(l.index, filepath.Join(tmp, criuDir)); err != nil {
		return err
	}
	if l.size, err = diskUsage(tmp); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	// Left by a run of the daemon that was killed, before prune: cannot be used.
	if err := os.RemoveAll(l.dir); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	if err := os.Rename(tmp, l.dir); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	return nil
}

// layIndex lays out the page index, and refuses what this node cannot restore.
func (s *layouts) layIndex(ctx context.Context, repo *registry.Repository, img *checkpoint.Image, key unwrapped, l *layout, dir string) error {
	p, err := s.meta.bytes(ctx, repo, img.PageIndex, false, s.limits.MaxPageIndex)
	if err != nil {
		return err
	}
	if img.Keys != nil {
		if l.sealed, p, err = openIndex(p, key, img.Keys); err != nil {
			return err
		}
	}
	if l.index, err = pageindex.Parse(p); err != nil {
		return fmt.Errorf("%w: %w", checkpoint.ErrFormat, err)
	}
	if err := checkBlobs(l.index, img); err != nil {
		return err
	}
	if l.sealed != nil {
		if err := l.sealed.write(dir, len(l.index.Blobs)); err != nil {
			return err
		}
	}
	for i := range l.index.Blobs { // better now than when a process waits for a page
		if err := repo.CheckRanges(l.index.Blobs[i].Size()); err != nil {
			return err
		}
	}
	if n := totalPages(l.index); n > uint64(s.limits.MaxMemory)/pageindex.PageSize {
		return fmt.Errorf("the checkpoint has %d bytes of memory, limits.max_memory allows %d: %w", min(n, 1<<52)*pageindex.PageSize, s.limits.MaxMemory, errdefs.ErrResourceExhausted)
	}
	l.index.ComputeKeys()
	if err := os.WriteFile(filepath.Join(dir, indexFile), p, 0o600); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	return nil
}

// layState lays out all but the page index. It refuses, before anything is unpacked, what this node cannot restore.
func (s *layouts) layState(ctx context.Context, repo *registry.Repository, img *checkpoint.Image, key unwrapped, l *layout, dir string) error {
	var state *os.File
	var config []byte
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() (err error) {
		config, err = s.meta.bytes(gctx, repo, img.Config, false, checkpoint.MaxConfigSize)
		return err
	})
	g.Go(func() (err error) {
		state, err = s.meta.file(gctx, repo, img.State)
		return err
	})
	err := g.Wait()
	if state != nil {
		defer state.Close()
	}
	if err != nil {
		return err
	}
	if l.config, err = checkpoint.ParseConfig(config); err != nil {
		return err
	}
	if err := checkHost(l.config); err != nil {
		return err
	}
	var content io.Reader = state
	if img.Keys != nil {
		if content, err = openState(state, key); err != nil {
			return err
		}
	}
	return s.unpack(ctx, dir, content, config)
}

func (s *layouts) unpack(ctx context.Context, dir string, state io.Reader, config []byte) error {
	_, span := startSpan(ctx, "Unpack")
	defer span.End()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	defer root.Close()
	if err := unpackState(state, root, s.limits.MaxState); err != nil {
		return err
	}
	if err := expandPages(dir); err != nil {
		return err
	}
	if s.tune {
		if err := tuneImages(root, filepath.Join(dir, criuDir)); err != nil {
			return err
		}
	}
	if err := root.WriteFile(configFile, config, 0o600); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	return nil
}

// tuneImages changes CRIU's images in ways that make no difference to what is
// restored by thaw, but to how long it takes.
func tuneImages(root *os.Root, dir string) error {
	images, err := image.Open(dir)
	if err != nil {
		return err
	}
	defer images.Close()
	content, err := images.SkipNetworkLock()
	if err != nil {
		return fmt.Errorf("%w: %w", checkpoint.ErrFormat, err)
	}
	if err := root.WriteFile(filepath.Join(criuDir, "inventory.img"), content, 0o600); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	return planMounts(root, images)
}

// maxPremounts bounds the mounts that the shim makes for CRIU, and the archives that are read to plan them. A
// container has three or so.
const maxPremounts = 64

// planMounts writes down which mounts the shim makes for CRIU.
func planMounts(root *os.Root, images *image.Dir) error {
	list, err := images.Tmpfs()
	if err != nil {
		return err
	}
	var plan premount.Plan
	keys := make(map[uint32]string)
	for _, t := range list[:min(len(list), maxPremounts)] {
		f, err := images.Open(t.Archive)
		if err != nil {
			return err
		}
		m, ok := premount.NewMount(fmt.Sprintf("thaw-tmpfs-%d", t.Device), t.Source, t.Options, t.ReadOnly, f)
		f.Close()
		if ok {
			keys[t.Device] = m.Key
			plan.Mounts = append(plan.Mounts, *m)
			plan.Archives = append(plan.Archives, t.Archive)
		}
	}
	if len(keys) == 0 {
		return nil
	}
	changed, err := images.GiveMounts(keys)
	if err != nil {
		return err
	}
	if err := root.Mkdir(premount.Dir, 0o700); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	for name, content := range changed {
		plan.Images = append(plan.Images, name)
		if err := root.WriteFile(filepath.Join(premount.Dir, name), content, 0o600); err != nil {
			return fmt.Errorf("checkpoint images: %w", err)
		}
	}
	if err := plan.Write(root); err != nil {
		return fmt.Errorf("checkpoint images: %w", err)
	}
	return nil
}

// keyValid reports whether a key read from a file may be used as a folder name.
func keyValid(key string) bool {
	return len(key) == 64 && strings.Trim(key, "0123456789abcdef") == ""
}
