// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/pkg/tracing"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/registry"
	"thaw.dev/thaw/snapshotter/workingset"
)

const (
	// lookupTimeout is how long the registry may take to say whether a working
	// set was published, and to deliver it. After so long the restore has touched
	// most of it.
	lookupTimeout = 3 * time.Second
	// lookupAgain is how soon the registry is asked again for the same image.
	lookupAgain = time.Minute
	// maxCandidates is how many published sets are looked at, newest first.
	maxCandidates = 3
)

// prefetch streams a restore's working set into the page store while CRIU works:
// what was recorded on this node, and, if that is nothing or was cut short, what was
// published. It begins before the checkpoint is laid out, so that a published set
// is looked for meanwhile. Nothing waits for it and its failure is nobody's: pages
// come when they are touched.
func (m *Manager) prefetch(ctx context.Context, r *restored, index digest.Digest) {
	ctx = log.WithLogger(ctx, log.G(m.ctx).WithField("image", r.record.Image).WithField("restore", r.record.ID))
	of := digest.Digest(r.record.Manifest)
	set, err := m.sets.Get(of)
	if err != nil && !errdefs.IsNotFound(err) {
		log.G(ctx).WithError(err).Warn("working set not read")
	}
	if err == nil {
		r.expects.settle(set)
	}
	defer r.expects.settle(nil) // if nothing is found
	var l *lookup
	if err != nil || set.Partial {
		if l, err = m.lookUp(r, index, of); err != nil {
			return // the daemon stops
		}
	}
	select {
	case <-r.ready:
	case <-ctx.Done():
		return
	}
	if set != nil {
		m.stream(ctx, r, set)
	}
	if l == nil {
		return
	}
	select {
	case <-l.done:
	case <-ctx.Done():
		return
	}
	if l.err != nil {
		log.G(ctx).WithError(l.err).Debug("no published working set")
		return
	}
	r.expects.settle(l.set)
	m.stream(ctx, r, l.set)
}

// expectation is what a restore is expected to touch first. The set that is known
// first stays: what is done ahead of touches cannot be undone.
type expectation struct {
	once sync.Once
	done chan struct{} // closed when it is known
	set  *workingset.Set
}

func (e *expectation) settle(set *workingset.Set) {
	e.once.Do(func() {
		e.set = set
		close(e.done)
	})
}

