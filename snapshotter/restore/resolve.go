// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"thaw.dev/thaw/snapshotter/checkpoint"
	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/registry"
)

// find returns the checkpoint manifest in an image's index. The index is read
// from the node's content store; a node that does not keep it there gets it from
// the registry by its digest.
func (m *Manager) find(ctx context.Context, namespace, name string, target v1.Descriptor, none func(string, ...any) (v1.Descriptor, error)) (v1.Descriptor, error) {
	if !images.IsIndexType(target.MediaType) {
		return none("image %s holds no checkpoint", name)
	}
	if desc, ok := m.known(target.Digest); ok {
		return desc, nil
	}
	if target.Size <= 0 || target.Size > checkpoint.MaxManifestSize {
		return v1.Descriptor{}, fmt.Errorf("index of image %s has %d bytes, allowed are %d: %w", name, target.Size, checkpoint.MaxManifestSize, errdefs.ErrResourceExhausted)
	}
	p, err := m.opts.Images.Content(ctx, namespace, target)
	if errdefs.IsNotFound(err) {
		var repo *repository
		if repo, err = m.repository(name); err != nil {
			return v1.Descriptor{}, err
		}
		p, err = repo.Manifest(ctx, target, checkpoint.MaxManifestSize)
		m.letGo(&restored{repo: repo})
	}
	if err != nil {
		return v1.Descriptor{}, err
	}
	if err := target.Digest.Validate(); err != nil {
		return v1.Descriptor{}, fmt.Errorf("index of image %s has digest %.80q: %w: %w", name, target.Digest, err, errdefs.ErrInvalidArgument)
	}
	if got := target.Digest.Algorithm().FromBytes(p); got != target.Digest {
		return v1.Descriptor{}, fmt.Errorf("index of image %s is damaged in containerd's content store: its digest is %s instead of %s: %w", name, got, target.Digest, errdefs.ErrDataLoss)
	}
	index, err := checkpoint.ParseIndex(p)
	if err != nil {
		return v1.Descriptor{}, fmt.Errorf("image %s: %w", name, classed(err))
	}
	desc, err := checkpoint.Find(index)
	switch {
	case err == nil:
		m.know(target.Digest, desc)
		return desc, nil
	case errors.Is(err, checkpoint.ErrNoCheckpoint):
		return none("image %s holds no checkpoint", name)
	}
	return v1.Descriptor{}, fmt.Errorf("image %s: %w", name, classed(err))
}

// maxKnown bounds how many indexes are remembered.
const maxKnown = 1024

// known returns the checkpoint that was found in an index before: by its digest an
// index has always the same.
func (m *Manager) known(index digest.Digest) (v1.Descriptor, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	desc, ok := m.indexes[index]
	return desc, ok
}

func (m *Manager) know(index digest.Digest, checkpoint v1.Descriptor) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.indexes) >= maxKnown {
		clear(m.indexes)
	}
	m.indexes[index] = checkpoint
}

// OpenRange reads a range of a blob; see pagestore.Source.
func (s source) OpenRange(ctx context.Context, blob digest.Digest, size, offset, length int64, avoid string) (pagestore.Stream, error) {
	return s.repo.Open(ctx, registry.Range{Digest: blob, Size: size, Offset: offset, Length: length, Avoid: avoid})
}
