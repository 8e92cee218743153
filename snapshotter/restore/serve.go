// SPDX-License-Identifier: Apache-2.0

package restore

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"google.golang.org/protobuf/proto"

	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/config"
	"thaw.dev/thaw/snapshotter/pagestore"
	"thaw.dev/thaw/snapshotter/registry"
)

var urgencies = map[api.Urgency]pagestore.Urgency{ // what is unknown can wait
	api.Urgency_BACKGROUND: pagestore.Background, api.Urgency_AHEAD: pagestore.Soon, api.Urgency_DEMAND: pagestore.Demand,
}

// Fetch brings chunks into the page store; see api.Node.
func (m *Manager) Fetch(ctx context.Context, req *api.FetchRequest) error {
	r, err := m.get(req.GetRestoreId())
	if err != nil {
		return err
	}
	if n := req.GetBlob(); uint64(n) >= uint64(len(r.blobs)) {
		return fmt.Errorf("blob %d of %d: %w", n, len(r.blobs), errdefs.ErrInvalidArgument)
	}
	chunks := make([]int, len(req.GetChunks()))
	for i, c := range req.GetChunks() {
		chunks[i] = int(c)
	}
	return r.blobs[req.GetBlob()].Fetch(ctx, source{r.repo.Repository}, chunks, urgencies[req.GetUrgency()])
}

// Report takes over how a restore is doing; see api.Node. It returns the state
// that was reported before.
func (m *Manager) Report(ctx context.Context, s *api.Status) (before string, err error) {
	r, err := m.get(s.GetRestoreId())
	if err != nil {
		return "", err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	next, ok := proto.Clone(s).(*api.Status)
	if !ok || m.closed {
		return "", errClosed
	}
	before = r.status.GetState()
	// Who and what it is, the daemon knows by itself.
	next.Namespace, next.ContainerId, next.Image, next.Pod = r.status.GetNamespace(), r.status.GetContainerId(), r.status.GetImage(), r.status.GetPod()
	next.PagesTotal, next.StartedUnixNs = r.status.GetPagesTotal(), r.status.GetStartedUnixNs()
	next.RecordedChunks = r.status.GetRecordedChunks()
	r.status = next
	if next.GetState() == StateLazy && !r.filling && r.record.Policy != config.PolicyLazy {
		r.filling = true
		m.wg.Go(func() { m.fill(r) })
	}
	if next.GetState() == StateFailed {
		log.G(ctx).WithField("restore", r.record.ID).Errorf("restore failed: %s", next.GetReason())
	}
	return before, nil
}

// fill brings all that is missing of a restore's blobs into the page store.
func (m *Manager) fill(r *restored) {
	delay := m.opts.FillDelay
	if r.record.Policy == config.PolicyComplete {
		delay = 0 // the fault handler asks for all of it too, chunk by chunk
	}
	t := time.NewTimer(delay)
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.ctx.Done():
		return
	}
	for _, b := range r.blobs {
		if err := b.Fill(r.ctx, source{r.repo.Repository}); err != nil {
			if r.ctx.Err() == nil {
				log.G(m.ctx).WithError(err).WithField("image", r.record.Image).Warn("page store not filled: pages still come from the registry when they are touched")
			}
			return
		}
	}
}

// source reads a repository's blobs for the page store.
type source struct{ repo *registry.Repository }
