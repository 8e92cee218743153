// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/registry"
)

// repository is a source that restores of one image reference share.
type repository struct {
	*registry.Repository
	ref  string
	refs int
}

// restored is one restore.
type restored struct {
	record record
	layout *layout
	repo   *repository
	blobs  []*pagestore.Blob

	status  *api.Status   // guarded by Manager.mu
	filling bool          // guarded by Manager.mu
	ready   chan struct{} // closed when the restore is prepared
	expects *expectation  // nil: nothing is known of its working set
	ctx     context.Context
	cancel  context.CancelFunc // ends prefetch and fill
}

// take opens a restore's page blobs.
func (m *Manager) take(r *restored) error {
	for i := range r.layout.index.Blobs {
		b, err := m.opts.Pages.Acquire(&r.layout.index.Blobs[i], r.layout.sealed.opener(i))
		if err != nil {
			return err
		}
		r.blobs = append(r.blobs, b)
	}
	return nil
}

// add makes a restore known. One of the same container that was not released
// is ended: its container is gone, or this one could not have been made.
func (m *Manager) add(r *restored) error {
	total := totalPages(r.layout.index)
	r.status = &api.Status{
		RestoreId: r.record.ID, Namespace: r.record.Namespace, ContainerId: r.record.Container, Image: r.record.Image,
		State: StatePreparing, PagesTotal: total, StartedUnixNs: r.record.Started.UnixNano(), Pod: r.record.Pod,
	}
	old, err := m.replace(r)
	if old != nil {
		m.letGo(old)
	}
	return err
}

// replace puts a restore in the place of one of the same container.
func (m *Manager) replace(r *restored) (old *restored, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, errClosed
	}
	if err := r.record.write(m.RecordDir()); err != nil {
		return nil, err
	}
	old = m.restores[r.record.ID]
	m.restores[r.record.ID] = r
	return old, nil
}

var errClosed = fmt.Errorf("thaw-snapshotter is stopping: %w", errdefs.ErrAborted)

// letGo gives back what a restore holds.
func (m *Manager) letGo(r *restored) {
	if r.cancel != nil {
		r.cancel()
	}
	for _, b := range r.blobs {
		b.Release()
	}
	if r.layout != nil {
		m.layouts.release(r.layout)
	}
	m.mu.Lock()
	if r.repo.refs--; r.repo.refs == 0 {
		delete(m.repos, r.repo.ref)
		defer r.repo.Close()
	}
	m.mu.Unlock()
}

func (m *Manager) repository(ref string) (*repository, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.repos[ref]
	if r == nil {
		repo, err := m.opts.Registry.Repository(ref)
		if err != nil {
			return nil, err
		}
		r = &repository{Repository: repo, ref: ref}
		m.repos[ref] = r
	}
	r.refs++
	return r, nil
}

func (r *restored) response() *api.PrepareResponse {
	resp := &api.PrepareResponse{
		Restore: true, RestoreId: r.record.ID, Image: r.record.Image, Digest: r.record.Manifest,
		ImagesDir: r.layout.images(), PageIndex: r.layout.indexPath(), Policy: r.record.Policy, PagesTotal: totalPages(r.layout.index),
	}
	for _, b := range r.blobs {
		resp.Stores = append(resp.Stores, &api.Store{Data: b.DataPath(), Present: b.PresentPath()})
	}
	return resp
}

func (m *Manager) get(id string) (*restored, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, errClosed
	}
	r := m.restores[id]
	if r == nil {
		return nil, fmt.Errorf("restore %.100q is not known: %w", id, errdefs.ErrNotFound)
	}
	return r, nil
}

// Release ends a restore; unknown ones are no error.
func (m *Manager) Release(_ context.Context, id string) error {
	m.mu.Lock()
	r := m.restores[id]
	m.mu.Unlock()
	if r == nil {
		return nil
	}
	return m.release(r)
}

// release ends a restore that was not replaced or released meanwhile.
func (m *Manager) release(r *restored) error {
	m.mu.Lock()
	if m.restores[r.record.ID] != r {
		m.mu.Unlock()
		return nil
	}
	delete(m.restores, r.record.ID)
	err := r.record.remove(m.RecordDir())
	m.mu.Unlock()
	m.letGo(r)
	return err
}

// List returns all restores.
func (m *Manager) List() []*api.Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*api.Status, 0, len(m.restores))
	for _, r := range m.restores {
		s, ok := proto.Clone(r.status).(*api.Status)
		if !ok {
			continue
		}
		s.BytesFetched = uint64(r.repo.Stats().Bytes)
		out = append(out, s)
	}
	return out
}