// Expected returns the encoded set that a restore is expected to touch first, when
// it is known; see api.Node.
func (m *Manager) Expected(ctx context.Context, id string) ([]byte, error) {
	r, err := m.get(id)
	if err != nil {
		return nil, err
	}
	none := fmt.Errorf("no working set is known for restore %s: %w", id, errdefs.ErrNotFound)
	if r.expects == nil {
		return nil, none
	}
	select {
	case <-r.expects.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	set := r.expects.set
	if set == nil {
		return nil, none
	}
	return (&workingset.Set{Checkpoint: set.Checkpoint, Partial: set.Partial, Chunks: set.Within(r.layout.index)}).Encode()
}

// stream brings a set's chunks into the page store.
func (m *Manager) stream(ctx context.Context, r *restored, set *workingset.Set) {
	begin := time.Now()
	chunks := set.Within(r.layout.index)
	ctx, span := startSpan(ctx, "Prefetch", tracing.WithAttribute("chunks", len(chunks)))
	defer span.End()
	err := r.prefetch(ctx, chunks)
	span.SetStatus(err)
	switch lg := log.G(ctx).WithField("chunks", len(chunks)).WithField("took", time.Since(begin)); {
	case err == nil:
		lg.Debug("working set prefetched")
	case ctx.Err() == nil:
		lg.WithError(err).Info("working set not prefetched as a whole: its pages come when they are touched")
	}
}

// prefetch brings chunks into the page store, in their order over all blobs.
func (r *restored) prefetch(ctx context.Context, chunks []workingset.Chunk) error {
	src := source{r.repo.Repository}
	var waits []func() error
	var errs []error
	for len(chunks) > 0 {
		blob := chunks[0].Blob
		var list []int
		for len(chunks) > 0 && chunks[0].Blob == blob {
			list = append(list, int(chunks[0].Chunk))
			chunks = chunks[1:]
		}
		wait, err := r.blobs[blob].Prefetch(ctx, src, list)
		if err != nil {
			errs = append(errs, err)
			break
		}
		waits = append(waits, wait)
	}
	for _, wait := range waits {
		if err := wait(); err != nil && len(errs) == 0 { // they all tell the same
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// lookup is the search for a published set, which restores of one image share.
type lookup struct {
	begun time.Time
	done  chan struct{}
	set   *workingset.Set // valid when done, as err
	err   error
}

// lookUp starts a search, unless there was one lately.
func (m *Manager) lookUp(r *restored, index, of digest.Digest) (*lookup, error) {
	key := r.record.Image + "@" + of.String()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, errClosed
	}
	now := time.Now()
	for k, l := range m.lookups {
		if now.Sub(l.begun) > lookupAgain {
			delete(m.lookups, k)
		}
	}
	if l := m.lookups[key]; l != nil {
		return l, nil
	}
	l := &lookup{begun: now, done: make(chan struct{})}
	m.lookups[key] = l
	repo := r.repo.Repository
	m.wg.Go(func() {
		defer close(l.done)
		ctx, cancel := context.WithTimeout(m.ctx, lookupTimeout)
		defer cancel()
		if l.set, l.err = published(ctx, repo, index, of); l.err != nil {
			return
		}
		if err := m.sets.Put(l.set); err != nil {
			log.G(ctx).WithError(err).Warn("published working set not kept")
		}
	})
	return l, nil
}

// published reads the newest set of a checkpoint that refers to the image's index.
func published(ctx context.Context, repo *registry.Repository, index, of digest.Digest) (*workingset.Set, error) {
	list, err := repo.Referrers(ctx, index, workingset.ArtifactType)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(list, func(a, b v1.Descriptor) int { return cmp.Compare(created(b), created(a)) })
	err = fmt.Errorf("none was published: %w", errdefs.ErrNotFound)
	for _, desc := range list[:min(len(list), maxCandidates)] {
		var set *workingset.Set
		if set, err = readSet(ctx, repo, desc); err == nil && set.Checkpoint == of {
			return set, nil
		}
		if err == nil {
			err = fmt.Errorf("%w: it is one of checkpoint %s", workingset.ErrFormat, set.Checkpoint)
		}
	}
	return nil, err
}

// created is when a manifest says it was made, in a form that sorts; "" if it
// does not say.
func created(desc v1.Descriptor) string {
	t, err := time.Parse(time.RFC3339, desc.Annotations[v1.AnnotationCreated])
	if err != nil {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

func readSet(ctx context.Context, repo *registry.Repository, desc v1.Descriptor) (*workingset.Set, error) {
	p, err := repo.Manifest(ctx, desc, checkpoint.MaxManifestSize)
	if err != nil {
		return nil, err
	}
	var manifest v1.Manifest
	if err := json.Unmarshal(p, &manifest); err != nil {
		return nil, fmt.Errorf("%w: manifest: %w", workingset.ErrFormat, err)
	}
	if len(manifest.Layers) != 1 || manifest.Layers[0].MediaType != workingset.MediaType || manifest.Layers[0].Digest.Validate() != nil {
		return nil, fmt.Errorf("%w: its manifest has not the one layer that it should have", workingset.ErrFormat)
	}
	if p, err = repo.Blob(ctx, manifest.Layers[0], int64(workingset.MaxEncodedSize)); err != nil {
		return nil, err
	}
	return workingset.Parse(p)
}

// Record keeps what a restored container touched first; see api.Node.
func (m *Manager) Record(_ context.Context, id string, encoded []byte) error {
	r, err := m.get(id)
	if err != nil {
		return err
	}
	set, err := workingset.Parse(encoded)
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	if set.Checkpoint.String() != r.record.Manifest {
		return fmt.Errorf("working set of checkpoint %s for a restore of %s: %w", set.Checkpoint, r.record.Manifest, errdefs.ErrInvalidArgument)
	}
	set.Chunks = set.Within(r.layout.index)
	if err := m.sets.Put(set); err != nil || set.Partial {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	r.status.RecordedChunks = uint64(len(set.Chunks))
	return nil
}

// WorkingSet returns the encoded set of a checkpoint; see api.Node.
func (m *Manager) WorkingSet(_ context.Context, checkpoint string) ([]byte, error) {
	set, err := m.sets.Get(digest.Digest(checkpoint))
	if err != nil {
		return nil, err
	}
	return set.Encode()
}
