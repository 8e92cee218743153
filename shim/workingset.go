// SPDX-License-Identifier: Apache-2.0

package shim

import (
	"context"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"

	"thaw.dev/thaw/shim/pager"
	"thaw.dev/thaw/snapshotter/api"
	"thaw.dev/thaw/snapshotter/workingset"
)

// The recording of a working set ends when the container has touched nothing new
// for recordQuiet, or after recordLimit. A readiness probe comes every ten seconds
// unless a pod says otherwise, so the first one is within the former; without the
// latter, or a bound of chunks, a busy container's set would be all of its memory.
const (
	recordQuiet = 15 * time.Second
	recordLimit = 60 * time.Second
)

// recording follows what a restored container touches, until it has become ready.
type recording struct {
	begun   time.Time // zero: the container is not restored yet
	changed time.Time // when something new was touched last
	seen    int       // chunks touched by then
	over    bool      // handed over, or nothing to hand over
}

// done takes note of how many chunks were touched by now and tells whether the
// recording has ended.
func (r *recording) done(touched int, now time.Time) bool {
	if r.begun.IsZero() {
		r.begun, r.changed = now, now
	}
	if touched > r.seen {
		r.seen, r.changed = touched, now
	}
	return touched >= workingset.MaxChunks || now.Sub(r.changed) >= recordQuiet || now.Sub(r.begun) >= recordLimit
}

// expect tells the fault handler what the container is expected to touch, when that
// is known.
func (c *restored) expect(ctx context.Context) {
	var set *workingset.Set
	err := c.service.node.call(ctx, func(ctx context.Context, n api.NodeService) error {
		resp, err := n.Expected(ctx, &api.ExpectedRequest{RestoreId: c.prepared.RestoreId})
		if err != nil {
			return err
		}
		set, err = workingset.Parse(resp.GetWorkingSet())
		return err
	})
	if err != nil {
		if ctx.Err() == nil && !errdefs.IsNotFound(err) {
			log.G(ctx).WithError(err).WithField("container", c.id).Debug("thaw: working set not known")
		}
		return
	}
	chunks := make([]pager.Chunk, len(set.Chunks))
	for i, k := range set.Chunks {
		chunks[i] = pager.Chunk(k)
	}
	c.pager.Expect(chunks)
	c.mu.Lock()
	c.expected = set
	c.mu.Unlock()
}

// fewNew is how many chunks beyond a working set that was used make it no worse: one
// in so many.
const fewNew = 10

// record hands the working set to the daemon when its recording has ended; or in
// any case, as a partial one, when the container ends. Not to be called by two
// goroutines at the same time.
func (c *restored) record(ctx context.Context, state string, ends bool) {
	if c.recording.over || state == "restoring" || state == "failed" {
		return
	}
	touched := c.pager.WorkingSet()
	if !c.recording.done(len(touched), time.Now()) && !ends {
		return
	}
	c.mu.Lock()
	partial, used := ends || c.filled, c.expected
	c.mu.Unlock()
	if used != nil && !used.Partial && len(touched)-len(used.Chunks) <= len(used.Chunks)/fewNew {
		touched, partial = touched[:0], false
		for _, k := range used.Chunks {
			touched = append(touched, pager.Chunk(k))
		}
	}
	encoded, err := encodeSet(c.prepared.Digest, touched, partial)
	if err == nil {
		err = c.service.node.call(ctx, func(ctx context.Context, n api.NodeService) error {
			_, err := n.Record(ctx, &api.RecordRequest{RestoreId: c.prepared.RestoreId, WorkingSet: encoded})
			return err
		})
	}
	if err != nil {
		// Lost, it costs the next restore a little time.
		log.G(ctx).WithError(err).WithField("container", c.id).Debug("thaw: working set not recorded")
	}
	c.recording.over = !errdefs.IsUnavailable(err)
}

func encodeSet(checkpoint string, touched []pager.Chunk, partial bool) ([]byte, error) {
	set := workingset.Set{Checkpoint: digest.Digest(checkpoint), Partial: partial}
	for _, t := range touched[:min(len(touched), workingset.MaxChunks)] {
		set.Chunks = append(set.Chunks, workingset.Chunk{Blob: t.Blob, Chunk: t.Chunk})
	}
	return set.Encode()
}
